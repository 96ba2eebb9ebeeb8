"""Bad samples are skipped or replaced, the same ones at any scale, and every rank keeps its number of steps."""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

from cachesvc.core.errors import CorruptData, DaemonUnavailable, NotFound
from cachesvc.core.order.substitutes import NEAR_TRIES, OTHER_TRIES, substitutes
from loader import DataLoader, mix, open_dataset
from loader.batches.bad_samples import MAX_KEPT, MAX_LOGGED, BadSample, BadSampleLog, BatchRepair
from testbed.node import Daemon
from testbed.servers import SeaweedFS
from tests.support import datasets
from tests.support.training.loader_fakes import MemoryLink, compiled, in_memory

COUNT = 103
BAD = frozenset({0, 7, 8, 50, 102})


@dataclass(frozen=True)
class RecordNumber:
    """A transform that returns a record's number, and fails for some numbers."""

    bad: frozenset[int]

    def __call__(self, record: torch.Tensor) -> int:
        number = int(record[0])
        if number in self.bad:
            raise ValueError(f"record {number} is spoilt")
        return number


def ranks(link: MemoryLink, world: int, bad: frozenset[int] = BAD, **settings: Any) -> list[DataLoader]:
    form = {"transform": RecordNumber(bad)}
    common = {"shuffle": True, "multiprocessing_context": "fork" if settings.get("num_workers") else None}
    return [
        DataLoader(in_memory(link, **form), rank=rank, world_size=world, **common | settings)
        for rank in range(world)
    ]


def real_samples(loader: DataLoader) -> list[list[int]]:
    """Return the real samples of each batch."""
    batches = []
    for batch in loader:
        assert batch.tolist() == loader.indices.tolist()
        batches.append(batch.tolist()[: loader.valid])
    return batches


