"""The ledgers of what a run may be told to do with its data: the same samples, and the same digest, at any number of ranks
and workers, over resumes, and whether bytes come from the source or through a daemon."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from cachesvc.core.order.digests import SampleSum
from loader import DataLoader, Dataset, mix, open_dataset, pack
from loader.batches.digest import fold, has_digest
from testbed.node import Daemon
from tests.support.training.loader_fakes import in_step
from tests.support.training.mixtures import SEQ, mixture_data

GLOBAL, EXTENT = 8, 4096
GIVEN: dict[str, Any] = {"shuffle": True, "window": 8192, "seed": 5, "epochs": 2}
WAYS = ("direct", "daemon")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixture_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def daemon(root: Path) -> Iterator[Daemon]:
    with Daemon(root / "node", ["--ram", "8MiB", "--extent-bytes", str(EXTENT), "--fillers", "1"]) as found:
        yield found


def opened(root: Path, name: str, **form: Any) -> Dataset:
    return open_dataset(root / name, extent_bytes=EXTENT, **form)


def numbers(root: Path) -> list[Dataset]:
    return [opened(root, f"n{number}.npy", format="records") for number in range(3)]


def ramp(root: Path, size: str) -> Any:
    first, second, third = numbers(root)
    later = [(9, {first: 1, second: 1, third: 8})]
    return mix({first: 8, second: 1, third: 1}, schedule=later, ramp="linear", size=size)  # type: ignore[arg-type]


def packed(root: Path, **form: Any) -> Any:
    return pack(opened(root, "text", format="tokens", seq_len=1, out="int64"), SEQ, **form)


def mixed_packs(root: Path) -> Any:
    """Packs whose documents end at a token, and packs of rows that are tokenised."""
    of_rows = pack(
        opened(root, "rows.npy", format="records"),
        SEQ,
        tokenize=lambda row: [*row[: 1 + int(row[0]) % 9].tolist()],
    )
    words = opened(root, "n1.npy", format="tokens", seq_len=8)
    return mix({of_rows: 2, pack(words, SEQ, eos=1003): 1}, schedule=[], size=64)


def tripled(record: torch.Tensor) -> torch.Tensor:
    return record.long() * 3


ITEMS: dict[str, tuple[Callable[[Path], Any], dict[str, Any]]] = {
    "left out": (
        lambda root: opened(root, "rows.npy", format="records"),
        {"skip_steps": [range(3, 5), (36, 39)], "exclude": ["rows.npy:5", "rows.npy:77"]},
    ),
    "left out of a mixture": (
        lambda root: mix(dict(zip(numbers(root), (5, 3, 2), strict=True))),
        {"skip_steps": [range(2, 4)], "exclude": ["n0.npy:7"]},
    ),
    "ramp": (lambda root: ramp(root, "total"), {}),
    "ramp, once": (lambda root: ramp(root, "once"), {"skip_steps": [range(6, 8)]}),
    "packs": (lambda root: packed(root, targets="shifted"), {"skip_steps": [range(2, 4)]}),
    "whole packs": (lambda root: packed(root, targets="unshifted", fit="best", document_ids=True), {}),
    "mixed packs": (lambda root: mixed_packs(root), {"skip_steps": [range(5, 6)]}),
    "prepared": (
        lambda root: opened(root, "rows.npy", format="records", prepare=tripled),
        {"exclude": ["rows.npy:5"]},
    ),
}
QUICK = [
    ("left out", "daemon", 2, 2),
    ("left out of a mixture", "direct", 4, 0),
    ("ramp", "daemon", 4, 0),
    ("ramp, once", "direct", 2, 2),
    ("packs", "direct", 4, 0),
    ("whole packs", "daemon", 2, 2),
]
GRID = [*product(ITEMS, WAYS, (1, 2, 4), (0, 2))]


@pytest.mark.parametrize(
    ("item", "way", "world", "workers"),
    [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in GRID if each not in QUICK)],
)
def test_a_run_is_the_same_at_any_scale_resumed_directly_or_through_a_daemon(
    root: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    item: str,
    way: str,
    world: int,
    workers: int,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(root / "cache"))
    monkeypatch.setenv("CACHESVC", "off")
    make, more = ITEMS[item]
    whole, end, expected = taken(make(root), 1, 0, **more)
    assert len(whole) > 12
    if way == "daemon":
        monkeypatch.setenv("CACHESVC", "require")
        monkeypatch.setenv("CACHESVC_SOCKET", request.getfixturevalue("daemon").socket_dir)
    head, state, first = taken(make(root), world, workers, stop=4, **more)
    middle, state, second = taken(make(root), 4 // world, workers, state, 5)
    rest, state, third = taken(make(root), world, workers, state)
    assert head + middle + rest == whole
    unsummed = {"digest": "", "source": ""}  # ranks without a process group cannot sum their digests
    assert state | unsummed == end | unsummed
    assert first + second + third == expected


def taken(
    data: Any, world: int, workers: int, state: Any = None, stop: int = 1 << 30, **more: Any
) -> tuple[list[Any], Any, SampleSum]:
    """Return the values of the real samples of each global batch, sorted, the state after them, and their sum."""
    forked: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    loaders = [
        DataLoader(data, GLOBAL // world, rank=rank, world_size=world, **GIVEN | forked | more)
        for rank in range(world)
    ]
    steps, after = in_step(loaders, state, stop)
    found = [sorted(row for batch, valid in step for row in rows(batch)[:valid]) for step in steps]
    total = SampleSum()
    for loader in loaders if has_digest(data) else ():
        total += fold(loader._progress.handed, data)
    return found, after, total


def rows(batch: Any) -> list[list[Any]]:
    """The values of each row."""
    if not isinstance(batch, dict):
        return batch[:, :8].tolist()
    columns = [column.tolist() for name, column in batch.items() if name not in ("cu_seqlens", "max_seqlen")]
    return [[*row] for row in zip(*columns, strict=True)]
