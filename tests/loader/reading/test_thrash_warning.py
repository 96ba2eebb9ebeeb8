"""A shuffle that needs more at once than the cache holds is warned of once; no other is."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachesvc.core.order.epoch_order import Plan
from loader import DataLoader, open_dataset
from loader.reading.thrash_warning import ThrashWarning, working_set_bytes
from testbed.node import Daemon
from tests.support.shared_daemon import for_one_test

EXTENT, EXTENTS, RECORD = 64 << 10, 64, 1024


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20), st.integers(0, 9)), max_size=12).map(
        lambda rows: sorted(rows, key=lambda row: row[1])
    )
)
def test_the_working_set_is_the_most_of_any_step(rows: list[tuple[int, int, int]]) -> None:
    sizes = np.asarray([1, 10, 100, 1000])
    extent, first, more = (np.asarray([row[at] for row in rows], np.int64) for at in range(3))
    needed = [
        sum(int(sizes[e]) for e, begin, length in rows if begin <= step <= begin + length)
        for step in range(30)
    ]
    assert working_set_bytes(Plan(extent, first, first + more), sizes) == max(needed)


@pytest.mark.parametrize(
    ("tier_budgets", "warnings"),
    [((), 0), ((4,), 1), ((4, 4), 1), ((4, 5), 0), ((4, 4, 4), 0)],
    ids=["no tier works", "one", "two", "the larger holds it", "the dataset fits"],
)
def test_the_largest_tier_counts_unless_all_data_fits(
    caplog: pytest.LogCaptureFixture, tier_budgets: tuple[int, ...], warnings: int
) -> None:
    steps = np.arange(5)
    warning = ThrashWarning(np.ones(10, np.int64))
    for _ in range(2):
        warning.check(Plan(steps, 0 * steps, steps), tier_budgets)
    assert len(caplog.messages) == warnings


@pytest.mark.parametrize(
    ("extent_bytes", "text"),
    [
        (4096, "20 KiB are shuffled together, and the largest tier of the daemon holds 12 KiB:"),
        (400 << 10, "2,000 KiB are shuffled together, and the largest tier of the daemon holds 1,200 KiB:"),
        (1 << 20, "5 MiB are shuffled together, and the largest tier of the daemon holds 3 MiB:"),
        (5 << 20, "25 MiB are shuffled together, and the largest tier of the daemon holds 15 MiB:"),
    ],
)
def test_sizes_are_shown_exactly(caplog: pytest.LogCaptureFixture, extent_bytes: int, text: str) -> None:
    steps = np.arange(5)
    ThrashWarning(np.full(10, extent_bytes, np.int64)).check(
        Plan(steps, 0 * steps, steps), (3 * extent_bytes,)
    )
    assert caplog.messages[0].startswith(text)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon whose one tier holds 32 extents."""
    options = ["--ram", f"{32 * EXTENT}", "--extent-bytes", str(EXTENT)]
    with Daemon(tmp_path_factory.mktemp("node"), options) as found:
        yield found


@pytest.fixture
def daemon(shared: Daemon) -> Iterator[Daemon]:
    yield from for_one_test(shared)


@pytest.mark.parametrize(
    ("extents", "given", "warnings"),
    [
        pytest.param(EXTENTS, {}, 1, marks=pytest.mark.slow),
        pytest.param(EXTENTS, {"window": 4 * EXTENT}, 0, marks=pytest.mark.slow),
        pytest.param(EXTENTS, {"shuffle": False}, 0, marks=pytest.mark.slow),
        (EXTENTS // 4, {"window": "all"}, 0),
    ],
)
def test_a_loader_warns_once(
    daemon: Daemon,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    extents: int,
    given: dict[str, object],
    warnings: int,
) -> None:
    (tmp_path / "data.bin").write_bytes(np.random.default_rng(0).bytes(EXTENT * extents))
    caplog.set_level(logging.WARNING, "cachesvc")
    monkeypatch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
    monkeypatch.setenv("CACHESVC", "require")
    data = open_dataset(tmp_path / "data.bin", format="records", record_bytes=RECORD)
    loader = DataLoader(data, 256, **{"shuffle": True} | given)  # type: ignore[arg-type]
    for _ in range(2):
        assert sum(map(len, loader)) == len(data)
    data.close()
    lines = [line for line in caplog.messages if "shuffled together" in line]
    assert len(lines) == warnings
    assert all(
        "4 MiB are shuffled together, and the largest tier of the daemon holds 2 MiB" in line
        for line in lines
    )
