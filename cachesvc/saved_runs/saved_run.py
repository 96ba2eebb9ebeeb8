"""A run as its saved state describes it, over the catalogs of its data: which samples each step has, and which steps each
sample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cachesvc.catalog.columns import Ints
from cachesvc.catalog.sample_places import NamedSample
from cachesvc.core.errors import InvalidInput, NotFound, StateMismatch
from cachesvc.core.order.assignment import Assignment
from cachesvc.core.order.digests import SampleSum
from cachesvc.core.order.epoch_order import EpochOrder, OrderSpec
from cachesvc.core.order.excluded import parse_excluded
from cachesvc.core.order.run import RunOrder
from cachesvc.core.order.skipped import RunSteps, parse_skipped
from cachesvc.core.order.state import STATE_VERSION, LoaderState
from cachesvc.saved_runs.run_data import ContentsIn, Leaf

if TYPE_CHECKING:
    from cachesvc.saved_runs.composed import RunData  # with all that mixtures and packs need

_CHUNK = 1 << 18
"""Samples of which the digest is summed at once."""


class Taken(NamedTuple):
    """A sample in a data step. `trained`: the number of that step among those that are not skipped, which an optimizer
    counts. `slot`: its place in the global batch. `sample`: its index in the dataset, a spot in a mixture, a pack
    among packs."""

    step: int
    trained: int
    slot: int
    sample: int


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
    """The steps of a run. Raises StateMismatch for data that is not the state's."""

    def __init__(self, state: LoaderState, data: RunData) -> None:
        self.state, self.data = state, data
        self._spec = spec = state.spec
        self._skipped = parse_skipped(spec.skipped)
        self._index_of = data.layout(spec.shuffle).index_of if isinstance(data, Leaf) else None
        samples = data.size(spec, state.epoch)
        if not data.may_change and samples != state.samples:
            raise StateMismatch(f"the state's run has {state.samples:,} samples, and this data {samples:,}")
        self._run_steps = RunSteps(spec.since_epoch, spec.since_step, data.changes, self._steps_of)
        self._order: EpochOrder | RunOrder | None = None

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
        slots, indices = self._samples(step, low, self._spec.global_batch if high is None else high)
        number = self.trained(step)
        return [Taken(step, number, *pair) for pair in zip(slots.tolist(), indices.tolist(), strict=True)]

    def _samples(self, step: int, low: int, high: int) -> tuple[Ints, Ints]:
        """The slots of a data step and their indices, without repeats and excluded samples."""
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
        kept = ~self.data.left_out(indices, self._spec.at_step(step), epoch)
        return slots[kept], indices[kept]

    def steps_with(self, key: str) -> Iterator[Taken]:
        """Each data step below the state's place that has a sample of this key, in turn by epoch; packs that have a part of
        it. Raises NotFound for a key that no sample has, StateMismatch as `place`."""
        match = self.data.matching(key)
        if match is None:
            raise NotFound(f"no sample of the run has the key {key[:80]!r}")
        self.place(self._spec.since_step)
        if isinstance(self.data, Leaf):
            yield from self._steps_with_indices(self.data.with_key(key).tolist())
            return
        for step in range(self._spec.since_step, self.state.data_step):
            slots, indices = self._samples(step, 0, self._spec.global_batch)
            spec = self._spec.at_step(step)
            held = np.flatnonzero(match(indices, spec, self.place(step)[0])).tolist()
            for row in held:
                yield Taken(step, self.trained(step), int(slots[row]), int(indices[row]))

    def _steps_with_indices(self, indices: list[int]) -> Iterator[Taken]:
        """`steps_with` for a dataset, whose order has an inverse."""
        for epoch in range(self._spec.since_epoch, self.state.epoch + 1):
            order, first = self._order_of(epoch), self._run_steps.first(epoch)
            assert isinstance(order, EpochOrder), "that of a dataset"
            for index in indices:
                at = np.flatnonzero(self._index_of == index)[0] if self._index_of is not None else index
                place = order.place(int(at))
                step = first + place[0] if place is not None else -1
                if place is None or step >= self.state.data_step or step in self._skipped:
                    continue
                if not parse_excluded(self._spec.at_step(step).excluded).among(np.array([index])).any():
                    yield Taken(step, self.trained(step), place[1], index)

    def digest_of(self, steps: range, contents_of: ContentsIn) -> bytes:
        """The digest of the samples of data steps: what their batches add to the loader's `digest()`."""
        total, at_once = SampleSum(), max(1, _CHUNK // self._spec.global_batch)
        for (epoch, spec), some in groupby(
            steps, lambda step: (self.place(step)[0], self._spec.at_step(step))
        ):
            while few := [*islice(some, at_once)]:
                indices = [self._samples(step, 0, self._spec.global_batch)[1] for step in few]
                total += self.data.sum(np.concatenate(indices), spec, epoch, contents_of)
        return total.digest

    def extents_ahead(self, steps: int, slots: Sequence[tuple[int, int]]) -> list[tuple[Leaf, Ints]]:
        """The extents with samples in these slots [low, high) of the next `steps` steps that are not skipped, of each
        dataset, in the order of their first use."""
        found: list[list[Ints]] = [[np.empty(0, np.int64)] for _ in self.data.leaves]
        number = self.trained(self.state.data_step)
        for step in (self._skipped.step(each) for each in range(number, number + steps)):
            taken = [self._samples(step, low, high)[1] for low, high in slots]
            indices = np.concatenate([np.empty(0, np.int64), *taken])
            for leaf, extents in self.data.extents(indices, self._spec.at_step(step), self.place(step)[0]):
                found[leaf].append(extents)
        return [*zip(self.data.leaves, map(_by_first_use, found), strict=True)]

    def named(self, taken: Sequence[Taken]) -> list[NamedSample]:
        """The names and places of samples of the run."""
        found: list[NamedSample] = []
        for step, group in groupby(taken, lambda each: each.step):
            indices = np.array([each.sample for each in group], np.int64)
            found += self.data.named(indices, self._spec.at_step(step), self.place(step)[0])
        return found

    def _steps_of(self, epoch: int) -> int:
        """The data steps of an epoch."""
        spec = self._spec
        return Assignment(
            self.data.size(spec, epoch), spec.global_batch, spec.node_parts, spec.last
        ).data_steps

    def _order_of(self, epoch: int) -> EpochOrder | RunOrder:
        """The order of an epoch without skipped steps, which only renumber it."""
        if self._order is None or self._order.epoch != epoch:
            self._order = self.data.order(self._spec, epoch)
        return self._order


def _by_first_use(extents: Sequence[Ints]) -> Ints:
    found, first = np.unique(np.concatenate(extents), return_index=True)
    return found[np.argsort(first, kind="stable")]
