"""Prepared samples through a daemon: what the function gives by hand, made once on the node, in the source's order."""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader

from cachesvc.__main__ import run
from cachesvc.client.control import Control
from cachesvc.client.grants import DaemonGrants
from cachesvc.core.errors import CorruptData, InvalidInput, NotFound
from cachesvc.core.model import DatasetId
from loader import DataLoader, mix, open_dataset
from loader.datasets.dataset import Dataset
from testbed import WAIT_S
from testbed.node import Daemon
from tests.loader.prepare.pictures import (
    BAD,
    CLASSES,
    COUNT,
    EACH,
    calls,
    doubled,
    fails,
    half,
    noted,
    run_job,
    same,
    write_pictures,
)
from tests.support.shared_daemon import for_one_test
from tests.support.users import ALICE, BOB, as_root, as_user
from tests.support.waiting import wait_until

EXTENT = 16 << 10
FEW = 10
"""The most pictures whose prepared bytes are in an extent of 16 KiB is 36; the source's extents hold as many or fewer."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    root = tmp_path_factory.mktemp("prepared")
    write_pictures(root / "data")
    options = [
        "--ram",
        "4MiB",
        "--nvme",
        f"{root}/disk=8MiB",
        "--extent-bytes",
        str(EXTENT),
        "--fillers",
        "1",
    ]
    (root / "disk").mkdir()
    options += ["--allow", f"{root}/", "--socket-mode", "666", "--preparing", "2"]
    with Daemon(root / "node", options) as found:
        yield found


@pytest.fixture
def daemon(shared: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    monkeypatch.setenv("CACHESVC", "require")
    monkeypatch.setenv("CACHESVC_SOCKET", shared.socket_dir)
    yield from for_one_test(shared)


@pytest.fixture
def data(shared: Daemon) -> str:
    return str(shared.root.parent / "data")


@pytest.fixture
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that lists the calls of functions."""
    path = tmp_path / "calls"
    path.touch()
    monkeypatch.setenv("CALLS", str(path))
    return path


def as_dict(sample: Any) -> dict[str, Any]:
    pixels = np.asarray(sample[0])
    return {
        "mean": float(pixels.mean()),
        "first": np.int16(pixels[0, 0, 0]),
        "rows": pixels[:2].astype(np.float32),
    }


def as_array(sample: Any) -> np.ndarray[Any, Any]:
    return np.asarray(sample[0])[:3, :3].copy()


