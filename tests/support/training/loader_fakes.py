"""Fake holders of extents for the loader's tests: real descriptors, chosen failures."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset as TorchDataset

from cachesvc.catalog.build import DirectBytes, build
from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.options import Options
from cachesvc.catalog.survey import survey
from cachesvc.client.protocol import CLOSED, Granted, Refused
from cachesvc.core.errors import CacheError, DaemonUnavailable
from cachesvc.core.model import DatasetId, Extent
from cachesvc.core.order.epoch_order import Plan
from cachesvc.sources.files import FilesSource
from cachesvc.sources.uri import canonical
from cachesvc.tiers.checksum import checksums_of
from loader.dataloader import DataLoader
from loader.datasets.dataset import Dataset
from loader.datasets.samples.sample_form import SampleSpec
from loader.reading.direct.direct_access import Access
from loader.reading.opened_dataset import OpenedDataset
from tests.support import datasets


def extent_bytes(extent: Extent) -> bytes:
    """An extent of plain local pieces."""
    out = b""
    for piece in extent.pieces:
        with open(piece.object.uri.removeprefix("file://"), "rb") as file:
            file.seek(piece.offset)
            out += file.read(piece.length)
    return out


def encoded(extent: Extent) -> Extent:
    """An extent of the same bytes that is no range of a file, so that it is filled."""
    return replace(extent, pieces=tuple(replace(piece, codec="none") for piece in extent.pieces))


class MemoryGrants:
    """Grants extents in memfds, as a daemon's RAM tier does; at most `room` leased at once. Some extents may be `lost`, and
    some take a while."""

    def __init__(
        self,
        extent_of: Callable[[int], Extent],
        origin: str = "ram",
        room: int = 1 << 30,
        lost: Mapping[int, Exception] = {},
        delays_s: Mapping[int, float] = {},
    ) -> None:
        self._extent_of, self._origin, self._room = extent_of, origin, room
        self._lost, self._delays_s = lost, delays_s
        self.leases: dict[int, int] = {}
        self._lock = threading.Lock()
        self.calls = 0
        self.steps: list[int] = []
        self.alive, self.closed = True, False

    def acquire(self, extents: Sequence[int], timeout_s: float) -> list[Granted | Refused]:
        self.calls += 1
        assert min(extents) >= 0, "no such extent: a daemon's message has no room for that number"
        if self.closed:
            raise CacheError(CLOSED)
        if not self.alive:
            raise DaemonUnavailable("the fake daemon is down; start it again")
        time.sleep(sum(self._delays_s.get(index, 0.0) for index in extents))
        for index in extents:
            if index in self._lost:
                raise self._lost[index]
        wanted = {index: self._extent_of(index) for index in extents}
        with self._lock:
            return self._answers(wanted)

    def _answers(self, extents: Mapping[int, Extent]) -> list[Granted | Refused]:
        answers: list[Granted | Refused] = []
        for index, extent in extents.items():
            if sum(self.leases.values()) >= self._room:
                answers.append(Refused(index))
                continue
            fd = os.memfd_create("test", os.MFD_CLOEXEC)
            os.write(fd, extent_bytes(extent))
            self.leases[index] = self.leases.get(index, 0) + 1
            content = checksums_of(fd, 0, extent.size_bytes).content
            answers.append(Granted(index, fd, 0, extent.size_bytes, self._origin, content=content))
        return answers

    def release(self, extents: Sequence[int]) -> None:
        with self._lock:
            for index in () if self.closed else extents:
                self.leases[index] -= 1
                assert self.leases[index] >= 0, "released more often than granted"

    def passed(self, step: int) -> None:
        self.steps.append(step)

    def close(self) -> None:
        self.closed = True
        self.leases.clear()


@dataclass(frozen=True)
class MemoryLink:
    """Opens a dataset over MemoryGrants; picklable, so that spawned workers do the same."""

    id: DatasetId
    path: str
    origin: str = "ram"
    room: int = 1 << 30
    daemon: str = ""
    kept: tuple[str, ...] = ()
    uris: tuple[str, ...] = ()
    options: Options = field(default_factory=Options)
    lost: Mapping[int, Exception] = field(default_factory=dict, hash=False)
    delays_s: Mapping[int, float] = field(default_factory=dict, hash=False)

    def catalog(self) -> Catalog:
        return Catalog.open(self.path)

    def access(self, catalog: Catalog) -> Access:
        grants = MemoryGrants(catalog.extent, self.origin, self.room, self.lost, self.delays_s)
        return Access(grants, _nothing)


def _nothing(plan: Plan, part: float) -> None:
    """Memory is filled on demand."""


@dataclass(frozen=True)
class PlannedLink(MemoryLink):
    """Records the plans that a dataset's connection submits."""

    plans: list[Plan] = field(default_factory=list, hash=False)
    grants: list[MemoryGrants] = field(default_factory=list, hash=False)

    def access(self, catalog: Catalog) -> Access:
        self.grants.append(MemoryGrants(catalog.extent))
        return Access(self.grants[-1], lambda plan, part: self.plans.append(plan))


