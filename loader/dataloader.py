"""The swap: a torch DataLoader that orders, shards, prefetches and resumes a dataset of ours by itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset, Sampler

from cachesvc.core.arguments import flag, whole_number
from cachesvc.core.errors import CacheError, InvalidInput, StateMismatch
from cachesvc.core.order.epoch_order import Last
from loader.arguments import check_arguments, checked_numbers, named, refuse_empty, refuse_unused
from loader.batches.bad_samples import BadSample, OnError
from loader.batches.epoch_report import EpochReport
from loader.batches.feed import Feed
from loader.batches.stats import Stats
from loader.datasets.dataset import key_transforms
from loader.datasets.wrapped import CacheDataset, as_view, cache_dataset_in
from loader.job.agreement import job_store, tell_failure
from loader.job.checkpoint import MAX_COUNT, Progress, State, parsed
from loader.job.rank_drift import DRIFT_S, watch_drift
from loader.job.rank_failures import PEER_FAILURE_S, Agreed, PeerWatch, warn_of_state, watch_for
from loader.job.topology import Topology, must_stand
from loader.order_setup import (
    Arguments,
    Window,
    agreed,
    check_data,
    check_inside,
    check_place,
    facts_of,
    feed_of,
    state_of,
    turn_of,
)
from loader.rank_order import RankOrder
from loader.reading.reader import Ints
from loader.samplers import samplers_of
from loader.workers.engines import WorkerSettings, WorkerType, check_device, worker_settings
from loader.workers.epoch_loop import BatchSource, EpochLoop
from loader.workers.iteration import Iteration
from loader.workers.torch_samplers import begin_as_torch, planned_batches, set_sampler_epoch, why_stateless

_T_co = TypeVar("_T_co", covariant=True)
OF_ONE_PROCESS = (
    "_data",
    "_topology",
    "_given",
    "_supply",
    "_account",
    "_job",
)
EMPTY_STATE = "an empty state was loaded: this DataLoader stays where it is"


class DataLoader(torch.utils.data.DataLoader[_T_co]):
    """torch's DataLoader, argument for argument. Given a dataset of `open_dataset` (also inside Subset,
    ConcatDataset, StackDataset, or what holds it in `.dataset`) and no sampler, every rank gets its own part of one global
    order: each sample once an epoch, in the same global batches at any number of ranks and workers, resumable. Any other
    dataset, or a sampler of your own, behaves as in torch. Without a `batch_size` (None) single samples come.

    `batch_size` is per rank. `global_batch_size`: samples of one optimizer step, all ranks together; a multiple of
    batch_size x ranks gives micro-batches (`accumulate`). `seed` (0 to 2^64 - 1): of the order, and of the generators
    that transforms get. `epochs`: how many one `iter()` runs through; None never ends. `last`: what becomes of the
    samples that fill no global batch: "short" (repeats are added until all micro-batches of all ranks are equally
    large) | "pad" (until they are full) | "drop" | "error"; "short" unless `drop_last`. `window`: bytes that are
    shuffled together, "auto" (256 MiB: the default) or "all". `mesh`, `dp_dims`: a DeviceMesh and its data-parallel
    dimensions; or `rank`, `world_size`; else from the environment. `shard=False`: this loader runs on one rank alone.
    `on_error`: "raise" | "skip" | "substitute" for a sample that is unreadable for good, or whose decode or transform
    raises (see `loader/batches/bad_samples.py`). `peer_failure_s`: how many seconds a rank that is blocked in a
    collective outlives another's failure. `log_stats`: one line each epoch. `worker_type`: "process", or "thread" for
    workers that are threads of this process (no hand-over; `get_worker_info()` is None in them). `device`: a CUDA
    device that batches are moved to ahead of use.

    Raises InvalidInput; while iterating, what reading raises, as PeerRankFailed on every rank of a job of several.
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
        mesh: Any = None,
        dp_dims: str | Sequence[str] = ("dp",),
        rank: int | None = None,
        world_size: int | None = None,
        shard: bool = True,
        on_error: OnError = "raise",
        peer_failure_s: float = PEER_FAILURE_S,
        log_stats: bool = False,
        device: torch.device | str | None = None,
        worker_type: WorkerType = "process",
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
        check_arguments(last, window, rank, world_size, on_error, peer_failure_s)
        self.seed, self.epochs, self.global_batch_size = checked_numbers(seed, epochs, global_batch_size)
        self.in_order, self.shuffle, self.last = in_order, bool(shuffle), last
        self.window, self.mesh = window, mesh
        self.dp_dims, self.shard = named(dp_dims), flag("shard", shard)
        self.rank, self.world_size, self.on_error = rank, world_size, on_error
        self.peer_failure_s, self.log_stats = peer_failure_s, flag("log_stats", log_stats)
        self.device, self.worker_type = device, worker_type
        self._device = check_device(worker_type, device)
        own = sampler is None and batch_sampler is None
        self._ours = cache_dataset_in(dataset) if own and not isinstance(dataset, IterableDataset) else None
        if self._ours is None:
            refuse_unused(self, drawn=not own)
        # Accelerate's `prepare` would share out among ranks what is one rank's; its checkpoints hold a loader's state.
        self._is_accelerate_prepared = self.use_stateful_dataloader = self._ours is not None
        self._progress = Progress()
        self._begin_in_process()

    def _begin_in_process(self) -> None:
        """What this very object has, and no copy of it."""
        if self._ours is not None:
            order = RankOrder(self, self._ours, self._progress)
            vars(self).update(samplers_of(order))  # torch lets nobody set them
        self._topology: Topology | None = None
        self._said = False
        self._job: Agreed | None = None
        """None: the ranks compare at the next `iter()`, for its user has moved this one's place since."""
        self._begin_anew(self._given_now())

    def _begin_anew(self, given: WorkerSettings) -> None:
        """What is made of the arguments of how batches are made."""
        self._given = given
        self._supply: BatchSource | None = None
        self._data: tuple[str, int] = "", 0
        self._account = EpochReport(given.reported, given.num_workers > 0)

    def __getstate__(self) -> dict[str, Any]:
        return {name: each for name, each in self.__dict__.items() if name not in OF_ONE_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._progress = self._progress.copied()
        self._begin_in_process()

    # ---- torch's surface

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        given = self._given_now()
        if self._ours is None:
            begun = begin_as_torch(self, given, self._progress.place.epoch, super().__iter__)
            self._progress.move(self._progress.place.epoch + 1)
            return begun
        with self._told():
            given.check()
            if self._has_other_data():
                self._job = None
                self._begin_anew(given)
            elif given.differs_from(self._given):  # a collate_fn, say
                self._begin_anew(given)
            feed = self._prepared().feed
        if self._topology is not None:
            must_stand(self._topology, self._found())
        self._progress.place.begin(feed)
        self._progress.warn_of_twice()
        if self._job is None or self._job.over.is_set():
            self._job = self._agree_and_say(feed)
        epochs = EpochLoop(self, self._progress, self._prepared, self._where().rank)
        length = partial(feed.turns_of, self._progress.place.epoch, self.epochs or 1)
        return Iteration(epochs.batches(partial(self._watch, self._job)), length)

    def __len__(self) -> int:
        if self._ours is None:
            return super().__len__()
        feed = self._prepared().feed
        if len(self.dataset) != self._data[1]:  # type: ignore[arg-type]
            feed = self._made_now()  # as the next `iter()` will have it
        return feed.turns_of(self.epoch, self.epochs or 1)

    @property
    def _index_sampler(self) -> Any:
        behind = self.num_workers * (self.prefetch_factor or 0) + 1
        return planned_batches(super()._index_sampler, self.dataset, behind)

    # ---- ours

    @property
    def epoch(self) -> int:
        """The epoch that the latest `iter()` is in, and the next one after its end."""
        return self._progress.epoch(self._feed)

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch at the next `iter()`. A place inside this very epoch, from a loaded state or a skip, is kept:
        scripts call this before every epoch, the resumed one too. A sampler of yours is told. Raises InvalidInput."""
        wanted = whole_number("epoch", epoch, 0, MAX_COUNT)
        if self._ours is None:
            set_sampler_epoch(self, wanted)
        self._job = None  # one that is told another epoch than the others is found out
        self._progress.begin(wanted, self._feed)
        self._key_transforms(wanted)

    @property
    def accumulate(self) -> int:
        """Batches of this rank in one step of the global batch."""
        return self._prepared().feed.share.accumulate

    @property
    def valid(self) -> int:
        """How many samples of the latest batch are real, the first ones; the others repeat samples of the epoch, so that
        all ranks have equal shapes. 0 where all are repeats. Raises InvalidInput where torch alone runs this loader."""
        latest = self._latest()
        return self._account.valid(self._prepared().feed, latest) if latest is not None else 0

    @property
    def indices(self) -> Ints:
        """The latest batch's indices in the dataset. Raises as `valid`."""
        latest = self._latest()
        if latest is None:
            return np.empty(0, np.int64)
        repair = self._account.repair(latest)
        return repair.indices if repair is not None else self._prepared().feed.indices(*latest)[0]

    @property
    def bad_samples(self) -> tuple[BadSample, ...]:
        """What this rank skipped or replaced in the latest epoch, the latest 1,000 of them. Not in the state."""
        return tuple(self._account.bad_samples.kept)

    def skip(self, batches: int) -> None:
        """Leave out this rank's next `batches` batches, into next epochs if need be. Raises StateMismatch, and
        InvalidInput, also for more than 2^63 - 1 together."""
        self._core()
        self._progress.skip(whole_number("skip", batches, 0, MAX_COUNT))
        self._job = None

    def stats(self) -> Stats:
        """The stall clock of the latest epoch; to be asked by the thread that iterates."""
        return self._account.stats()

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands, in plain numbers: batches handed over, not those prefetched. The same on every
        rank. Empty, with a warning, for a loader that torch alone runs."""
        if self._ours is None:
            warnings.warn(why_stateless(self.dataset), stacklevel=2)
            return {}
        feed = self._feed()
        place = self._progress.place.next_in(feed)
        warn_of_state(self._job)
        return state_of(*self._data, feed, place, self._where().world_size).plain()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a saved run at the next `iter()`, at any number of ranks and workers that divides its global
        batch. An empty state changes nothing, with a warning. Raises StateMismatch for a state of another dataset,
        version or seed, and in mid-epoch for one of another global batch, window or `last` than this loader was given."""
        if isinstance(state, Mapping) and not state:
            warnings.warn(
                EMPTY_STATE if self._ours is not None else why_stateless(self.dataset), stacklevel=2
            )
            return
        self._job = None  # the ranks compare again: each may have loaded a state of another step
        with self._told():
            found, held = parsed(state), self._held()
            check_data(found, *held)
            feed = self._made(found, found.epoch + found.over)
            check_place(found, feed)
            check_inside(found, feed.share.batch_size, self._where().world_size)
            turn = turn_of(found, feed)
        self._data, self._supply = held, BatchSource(feed, self._given, self._account)
        self._progress.load(found, turn)
        self._key_transforms(self._progress.place.epoch)

    # ---- inside

    def _key_transforms(self, epoch: int) -> None:
        """Key the transforms of a loader that is built from this one's samplers, and of its workers."""
        if self._ours is not None:
            key_transforms(self._ours.leaves, self.seed, epoch)

    def _held(self) -> tuple[str, int]:
        """Which data a state belongs to (a subset or a mixture is not what it is made of), and how many samples."""
        return (as_view(self.dataset) or self._core()).identity, len(self.dataset)  # type: ignore[arg-type]

    def _given_now(self) -> WorkerSettings:
        return worker_settings(self, self.worker_type, self._device)

    def _has_other_data(self) -> bool:
        """A Subset may have been given other indices, a dataset of the user's own may have grown, since the feed was made:
        as with torch, an iteration has what is there when it begins. Raises StateMismatch for a place in what was there."""
        if self._supply is None or self._data == self._held():
            return False
        self._progress.place.begin(self._supply.feed)
        if self._progress.place.turn:
            raise StateMismatch(
                "the dataset holds other samples than when a state was loaded or batches were skipped: load a state of what"
                " it holds now, or make a new DataLoader"
            )
        return True

    def _core(self) -> CacheDataset:
        if self._ours is None:
            raise StateMismatch(why_stateless(self.dataset))
        return self._ours

    def _latest(self) -> tuple[int, int] | None:
        if self._ours is None:
            raise InvalidInput("torch alone runs this DataLoader: what its batches hold, its sampler says")
        return self._progress.place.latest

    def _where(self) -> Topology:
        if self._topology is None:
            self._topology = self._found()
        return self._topology

    def _found(self) -> Topology:
        return Arguments.of(self).topology()

    def _prepared(self) -> BatchSource:
        """The batches of this rank, made at first need: only then is the rank known."""
        if self._supply is None:
            feed, self._data = self._made_now(), self._held()
            self._supply = BatchSource(feed, self._given, self._account)
        return self._supply

    def _feed(self) -> Feed:
        return self._prepared().feed

    def _made_now(self) -> Feed:
        return self._made(self._progress.loaded, self._progress.place.epoch)

    def _made(self, loaded: State | None, epoch: int) -> Feed:
        return feed_of(Arguments.of(self), self._core(), self._where(), loaded, epoch)

    def _agree_and_say(self, feed: Feed) -> Agreed:
        facts = facts_of(self._data[0], feed, self._progress.place.epoch, self._progress.place.turn)
        via, first, self._said = self._core().leaves[0].via, not self._said, True
        where, store = self._where(), self._store()
        name = agreed(where, facts, store, via, first)
        prefetch = self.num_workers * (self.prefetch_factor or 0)
        return Agreed(name, watch_drift(store, where, name, prefetch, feed.share.accumulate, self._drift_s))

    @contextmanager
    def _told(self) -> Iterator[None]:
        """What fails here while the ranks have yet to agree is this one's word in that: nobody waits for it in vain."""
        try:
            yield
        except Exception as error:
            with suppress(CacheError):  # no place in the job, say
                self._tell(f"{type(error).__name__}: {error}")
            raise

    def _tell(self, failure: str) -> None:
        if self._job is None or self._job.over.is_set():
            store = self._store()
            if store is not None:
                tell_failure(self._where(), failure, store)

    def _store(self) -> Any:
        """The job's, where this loader is one of several."""
        return job_store() if self.shard and self._where().processes > 1 else None

    def _watch(self, job: Agreed) -> PeerWatch | None:
        return watch_for(self._store(), self._where(), job, self.peer_failure_s)
