"""Chooses what makes batches beside the training step: worker processes, threads, or nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Protocol, get_args

import torch

from cachesvc.core.errors import CorruptData, InvalidInput
from loader.batches.bad_samples import OnError
from loader.batches.feed import Feed
from loader.batches.maker import BatchMaker, MadeBatch, move_batch
from loader.batches.turns import BatchKey
from loader.gpu.cuda_driver import can_register
from loader.gpu.image_decoder import ImageDecoder, UndecodableImage
from loader.gpu.record_gather import RecordGather
from loader.gpu.to_device import DeviceMover, pinned
from loader.workers.processes import ProcessEngine
from loader.workers.settings import WorkerSettings
from loader.workers.threads import BufferPool, Make, ThreadEngine

WorkerType = Literal["process", "thread"]
WORKER_TYPES = get_args(WorkerType)
MOVED_AHEAD = 2
"""Batches under way to a device or to pinned memory besides the one in use: one being copied, one waiting."""
UNPINNED = "'pin_memory' argument is set as true but no accelerator is found, then device pinned memory won't be used."
"""torch's warning: scripts filter it by its text."""
GATHERING_THREADS = 2
"""While one waits for the device, the other prepares the next batch."""


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


class CopyingEngine:
    """Copies batches to a device or to pinned memory ahead of their use, in a thread. `mover`, if given, hands over what it
    copied. `inner`, if given, makes the batches in worker processes."""

    def __init__(
        self, thread: ThreadEngine, mover: DeviceMover | None, inner: ProcessEngine | None = None
    ) -> None:
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
        if self._mover is None or made.report.failure:
            return made
        return made._replace(batch=self._mover.receive(made.batch))

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
    pin = pinning(settings) if workers else None
    images = partial(ImageDecoder, mode=feed.image_mode) if feed.encoded_images else None
    mover = DeviceMover(device, images) if device is not None else None
    feed.turn_stride = max(1, workers)
    of_device = (
        _feed_of_device(feed, mover, settings.pinned_bytes) if mover and settings.pinned_bytes else None
    )
    if workers and settings.worker_type == "thread":
        ahead = workers * (settings.prefetch_factor or 1)
        threads = ThreadEngine(
            _maker_factory(of_device or feed, mover, pin, on_error, BufferPool(ahead + workers)),
            workers,
            ahead,
            settings.timeout,
            settings.worker_init_fn,
        )
        return threads if mover is None else CopyingEngine(threads, mover)
    if workers == 0 and mover is not None:
        count = 1 if of_device is None else GATHERING_THREADS
        if of_device is not None:
            of_device.turn_stride = count
        maker = _maker_factory(of_device or feed, mover, None, on_error)
        return CopyingEngine(ThreadEngine(maker, count, MOVED_AHEAD + count - 1), mover)
    if workers == 0:
        return None
    engine = ProcessEngine(BatchMaker(feed, on_error), settings)
    if mover is None:
        return engine if pin is None else CopyingEngine(_pinning_thread(engine, pin), None, engine)

    def new_mover() -> Make:
        mover.begin_thread()
        return _naming_images(feed, partial(_fetch_and_move, engine, mover.send))

    return CopyingEngine(ThreadEngine(new_mover, 1, MOVED_AHEAD), mover, engine)


def pinning(settings: WorkerSettings) -> Callable[[Any], Any] | None:
    """Return the function that copies a batch to pinned memory, for any thread, or None where batches stay as they are: a
    batch that goes to a device needs none, and without an accelerator there is a warning, as in torch."""
    if not settings.pin_memory or settings.device is not None:
        return None
    if not torch.accelerator.is_available():
        warnings.warn(UNPINNED, stacklevel=2)
        return None
    index = torch.accelerator.current_device_index()

    def pin(batch: Any) -> Any:
        torch.accelerator.set_device_index(index)  # a new thread has the first one
        return pinned(batch)

    return pin


def _pinning_thread(engine: ProcessEngine, pin: Callable[[Any], Any]) -> ThreadEngine:
    def new_pinner() -> Make:
        torch.set_num_threads(1)  # of this thread, as in torch
        return partial(_fetch_and_move, engine, pin)

    return ThreadEngine(new_pinner, 1, MOVED_AHEAD)


def _fetch_and_move(engine: ProcessEngine, move: Callable[[Any], Any], turn: BatchKey) -> Any:
    """Return a batch of worker processes, moved, or the error that came in its place, as it is."""
    try:
        made = engine.fetch(turn)
    except Exception as error:  # noqa: BLE001  raised by the thread that asks for the batch
        return error.with_traceback(None)
    return move_batch(made, move)


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
    pin: Callable[[Any], Any] | None,
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
        return make if pin is None else lambda turn: move_batch(make(turn), pin)

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
