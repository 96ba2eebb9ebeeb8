"""`cachesvc prefetch` of a part: exactly what a run reads next is resident, and its steps ask the source for nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cachesvc.__main__ import run
from cachesvc.client.control import Control
from cachesvc.core.errors import InvalidInput
from cachesvc.saved_runs.fetch import prefetch_next
from loader import DataLoader, Dataset, open_dataset
from testbed.node import Daemon
from tests.support import shared_daemon
from tests.support.shared_daemon import for_one_test
from tests.support.waiting import wait_until

EXTENT, EXTENTS = 64 << 10, 40
RECORDS: dict[str, Any] = {"format": "records", "record_bytes": 4096, "extent_bytes": EXTENT}
GIVEN: dict[str, Any] = {"shuffle": True, "epochs": None, "seed": 7, "window": 2 * EXTENT}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon whose RAM holds half of the data."""
    root = tmp_path_factory.getbasetemp()
    options = ["--ram", f"{EXTENT * EXTENTS // 2}", "--allow", str(root), "--fillers", "1"]
    options += ["--extent-bytes", f"{EXTENT}"]
    with Daemon(tmp_path_factory.mktemp("node"), options) as found:
        yield found


@pytest.fixture
def daemon(shared: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    monkeypatch.setenv("CACHESVC_SOCKET", shared.socket_dir)
    monkeypatch.setenv("CACHESVC", "require")
    yield from for_one_test(shared)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "d").mkdir()
    numbers = np.arange(EXTENT * EXTENTS // 8, dtype=np.int64)
    (tmp_path / "d" / "0.bin").write_bytes(numbers.tobytes())
    return tmp_path / "d"


def resident(daemon: Daemon) -> int:
    with Control(daemon.socket_dir) as control:
        return sum(row.resident_extents for row in control.list())


def misses(daemon: Daemon) -> int:
    with Control(daemon.socket_dir) as control:
        return sum(row.misses + row.refused for row in control.list())


def loaders(view: Dataset, world: int, batch: int = 8) -> list[DataLoader]:
    return [
        DataLoader(view, batch, rank=rank, world_size=world, global_batch_size=32, **GIVEN)
        for rank in range(world)
    ]


def saved_after(view: Dataset, steps: int, file: Path) -> dict[str, Any]:
    (loader,) = loaders(view, 1, 32)
    for _ in islice(loader, steps):
        pass
    state = loader.state_dict()
    file.write_text(json.dumps(state))
    view.close()
    return state


def emptied(daemon: Daemon, view: Dataset) -> None:
    view.close()
    wait_until(lambda: shared_daemon.emptied(daemon))


def result(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


@pytest.mark.parametrize("ranks", [[0], [1], [2, 3], [0, 1, 2, 3]])
def test_what_a_nodes_ranks_read_next_is_resident_and_nothing_else(
    daemon: Daemon, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], ranks: list[int]
) -> None:
    view = open_dataset(data, **RECORDS)
    file = tmp_path / "state.json"
    state = saved_after(view, 3, file)
    emptied(daemon, view)
    steps = 5
    arguments = ["prefetch", "--state", str(file), "--steps", str(steps), "--world", "4", "--json"]
    assert run([*arguments, "--rank-range", f"{ranks[0]}-{ranks[-1]}"]) == 0, capsys.readouterr().err
    row = result(capsys)
    assert row["resident_extents"] == row["extents"] == resident(daemon)
    before, touched = misses(daemon), set[int]()
    for rank in ranks:
        loader = loaders(view, 4)[rank]
        loader.load_state_dict(state)
        batches = iter(loader)
        for _ in range(steps):
            next(batches)
            touched |= set((loader.indices // (EXTENT // 4096)).tolist())
    view.close()
    assert row["extents"] == len(touched)
    assert misses(daemon) == before, "no step waited for the source"


def test_a_python_program_fetches_the_same_and_hears_of_what_does_not_fit(
    daemon: Daemon, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    view = open_dataset(data, **RECORDS)
    file = tmp_path / "state.json"
    state = saved_after(view, 3, file)
    emptied(daemon, view)
    found = prefetch_next(state, steps=5, world=4, ranks=[0, 1])
    assert found.resident_extents == found.extents == resident(daemon) > 0
    with pytest.raises(InvalidInput, match="rank 4 of 4"):
        prefetch_next(str(file), steps=5, world=4, ranks=[4])
    assert run(["prefetch", "--state", str(file), "--steps", "400", "--json"]) == 8
    out, err = capsys.readouterr()
    row = json.loads(out.splitlines()[-1])
    assert row["extents"] == EXTENTS
    assert 0 < row["resident_extents"] < EXTENTS
    assert row["unfit_extents"] == EXTENTS - row["resident_extents"]
    assert "choose fewer steps" in err


def test_an_expression_a_fraction_and_a_run_that_begins_choose_extents(
    daemon: Daemon, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--format", "records", "--record-bytes", "4096", "--json"]
    assert (
        run(["prefetch", str(data), *options, "--where", "key in ('0.bin:0', '0.bin:17', '0.bin:18')"]) == 0
    )
    assert result(capsys)["resident_extents"] == resident(daemon) == 2
    assert run(["prefetch", str(data), *options, "--fraction", "0.1"]) == 0
    assert result(capsys)["resident_extents"] == EXTENTS // 10
    assert resident(daemon) == EXTENTS // 10
    view = open_dataset(data, **{name: value for name, value in RECORDS.items() if name != "extent_bytes"})
    emptied(daemon, view)
    view.close()
    fresh = ["--steps", "3", "--global-batch", "32", "--seed", "7", "--world", "4", "--rank-range", "1"]
    assert run(["prefetch", str(data), *options, *fresh]) == 0
    loader = DataLoader(view, 8, shuffle=True, rank=1, world_size=4, global_batch_size=32, seed=7)
    touched = {int(index) // (EXTENT // 4096) for _ in islice(loader, 3) for index in loader.indices}
    assert result(capsys)["extents"] == len(touched)
    view.close()


def test_arguments_that_choose_nothing_are_refused(
    daemon: Daemon, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    view = open_dataset(data, **RECORDS)
    file = tmp_path / "state.json"
    saved_after(view, 1, file)
    records = [str(data), "--format", "records", "--record-bytes", "4096"]
    for wrong, why in [
        ([], "give a URI"),
        (["--state", str(file)], "Give --steps"),
        (["--state", str(file), "--steps", "3", "--world", "5"], "has no such part"),
        (["--state", str(file), "--steps", "3", "--rank-range", "3-1"], "no range of ranks"),
        (["--state", str(file), "--steps", "3", "--dry-run"], "of whole datasets"),
        ([*records, "--steps", "3"], "--global-batch"),
        (["--fraction", "0.5"], "give the URI"),
        ([*records, "--where", "key = 3"], ""),
    ]:
        assert run(["prefetch", *wrong]) == 2, wrong
        assert why in capsys.readouterr().err
