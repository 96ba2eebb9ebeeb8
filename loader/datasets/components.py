"""The components of a mixture: the interface that a mixture needs, and a plain dataset behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

from cachesvc.core.errors import InvalidInput
from cachesvc.core.order.epoch_order import OrderSpec
from cachesvc.core.order.excluded import parse_excluded
from cachesvc.core.order.part_layout import PartLayout, part_layout
from cachesvc.core.order.permute import Mask
from cachesvc.core.order.run import DatasetRun, Run
from loader.datasets.collate import default_collate_into
from loader.datasets.dataset import Dataset
from loader.datasets.shape_mismatch import SampleName, name_by_place
from loader.reading.reader import Ints

IN_ORDER = OrderSpec(seed=0, global_batch=1, shuffle=False)
"""The order in which mixtures and packs are indexed."""


class Component(Protocol):
    """A dataset that is one run of spots per epoch. A spot is a number that names one sample of the component. `spec`
    gives seed, window and shuffle; how batches are cut does not matter here."""

    @property
    def leaf(self) -> Dataset: ...

    def __len__(self) -> int: ...

    def run(self, spec: OrderSpec, epoch: int) -> Run: ...

    def left_out(self, spots: Ints, spec: OrderSpec, epoch: int) -> Mask: ...

    def read(self, spots: Ints, spec: OrderSpec, epoch: int) -> list[Any]: ...

    def collate(self, samples: Sequence[Any], name: SampleName = name_by_place) -> Any: ...


def refuse_subsets(made: str) -> Callable[..., NoReturn]:
    """Return the replacement for a method that makes a subset, for datasets that `made` makes. It raises
    InvalidInput."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise InvalidInput(
            f"{made}() draws its samples anew in each epoch, so it has no subsets of its own: apply where(), select(), "
            f"take() or split() to the datasets first, then {made}() to the parts"
        )

    return refuse


class DatasetComponent:
    """A plain dataset as a component."""

    def __init__(self, dataset: Dataset) -> None:
        self.leaf = dataset
        self._layouts: dict[bool, PartLayout] = {}

    def __len__(self) -> int:
        return len(self.leaf)

    def run(self, spec: OrderSpec, epoch: int) -> Run:
        """Return the order of one epoch of the dataset."""
        if spec.shuffle not in self._layouts:
            first, ids = self.leaf.catalog.extent_first, self.leaf.ids
            self._layouts[spec.shuffle] = part_layout(first, ids, spec.shuffle)
        return DatasetRun(spec, self._layouts[spec.shuffle], epoch)

    def left_out(self, spots: Ints, spec: OrderSpec, epoch: int) -> Mask:
        """Tell the samples that a spec excludes."""
        return parse_excluded(spec.excluded).among(spots)

    def read(self, spots: Ints, spec: OrderSpec, epoch: int) -> list[Any]:
        """Return samples. Their generators are keyed by (seed, epoch of the component, sample)."""
        return list(self.leaf.iter_samples(self.leaf.ids_of(spots), (spec.seed, epoch)))

    def collate(self, samples: Sequence[Any], name: SampleName = name_by_place) -> Any:
        """Collate as torch does by default."""
        return default_collate_into(None, samples, len(samples), name)