def compiled(uri: Path, into: Path, **options: object) -> MemoryLink:
    """Compile a local dataset and link it to memory."""
    source = FilesSource(())
    found = survey([canonical(str(uri))], Options(**options), lambda _: source)  # type: ignore[arg-type]
    path = into / f"{found.id}.lmdb"
    if not path.exists():
        build(found, str(path), lambda _: source, DirectBytes(lambda _: source), lambda done, total: None)
    return MemoryLink(found.id, str(path))


def in_memory(link: MemoryLink, **form: object) -> Dataset:
    """A dataset of that link."""
    return Dataset(OpenedDataset(link), SampleSpec(**form))  # type: ignore[arg-type]


def numbered_records(root: Path, count: int) -> MemoryLink:
    """A dataset of which record n holds n."""
    datasets.array_file(root / "r.bin", np.arange(count, dtype="<i8").reshape(count, 1))
    return compiled(root / "r.bin", root, format="records", dtype="(1,)i8")


def wide_records(root: Path, count: int) -> MemoryLink:
    """A dataset of records of 2 KiB, four to an extent; see `numbers_in`."""
    datasets.array_file(root / "r.bin", np.arange(count * 512, dtype="<u4").reshape(count, 512))
    return compiled(root / "r.bin", root, format="records", record_bytes=2048, extent_bytes=8192)


def numbers_in(batch: torch.Tensor) -> list[int]:
    """The numbers of the `wide_records` in a batch, read from their bytes."""
    found: list[int] = (batch.numpy().view("<u4")[:, 0] // 512).tolist()
    return found


def drawing(record: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """A transform that draws a number for a record."""
    return torch.tensor([int(record[0]), int(rng.integers(1 << 40))])


class Holding(TorchDataset[Any]):
    """A user's dataset around another."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


Step = list[tuple[Any, int]]
"""One batch of each rank, with the number of its real samples."""


def loaders_of_ranks(
    link: MemoryLink, batch: int, world: int, workers: int = 0, **given: Any
) -> list[DataLoader[Any]]:
    """The loaders of all ranks of a run over a link, shuffled, whose global batches have `batch` samples."""
    settings: dict[str, Any] = {"shuffle": True, "num_workers": workers, "worker_type": "thread"} | given
    return [
        DataLoader(
            in_memory(link), batch // world, global_batch_size=batch, rank=rank, world_size=world, **settings
        )
        for rank in range(world)
    ]


def in_step(loaders: Sequence[Any], state: object = None, stop: int = 1 << 30) -> tuple[list[Step], Any]:
    """Load a state into the loaders of all ranks, if one is given, and take at most `stop` batches of each, in step. Return
    them, and the state after them, which is the same on all ranks."""
    for loader in loaders if state is not None else ():
        loader.load_state_dict(json.loads(json.dumps(state)))
    steps, iterators = list[Step](), [iter(loader) for loader in loaders]
    while len(steps) < stop:
        batches = [next(iterator, None) for iterator in iterators]
        if batches[0] is None:
            break
        steps.append([(batch, loader.valid) for batch, loader in zip(batches, loaders, strict=True)])
    states = [loader.state_dict() for loader in loaders]
    assert all(each == states[0] for each in states)
    return steps, states[0]
