"""`mix`: several datasets as one, where each slot of an epoch is drawn from one of them. The arithmetic is in
core/order/mixture.py."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeVar

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
from cachesvc.core.order.permute import mix as mix_seed
from loader.datasets.components import IN_ORDER, Component, DatasetComponent, refuse_subsets
from loader.datasets.dataset import Dataset
from loader.datasets.pack_form import Edges
from loader.datasets.packing import Packed
from loader.datasets.samples.kinds import gathered_records
from loader.datasets.shape_mismatch import SampleName, name_by_place
from loader.reading.reader import Ints

By = Literal["proportion", "repeat", "choose"]
D = TypeVar("D")
MAX_IDENTITY_CHARS = 4096
"""Characters that the weights may take in an identity that a state saves."""


class _Phase(NamedTuple):
    """The pattern and the slots per epoch that hold from epoch `first` on."""

    first: int
    pattern: Pattern
    slots: int


def mix(weights: Mapping[Dataset | Packed, float], *, by: By = "proportion", size: Size = "total") -> Mixture:
    """Mix datasets of `open_dataset` (or parts of them) or of `pack` by weight.

    - `by="proportion"`: weights are relative. `size` is the number of samples of an epoch: a number; "total", as
      many as the datasets have together; "first", until one of them would repeat; "last", until each has been read
      once.
    - `by="repeat"`: a weight is how often an epoch reads the dataset (0.5: half of it).
    - `by="choose"`: a weight is how many samples an epoch takes from the dataset.

    A dataset that repeats is shuffled anew. Samples that an epoch did not take come in the next epoch. The seed of
    a component is derived from the loader's seed and the component's place in `weights`.

    Raises InvalidInput for weights that are negative or all zero, for an empty dataset, and for samples of
    different kinds (including labels of different classes).
    """
    given = shares("weights", weights)
    components = tuple(weights)
    parts = [_component(one) for one in components]
    if not parts:
        raise InvalidInput("mix() needs at least one dataset")
    for number, part in enumerate(parts):
        if not len(part):
            raise InvalidInput(f"component {number} of the mixture, {components[number]!r}, is empty")
    looks = {
        look: number for number, one in reversed(list(enumerate(components))) if (look := one.sample_kind)
    }
    if len(looks) > 1:
        (one, first), (other, second) = sorted(looks.items(), key=lambda item: item[1])[:2]
        raise InvalidInput(
            f"components {first} and {second} of the mixture differ: {one} and {other}; open them with the same "
            "fields, or with a transform that makes them alike"
        )
    return Mixture(components, by, size, ((0, tuple(given)),))


class Mixture(TorchDataset[Any]):
    """A dataset made by `mix`. `mixture[i]` is slot i, with every component in its own order. A cachesvc DataLoader
    shuffles each component, and its `batches.indices` are spots (see `locate`). Picklable."""

    def __init__(
        self,
        components: tuple[Dataset | Packed, ...],
        by: By,
        size: Size,
        schedule: tuple[tuple[int, tuple[float, ...]], ...],
    ) -> None:
        """`schedule`: pairs of a first epoch and the weights from there on. Raises InvalidInput."""
        self.components, self._by, self._size, self._schedule = components, by, size, schedule
        self._parts = [_component(one) for one in components]
        self._sizes = [len(part) for part in self._parts]
        self._phases = [self._phase(first, weights) for first, weights in schedule]

    def __getstate__(self) -> tuple[Any, ...]:
        return self.components, self._by, self._size, self._schedule

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def __len__(self) -> int:
        """Number of samples of the first epoch."""
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
        """A digest of the components, and the weights of each phase as integers, e.g. `9f2c@0:7,3;5:1,1` where 7:3
        holds from epoch 0 and 1:1 from epoch 5. Where weights determine the length of an epoch, they are numbers of
        samples."""
        parts = [self._by, str(self._size), *(one.identity for one in self.components)]
        digest = hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()
        return f"{digest}@{';'.join(map(self._phase_text, self._phases))}"

    def reweighed(self, weights: Mapping[Dataset | Packed, float], epoch: int) -> Mixture:
        """Return the same mixture with other weights from the beginning of `epoch` on. A loader over it can load a
        state that was saved earlier. Raises InvalidInput for other datasets, or for an epoch that is not after the
        latest change."""
        given = dict(zip(weights, shares("weights", weights), strict=True))
        epoch = whole_number("epoch", epoch, 0, 2**63 - 1)
        unknown = [repr(one) for one in weights if one not in self.components]
        if unknown:
            raise InvalidInput(f"{unknown[0]} is not among the {len(self.components)} mixed datasets")
        if len(weights) != len(self.components) or epoch <= self._phases[-1].first:
            raise InvalidInput(
                f"weights for {len(weights)} datasets from epoch {epoch}: give one for each of the "
                f"{len(self.components)} mixed ones, from an epoch after {self._phases[-1].first}"
            )
        ordered = tuple(given[one] for one in self.components)
        return Mixture(self.components, self._by, self._size, (*self._schedule, (epoch, ordered)))

    def locate(self, indices: Ints) -> tuple[Ints, Ints, Ints]:
        """Return component, epoch of the component, and index in it for each spot (`batches.indices`). Each such
        triple comes once in a job."""
        return split_spots(self._sizes, np.asarray(indices, np.int64))

    where = select = take = split = refuse_subsets("mix")

    # ---- used by the loader

    def with_run_edges(self, edges: Edges) -> Mixture:
        """Return the same mixture, whose packs are in a run of these edges."""
        components = tuple(with_run_edges(one, edges) for one in self.components)
        return Mixture(components, self._by, self._size, self._schedule)

    @property
    def weight_changes(self) -> tuple[int, ...]:
        """The epochs, ascending, from which other weights hold."""
        return tuple(phase.first for phase in self._phases)

    def base_of(self, spots: Ints) -> Ints:
        """Return spots of each component's first own epoch with the same samples."""
        component, _, inner = split_spots(self._sizes, spots)
        return inner * len(self._sizes) + component

    def run(self, spec: OrderSpec, epoch: int) -> MixtureRun:
        """Return the order of an epoch's slots."""
        phase, taken = self._phases[0], [0] * len(self._parts)
        for following in self._phases[1:]:
            if following.first > epoch:
                break
            self._add_taken(taken, phase, following.first - phase.first)
            phase = following
        self._add_taken(taken, phase, epoch - phase.first)
        return MixtureRun(phase.pattern, phase.slots, self._sizes, taken, self._run_of(spec))

    def read(self, spots: Ints, spec: OrderSpec, epoch: int) -> list[Any]:
        """Return samples, read component by component."""
        out: list[Any] = [None] * len(spots)
        for rows, part, own, own_epoch, inner in self._groups(spots, spec):
            for row, sample in zip(rows.tolist(), part.read(inner, own, own_epoch), strict=True):
                out[row] = sample
        return out

    def default_batch(
        self, spots: Ints, spec: OrderSpec, epoch: int, name: SampleName = name_by_place
    ) -> Any:
        """Make a batch under default collation; records of one size take no Python call per sample."""
        batch = samples = None
        for rows, part, _, _, inner in self._groups(spots, spec):
            samples = (
                gathered_records(part.leaf.sample_reader) if isinstance(part, DatasetComponent) else None
            )
            if samples is None:
                return self.collate(self.read(spots, spec, epoch), name)
            reader = part.leaf.opened.reader()
            records = samples.tensor(reader, samples.locate(reader, part.leaf.ids_of(inner))).numpy()
            if batch is None:
                batch = np.empty((len(spots), *records.shape[1:]), records.dtype)
            batch[rows] = records  # numpy assigns rows 30 times as fast as torch
        assert samples is not None, "no batch is empty"
        assert batch is not None, "its rows are records"
        return samples.batch_of_rows(batch)

    def collate(self, samples: Sequence[Any], name: SampleName = name_by_place) -> Any:
        """Collate samples as the first component does."""
        return self._parts[0].collate(samples, name)

    def _groups(self, spots: Ints, spec: OrderSpec) -> list[tuple[Ints, Component, OrderSpec, int, Ints]]:
        """Group the rows of a batch by component and epoch of the component."""
        component, own_epoch, inner = split_spots(self._sizes, spots)
        found = []
        for index in np.unique(component).tolist():
            mine = component == index
            for epoch in np.unique(own_epoch[mine]).tolist():
                rows = np.flatnonzero(mine & (own_epoch == epoch))
                found.append((rows, self._parts[index], _seeded_spec(spec, index), epoch, inner[rows]))
        return found

    def _run_of(self, spec: OrderSpec) -> Callable[[int, int], Any]:
        return lambda index, own_epoch: self._parts[index].run(_seeded_spec(spec, index), own_epoch)

    def _phase_text(self, phase: _Phase) -> str:
        times = 1 if self._by == "proportion" else phase.slots // phase.pattern.period
        return f"{phase.first}:{','.join(str(share * times) for share in phase.pattern.shares)}"

    def _add_taken(self, taken: list[int], phase: _Phase, epochs: int) -> None:
        for index in range(len(taken)):
            taken[index] += epochs * phase.pattern.count(index, phase.slots)

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


