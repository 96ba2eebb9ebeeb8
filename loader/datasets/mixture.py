"""`mix`: several datasets as one, each slot of an epoch drawn from one of them. The arithmetic: core/order/mixture.py."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
from torch.utils.data import Dataset as TorchDataset

from cachesvc.core.arguments import place_of, shares, whole_number
from cachesvc.core.errors import InvalidInput
from cachesvc.core.order.epoch_order import OrderSpec
from cachesvc.core.order.mixture import (
    MAX_PERIOD,
    MixtureRun,
    Pattern,
    Size,
    epoch_slots,
    integer_shares,
    split_spots,
)
from cachesvc.core.order.permute import mix as keyed
from loader.datasets.composite import Component, Plain, without_parts
from loader.datasets.dataset import Dataset
from loader.datasets.packing import Packed
from loader.datasets.shape_mismatch import Name, unnamed
from loader.reading.reader import Ints

By = Literal["proportion", "repeat", "choose"]
MAX_TOLD = 4096
"""Characters that an identity may spend on weights, in a state."""
IN_ORDER = OrderSpec(seed=0, global_batch=1, shuffle=False)
"""The order in which a composed dataset is indexed."""


class _Phase(NamedTuple):
    """From epoch `first` on: a pattern, and how many slots an epoch has."""

    first: int
    pattern: Pattern
    slots: int


def mix(weights: Mapping[Dataset | Packed, float], *, by: By = "proportion", size: Size = "total") -> Mixture:
    """Datasets of `open_dataset` (or parts of them) or of `pack`, mixed by weight.

    `by="proportion"`: weights are relative; an epoch has `size` samples: a number; "total", as many as the datasets
    have together; "first", until one of them would repeat; "last", until each was gone through once.
    `by="repeat"`: how often an epoch goes through each dataset (0.5: half of it). `by="choose"`: how many samples
    an epoch takes from each. A dataset that is gone through again is shuffled anew; what an epoch did not take of one
    comes in the next epoch. A component's seed is derived from the loader's and its place in `weights`.

    Raises InvalidInput for weights below zero or all zero, an empty dataset, and samples that do not look alike
    (labels of different classes among them).
    """
    given = shares("weights", weights)
    components = tuple(weights)
    parts = [_component(one) for one in components]
    if not parts:
        raise InvalidInput("a mixture of nothing: give at least one dataset")
    for number, part in enumerate(parts):
        if not len(part):
            raise InvalidInput(f"component {number} of the mixture, {components[number]!r}, is empty")
    looks = {look: number for number, one in reversed(list(enumerate(components))) if (look := one.looks)}
    if len(looks) > 1:
        (one, first), (other, second) = sorted(looks.items(), key=lambda item: item[1])[:2]
        raise InvalidInput(
            f"components {first} and {second} of the mixture differ: {one} and {other}; open them with the same "
            "fields, or with a transform that makes them alike"
        )
    return Mixture(components, by, size, ((0, tuple(given)),))


class Mixture(TorchDataset[Any]):
    """Made by `mix`. `mixture[i]` is slot i with every component in its own order; under our DataLoader each is
    shuffled, and `batches.indices` are spots (see `locate`). Picklable."""

    def __init__(
        self,
        components: tuple[Dataset | Packed, ...],
        by: By,
        size: Size,
        schedule: tuple[tuple[int, tuple[float, ...]], ...],
    ) -> None:
        """`schedule`: from which epoch on which weights hold. Raises InvalidInput."""
        self.components, self._by, self._size, self._schedule = components, by, size, schedule
        self._parts = [_component(one) for one in components]
        self._sizes = [len(part) for part in self._parts]
        self._phases = [self._phase(first, weights) for first, weights in schedule]

    def __getstate__(self) -> tuple[Any, ...]:
        return self.components, self._by, self._size, self._schedule

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def __len__(self) -> int:
        """Samples of the first epoch."""
        return self._phases[0].slots

    def __getitem__(self, index: int) -> Any:
        slot = np.asarray([place_of(index, len(self), "sample")], np.int64)
        return self.read(self.run(IN_ORDER, 0).at(slot), IN_ORDER, 0)[0]

    def __repr__(self) -> str:
        return f"Mixture({len(self.components)} datasets, {len(self):,} samples, {self.identity})"

    @property
    def leaves(self) -> tuple[Dataset, ...]:
        """The dataset that each component reads."""
        return tuple(part.leaf for part in self._parts)

    @property
    def identity(self) -> str:
        """Which data this is: a digest of the components, and the weights of each phase as integers, e.g.
        `9f2c@0:7,3;5:1,1` where 7:3 holds from epoch 0 and 1:1 from epoch 5. Where weights say how long an epoch is,
        they are what it takes of each."""
        parts = [self._by, str(self._size), *(one.identity for one in self.components)]
        digest = hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()
        return f"{digest}@{';'.join(map(self._said, self._phases))}"

    def reweighed(self, weights: Mapping[Dataset | Packed, float], epoch: int) -> Mixture:
        """The same mixture with other weights from the beginning of `epoch` on. A state saved before that continues
        in a loader over it. Raises InvalidInput for other datasets, or an epoch not after the latest change."""
        given = dict(zip(weights, shares("weights", weights), strict=True))
        epoch = whole_number("epoch", epoch, 0, 2**63 - 1)
        others = [repr(one) for one in weights if one not in self.components]
        if others:
            raise InvalidInput(
                f"{others[0]} is none of the {len(self.components)} mixed datasets: weigh those"
            )
        if len(weights) != len(self.components) or epoch <= self._phases[-1].first:
            raise InvalidInput(
                f"weights for {len(weights)} datasets from epoch {epoch}: give one for each of the "
                f"{len(self.components)} mixed ones, from an epoch after {self._phases[-1].first}"
            )
        ordered = tuple(given[one] for one in self.components)
        return Mixture(self.components, self._by, self._size, (*self._schedule, (epoch, ordered)))

    def locate(self, indices: Ints) -> tuple[Ints, Ints, Ints]:
        """Spots (`batches.indices`) -> component, its own epoch, and the index in it. Each (component, own epoch,
        index) comes once in a job."""
        return split_spots(self._sizes, np.asarray(indices, np.int64))

    where = select = take = split = without_parts("mix")

    # ---- for the loader

    @property
    def changes(self) -> tuple[int, ...]:
        """The epochs from which on other weights hold, ascending."""
        return tuple(phase.first for phase in self._phases)

    def run(self, spec: OrderSpec, epoch: int) -> MixtureRun:
        """The slots of an epoch."""
        phase, drawn = self._phases[0], [0] * len(self._parts)
        for following in self._phases[1:]:
            if following.first > epoch:
                break
            self._draw(drawn, phase, following.first - phase.first)
            phase = following
        self._draw(drawn, phase, epoch - phase.first)
        return MixtureRun(phase.pattern, phase.slots, self._sizes, drawn, self._run_of(spec))

    def read(self, spots: Ints, spec: OrderSpec, epoch: int) -> list[Any]:
        """Samples, read component by component."""
        out: list[Any] = [None] * len(spots)
        for rows, part, own, own_epoch, inner in self._groups(spots, spec):
            for row, sample in zip(rows.tolist(), part.read(inner, own, own_epoch), strict=True):
                out[row] = sample
        return out

    def whole(self, spots: Ints, spec: OrderSpec, epoch: int, name: Name = unnamed) -> Any:
        """A batch as it goes out when nobody collates: records of one size without Python for each."""
        if not all(isinstance(part, Plain) and part.leaf.samples.ready for part in self._parts):
            return self.collate(self.read(spots, spec, epoch), name)
        batch = None
        for rows, part, _, _, inner in self._groups(spots, spec):
            reader, samples = part.leaf.opened.reader(), part.leaf.samples
            records = samples.tensor(reader, samples.locate(reader, part.leaf.ids_of(inner))).numpy()
            if batch is None:
                batch = np.empty((len(spots), *records.shape[1:]), records.dtype)
            batch[rows] = records  # numpy's is 30 times as fast as torch's
        assert batch is not None, "no batch is empty"
        return self.leaves[0].samples.batched(batch)

    def collate(self, samples: Sequence[Any], name: Name = unnamed) -> Any:
        """A batch of samples, when nobody else collates."""
        return self._parts[0].collate(samples, name)

    def _groups(self, spots: Ints, spec: OrderSpec) -> list[tuple[Ints, Component, OrderSpec, int, Ints]]:
        """Rows of one component and one of its epochs each."""
        component, own_epoch, inner = split_spots(self._sizes, spots)
        found = []
        for index in np.unique(component).tolist():
            mine = component == index
            for epoch in np.unique(own_epoch[mine]).tolist():
                rows = np.flatnonzero(mine & (own_epoch == epoch))
                found.append((rows, self._parts[index], _own(spec, index), epoch, inner[rows]))
        return found

    def _run_of(self, spec: OrderSpec) -> Callable[[int, int], Any]:
        return lambda index, own_epoch: self._parts[index].run(_own(spec, index), own_epoch)

    def _said(self, phase: _Phase) -> str:
        times = 1 if self._by == "proportion" else phase.slots // phase.pattern.period
        return f"{phase.first}:{','.join(str(share * times) for share in phase.pattern.shares)}"

    def _draw(self, drawn: list[int], phase: _Phase, epochs: int) -> None:
        for index in range(len(drawn)):
            drawn[index] += epochs * phase.pattern.count(index, phase.slots)

    def _phase(self, first: int, weights: Sequence[float]) -> _Phase:
        shares = integer_shares(weights)
        if self._by == "proportion":
            pattern = Pattern(shares)
            slots = epoch_slots(pattern, self._sizes, self._size)
        elif self._by in ("repeat", "choose"):
            if self._by == "choose":
                for weight in weights:
                    if not float(weight).is_integer():
                        raise InvalidInput(f"by='choose' takes whole samples of each dataset, not {weight}")
            scale = self._sizes if self._by == "repeat" else [1] * len(weights)
            counts = [round(weight * samples) for weight, samples in zip(weights, scale, strict=True)]
            slots = sum(counts)
            if not 0 < slots <= MAX_PERIOD or self._size != "total":
                raise InvalidInput(
                    f"by={self._by!r} with weights {list(weights)} makes epochs of {slots} samples: give from 1 to "
                    f"{MAX_PERIOD}, and no `size`"
                )
            pattern = Pattern(counts)
        else:
            raise InvalidInput(f"by={self._by!r}: give 'proportion', 'repeat' or 'choose'")
        if not slots:
            raise InvalidInput(
                f"a mixture with weights {list(weights)} and size={self._size!r} has no samples"
            )
        return _Phase(first, pattern, slots)


def begun(identity: str, epoch: int, inside: bool) -> str:
    """An identity without the weights of phases that have not begun: at the start of `epoch`, or inside it. Of many
    weights their digest, in the place of the first phase, so that the identity of one that was made so is itself."""
    data, _, phases = identity.partition("@")
    held = [one for one in phases.split(";") if one and int(one.partition(":")[0]) < epoch + inside]
    told = ";".join(held)
    if len(told) > MAX_TOLD:
        told = f"{held[0].partition(':')[0]}:{hashlib.blake2b(told.encode(), digest_size=16).hexdigest()}"
    return f"{data}@{told}"


def _component(given: object) -> Component:
    if isinstance(given, Packed):
        return given
    if isinstance(given, Dataset):
        return Plain(given)
    raise InvalidInput(
        f"{type(given).__name__} cannot be mixed: give datasets of open_dataset, parts or packs of them"
    )


def _own(spec: OrderSpec, index: int) -> OrderSpec:
    """A component has a seed of its own: equal datasets would otherwise run in step."""
    return replace(spec, seed=keyed(spec.seed, index))