@pytest.mark.parametrize(("world", "workers"), list(product((1, 2), (0, 2))))
def test_skip_drops_and_reports_only_bad_samples(link: MemoryLink, world: int, workers: int) -> None:
    loaders = ranks(link, world, batch_size=8, on_error="skip", last="pad", num_workers=workers)
    ledgers = [real_samples(loader) for loader in loaders]
    assert {len(ledger) for ledger in ledgers} == {-(-COUNT // (8 * world))}
    assert sorted(n for ledger in ledgers for batch in ledger for n in batch) == sorted(
        set(range(COUNT)) - BAD
    )
    told = [bad for loader in loaders for bad in loader.bad_samples]
    assert {bad.sample for bad in told} == BAD
    assert all(bad.key == f"r.bin:{bad.sample}" for bad in told), told
    assert all(bad.cause == f"ValueError: record {bad.sample} is spoilt" for bad in told)
    assert sum(loader.stats().bad_samples for loader in loaders) == len(BAD)


def test_substitutes_are_the_same_at_any_scale(link: MemoryLink) -> None:
    bad = frozenset(range(0, COUNT, 3))

    def globally(world: int, workers: int) -> list[list[int]]:
        loaders = ranks(
            link, world, bad, batch_size=12 // world, on_error="substitute", last="pad", num_workers=workers
        )
        steps = zip(*(real_samples(loader) for loader in loaders), strict=True)
        return [[n for part in parts for n in part] for parts in steps]

    alone = globally(1, 0)
    flat = [n for batch in alone for n in batch]
    assert len(flat) == COUNT
    assert set(flat) == set(range(COUNT)) - bad
    assert globally(1, 2) == alone
    for world in (2, 3, 4, 6):
        more = globally(world, 0)
        assert more[:-1] == alone[:-1]
        assert sorted(more[-1]) == sorted(
            alone[-1]
        )  # the samples of the last batch are shared out over the ranks


def test_a_batch_of_bad_samples_only_holds_one_invalid_substitute(link: MemoryLink) -> None:
    loader = ranks(link, 1, frozenset(range(4)), batch_size=4, on_error="skip", shuffle=False)[0]
    batches = iter(loader)
    first = next(batches)
    assert (len(first), loader.valid, len(loader.bad_samples)) == (1, 0, 4)
    assert len(list(batches)) + 1 == -(-COUNT // 4)


def test_an_epoch_of_bad_samples_only_is_an_error(link: MemoryLink) -> None:
    for on_error in ("skip", "substitute"):
        loader = ranks(link, 1, frozenset(range(COUNT)), batch_size=4, on_error=on_error)[0]
        with pytest.raises(CorruptData, match="spoilt"):
            next(iter(loader))


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> MemoryLink:
    """Four files of 20 records, one extent each."""
    root = tmp_path_factory.mktemp("parts")
    for part in range(4):
        rows = np.arange(part * 20 * 4, (part + 1) * 20 * 4, dtype="<i4").reshape(20, 4)
        datasets.array_file(root / "b" / f"{part}.npy", rows)
    return compiled(root / "b", root, format="records")


@pytest.mark.parametrize(("on_error", "workers"), list(product(("skip", "substitute"), (0, 1))))
def test_samples_of_an_object_that_is_gone_are_bad(parts: MemoryLink, on_error: Any, workers: int) -> None:
    dataset = in_memory(replace(parts, lost={1: NotFound("b/1.npy is gone; put it back")}))
    loader = DataLoader(dataset, batch_size=8, shuffle=True, on_error=on_error, num_workers=workers)
    gone = set(range(20, 40))
    found = []
    for batch in loader:
        found += [n // 4 for n in batch[: loader.valid, 0].tolist()]
    assert set(found) == set(range(80)) - gone
    assert len(found) == (60 if on_error == "skip" else 80)
    assert {bad.sample for bad in loader.bad_samples} == gone
    assert loader.bad_samples[0].cause == "NotFound: b/1.npy is gone; put it back"


@pytest.mark.parametrize("workers", [0, 1])
def test_an_unavailable_source_makes_no_bad_samples(parts: MemoryLink, workers: int) -> None:
    away = replace(parts, lost={1: DaemonUnavailable("nobody is there; start it")})
    loader = DataLoader(in_memory(away), batch_size=8, on_error="skip", num_workers=workers)
    with pytest.raises(DaemonUnavailable, match=r"^nobody is there; start it$"):
        list(loader)


def test_a_sample_that_does_not_decode_is_bad(tmp_path: Path) -> None:
    bodies = {f"x/{n:02d}.json": b"[1]" if n != 5 else b"[1" for n in range(10)}
    datasets.write_files(tmp_path / "d", bodies)
    link = compiled(tmp_path / "d", tmp_path, format="files", labels="none")
    loader = DataLoader(in_memory(link), batch_size=5, on_error="skip", collate_fn=len)
    assert sum(loader) == 9
    (bad,) = loader.bad_samples
    assert bad.key == "x/05.json"
    assert bad.cause.startswith("CorruptData")


def test_a_bad_sample_has_its_key_in_any_wrapped_dataset(tmp_path: Path) -> None:
    parts = []
    for part in ("a", "b"):
        bodies = {f"{part}/{n}.json": b"[1]" if (part, n) != ("b", 2) else b"[1" for n in range(4)}
        datasets.write_files(tmp_path / part, bodies)
        parts.append(in_memory(compiled(tmp_path / part, tmp_path, format="files", labels="none")))
    both: ConcatDataset[Any] = ConcatDataset(parts)
    around: list[Any] = [
        mix({parts[0]: 0.5, parts[1]: 0.5}),
        mix({parts[0]: 0.5, parts[1].where("key >= 'b/2'"): 0.5}),
        both,
        Subset(both, [0, 5, 6, 7, -4, -3, -2, -1]),
        Subset(
            StackDataset(TensorDataset(torch.zeros(4)), Subset(both, range(4, 8)), parts[0]), [3, 2, 1, 0]
        ),
    ]
    for dataset in around:
        loader = DataLoader(dataset, batch_size=3, shuffle=True, on_error="skip", collate_fn=len)
        list(loader)
        assert {bad.key for bad in loader.bad_samples} == {"b/2.json"}


def test_the_list_and_the_log_of_bad_samples_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    found = BadSampleLog()
    with caplog.at_level(logging.WARNING, "cachesvc"):
        for n in range(MAX_KEPT + 5):
            bad = BadSample(0, n, "k", "ValueError: x")
            found.record(BatchRepair(0, n, np.empty(0, np.int64), 0, (bad,)))
    assert (found.count, len(found.kept), len(caplog.records)) == (MAX_KEPT + 5, MAX_KEPT, MAX_LOGGED + 1)


@given(
    st.integers(0, 2**64 - 1), st.integers(0, 99), st.integers(0, 10**12), st.integers(1, 10**4), st.data()
)
def test_substitutes_are_a_few_other_positions(
    seed: int, epoch: int, position: int, batch: int, data: st.DataObject
) -> None:
    positions = data.draw(st.integers(1, 10**12))
    position %= positions
    found = list(substitutes(seed, epoch, position, batch, positions))
    assert found == list(substitutes(seed, epoch, position, batch, positions))
    assert len(found) <= NEAR_TRIES + OTHER_TRIES
    assert all(0 <= each < positions and each != position for each in found)


def test_an_object_deleted_at_the_source_is_skipped_through_the_daemon(
    bucket: str, s3_server: SeaweedFS, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3 = s3_server.client()
    for part in range(3):
        s3.put_object(Bucket=bucket, Key=f"d/{part}.bin", Body=bytes([part]) * 16 * 1024)
    options = ["--ram", "16MiB", "--fillers", "1", "--extent-bytes", "16KiB", "--allow", f"s3://{bucket}/"]
    monkeypatch.setenv("CACHESVC", "require")
    with Daemon(tmp_path / "node", options, s3_server.env()) as daemon:
        monkeypatch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
        dataset = open_dataset(f"s3://{bucket}/d/", format="records", record_bytes=1024)
        s3.delete_object(Bucket=bucket, Key="d/1.bin")
        loader = DataLoader(dataset, batch_size=8, shuffle=True, on_error="skip")
        found = [int(n) for batch in loader for n in batch[: loader.valid, 0]]
        assert sorted(found) == [0] * 16 + [2] * 16
        assert {bad.sample for bad in loader.bad_samples} == set(range(16, 32))
        assert "d/1.bin" in loader.bad_samples[0].cause
        with pytest.raises(NotFound, match=r"d/1\.bin"):
            list(DataLoader(dataset, batch_size=8))
        dataset.close()


def failing_collate(samples: list[int]) -> torch.Tensor:
    """A user's collate_fn with a fault of its own."""
    if COUNT - 1 in samples:
        raise ValueError("the batch is spoilt")
    return torch.tensor(samples)


def never(samples: list[int]) -> torch.Tensor:
    raise ValueError("the batch is spoilt")


@pytest.mark.parametrize("on_error", ["skip", "substitute"])
@pytest.mark.parametrize("collate_fn", [failing_collate, never])
@pytest.mark.parametrize(("batch_size", "workers"), [(1, 0), (8, 0), (8, 1)])
def test_an_error_of_collate_fn_over_good_samples_is_raised(
    link: MemoryLink, on_error: str, collate_fn: Any, batch_size: int, workers: int
) -> None:
    given = {"batch_size": batch_size, "on_error": on_error, "collate_fn": collate_fn, "num_workers": workers}
    loader = ranks(link, 1, BAD - {COUNT - 1}, **given)[0]
    with pytest.raises(ValueError, match="the batch is spoilt"):
        list(loader)
    assert not {bad.sample for bad in loader.bad_samples} - BAD


def refuse_small_batches(samples: list[int]) -> torch.Tensor:
    """A collate_fn that fails for fewer than four samples."""
    if len(samples) < 4:
        raise ValueError("too few")
    return torch.tensor(samples)


def test_a_collate_fn_that_refuses_small_batches_loses_no_good_sample(link: MemoryLink) -> None:
    given = {"batch_size": 20, "on_error": "skip", "collate_fn": refuse_small_batches, "last": "drop"}
    loader = ranks(link, 1, frozenset({3, 4, 9}), shuffle=False, **given)[0]
    assert next(iter(loader)).tolist() == sorted(set(range(20)) - {3, 4, 9})
    assert [bad.sample for bad in loader.bad_samples] == [3, 4, 9]


def test_a_repeat_may_be_replaced_by_the_only_good_sample(link: MemoryLink) -> None:
    """A repeat has no position of its own, so the search for a substitute leaves no position out."""
    for bad in (0, 1):
        for run in ranks(
            link, 4, frozenset({bad}), batch_size=1, shuffle=False, last="pad", on_error="substitute"
        ):
            pair = run.dataset.take(2)  # type: ignore[attr-defined]
            settings: dict[str, Any] = {"rank": run.rank, "world_size": 4, "last": "pad"}
            batches = list(DataLoader(pair, batch_size=1, on_error="substitute", **settings))
            assert [batch.tolist() for batch in batches] == [[1 - bad]]


class RandomlyFailing:
    """A transform that fails at random, independently of the sample."""

    def __init__(self, rate: float) -> None:
        self._rate, self._random = rate, random.Random(3)

    def __call__(self, record: torch.Tensor) -> int:
        if self._random.random() < self._rate:
            raise ValueError("not now")
        return int(record[0])


@pytest.mark.parametrize("on_error", ["skip", "substitute"])
@pytest.mark.parametrize("workers", [0, 2])
def test_transforms_that_fail_at_random_do_not_end_the_epoch(
    link: MemoryLink, on_error: Any, workers: int
) -> None:
    data = in_memory(link, transform=RandomlyFailing(0.3))
    loader = DataLoader(data, batch_size=10, shuffle=True, on_error=on_error, num_workers=workers)
    real = [number for batch in real_samples(loader) for number in batch]
    assert len(loader) == 11
    assert loader.bad_samples
    missing = len(loader.bad_samples) if on_error == "skip" else 0
    assert len(real) == COUNT - missing


@pytest.mark.parametrize("given", [{}, {"num_workers": 1}, {"num_workers": 1, "worker_type": "thread"}])
def test_on_error_may_change_between_iterations(link: MemoryLink, given: Any) -> None:
    loader = ranks(link, 1, batch_size=8, on_error="skip", **given)[0]
    assert sum(len(batch) for batch in real_samples(loader)) == COUNT - len(BAD)
    loader.on_error = "substitute"
    assert sum(len(batch) for batch in real_samples(loader)) == COUNT
    loader.on_error = "raise"
    with pytest.raises(ValueError, match="spoilt"):
        real_samples(loader)
