"""Chooses what makes batches beside the training step: worker processes of torch, threads, or nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from operator import is_not
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from cachesvc.core.errors import CorruptData, InvalidInput
from loader.batches.bad_samples import OnError
from loader.batches.buffer_pool import BufferPool
from loader.batches.feed import Feed
from loader.batches.maker import BatchMaker, MadeBatch, move_batch
from loader.batches.turns import BatchKey
from loader.gpu.cuda_driver import can_register
from loader.gpu.image_decoder import ImageDecoder, UndecodableImage
from loader.gpu.record_gather import RecordGather
from loader.gpu.to_device import DeviceMover
from loader.process.parent_watch import EndsWithTrainer
from loader.workers.threads import Make, ThreadEngine
from loader.workers.torch_processes import ProcessEngine

WorkerType = Literal["process", "thread"]
WORKER_TYPES = get_args(WorkerType)
MOVED_AHEAD = 2
"""Batches under way to a device besides the one in use: one being copied, one waiting."""
GATHERING_THREADS = 2
"""While one waits for the device, the other prepares the next batch."""


class WorkerSettings(NamedTuple):
    """The loader arguments that say how batches are made, as they stand when an iteration begins. torch allows
    changes until then."""

    collate_fn: Any
    num_workers: int
    prefetch_factor: int | None
    persistent_workers: bool
    multiprocessing_context: Any
    worker_init_fn: Callable[[int], None] | None
    generator: torch.Generator | None
    timeout: float
    pin_memory: bool
    pin_memory_device: str
    worker_type: str
    device: torch.device | None
    pinned_bytes: int

    def check(self) -> None:
        """Check what torch checks when an iteration begins. Raises InvalidInput."""
        if self.num_workers and self.prefetch_factor == 0:
            raise InvalidInput("prefetch_factor=0: no worker would make a batch; give 1 or more")
        if self.timeout and not self.num_workers:
            raise InvalidInput(
                f"timeout={self.timeout} is for workers, and num_workers is 0: give workers, or no timeout"
            )
        if self.pinned_bytes and self.device is None:
            raise InvalidInput(
                f"pinned_bytes={self.pinned_bytes} is for batches that a device gathers: give device='cuda', too"
            )
        if self.pinned_bytes and self.num_workers and self.worker_type == "process":
            raise InvalidInput(
                "pinned_bytes= lets the device gather for this process: give num_workers=0 or worker_type='thread'"
            )

    @property
    def reported(self) -> bool:
        """True if batches come with reports: from workers, or from torch's own iterator in this process."""
        return self.num_workers > 0 or self.pin_memory or self.device is not None

    def without_workers(self) -> WorkerSettings:
        """Return these settings for batches that this process makes, and leaves where they are gathered."""
        return self._replace(
            num_workers=0, prefetch_factor=None, persistent_workers=False, timeout=0, pinned_bytes=0
        )

    def differs_from(self, before: WorkerSettings) -> bool:
        """Return whether any setting is another object than in `before`."""
        return any(map(is_not, self, before))


def worker_settings(
    loader: torch.utils.data.DataLoader[Any],
    worker_type: str,
    device: torch.device | None,
    pinned_bytes: int,
) -> WorkerSettings:
    """Collect the settings of a loader: torch's arguments and cachesvc's own."""
    return WorkerSettings(
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        multiprocessing_context=loader.multiprocessing_context,
        worker_init_fn=loader.worker_init_fn,
        generator=loader.generator,
        timeout=loader.timeout,
        pin_memory=loader.pin_memory,
        pin_memory_device=loader.pin_memory_device,
        worker_type=worker_type,
        device=device,
        pinned_bytes=pinned_bytes,
    )


class BatchEngine(Protocol):
    """Makes the batches of one iteration after another, in order."""

    def start(self, epoch: int, first: int, last: int) -> None:
        """Begin to make the turns [first, last) of an epoch."""
        ...

    def fetch(self, key: tuple[int, int]) -> MadeBatch:
        """Return the batch of a turn with its report. Raises the error of making it, unless that is a typed error,
        which is in the report."""
        ...

    def stop(self) -> None:
        """End the iteration, complete or not."""
        ...


class DeviceEngine:
    """Copies batches to a device ahead of their use, in a thread. `inner`, if given, makes the batches in worker
    processes."""

    def __init__(self, thread: ThreadEngine, mover: DeviceMover, inner: ProcessEngine | None = None) -> None:
        self._thread, self._mover, self._inner = thread, mover, inner

    def start(self, epoch: int, first: int, last: int) -> None:
        """See BatchEngine."""
        self._thread.stop()
        if self._inner is not None:
            self._inner.start(epoch, first, last)
        self._thread.start(epoch, first, last)

    def fetch(self, key: tuple[int, int]) -> MadeBatch:
        """See BatchEngine."""
        made: MadeBatch = self._thread.fetch(key)
        return made if made.report.failure else made._replace(batch=self._mover.receive(made.batch))

    def stop(self) -> None:
        """See BatchEngine."""
        self._thread.stop()
        if self._inner is not None:
            self._inner.stop()


