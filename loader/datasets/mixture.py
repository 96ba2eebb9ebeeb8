"""`mix`: several datasets as one, where each slot of an epoch is drawn from one of them. The arithmetic is in
core/order/mixture.py."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import numpy as np
from torch.utils.data import Dataset as TorchDataset

from cachesvc.catalog.layout import Fixed
from cachesvc.core.arguments import one_of, place_of, shares, whole_number
from cachesvc.core.errors import InvalidInput
from cachesvc.core.order.epoch_order import OrderSpec
from cachesvc.core.order.mixture import MixtureRun, Size, SpotGroup, groups_of, own_spec, split_spots
from cachesvc.core.order.mixture_weights import By, Change, EpochWeights, StepWeights
from cachesvc.core.order.permute import Mask
from cachesvc.saved_runs.data import MixSource, digest_of_mixture
from loader.datasets.components import IN_ORDER, Component, DatasetComponent, refuse_subsets
from loader.datasets.dataset import Dataset
from loader.datasets.pack_form import Edges
from loader.datasets.packing import Packed
from loader.datasets.samples.kinds import gathered_records
from loader.datasets.shape_mismatch import SampleName, name_by_place
from loader.reading.reader import Ints

D = TypeVar("D")
Unit = Literal["steps", "tokens"]
Ramp = Literal["step", "linear"]
Schedule = Sequence[tuple[int, Mapping[Dataset | Packed, float]]]
MAX_IDENTITY_CHARS = 4096
"""Characters that the weights may take in an identity that a state saves."""


def mix(
    weights: Mapping[Dataset | Packed, float],
    *,
    by: By = "proportion",
    size: Size = "total",
    schedule: Schedule | None = None,
    unit: Unit = "steps",
    ramp: Ramp = "step",
) -> Mixture:
    """Mix datasets of `open_dataset` (or parts of them) or of `pack` by weight.

    - `by="proportion"`: weights are relative. `size` is the number of samples of an epoch: a number; "total", as
      many as the datasets have together; "first", until one of them would repeat; "last", until each has been read
      once; "once", each is read once, and one that has ended drops out.
    - `by="repeat"`: a weight is how often an epoch reads the dataset (0.5: half of it).
    - `by="choose"`: a weight is how many samples an epoch takes from the dataset.

    A dataset that repeats is shuffled anew. Samples that an epoch did not take come in the next epoch. The seed of
    a component is derived from the loader's seed and the component's place in `weights`.

    `schedule`: pairs of a place in the run and the weights from there on, such as `[(10_000, {web: .5, code: .5})]`. Places
    count steps of the global batch over all epochs, or tokens (`unit="tokens"`, for packs and token files). With
    `ramp="linear"`, weights move there from the place before, in at most 128 stages. All ranks take the slots of a batch in
    sequence, so nodes share extents.

    Raises InvalidInput for weights that are negative or all zero, for places that do not ascend from above 0, for an empty
    dataset, and for samples of different kinds (including labels of different classes).
    """
    given = tuple(shares("weights", weights))
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
    sizes = tuple(map(len, parts))
    if schedule is None and size != "once":
        return Mixture(components, EpochWeights(sizes, by, size, ((0, given),)))
    if by != "proportion":
        raise InvalidInput(f"by={by!r} goes with neither schedule= nor size='once': give by='proportion'")
    start = StepWeights(sizes, size, (Change(0, given),), unit_is_tokens(unit))
    found = Mixture(components, start)
    for place, changed in _pairs(schedule or ()):
        found = found._with_change(place, changed, unit, ramp)
    return found


class Mixture(TorchDataset[Any]):
    """A dataset made by `mix`. `mixture[i]` is slot i, with every component in its own order. A cachesvc DataLoader
    shuffles each component, and its `batches.indices` are spots (see `locate`). Picklable."""

    def __init__(self, components: tuple[Dataset | Packed, ...], weights: EpochWeights | StepWeights) -> None:
        """`weights`: of the components, in their order. Raises InvalidInput."""
        self.components, self._weights = components, weights
        self._parts = [_component(one) for one in components]
        self._sizes = [len(part) for part in self._parts]

    def __getstate__(self) -> tuple[Any, ...]:
        return self.components, self._weights

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def __len__(self) -> int:
        """Number of samples of the first epoch; at most, where a schedule goes with `size="first"`."""
        return self._weights.slots

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
        holds from epoch 0 and 1:1 from epoch 5, or `9f2c@s0:7,3;s5:1,1` where that is a step (`l5`: reached there; `x`,
        `y`: samples). Where weights determine the length of an epoch, they are numbers of samples."""
        weights = self._weights
        return f"{digest_of_mixture(weights, [one.identity for one in self.components])}@{';'.join(weights.texts)}"

    @property
    def source(self) -> MixSource:
        """The places of the data of all components, and the weights: for saved states."""
        return MixSource(tuple(one.source for one in self.components), self._weights.row)

    def reweighed(
        self,
        weights: Mapping[Dataset | Packed, float],
        epoch: int | None = None,
        *,
        step: int | None = None,
        tokens: int | None = None,
        ramp: Ramp = "step",
    ) -> Mixture:
        """Return the same mixture with other weights from the beginning of `epoch` on, or from a `step` of the run, or a
        number of its `tokens`, on. A loader over it can load a state that was saved earlier: so a run that goes on takes
        the change on all ranks at that place.

        Raises InvalidInput for other datasets, for a place that is not after the latest change, and for one of another
        kind than the latest.
        """
        places = {"epoch": epoch, "steps": step, "tokens": tokens}
        given = [(unit, place) for unit, place in places.items() if place is not None]
        if len(given) != 1:
            raise InvalidInput(f"{len(given)} places for new weights: give epoch=, step= or tokens=")
        ((unit, place),) = given
        if unit != "epoch":
            return self._with_change(place, weights, unit, ramp)  # type: ignore[arg-type]
        if isinstance(self._weights, StepWeights):
            raise InvalidInput("the weights of this mixture change by step or token: give step= or tokens=")
        ordered = self._ordered(weights)
        return Mixture(
            self.components, self._weights.changed(whole_number("epoch", place, 0, 2**63 - 1), ordered)
        )

    def locate(self, indices: Ints) -> tuple[Ints, Ints, Ints]:
        """Return component, epoch of the component, and index in it for each spot (`batches.indices`). Each such
        triple comes once in a job."""
        return split_spots(self._sizes, np.asarray(indices, np.int64))

    where = select = take = split = refuse_subsets("mix")

    # ---- used by the loader

    def with_run_edges(self, edges: Edges) -> Mixture:
        """Return the same mixture, whose packs are in a run of these edges."""
        components = tuple(with_run_edges(one, edges) for one in self.components)
        return Mixture(components, self._weights)

    @property
    def weight_changes(self) -> tuple[int, ...]:
        """The epochs, ascending, from which epochs may have another length."""
        return self._weights.length_changes

    @property
    def in_time_order(self) -> bool:
        """Whether batches are consecutive slots, for any number of canonical nodes."""
        return isinstance(self._weights, StepWeights)

    @property
    def counts_steps(self) -> bool:
        """Whether a place in the run depends on the global batch."""
        return (
            isinstance(self._weights, StepWeights)
            and not self._weights.by_sample
            and len(self._weights.changes) > 1
        )

    def left_out(self, spots: Ints, spec: OrderSpec, epoch: int) -> Mask:
        """Tell the spots of samples that a spec excludes, and of packs of which nothing is left."""
        found = np.zeros(len(spots), np.bool_)
        for rows, index, own, own_epoch, inner in self.groups(spots, spec):
            found[rows] = self._parts[index].left_out(inner, own, own_epoch)
        return found

    def run(self, spec: OrderSpec, epoch: int) -> MixtureRun:
        """Return the order of an epoch's slots."""
        draws, slots, taken = self._weights.epoch(spec, epoch)
        return MixtureRun(draws, slots, self._sizes, taken, self._run_of(spec))

    def groups(self, spots: Ints, spec: OrderSpec) -> list[SpotGroup]:
        """Group spots by component and epoch of the component."""
        return groups_of(self._sizes, spots, spec)

    def read(self, spots: Ints, spec: OrderSpec, epoch: int) -> list[Any]:
        """Return samples, read component by component."""
        out: list[Any] = [None] * len(spots)
        for rows, index, own, own_epoch, inner in self.groups(spots, spec):
            for row, sample in zip(
                rows.tolist(), self._parts[index].read(inner, own, own_epoch), strict=True
            ):
                out[row] = sample
        return out

    def default_batch(
        self, spots: Ints, spec: OrderSpec, epoch: int, name: SampleName = name_by_place
    ) -> Any:
        """Make a batch under default collation; records of one size take no Python call per sample."""
        batch = samples = None
        for rows, index, _, _, inner in self.groups(spots, spec):
            part = self._parts[index]
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

    def _run_of(self, spec: OrderSpec) -> Callable[[int, int], Any]:
        count = len(self._parts)
        return lambda index, own_epoch: self._parts[index].run(own_spec(spec, index, count), own_epoch)

    def _ordered(self, weights: Mapping[Dataset | Packed, float]) -> tuple[float, ...]:
        """Return weights in the order of the components. Raises InvalidInput for other datasets."""
        given = dict(zip(weights, shares("weights", weights), strict=True))
        unknown = [repr(one) for one in weights if one not in self.components]
        if unknown:
            raise InvalidInput(f"{unknown[0]} is not among the {len(self.components)} mixed datasets")
        if len(weights) != len(self.components):
            raise InvalidInput(
                f"weights for {len(weights)} datasets: give one for each of the {len(self.components)} mixed ones"
            )
        return tuple(given[one] for one in self.components)

    def _with_change(
        self, place: Any, weights: Mapping[Dataset | Packed, float], unit: Unit, ramp: Ramp
    ) -> Mixture:
        """Return the mixture with other weights from a step, or from a number of tokens, on."""
        one_of("ramp", ramp, get_args(Ramp))
        by_sample, ordered = unit_is_tokens(unit), self._ordered(weights)
        first = whole_number("the place of new weights", place, 1, 2**62)
        if by_sample:
            first = -(-first // self._tokens_of_a_sample())
        now = self._weights
        if isinstance(now, EpochWeights):
            if now.by != "proportion" or now.size in ("first", "last") or len(now.schedule) > 1:
                raise InvalidInput(
                    "new weights at a step or token go with by='proportion', with a size that does not depend on weights "
                    "(a number, 'total' or 'once'), and not with weights that changed by epoch"
                )
            now = StepWeights(
                tuple(self._sizes), now.size, (Change(0, now.schedule[0][1]),), by_sample, False
            )
        if len(now.changes) == 1:
            now = replace(now, by_sample=by_sample)
        if now.by_sample != by_sample:
            raise InvalidInput(
                f"the weights of this mixture change by {'token' if now.by_sample else 'step'}"
            )
        return Mixture(self.components, now.changed(Change(first, ordered, ramp == "linear")))

    def _tokens_of_a_sample(self) -> int:
        """Return the tokens of a sample of all components. Raises InvalidInput where they differ, or are unknown."""
        found = {_tokens_in(one) for one in self.components}
        if len(found) > 1 or not (tokens := found.pop()):
            raise InvalidInput(
                "unit='tokens' is for packs and token files, with equally many tokens a sample: give unit='steps'"
            )
        return tokens


def packs_in(dataset: object) -> list[Packed]:
    """Return a dataset if it is packs, or the packs that it mixes."""
    parts = dataset.components if isinstance(dataset, Mixture) else (dataset,)
    return [part for part in parts if isinstance(part, Packed)]


def with_run_edges(dataset: D, edges: Edges) -> D:
    """Return a dataset in a run of these edges, which count in packs that were given none."""
    return dataset.with_run_edges(edges) if isinstance(dataset, (Mixture, Packed)) else dataset  # type: ignore[return-value]


class Place(NamedTuple):
    """A place in a run: how many epochs have begun, and how many steps and samples at most were taken."""

    epochs: int
    steps: int
    samples: int


def identity_until(identity: str, place: Place) -> str:
    """Return an identity without the changes of weights that had no effect yet at a place in the run.

    Many weights are replaced by their digest, in the place of the first phase. The result is stable: applied to its
    own result, the function returns the same.
    """
    data, _, phases = identity.partition("@")
    heads = [one.partition(":")[0] for one in phases.split(";")] if phases else []
    firsts = [int(head.lstrip("slxy")) for head in heads]
    begun = []
    for at, (head, one) in enumerate(zip(heads, phases.split(";"), strict=False)):
        begins = (
            firsts[at - 1] if head[0] in "ly" else firsts[at]
        )  # linear changes begin where the one before ended
        taken = place.steps if head[0] in "sl" else place.samples if head[0] in "xy" else place.epochs
        begun += [one] if begins < taken else []
    weights = ";".join(begun)
    if len(weights) > MAX_IDENTITY_CHARS:
        weights = (
            f"{begun[0].partition(':')[0]}:{hashlib.blake2b(weights.encode(), digest_size=16).hexdigest()}"
        )
    return f"{data}@{weights}"


def is_in_time_order(identity: str) -> bool:
    """Tell whether an identity is of a mixture whose batches are consecutive slots."""
    phases = identity.rpartition("@")[2] if "@" in identity else ""
    return any(one[:1] in ("s", "l", "x", "y") for one in phases.split(";"))


def unit_is_tokens(unit: Any) -> bool:
    """Tell whether a unit is tokens. Raises InvalidInput for one that is neither steps nor tokens."""
    one_of("unit", unit, get_args(Unit))
    return bool(unit == "tokens")


def _pairs(schedule: Any) -> list[tuple[Any, Any]]:
    try:
        return [(place, weights) for place, weights in schedule]
    except (TypeError, ValueError):
        raise InvalidInput(
            "schedule= takes pairs of a place in the run and weights, such as [(10_000, {a: 0.5, b: 0.5})]"
        ) from None


def _tokens_in(component: Dataset | Packed) -> int:
    """Return the tokens by which a sample moves on; 0 where samples are not tokens."""
    if isinstance(component, Packed):
        return component.seq_len
    layout = component.catalog.layout
    if component.catalog.format != "tokens" or not isinstance(layout, Fixed):
        return 0
    return int(layout.stride_bytes // np.dtype(layout.dtype).itemsize)


def _component(given: object) -> Component:
    if isinstance(given, Packed):
        return given
    if isinstance(given, Dataset):
        return DatasetComponent(given)
    raise InvalidInput(
        f"{type(given).__name__} cannot be mixed: give datasets of open_dataset, parts or packs of them"
    )
