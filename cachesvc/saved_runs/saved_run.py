"""A run as its saved state describes it, over the catalog of its data: which samples each step has, and which steps each
sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.columns import Ints
from cachesvc.catalog.layout import Columns, Indirect
from cachesvc.catalog.sample_places import SamplePlace, places_of, samples_with_key
from cachesvc.core.errors import InvalidInput, NotFound, StateMismatch
from cachesvc.core.order.assignment import Assignment
from cachesvc.core.order.digests import SampleSum, sum_of
from cachesvc.core.order.epoch_order import EpochOrder, OrderSpec, subset_first
from cachesvc.core.order.excluded import parse_excluded
from cachesvc.core.order.skipped import RunSteps, parse_skipped
from cachesvc.core.order.state import STATE_VERSION, LoaderState
from cachesvc.saved_runs.data import DataSource

_CHUNK = 1 << 18
"""Samples of which the digest is summed at once."""


class Taken(NamedTuple):
    """A sample in a data step. `trained`: the number of that step among those that are not skipped, which an optimizer
    counts. `slot`: its place in the global batch. `sample`: its number in the catalog."""

    step: int
    trained: int
    slot: int
    sample: int


@dataclass(frozen=True, slots=True)
class NamedSample:
    """A sample's name in the source, and the bytes that hold it."""

    key: str
    places: tuple[SamplePlace, ...]


def fresh_state(identity: str, samples: int, spec: OrderSpec) -> LoaderState:
    """The state of a run that has yet to begin."""
    steps = Assignment(samples, spec.global_batch, spec.node_parts, spec.last).data_steps
    numbers = ("epoch", "step", "micro", "batch_size", "world_size", "epochs_done", "data_step")
    place: dict[str, Any] = dict.fromkeys(numbers, 0)
    return LoaderState(
        version=STATE_VERSION,
        dataset=identity,
        samples=samples,
        steps=steps,
        source="",
        digest="",
        edges="mask",
        **place,
        **asdict(spec),
    )