def check_device(worker_type: str, device: Any) -> torch.device | None:
    """Return the device that batches are copied to; None for the CPU. Raises InvalidInput."""
    if worker_type not in WORKER_TYPES:
        raise InvalidInput(f"worker_type={worker_type!r} is neither 'process' nor 'thread'")
    if device is None:
        return None
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise InvalidInput(f"device={device!r} is not a device; give 'cuda', 'cuda:N' or 'cpu'") from None
    if found.type == "cpu":
        return None
    if found.type != "cuda":
        raise InvalidInput(f"device={device!r}: batches move to 'cuda' or stay on 'cpu'")
    if not torch.cuda.is_available():
        raise InvalidInput(f"device={device!r}: torch finds no CUDA device here; leave device out")
    return found


def engine_for(feed: Feed, settings: WorkerSettings, on_error: OnError) -> BatchEngine | None:
    """Return the engine for the batches of a feed; None if this process makes each batch on demand."""
    workers, device = settings.num_workers, settings.device
    images = partial(ImageDecoder, mode=feed.image_mode) if feed.encoded_images else None
    mover = DeviceMover(device, images) if device is not None else None
    feed.turn_stride = max(1, workers)
    of_device = (
        _feed_of_device(feed, mover, settings.pinned_bytes) if mover and settings.pinned_bytes else None
    )
    if workers and settings.worker_type == "thread":
        ahead = workers * (settings.prefetch_factor or 1)
        threads = ThreadEngine(
            _maker_factory(
                of_device or feed, mover, settings.pin_memory, on_error, BufferPool(ahead + workers)
            ),
            workers,
            ahead,
            settings.timeout,
            settings.persistent_workers,
            settings.worker_init_fn,
        )
        return threads if mover is None else DeviceEngine(threads, mover)
    if workers == 0 and mover is not None:
        count = 1 if of_device is None else GATHERING_THREADS
        if of_device is not None:
            of_device.turn_stride = count
        maker = _maker_factory(of_device or feed, mover, False, on_error)
        return DeviceEngine(ThreadEngine(maker, count, MOVED_AHEAD + count - 1), mover)
    if workers == 0 and not settings.pin_memory:
        return None
    engine = ProcessEngine(BatchMaker(feed, on_error), _torch_arguments(settings))
    if mover is None:
        return engine

    def new_mover() -> Make:
        mover.begin_thread()
        return _naming_images(feed, lambda turn: move_batch(engine.fetch(turn), mover.send))

    return DeviceEngine(ThreadEngine(new_mover, 1, MOVED_AHEAD), mover, engine)


def _feed_of_device(feed: Feed, mover: DeviceMover, limit_bytes: int) -> Feed | None:
    """Return a feed whose batches the device gathers, or None, with a warning, where it cannot."""
    source = feed.records
    if source is None or not can_register(mover.device.index):
        reason = (
            "samples are not records of one size" if source is None else "the device cannot read such memory"
        )
        warnings.warn(f"pinned_bytes={limit_bytes} has no effect: {reason}", stacklevel=2)
        return None
    found = feed.for_thread()
    found.on_device = RecordGather(source, feed.share, mover, limit_bytes).batch
    return found


def _maker_factory(
    feed: Feed,
    mover: DeviceMover | None,
    pinned: bool,
    on_error: OnError,
    pool: BufferPool | None = None,
) -> Callable[[], Make]:
    """Return a function that gives each thread its own copy of the feed. The threads share dataset and reader."""

    def new_maker() -> Make:
        own = feed.for_thread()
        make = BatchMaker(own, on_error).make
        if mover is not None:
            mover.begin_thread()
            send, own.empty = mover.send, mover.empty
            return _naming_images(own, lambda turn: move_batch(make(turn), send))
        own.empty = pool.empty if pool is not None else None
        if pinned and torch.cuda.is_available():
            return lambda turn: move_batch(make(turn), pin_memory)
        return make

    return new_maker


def _naming_images(feed: Feed, make: Make) -> Make:
    """Return a maker of batches whose error names the sample of an image that does not decode."""

    def named(key: BatchKey) -> Any:
        try:
            return make(key)
        except UndecodableImage as error:
            index = int(feed.indices(*key)[0][error.row])
            name = feed.key_of(index) or f"sample {index}"
            raise CorruptData(
                f"{name} does not decode: {error.cause}; repair the file, or leave it out of the dataset"
            ) from error

    return named


def _torch_arguments(settings: WorkerSettings) -> dict[str, Any]:
    """Return the arguments of the torch DataLoader inside the process engine."""
    arguments: dict[str, Any] = {
        "num_workers": settings.num_workers,
        "pin_memory": settings.pin_memory,
        "timeout": settings.timeout,
        "worker_init_fn": settings.worker_init_fn,
        "persistent_workers": settings.persistent_workers,
        "generator": settings.generator,
    }
    if settings.num_workers:
        arguments["prefetch_factor"] = settings.prefetch_factor
        arguments["worker_init_fn"] = EndsWithTrainer(settings.worker_init_fn)
        arguments["multiprocessing_context"] = settings.multiprocessing_context
    if settings.pin_memory_device:
        arguments["pin_memory_device"] = settings.pin_memory_device
    return arguments