def packs_in(dataset: object) -> list[Packed]:
    """Return a dataset if it is packs, or the packs that it mixes."""
    parts = dataset.components if isinstance(dataset, Mixture) else (dataset,)
    return [part for part in parts if isinstance(part, Packed)]


def with_run_edges(dataset: D, edges: Edges) -> D:
    """Return a dataset in a run of these edges, which count in packs that were given none."""
    return dataset.with_run_edges(edges) if isinstance(dataset, (Mixture, Packed)) else dataset  # type: ignore[return-value]


def identity_until(identity: str, epoch: int, inside: bool) -> str:
    """Return an identity without the weights of phases that have not begun, at the start of `epoch` or `inside` it.

    Many weights are replaced by their digest, in the place of the first phase. The result is stable: applied to its
    own result, the function returns the same.
    """
    data, _, phases = identity.partition("@")
    begun = [one for one in phases.split(";") if one and int(one.partition(":")[0]) < epoch + inside]
    weights = ";".join(begun)
    if len(weights) > MAX_IDENTITY_CHARS:
        weights = (
            f"{begun[0].partition(':')[0]}:{hashlib.blake2b(weights.encode(), digest_size=16).hexdigest()}"
        )
    return f"{data}@{weights}"


def _component(given: object) -> Component:
    if isinstance(given, Packed):
        return given
    if isinstance(given, Dataset):
        return DatasetComponent(given)
    raise InvalidInput(
        f"{type(given).__name__} cannot be mixed: give datasets of open_dataset, parts or packs of them"
    )


def _seeded_spec(spec: OrderSpec, index: int) -> OrderSpec:
    """Return the spec with a seed for one component. With a common seed, equal datasets would run in step."""
    return replace(spec, seed=mix_seed(spec.seed, index))
