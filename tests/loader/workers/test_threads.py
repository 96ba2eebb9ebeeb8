"""Worker threads: the same batches as in the trainer, errors and arguments as in torch, and nothing left behind."""

from __future__ import annotations

import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset, get_worker_info

from cachesvc.client.protocol import Granted, Refused
from cachesvc.core.errors import InvalidInput, TierFailed
from loader import DataLoader
from loader.batches.turns import BatchKey
from loader.reading.reader import ExtentReader
from loader.workers.threads import ThreadEngine
from testbed import WAIT_S
from tests.support.training.loader_fakes import MemoryGrants, MemoryLink, in_memory, numbers_in, wide_records

COUNT = 203


EARLIER: set[threading.Thread] = set()
"""Threads that ran before the tests of this module."""


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> MemoryLink:
    return wide_records(tmp_path_factory.mktemp("records"), COUNT)


@pytest.fixture(scope="module", autouse=True)
def collect_garbage() -> None:
    """Collect loaders that earlier tests dropped in reference cycles, before threads are counted, and count none of those
    that earlier tests keep."""
    gc.collect()
    EARLIER.update(threading.enumerate())


def loader(link: MemoryLink, **settings: Any) -> DataLoader:
    settings = {"batch_size": 16, "shuffle": True, "window": 16384, "num_workers": 3} | settings
    return DataLoader(in_memory(link), worker_type="thread", **settings)


def in_process(link: MemoryLink, **settings: Any) -> list[list[int]]:
    return epoch_of(loader(link, num_workers=0, **settings))


def epoch_of(batches: DataLoader) -> list[list[int]]:
    return [numbers_in(batch) for batch in batches]


def workers() -> list[threading.Thread]:
    threads = [thread for thread in threading.enumerate() if thread not in EARLIER]
    return [thread for thread in threads if thread.name.startswith("cachesvc-worker")]


def test_threads_make_the_same_batches_as_the_trainer(link: MemoryLink) -> None:
    shared = loader(link)
    single = loader(link, num_workers=0)
    for _ in range(3):
        assert epoch_of(shared) == epoch_of(single)
        assert not workers()
        assert sum(shared.stats().bytes_by_origin.values()) == COUNT * 2048
    assert epoch_of(loader(link, epochs=2)) == epoch_of(loader(link, epochs=2, num_workers=0))
    del shared
    gc.collect()
    assert not workers()


def test_an_abandoned_iteration_leaves_no_thread(link: MemoryLink) -> None:
    batches = loader(link)
    for _ in batches:
        break
    assert not workers()
    kept = iter(batches)
    next(kept)
    assert len(workers()) == 3
    del kept
    assert not workers()
    batches.set_epoch(0)
    assert epoch_of(batches) == in_process(link)


class CountingMaker:
    """Counts the batches that were begun."""

    def __init__(self) -> None:
        self.turns: list[int] = []
        self.changed = threading.Condition()

    def make(self, turn: BatchKey) -> int:
        with self.changed:
            self.turns.append(turn.turn)
            self.changed.notify_all()
        return turn.turn

    def wait(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.turns) >= count, WAIT_S)


def test_threads_make_at_most_prefetch_factor_batches_ahead() -> None:
    maker = CountingMaker()
    engine = ThreadEngine(lambda: maker.make, workers=2, ahead=4)
    engine.start(0, 10, 30)
    maker.wait(4)
    assert engine.fetch((0, 10)) == 10
    maker.wait(5)
    engine.stop()  # joins the threads, so the count is final
    assert sorted(maker.turns) == [10, 11, 12, 13, 14]


def broken(sample: torch.Tensor) -> torch.Tensor:
    if int(sample.numpy().view("<u4")[0]) // 512 == 77:
        raise KeyError("a bad sample")
    return sample


def leaves(sample: torch.Tensor) -> torch.Tensor:
    raise SystemExit(3)


def test_exceptions_are_raised_as_from_worker_processes(link: MemoryLink) -> None:
    failing = DataLoader(
        in_memory(link, transform=broken), batch_size=16, num_workers=2, worker_type="thread"
    )
    with pytest.raises(KeyError, match=r"Caught KeyError in DataLoader worker thread \d"):
        list(failing)
    assert not workers()
    with pytest.raises(SystemExit):
        list(DataLoader(in_memory(link, transform=leaves), num_workers=1, worker_type="thread"))


def refuse(worker: int) -> None:
    raise ValueError(f"worker {worker} cannot begin")


def test_worker_init_runs_in_each_thread_and_its_failure_is_raised(link: MemoryLink) -> None:
    begun: list[tuple[int, int, object]] = []

    def begin(worker: int) -> None:
        begun.append((worker, threading.get_ident(), get_worker_info()))

    epoch_of(loader(link, worker_init_fn=begin))
    assert sorted(worker for worker, _, _ in begun) == [0, 1, 2]
    assert threading.get_ident() not in {ident for _, ident, _ in begun}
    assert {info for _, _, info in begun} == {None}
    with pytest.raises(ValueError, match="cannot begin"):
        epoch_of(loader(link, worker_init_fn=refuse))


def test_a_timeout_raises_torchs_error(link: MemoryLink) -> None:
    stuck = threading.Event()

    def wait(sample: torch.Tensor) -> torch.Tensor:
        stuck.wait(1)
        return sample

    slow = DataLoader(
        in_memory(link, transform=wait), batch_size=4, num_workers=1, worker_type="thread", timeout=0.1
    )
    reading = iter(slow)
    with pytest.raises(RuntimeError, match="timed out"):
        next(reading)
    stuck.set()


