"""The DataLoader: a subclass of torch's that orders, shards, prefetches and resumes datasets of `open_dataset`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset, Sampler

from cachesvc.core.arguments import flag, whole_number
from cachesvc.core.errors import InvalidInput, StateMismatch
from cachesvc.core.limits import PEER_FAILURE_S
from cachesvc.core.order.epoch_order import Last, ShuffleScope
from cachesvc.core.order.skipped import skipped_by
from cachesvc.core.order.state import MAX_COUNT, MAX_SEED, LoaderState, parse_state
from loader.arguments import (
    check_arguments,
    check_device_decoding,
    count_or_none,
    dimension_names,
    key_list,
    refuse_empty,
    refuse_unused,
)
from loader.batches.bad_samples import BadSample, OnError
from loader.batches.digest import fold, known_before, known_digest
from loader.batches.epoch_report import EpochReport
from loader.batches.feed import Feed
from loader.batches.stats import Stats
from loader.batches.taken_samples import TakenSample, samples_of
from loader.datasets.dataset import key_transforms
from loader.datasets.sample_keys import indices_of_keys
from loader.datasets.wrapped import CacheDataset, as_view, cache_dataset_in
from loader.job.checkpoint import LoaderProgress
from loader.job.handed_over import HandedOver
from loader.job.rank_drift import DRIFT_S
from loader.job.topology import Topology
from loader.job_membership import JobMembership
from loader.order_setup import OrderArguments, Window, feed_of
from loader.reading.reader import Ints
from loader.samplers import RankOrder, samplers_of
from loader.saved_state import check_data, check_micro_batches, check_place, state_of
from loader.workers.engines import WorkerType, check_device
from loader.workers.epoch_loop import BatchSource, EpochLoop, batch_outside_iterations
from loader.workers.iteration import Iteration
from loader.workers.resumable import ResumableLoader, resumable_loader
from loader.workers.settings import WorkerSettings, worker_settings
from loader.workers.torch_samplers import (
    begin_as_torch,
    planned_batches,
    set_sampler_epoch,
    why_as_torch,
    why_stateless,
)

_T_co = TypeVar("_T_co", covariant=True)
OF_ONE_PROCESS = ("_data", "_given", "_source", "_report", "_job", "_resumable")
"""Attributes that no pickled copy has."""
EMPTY_STATE = "an empty state was loaded: this DataLoader stays where it is"


class DataLoader(torch.utils.data.DataLoader[_T_co]):
    """torch's DataLoader, argument for argument. Given a dataset of `open_dataset` (also inside Subset, ConcatDataset,
    StackDataset, or a dataset that holds it in `.dataset`) and no sampler, every rank gets its own part of one global
    order: each sample once an epoch, in the same global batches at any number of ranks and workers, resumable. Any other
    dataset, or a sampler of your own, behaves as in torch (or torchdata). With `batch_size=None` it yields single samples.

    `batch_size` is per rank. `global_batch_size`: samples of one optimizer step, all ranks together; a multiple of
    batch_size x ranks gives micro-batches (`accumulate`). `seed` (0 to 2^64 - 1): of the order, and of the generators
    passed to transforms. `epochs`: how many one `iter()` runs through; None never ends. `last`: the treatment of samples
    that fill no global batch: "short" (samples are repeated until all micro-batches of all ranks have one size) | "pad"
    (until they are full) | "drop" | "error"; "short" unless `drop_last`. `window`: bytes that are shuffled together, "auto"
    (256 MiB: the default) or "all". `shuffle_scope`: "job" (the default) has each node read other data in each epoch;
    "node" gives each node the same data in all epochs, so that nothing it holds is fetched again. `mesh`, `dp_dims`: a
    DeviceMesh and its data-parallel dimensions; or `rank`, `world_size`; else from the environment. `shard=False`: this
    loader runs on one rank alone. `on_error`: "raise" | "skip" | "substitute" for a sample that is permanently unreadable,
    or whose decode or transform raises. `skip_steps`: ranges of global batches, counted through all epochs from 0, that are
    left out for good. `exclude`: keys of samples that are left out from where the run stands on; batches have repeats in
    their place, and `valid` counts the others. Of packs they are keys of documents, which padding replaces.
    `peer_failure_s`: how many seconds a rank that is blocked in a collective outlives another's failure. `log_stats`: log
    one line each epoch. `worker_type`: "process", or "thread" for workers that are threads of this process (batches are not
    copied between processes; `get_worker_info()` is None in them). `device`: a CUDA device to which batches are moved ahead
    of use. `pinned_bytes`: at most so much of the cache's memory is pinned, so that the device gathers fixed-size records
    out of it. `snapshot_every_n_steps`: as in torchdata's StatefulDataLoader, for a loader that torch alone runs.

    Raises InvalidInput; while iterating, the errors of reading, as PeerRankFailed on every rank of a job of several.
    """

    _drift_s = DRIFT_S

    def __init__(
        self,
        dataset: TorchDataset[_T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[Any] | Iterable[Any] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        seed: int = 0,
        global_batch_size: int | None = None,
        epochs: int | None = 1,
        last: Last | None = None,
        window: Window | None = None,
        shuffle_scope: ShuffleScope | None = None,
        mesh: Any = None,
        dp_dims: str | Sequence[str] = ("dp",),
        rank: int | None = None,
        world_size: int | None = None,
        shard: bool = True,
        on_error: OnError = "raise",
        skip_steps: Iterable[range | tuple[int, int]] = (),
        exclude: Iterable[str] = (),
        peer_failure_s: float = PEER_FAILURE_S,
        log_stats: bool = False,
        device: torch.device | str | None = None,
        worker_type: WorkerType = "process",
        pinned_bytes: int = 0,
        snapshot_every_n_steps: int | None = 1,
    ) -> None:
        refuse_empty(dataset, shuffle)
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        check_arguments(last, window, shuffle_scope, rank, world_size, on_error, peer_failure_s)
        self.seed, self.epochs = whole_number("seed", seed, 0, MAX_SEED), count_or_none("epochs", epochs)
        self.global_batch_size = count_or_none("global_batch_size", global_batch_size)
        self.in_order, self.shuffle, self.last, self.window = in_order, bool(shuffle), last, window
        self.shuffle_scope = shuffle_scope
        self.mesh, self.dp_dims, self.shard = mesh, dimension_names(dp_dims), flag("shard", shard)
        self.rank, self.world_size, self.on_error = rank, world_size, on_error
        self.peer_failure_s, self.log_stats = peer_failure_s, flag("log_stats", log_stats)
        self.device, self.worker_type, self._device = device, worker_type, check_device(worker_type, device)
        self.skip_steps, self.exclude = skipped_by(skip_steps).ranges, key_list("exclude", exclude)
        self.pinned_bytes = whole_number("pinned_bytes", pinned_bytes, 0, MAX_COUNT)
        self.has_sampler = sampler is not None or batch_sampler is not None
        of_torch = self.has_sampler or isinstance(dataset, IterableDataset)
        self._core = None if of_torch else cache_dataset_in(dataset)
        self.excluded = indices_of_keys(self._core, self.exclude)
        if self._core is None:
            refuse_unused(self._arguments(), on_error, self.has_sampler)
        collates_by_default = collate_fn is None and batch_size is not None and not self.has_sampler
        check_device_decoding(dataset, self._device, on_error, collates_by_default)
        # Accelerate's `prepare` would split one rank's part among ranks again; its checkpoints hold a loader's state.
        self._is_accelerate_prepared = self.use_stateful_dataloader = self._core is not None
        self.snapshot_every_n_steps = count_or_none("snapshot_every_n_steps", snapshot_every_n_steps, 0)
        self._progress = LoaderProgress()
        self._reset_for_process()

    def _reset_for_process(self) -> None:
        """Set the attributes that belong to this object and to no copy of it."""
        if self._core is not None:
            # torch forbids setting these attributes
            vars(self).update(samplers_of(RankOrder(self, self._core, self._progress)))
        self._job = JobMembership()
        self._resumable: ResumableLoader | None = None
        self._reset_batches(self._given_now())

    def _reset_batches(self, given: WorkerSettings) -> None:
        """Make batches with these arguments from now on."""
        self._given = given
        self._source: BatchSource | None = None
        self._data: tuple[str, int] = "", 0
        self._report = EpochReport(given.reported, given.num_workers > 0)

    def __getstate__(self) -> dict[str, Any]:
        return {name: each for name, each in self.__dict__.items() if name not in OF_ONE_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._progress = self._progress.copied()
        self._reset_for_process()

    # ---- torch's interface

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        given, place = self._given_now(), self._progress.place
        if self._core is None:
            resumable = self._as_resumable()
            begin = super().__iter__ if resumable is None else partial(resumable.begin, self, place.epoch)
            begun = begin_as_torch(self, given, place.epoch, begin)
            self._progress.move(place.epoch + 1)
            return begun
        arguments, job = self._arguments(), self._job
        with job.failures_told(arguments):
            given.check()
            if self._data_changed():
                job.compare_again()
                self._reset_batches(given)
            elif given.differs_from(self._given):  # a collate_fn, say
                self._reset_batches(given)
            feed = self._prepared().feed
        job.check_topology(arguments)
        place.begin(feed, self.epochs)
        self._progress.warn_if_read_twice()
        leaf, prefetch = self._core.leaves[0], self.num_workers * (self.prefetch_factor or 0)
        before = job.place(arguments)
        agreement = job.agree(arguments, self._data[0], feed, place, leaf, prefetch, self._drift_s)
        if job.place(arguments) != before:  # this node has another part of the data
            self._source = BatchSource(self._new_feed(), self._given, self._report)
        loop = EpochLoop(self, self._progress, self._prepared, self._topology().rank)
        return Iteration(loop.batches(agreement), partial(replace(place).length, feed, self.epochs))

    def __len__(self) -> int:
        if self._core is None:
            return super().__len__()
        feed = self._prepared().feed
        if len(self.dataset) != self._data[1]:  # type: ignore[arg-type]
            feed = self._new_feed()  # as the next `iter()` will have it
        return self._progress.place.length(feed, self.epochs)

    @property
    def _index_sampler(self) -> Any:
        behind = self.num_workers * (self.prefetch_factor or 0) + 1
        return planned_batches(super()._index_sampler, self.dataset, behind)

    # ---- our interface

    @property
    def epoch(self) -> int:
        """The epoch of the latest `iter()`, and the next one after its end."""
        return self._progress.epoch(self._feed)

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch at the next `iter()`. A place inside this very epoch, from a loaded state or a skip, is kept:
        scripts call this before every epoch, the resumed one too. A sampler of yours is called as well. Raises
        InvalidInput."""
        wanted = whole_number("epoch", epoch, 0, MAX_COUNT)
        if self._core is None:
            set_sampler_epoch(self, wanted)
        self._job.compare_again()
        self._progress.begin(wanted, self._feed)
        self._key_transforms(wanted)

    @property
    def accumulate(self) -> int:
        """Batches of this rank in one step of the global batch."""
        return self._prepared().feed.share.accumulate

    @property
    def valid(self) -> int:
        """The number of real samples in the latest batch: they come first, and the others repeat samples of the epoch, so
        that all ranks have equal shapes. 0 where all are repeats. Raises InvalidInput where torch alone runs the
        loader."""
        latest = self._latest()
        return self._report.valid(self._prepared().feed, latest) if latest is not None else 0

    @property
    def indices(self) -> Ints:
        """The latest batch's indices in the dataset, int64. Raises as `valid`."""
        latest = self._latest()
        if latest is None:
            return np.empty(0, np.int64)
        repair = self._report.repair(latest)
        return repair.indices if repair is not None else self._prepared().feed.indices(*latest)[0]

    @property
    def bad_samples(self) -> tuple[BadSample, ...]:
        """The samples that this rank skipped or replaced in the latest epoch, the latest 1,000 of them. Not in the
        state."""
        return tuple(self._report.bad_samples.kept)

    def skip(self, batches: int) -> None:
        """Leave out this rank's next `batches` batches, into next epochs if need be. Raises StateMismatch, and
        InvalidInput, also for more than 2^63 - 1 together."""
        self._required_core()
        self._progress.skip(whole_number("skip", batches, 0, MAX_COUNT))
        self._job.compare_again()

    def peek(self) -> Any:
        """The batch with which the next `iter()` begins, for its shapes. The loader does not move, and other ranks need
        not call. Raises InvalidInput for an empty epoch and where torch alone runs the loader, and errors of reading."""
        self._latest()
        feed = self._new_feed()
        key = self._progress.place.upcoming(feed, self.epochs)
        return batch_outside_iterations(feed, self._given_now(), self.on_error, key)

    def samples_of(self, step: int) -> list[TakenSample]:
        """The samples of one data step (a global batch, counted through all epochs from 0), of all ranks in the order of
        their slots. A skipped step has none, and repeats are not among them. Nothing is read, and the loader does not move.
        Raises InvalidInput for a step that the run does not have, StateMismatch for one from before the latest change of
        the global batch, `last` or window."""
        self._required_core()
        return samples_of(self._new_feed(), whole_number("step", step, 0, MAX_COUNT))

    def digest(self) -> bytes:
        """32 bytes that depend on the samples that the run has handed over, how often, and on the bytes of their data: not
        on order, ranks, workers or restarts. All ranks call it after the same batch. Local files that are read in place are
        read once for it. Raises InvalidInput for datasets that wrap ours, and for several ranks without a process group;
        StateMismatch where ranks stand at different places, or the state that the run continues has no digest; and the
        errors of reading."""
        self._required_core()
        handed = self._progress.handed
        before, own = known_before(handed), fold(handed, self.dataset)
        place = self._progress.place.text(self.accumulate)
        total = self._job.summed(self._arguments(), place, before, own)
        self._progress.handed = HandedOver(total)
        return total.digest

    def stats(self) -> Stats:
        """The stall clock of the latest epoch; call it from the thread that iterates."""
        return self._report.stats()

    def state_dict(self) -> dict[str, Any]:
        """The run's place, in plain numbers: batches handed over, not those prefetched. The same on every rank. A loader
        that torch alone runs has a state of torchdata's StatefulDataLoader, for this rank and number of workers; without
        torchdata an empty one, with a warning."""
        if self._core is None:
            resumable = self._as_resumable()
            if resumable is not None:
                return resumable.state_dict(self._progress.place.epoch)
            warnings.warn(why_stateless(self.dataset), stacklevel=2)
            return {}
        feed = self._feed()
        place = self._progress.place.next_of(feed, self.epochs)
        self._job.warn_of_state()
        digest = known_digest(self._progress.handed, self.dataset, self._topology().world_size)
        return state_of(*self._data, feed, place, self._topology().world_size, digest).plain()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a saved run at the next `iter()`, at any number of ranks and workers that divides its global batch. An
        empty state changes nothing, with a warning. Raises StateMismatch for a state of another dataset, version or seed,
        and in mid-epoch for one of another global batch, window or `last` than this loader was given."""
        if isinstance(state, Mapping) and not state:
            why = EMPTY_STATE if self._core is not None else why_stateless(self.dataset)
            warnings.warn(why, stacklevel=2)
            return
        if self._core is None:
            resumable = self._as_resumable()
            if resumable is None:
                raise StateMismatch(why_stateless(self.dataset))
            self._progress.move(resumable.load_state_dict(state, self._progress.place.epoch))
            return
        self._job.compare_again()  # each rank may have loaded a state of another step
        with self._job.failures_told(self._arguments()):
            found, data = parse_state(state), self._data_now()
            check_data(found, *data)
            feed = self._new_feed(found)
            check_place(found, feed)
            check_micro_batches(found, feed.share.batch_size, self._topology().world_size)
            # as the epoch is cut now
            turn = feed.orders.kept_step(found.epoch, found.step) * feed.share.accumulate + found.micro
        self._data, self._source = data, BatchSource(feed, self._given, self._report)
        self._progress.load(found, turn)
        self._key_transforms(self._progress.place.epoch)

    # ---- inside

    def _as_resumable(self) -> ResumableLoader | None:
        """torchdata's loader with these arguments, for a loader that torch alone runs; None without torchdata."""
        if self._resumable is None:
            self._resumable = resumable_loader(self)
        return self._resumable

    def _key_transforms(self, epoch: int) -> None:
        """Key the transforms of a loader that is built from this one's samplers, and of its workers."""
        if self._core is not None:
            key_transforms(self._core.leaves, self.seed, epoch)

    def _data_now(self) -> tuple[str, int]:
        """The identity of the data that a state belongs to (a subset or a mixture has its own), and its samples."""
        return (as_view(self.dataset) or self._required_core()).identity, len(self.dataset)  # type: ignore[arg-type]

    def _given_now(self) -> WorkerSettings:
        return worker_settings(self, self._device)

    def _arguments(self) -> OrderArguments:
        return OrderArguments.of(self)

    def _data_changed(self) -> bool:
        """True if the dataset has other samples than when the feed was made: a Subset may have been given other indices, a
        dataset of the user's own may have grown. An iteration has the data of its beginning, as with torch. Raises
        StateMismatch for a place in the old data."""
        if self._source is None or self._data == self._data_now():
            return False
        self._progress.place.begin(self._source.feed, self.epochs)
        if self._progress.place.turn:
            raise StateMismatch(
                "the dataset holds other samples than when a state was loaded or batches were skipped: load a state of what"
                " it holds now, or make a new DataLoader"
            )
        return True

    def _required_core(self) -> CacheDataset:
        if self._core is None:
            raise StateMismatch(why_as_torch(self.dataset))
        return self._core

    def _latest(self) -> tuple[int, int] | None:
        if self._core is None:
            raise InvalidInput("torch alone runs this DataLoader: its sampler knows what its batches hold")
        return self._progress.place.latest

    def _topology(self) -> Topology:
        return self._job.topology(self._arguments())

    def _prepared(self) -> BatchSource:
        """The batches of this rank, made at first need: only then is the rank known."""
        if self._source is None:
            feed, self._data = self._new_feed(), self._data_now()
            self._source = BatchSource(feed, self._given, self._report)
        return self._source

    def _feed(self) -> Feed:
        return self._prepared().feed

    def _new_feed(self, state: LoaderState | None = None) -> Feed:
        """This rank's batches as a state continues; without one, as they are now."""
        epoch = state.epoch + state.over if state is not None else self._progress.place.epoch
        state = state or self._progress.loaded
        arguments = self._arguments()
        return feed_of(arguments, self._required_core(), self._job.place(arguments), state, epoch)
