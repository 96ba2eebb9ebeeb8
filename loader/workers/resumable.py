"""Gives a state to a loader that torch alone runs, through torchdata's StatefulDataLoader where torchdata is installed.

The batches are torch's, in torch's order. torchdata collects the states of datasets and samplers, from workers too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from cachesvc.core.arguments import whole_number
from cachesvc.core.errors import StateMismatch
from cachesvc.core.order.state import MAX_COUNT

EPOCH = "_cachesvc_epoch"
"""The key of our epoch in a state; torchdata ignores it."""
FINISHED, WITH_WORKERS, WITHOUT_WORKERS = "_iterator_finished", "_snapshot", "_num_yielded"
"""Keys of torchdata's states: in each, and in those of loaders with workers, and without."""
RANDOM_SAMPLERS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
"""torch's samplers that draw from a generator, and have no state of their own."""
MIRRORED = (
    "collate_fn",
    "num_workers",
    "prefetch_factor",
    "pin_memory",
    "pin_memory_device",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "in_order",
    "snapshot_every_n_steps",
)
"""Attributes that a user may change between iterations, as with torch."""
LENGTH_TOLD = "_IterableDataset_len_called"
"""torch's attribute for the length that an iterable dataset has told: more samples than that give a warning."""


class ResumableLoader:
    """A StatefulDataLoader with the arguments of a loader of ours. The loader's own epoch is part of the states."""

    def __init__(self, loader: Any, kind: Any) -> None:
        """`kind`: the class StatefulDataLoader. The loader is not kept: it would end, with its workers, in a garbage
        collection at any moment, as while new workers start."""
        self._epoch: int | None = None
        given = {name: getattr(loader, name) for name in (*MIRRORED, "persistent_workers")}
        if isinstance(loader.dataset, IterableDataset):
            given |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        elif not (loader.has_sampler or (loader.shuffle and loader.generator)):
            # Only torchdata's own sampler repeats the next epochs of a loader without a generator.
            given |= {name: getattr(loader, name) for name in ("batch_size", "drop_last", "shuffle")}
        elif loader.batch_sampler is None:
            given |= {"batch_size": None, "sampler": _index_sampler_of(loader)}
        else:
            given["batch_sampler"] = _index_sampler_of(loader)
        self._inner = kind(loader.dataset, **given)

    def begin(self, loader: Any, epoch: int) -> Iterator[Any]:
        """Begin an iteration with the loader's arguments as they are now; at the place of a state if one was loaded."""
        for name in (*MIRRORED, LENGTH_TOLD):
            value = getattr(loader, name)
            if getattr(self._inner, name) is not value:
                setattr(self._inner, name, value)
        self._epoch = epoch
        begun: Iterator[Any] = iter(self._inner)
        return begun

    def state_dict(self, next_epoch: int) -> dict[str, Any]:
        """The state of the latest iteration. `next_epoch`: that of the next iteration, unless it continues this one."""
        state: dict[str, Any] = self._inner.state_dict()
        begun = self._epoch is not None and not state[FINISHED]
        return {**state, EPOCH: self._epoch if begun else next_epoch}

    def load_state_dict(self, state: Mapping[str, Any], epoch: int) -> int:
        """Continue from a state at the next `begin`. Returns its epoch; `epoch` for a state of torchdata's own loader.
        Raises StateMismatch."""
        _check(state, self._inner.num_workers)
        self._inner.load_state_dict(dict(state))
        self._epoch = None
        return whole_number("epoch of the state", state.get(EPOCH, epoch), 0, MAX_COUNT)


def resumable_loader(loader: Any) -> ResumableLoader | None:
    """The loader with a state; None without torchdata."""
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError:
        return None
    return ResumableLoader(loader, StatefulDataLoader)


class _Draws:
    """One epoch's draws of one of torch's random samplers, with the state of their generator."""

    def __init__(self, source: Iterable[Any], sampler: Any) -> None:
        """`source` yields the samples that `sampler` draws, or batches of them."""
        self._source, self._sampler = source, sampler
        self._drawn = 0
        self._items: Iterator[Any] = iter(())
        self._before: torch.Tensor | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._before is None:  # torch, too, draws at the first request
            self._begin(0)
        item = next(self._items)
        self._drawn += 1
        return item

    def state_dict(self) -> dict[str, Any]:
        """The number of draws, and the generator as it was before the first."""
        if self._before is None:
            self._begin(0)
        return {"yielded": self._drawn, "generator": self._before}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue these draws. Raises StateMismatch for a state of torchdata's own samplers."""
        if "generator" not in state:
            raise StateMismatch(
                "torchdata's StatefulDataLoader saved this state of a loader with generator=: begin the epoch anew"
            )
        generator = self._generator()
        before = generator.get_state()
        generator.set_state(state["generator"])
        self._begin(state["yielded"])
        if generator is torch.default_generator:  # which the rest of the training script uses, too
            generator.set_state(before)

    def _begin(self, drawn: int) -> None:
        self._before = self._generator().get_state()
        items = iter(self._source)
        first = [*islice(items, max(1, drawn))]
        self._drawn, self._items = drawn, chain(first[drawn:], items)

    def _generator(self) -> torch.Generator:
        own: torch.Generator | None = self._sampler.generator
        return torch.default_generator if own is None else own


class _ResumableDraws:
    """The samples or batches of a loader with one of torch's random samplers. Its iterators have a state."""

    def __init__(self, source: Any, sampler: Any) -> None:
        """See `_Draws`."""
        self._source, self._sampler = source, sampler

    def __iter__(self) -> _Draws:
        return _Draws(self._source, self._sampler)

    def __len__(self) -> int:
        return len(self._source)


def _index_sampler_of(loader: Any) -> Any:
    """The sampler of a loader's batches, or of its samples without a batch size, in a form whose state is exact."""
    from torchdata.stateful_dataloader.sampler import BatchSampler as StatefulBatchSampler

    batches = loader.batch_sampler
    sampler = batches.sampler if type(batches) is BatchSampler else loader.sampler
    if type(sampler) in RANDOM_SAMPLERS and (batches is None or type(batches) is BatchSampler):
        return _ResumableDraws(loader._index_sampler, sampler)
    if type(batches) is BatchSampler:
        return StatefulBatchSampler(sampler, batches.batch_size, batches.drop_last)
    return loader._index_sampler


def _check(state: Mapping[str, Any], workers: int) -> None:
    """Raise StateMismatch for a state of another kind of loader, or of another number of workers."""
    if not (
        isinstance(state, Mapping) and FINISHED in state and {WITH_WORKERS, WITHOUT_WORKERS} & state.keys()
    ):
        raise StateMismatch(
            "this is no state of a loader that runs as torch's own; a state of a loader over open_dataset needs such a"
            " loader again, without a sampler"
        )
    snapshots = state[WITH_WORKERS].get("_worker_snapshots", ()) if WITH_WORKERS in state else ()
    if len(snapshots) != workers:
        raise StateMismatch(
            f"the state was saved with num_workers={len(snapshots)}, the loader has {workers}: each worker of a dataset of"
            " your own has its own state; give the same number"
        )