def test_invalid_worker_settings_are_refused_at_once(link: MemoryLink) -> None:
    with pytest.raises(InvalidInput, match="thread"):
        DataLoader(in_memory(link), worker_type="fiber")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="meta"):
        DataLoader(in_memory(link), device="meta")
    with pytest.raises(InvalidInput, match="is not a device"):
        DataLoader(in_memory(link), device="gpu")
    if not torch.cuda.is_available():
        with pytest.raises(InvalidInput, match="CUDA"):
            DataLoader(in_memory(link), device="cuda")
    with pytest.raises(InvalidInput, match="open_dataset"):
        iter(DataLoader(TensorDataset(torch.arange(4)), num_workers=1, worker_type="thread"))


@pytest.mark.parametrize("count", [0, 2])
def test_device_cpu_leaves_batches_alone(link: MemoryLink, count: int) -> None:
    batches = loader(link, num_workers=count, device="cpu")
    assert batches.device == "cpu"
    assert epoch_of(batches) == in_process(link)


class SlowGrants(MemoryGrants):
    """Grants one extent at each permission."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.asked, self.go = threading.Event(), threading.Event()

    def acquire(self, extents: Any, timeout_s: float) -> list[Granted | Refused]:
        if 9 in extents:
            self.asked.set()
            assert self.go.wait(WAIT_S)
        return super().acquire(extents, timeout_s)


def gathered(reader: ExtentReader, catalog: Any, samples: list[int]) -> list[int]:
    slots = catalog.layout.slots(np.asarray(samples))
    first, last = reader.spans(slots * 2048, np.full(len(slots), 2048))
    return (reader.gather(slots, first, last).view("<u4").reshape(-1, 512)[:, 0] // 512).tolist()


@pytest.mark.parametrize("origin", ["ram", "nvme"])
def test_a_thread_with_its_extents_at_hand_does_not_wait_for_a_fill(link: MemoryLink, origin: str) -> None:
    catalog = link.catalog()
    grants = SlowGrants(catalog.extent, origin)
    reader = ExtentReader(catalog, grants)
    assert gathered(reader, catalog, [0, 1]) == [0, 1]
    with ThreadPoolExecutor(1) as pool, ThreadPoolExecutor(1) as again:
        waiting = pool.submit(gathered, reader, catalog, [36])
        assert grants.asked.wait(WAIT_S)
        assert gathered(reader, catalog, [1, 0]) == [1, 0]
        assert gathered(reader, catalog, [20, 40]) == [20, 40], (
            "extents that are elsewhere do not wait either"
        )
        same = again.submit(gathered, reader, catalog, [37, 5])
        assert not waiting.done()
        assert not same.done()
        grants.go.set()
        assert waiting.result(WAIT_S) == [36]
        assert same.result(WAIT_S) == [37, 5]
    assert max(grants.leases.values()) == 1, "an extent that is on its way is not asked for again"
    reader.close()
    assert not any(grants.leases.values())


@pytest.mark.parametrize(
    ("origin", "limit", "room"), [("ram", 1 << 30, 4), ("ram", 20_000, 99), ("nvme", 0, 5)]
)
def test_many_threads_share_a_reader_with_little_memory(
    link: MemoryLink, origin: str, limit: int, room: int
) -> None:
    catalog = link.catalog()
    grants = MemoryGrants(catalog.extent, origin, room)
    reader = ExtentReader(catalog, grants, limit)

    def reads(seed: int) -> bool:
        rng = np.random.default_rng(seed)
        for _ in range(30):
            samples = rng.integers(0, COUNT, 12).tolist()
            if gathered(reader, catalog, samples) != samples:
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(reads, range(4)))
    assert reader.origin_bytes()[origin] == 4 * 30 * 12 * 2048
    reader.close()
    assert not any(grants.leases.values())


def test_no_thread_waits_for_extents_of_an_interrupted_read(
    link: MemoryLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = link.catalog()
    reader = ExtentReader(catalog, MemoryGrants(catalog.extent), 2 * 8192)
    assert gathered(reader, catalog, [0, 4]) == [0, 4]

    def interrupted(*_: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as making_room:
        making_room.setattr(type(reader._leases.held.range), "unmap", interrupted)
        with pytest.raises(KeyboardInterrupt):
            gathered(reader, catalog, [8, 12])
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(gathered, reader, catalog, [8, 12]).result(WAIT_S) == [8, 12]
    reader.close()


def test_a_file_truncated_during_a_read_is_a_typed_error(link: MemoryLink, tmp_path: Path) -> None:
    class TruncatedGrants(MemoryGrants):
        """Grants files that end too early."""

        def acquire(self, extents: Any, timeout_s: float) -> list[Granted | Refused]:
            answers = super().acquire(extents, timeout_s)
            for answer in answers:
                assert isinstance(answer, Granted)
                os.ftruncate(answer.fd, 5000)
            return answers

    catalog = link.catalog()
    reader = ExtentReader(catalog, TruncatedGrants(catalog.extent, "nvme"))
    with pytest.raises(TierFailed, match="cut"):
        gathered(reader, catalog, [0, 1, 2, 3])
    addresses, lengths = catalog.locate(np.asarray([3]))
    with pytest.raises(TierFailed, match="cut"):
        reader.read(addresses[:, 0], lengths[:, 0])
    reader.close()