class SavedRun:
    """The steps of a run. `ids`: the catalog's samples of a part of the dataset, in the order of their indices; None for
    all. Raises StateMismatch for data that is not the state's."""

    def __init__(self, state: LoaderState, source: DataSource, catalog: Catalog, ids: Ints | None) -> None:
        self.state, self.source, self.catalog, self._ids = state, source, catalog, ids
        self._spec = spec = state.spec
        self._skipped, self._excluded = parse_skipped(spec.skipped), parse_excluded(spec.excluded)
        first, self._index_of = catalog.extent_first, None
        if ids is not None and (ids[1:] < ids[:-1]).any():
            if not spec.shuffle:
                first = np.array([0, ids.size], np.int64)
            else:
                self._index_of = np.argsort(ids, kind="stable")
                first = subset_first(catalog.extent_first, ids[self._index_of])
        elif ids is not None:
            first = subset_first(catalog.extent_first, ids)
        self._first, samples = first, int(first[-1])
        if samples != state.samples:
            raise StateMismatch(f"the state's run has {state.samples:,} samples, and this data {samples:,}")
        self.steps_of_epoch = Assignment(samples, spec.global_batch, spec.node_parts, spec.last).data_steps
        self._run_steps = RunSteps(spec.since_epoch, spec.since_step, (), lambda _: self.steps_of_epoch)
        self._order: EpochOrder | None = None

    def place(self, step: int) -> tuple[int, int]:
        """The epoch of a data step, and its number there. Raises StateMismatch for a step from before the latest change of
        the global batch, `last` or window, InvalidInput for a run without steps."""
        if step < self._spec.since_step:
            raise StateMismatch(
                f"step {step:,} lies before step {self._spec.since_step:,}, where the global batch, `last` or the window "
                "changed: give a state of before it"
            )
        place = self._run_steps.place(step)
        if place is None:
            raise InvalidInput("the data is less than one batch: the run has no steps")
        return place

    def trained(self, step: int) -> int:
        """The number of a data step among those that are not skipped; of a skipped step, that of the next one."""
        return self._skipped.number(step)

    def is_skipped(self, step: int) -> bool:
        """Whether a data step is left out."""
        return step in self._skipped

    def slots_of(self, rank: int | None, world: int | None) -> tuple[int, int]:
        """The slots of a rank of `world`; of all ranks for None. Raises InvalidInput."""
        batch = self._spec.global_batch
        if rank is None:
            return 0, batch
        if world is None:
            raise InvalidInput(
                f"rank {rank} of how many? Give --world: a state is the same for any number of ranks"
            )
        if rank >= world or batch % world:
            raise InvalidInput(f"rank {rank} of {world}: a global batch of {batch} has no such part")
        return rank * batch // world, (rank + 1) * batch // world

    def samples_of(self, step: int, low: int = 0, high: int | None = None) -> list[Taken]:
        """The real samples in the slots [low, high) of a data step; all slots by default, none of a skipped step."""
        slots, samples = self._samples(step, low, self._spec.global_batch if high is None else high)
        number = self.trained(step)
        return [Taken(step, number, *pair) for pair in zip(slots.tolist(), samples.tolist(), strict=True)]

    def _samples(self, step: int, low: int, high: int) -> tuple[Ints, Ints]:
        """The slots of a data step and their samples, without repeats and excluded ones."""
        epoch, at = self.place(step)
        if step in self._skipped:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        order = self._order_of(epoch)
        if at < order.full_steps:
            found, slots = order.slots(at, at + 1, low, high)[0], np.arange(low, high)
        else:
            tail = order.tail(low, high)
            found = tail.samples[0][: int(tail.valid[0])]
            slots = low // (high - low) * tail.samples.shape[1] + np.arange(found.size)
        indices = found if self._index_of is None else self._index_of[found]
        kept = ~self._excluded.among(indices, np.array(step))
        return slots[kept], (indices if self._ids is None else self._ids[indices])[kept]

    def steps_with(self, key: str) -> Iterator[Taken]:
        """Each data step below the state's place that has a sample of this key, in turn by epoch. Raises NotFound for a key
        that no sample has, StateMismatch as `place`."""
        samples = samples_with_key(self.catalog, key)
        if self._ids is not None:
            samples = [sample for sample in samples if (self._ids == sample).any()]
        if not samples:
            raise NotFound(f"no sample of the run has the key {key[:80]!r}")
        self.place(self._spec.since_step)
        for epoch in range(self._spec.since_epoch, self.state.epoch + 1):
            order, first = self._order_of(epoch), self._run_steps.first(epoch)
            for sample in samples:
                for ordinal in self._ordinals(sample):
                    place = order.place(ordinal)
                    step = first + place[0] if place is not None else -1
                    if place is None or step >= self.state.data_step or step in self._skipped:
                        continue
                    index = ordinal if self._index_of is None else int(self._index_of[ordinal])
                    if not self._excluded.among(np.array([index]), np.array(step)).any():
                        yield Taken(step, self.trained(step), place[1], sample)

    def digest_of(self, steps: range, contents_of: Callable[[Ints], Sequence[bytes]]) -> bytes:
        """The digest of the samples of data steps: what their batches add to the loader's `digest()`. `contents_of` gives
        digests of the bytes of extents."""
        total, waiting, catalog = SampleSum(), list[Ints](), self.catalog
        for step in steps:
            waiting.append(self._samples(step, 0, self._spec.global_batch)[1])
            if len(waiting) * self._spec.global_batch >= _CHUNK or step == steps[-1]:
                total += sum_of(np.concatenate(waiting), catalog.extent_first, contents_of)
                waiting = []
        return total.digest

    def extents_ahead(self, steps: int, slots: Sequence[tuple[int, int]]) -> Ints:
        """The extents with samples in these slots [low, high) of the next `steps` steps that are not skipped, in the order
        of their first use."""
        found: list[Ints] = []
        number = self.trained(self.state.data_step)
        ahead = [self._skipped.step(each) for each in range(number, number + steps)]
        for step in ahead:
            taken = [self._samples(step, low, high)[1] for low, high in slots]
            found.append(self.extents_of(self.catalog, np.concatenate([np.empty(0, np.int64), *taken])))
        extents, first = np.unique(np.concatenate([np.empty(0, np.int64), *found]), return_index=True)
        return extents[np.argsort(first, kind="stable")]

    @staticmethod
    def extents_of(catalog: Catalog, samples: Ints) -> Ints:
        """The extents of samples, ascending, with those into which samples continue."""
        begin = np.searchsorted(catalog.extent_first, samples, side="right") - 1
        if isinstance(catalog.layout, (Columns, Indirect)) or not samples.size:
            return np.unique(begin)
        addresses, lengths = catalog.locate(samples)
        held = lengths > 0
        low, high = addresses[held], addresses[held] + lengths[held] - 1
        first, last = (np.searchsorted(catalog.extent_starts, each, side="right") - 1 for each in (low, high))
        spans = [np.arange(*pair) for pair in np.unique(np.stack((first, last + 1)), axis=1).T.tolist()]
        return np.unique(np.concatenate([begin, *spans]))

    def named(self, samples: list[int]) -> list[NamedSample]:
        """The names and places of samples of the catalog."""
        places = places_of(self.catalog, np.array(samples, np.int64)) if samples else []
        return [
            NamedSample(self.catalog.key(sample), where)
            for sample, where in zip(samples, places, strict=True)
        ]

    def _ordinals(self, sample: int) -> list[int]:
        if self._ids is None:
            return [sample]
        indices = np.flatnonzero(self._ids == sample)
        if self._index_of is None:
            return list(map(int, indices))
        return [int(np.flatnonzero(self._index_of == index)[0]) for index in indices]

    def _order_of(self, epoch: int) -> EpochOrder:
        """The order of an epoch without skipped steps, which only renumber it."""
        if self._order is None or self._order.epoch != epoch:
            self._order = EpochOrder(self._spec, self._first, epoch)
        return self._order