@pytest.mark.parametrize("function", [half, as_dict, as_array])
def test_samples_and_batches_are_those_of_the_function_called_by_hand(
    daemon: Daemon, data: str, function: Callable[[Any], Any]
) -> None:
    plain, prepared = open_dataset(data), open_dataset(data, prepare=function)
    assert [*map(len, (plain, prepared))] == [COUNT, COUNT]
    assert all(same(prepared[n], function(plain[n])) for n in range(COUNT))
    by_hand = DataLoader(open_dataset(data, transform=function), 8, shuffle=True)
    assert all(same(*pair) for pair in zip(DataLoader(prepared, 8, shuffle=True), by_hand, strict=True))
    assert all(
        same(*pair) for pair in zip(TorchLoader(prepared, 8), TorchLoader(by_hand.dataset, 8), strict=True)
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_a_transform_draws_as_without_preparing(daemon: Daemon, data: str, workers: int) -> None:
    loaders = [
        DataLoader(dataset, 8, shuffle=True, num_workers=workers, seed=3)
        for dataset in (
            open_dataset(data, prepare=half, transform=noisy),
            open_dataset(data, transform=lambda sample, rng: noisy(half(sample), rng)),
        )
    ]
    for _ in range(2):
        assert all(same(*pair) for pair in zip(*loaders, strict=True))


def noisy(sample: tuple[torch.Tensor, int], rng: np.random.Generator) -> tuple[torch.Tensor, int]:
    return sample[0] + int(rng.integers(9)), sample[1]


def test_two_processes_of_each_of_two_jobs_prepare_each_sample_once(
    daemon: Daemon, data: str, tmp_path: Path, called: Path
) -> None:
    other = write_pictures(daemon.root.parent / "of-jobs", seed=1)
    open_dataset(other, prepare=half)  # the function is tried here, and not by the jobs
    before = calls(called)
    assert set(before.values()) == {2}
    jobs = [run_job(other, daemon.socket_dir, job, 2, called) for job in ("1", "2")]
    outs = [json.loads(job.communicate(timeout=WAIT_S)[0]) for job in jobs]
    assert [sorted(out["numbers"]) for out in outs] == [[*range(COUNT)]] * 2
    assert [out["origins"]["prepared"] for out in outs] == [0, 0]
    assert calls(called) - before == dict.fromkeys(range(COUNT), 1)
    later = [
        number
        for images, _ in DataLoader(open_dataset(other, prepare=half), 8)
        for number in images[:, 0, 0, 0]
    ]
    assert len(later) == COUNT
    assert calls(called) - before == dict.fromkeys(range(COUNT), 1)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_run_goes_on_with_prepared_samples_where_plain_ones_ended_and_back(
    daemon: Daemon, data: str, world_size: int
) -> None:
    plain, prepared = open_dataset(data, transform=half), open_dataset(data, prepare=half)

    def loader(dataset: Dataset, rank: int) -> DataLoader:
        size = 8 // world_size
        return DataLoader(dataset, size, shuffle=True, rank=rank, world_size=world_size)

    for rank in range(world_size):
        whole = [*loader(plain, rank)]
        state, found = None, list[Any]()
        for begin, end in pairwise((0, 3, 7, len(whole))):
            current = loader((plain, prepared)[begin % 2], rank)
            if state is not None:
                current.load_state_dict(state)
            batches = iter(current)
            found += [next(batches) for _ in range(end - begin)]
            state = current.state_dict()
        assert all(same(*pair) for pair in zip(found, whole, strict=True))


def test_views_and_mixtures_of_prepared_samples(daemon: Daemon, data: str) -> None:
    plain, prepared = open_dataset(data, transform=half), open_dataset(data, prepare=half)
    views: list[Callable[[Dataset], Dataset]] = [
        lambda ds: ds.where("label == 'dog'"),
        lambda ds: ds.select([70, 3, 3, 40]),
        lambda ds: ds.split({"a": 0.3, "b": 0.7})["b"],
        lambda ds: ds.take(5),
    ]
    for view in views:
        pairs = zip(
            DataLoader(view(prepared), 4, shuffle=True), DataLoader(view(plain), 4, shuffle=True), strict=True
        )
        assert all(same(*pair) for pair in pairs)
    mixed = [
        DataLoader(mix({ds.where("label == 'dog'"): 0.7, ds.where("label == 'cat'"): 0.3}), 8)
        for ds in (prepared, plain)
    ]
    assert all(same(*pair) for pair in zip(*mixed, strict=True))
    with pytest.raises(InvalidInput, match="prepared already"):
        prepared.prepared(half)
    with pytest.raises(InvalidInput, match="array"):
        prepared.array()


def edited(by: int) -> Callable[[Any], Any]:
    def prepare(sample: Any) -> Any:
        noted(0)
        return np.asarray(sample[0])[:2, :2].copy() // by

    return prepare


def test_an_edited_function_is_another_version_and_an_error_under_a_name(
    daemon: Daemon, data: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert same(
        open_dataset(data, prepare=edited(1))[5], open_dataset(data, decode="auto", transform=edited(1))[5]
    )
    first, second = (open_dataset(data, prepare=edited(by)) for by in (2, 3))
    assert not same(first[5], second[5])
    assert first.identity == second.identity == open_dataset(data).identity
    with Control(daemon.socket_dir) as control:
        listed = [each.dataset.uri for each in control.list() if each.dataset.format == "prepared"]
    assert len(listed) >= 3
    assert all("edited.<locals>.prepare@" in uri for uri in listed if "edited" in uri)
    open_dataset(data, prepare=edited(2), prepare_name="two")
    with pytest.raises(InvalidInput, match="another version"):
        open_dataset(data, prepare=edited(3), prepare_name="two")
    monkeypatch.setattr(np, "__version__", "0.1")
    with caplog.at_level(logging.WARNING, "cachesvc"):
        open_dataset(data, prepare=edited(2))
    assert "(now 0.1)" in caplog.text


def test_a_sample_that_cannot_be_prepared_is_its_typed_error_and_is_tried_once(
    daemon: Daemon, data: str, called: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = open_dataset(data, prepare=fails)
    called.write_text("")
    with pytest.raises(CorruptData, match=r"cat/017.png .*ValueError: an odd picture"):
        list(DataLoader(dataset, 9))
    assert re.search("1 of [0-9]+ samples cannot be prepared.*ValueError: an odd picture", caplog.text)
    batches = DataLoader(dataset, 9, on_error="skip")
    numbers = [number for images, _ in batches for number in images[:, 0, 0, 0].tolist()]
    assert sorted(numbers) == [number for number in range(COUNT) if number != BAD]
    assert calls(called)[BAD] == 1
    bad = next(index for index in range(COUNT) if dataset.catalog.key(index).endswith("017.png"))
    with pytest.raises(CorruptData, match="odd picture"):
        dataset[bad]


def at_random(sample: Any) -> Any:
    return np.random.default_rng().integers(1 << 40, size=3)


def of_several_sizes(sample: Any) -> Any:
    return np.zeros(int(np.asarray(sample[0])[0, 0, 0]) + 1)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (at_random, "deterministic"),
        (of_several_sizes, "alike"),
        (lambda sample: sample, "return a tensor"),
        (lambda sample, rng: 1, "sample alone"),
        (7, "not a function"),
    ],
)
def test_a_function_whose_results_cannot_be_kept_is_refused_at_opening(
    daemon: Daemon, data: str, function: Any, says: str
) -> None:
    with pytest.raises(InvalidInput, match=says):
        open_dataset(data, prepare=function)


def test_without_a_daemon_each_process_prepares_for_itself(
    data: str, called: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CACHESVC", "off")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    prepared, plain = open_dataset(data, prepare=half), open_dataset(data, transform=half)
    assert "prepared here" in prepared.via
    for _ in range(2):
        assert all(same(*pair) for pair in zip(DataLoader(prepared, 8), DataLoader(plain, 8), strict=True))
    assert set(calls(called).values()) == {4}


@pytest.mark.slow
def test_a_reader_prepares_for_itself_while_the_daemon_is_gone_and_says_so(
    daemon: Daemon, data: str, called: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CACHESVC", "auto")
    plain = [half(open_dataset(data)[n]) for n in range(COUNT)]
    dataset = open_dataset(data, prepare=half)
    daemon.kill()
    batches = DataLoader(dataset, 9)
    found = [sample for images, labels in batches for sample in zip(images, labels.tolist(), strict=True)]
    assert all(same(*pair) for pair in zip(found, plain, strict=True))
    assert batches.stats().bytes_by_origin["prepared"] > COUNT * plain[0][0].nbytes


def test_evicted_samples_are_prepared_again(daemon: Daemon, data: str, called: Path) -> None:
    prepared = open_dataset(data, prepare=half)
    first, dataset = [*DataLoader(prepared, 9)], prepared.opened.link.id
    prepared.close()
    wait_until(lambda: evicted(daemon, dataset))
    called.write_text("")
    again = [*DataLoader(open_dataset(data, prepare=half), 9)]
    assert all(same(*pair) for pair in zip(again, first, strict=True))
    assert calls(called) == dict.fromkeys(range(COUNT), 1)


def test_where_the_source_changed_samples_are_prepared_anew(daemon: Daemon) -> None:
    data = write_pictures(daemon.root.parent / "of-changed", seed=3)
    before = open_dataset(data, prepare=half)
    first = [*DataLoader(before, 9)]
    write_pictures(Path(data), seed=4)
    by_hand, after = open_dataset(data, transform=half), open_dataset(data, prepare=half)
    assert after.identity != before.identity
    assert all(same(*pair) for pair in zip(DataLoader(after, 9), DataLoader(by_hand, 9), strict=True))
    assert all(same(*pair) for pair in zip(DataLoader(before, 9), first, strict=True)), "it is kept as it was"


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_samples_that_no_tier_has_room_for_are_those_of_the_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """A full NVMe: it holds a tenth of what is prepared."""
    data, disk = write_pictures(tmp_path / "data"), tmp_path / "disk"
    disk.mkdir()
    options = ["--ram", f"{2 * EXTENT}", "--nvme", f"{disk}={4 * EXTENT}", "--extent-bytes", str(EXTENT)]
    monkeypatch.setenv("CACHESVC", "require")
    with Daemon(tmp_path / "node", [*options, "--fillers", "1", "--allow", data]) as daemon:
        monkeypatch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
        plain = open_dataset(data)
        by_hand = [doubled(plain[n]) for n in range(COUNT)]
        batches = DataLoader(open_dataset(data, prepare=doubled), 9, shuffle=True, num_workers=workers)
        for _ in range(3):
            seen = list[int]()
            for batch in batches:
                numbers = batches.indices.tolist()
                assert all(same(np.asarray(each), by_hand[n]) for each, n in zip(batch, numbers, strict=True))
                seen += numbers
            assert sorted(seen) == [*range(COUNT)]


def test_the_digest_of_a_run_is_that_of_plain_samples(
    daemon: Daemon, data: str, tmp_path: Path, called: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prepared in this run, before it, by its own process, or not at all; and records say which bytes they are made of."""

    def digest(dataset: Dataset, workers: int = 0) -> str:
        batches = DataLoader(dataset, 9, shuffle=True, num_workers=workers, on_error="skip")
        assert sum(len(labels) for _, labels in batches) == COUNT - 1
        found: str = batches.state_dict()["digest"]
        assert found == batches.digest().hex()
        return found

    prepared = open_dataset(data, prepare=fails)
    expected = digest(prepared, workers=2)
    prepared.close()
    plain = open_dataset(data)
    wait_until(lambda: evicted(daemon, plain.opened.link.id))
    called.write_text("")
    assert digest(open_dataset(data, prepare=fails)) == expected
    assert not calls(called), "from records alone, without the source's bytes"
    assert digest(open_dataset(data, transform=fails), workers=2) == expected
    monkeypatch.setenv("CACHESVC", "off")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert digest(open_dataset(data, prepare=fails, extent_bytes=EXTENT)) == expected


def evicted(daemon: Daemon, dataset: DatasetId) -> bool:
    """Evict a dataset; return True once no reader that a collected loader left keeps any of it."""
    gc.collect()
    with Control(daemon.socket_dir) as control:
        return not control.evict(dataset).busy_bytes


def test_prepared_samples_on_a_disk_survive_a_restart(
    tmp_path: Path, called: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, disk = write_pictures(tmp_path / "data"), tmp_path / "disk"
    disk.mkdir()
    options = ["--ram", "0", "--nvme", f"{disk}=8MiB", "--extent-bytes", str(EXTENT), "--fillers", "1"]
    monkeypatch.setenv("CACHESVC", "require")
    with Daemon(tmp_path / "node", [*options, "--allow", data]) as daemon:
        monkeypatch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
        first = [*DataLoader(open_dataset(data, prepare=half), 9)]
        daemon.stop()
        gc.collect()
        called.write_text("")
        daemon.start()
        batches = DataLoader(open_dataset(data, prepare=half), 9)
        assert all(same(*pair) for pair in zip(batches, first, strict=True))
        assert batches.stats().bytes_by_origin["nvme"] > 0
    assert sum(calls(called).values()) < COUNT / 2


@as_root
def test_what_one_user_prepared_no_other_user_reads(daemon: Daemon, data: str) -> None:
    open_dataset(data, prepare=half)[0]
    with Control(daemon.socket_dir) as control:
        mine = next(each.dataset.id for each in control.list() if each.dataset.uri.partition("#")[2])
    directory = daemon.socket_dir
    os.chmod(directory, 0o755)

    def peek() -> object:
        grants = DaemonGrants(directory, DatasetId(mine))
        try:
            grants.connect()
        except NotFound as error:
            return type(error).__name__
        finally:
            grants.close()
        return "granted"

    assert [as_user(uid, peek) for uid in (ALICE, BOB)] == ["NotFound", "NotFound"]
    DaemonGrants(directory, DatasetId(mine)).close()


@pytest.mark.slow
def test_a_preparer_that_is_killed_costs_its_extent_alone(
    daemon: Daemon, data: str, called: Path, tmp_path: Path
) -> None:
    other = write_pictures(daemon.root.parent / "of-killed", seed=2)
    open_dataset(other, prepare=half)
    first = run_job(other, daemon.socket_dir, "1", 0, called)
    wait_until(lambda: sum(calls(called).values()) > FEW)
    first.kill()
    first.communicate()
    batches = DataLoader(open_dataset(other, prepare=half), 8)
    numbers = [number for images, _ in batches for number in images[:, 0, 0, 0].tolist()]
    assert sorted(numbers) == [*range(COUNT)]
    assert batches.stats().bytes_by_origin["prepared"] == 0
    assert sum(calls(called).values()) < 2 * COUNT


def as_long_as_its_label(sample: tuple[Any, int], _name: str) -> np.ndarray[Any, Any]:
    return np.zeros(1 + sample[1])


def test_a_subset_is_tried_by_its_own_samples_and_found_by_its_id(
    daemon: Daemon, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for label, name in enumerate(CLASSES):
        some = open_dataset(data).where(f"label == '{name}'")
        prepared = some.prepared(partial(as_long_as_its_label, _name=name))
        assert [*map(len, prepared)] == [1 + label] * EACH
        assert run(["find", prepared.opened.link.id, f"label == '{name}'", "--count"]) == 0
        assert capsys.readouterr().out == f"{EACH}\n"


def test_a_daemon_that_lost_its_state_learns_of_the_prepared_dataset_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_pictures(tmp_path / "data")
    monkeypatch.setenv("CACHESVC", "require")
    options = ["--ram", "4MiB", "--extent-bytes", str(EXTENT), "--fillers", "1", "--allow", data]
    with Daemon(tmp_path / "node", options) as daemon:
        monkeypatch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
        dataset = open_dataset(data, prepare=half)
        first = [*DataLoader(dataset, 9)]
        daemon.stop()
        shutil.rmtree(tmp_path / "node" / "state")
        daemon.start()
        batches = DataLoader(dataset, 9)
        assert all(same(*pair) for pair in zip(batches, first, strict=True))
        assert batches.stats().bytes_by_origin["prepared"] == 0
