"""How batches come to be made beside the training step: by nobody, by torch's processes, or by threads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from operator import is_not
from typing import Any, Literal, Protocol, get_args

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from cachesvc.core.errors import InvalidInput
from cachesvc.core.permute import mix
from loader.device import Mover
from loader.feed import Feed
from loader.made import Made, Maker, moved
from loader.mend import OnError
from loader.orphans import EndsWithTrainer
from loader.recycled import Recycled
from loader.threads import Make, ThreadEngine
from loader.workers import Engine

WorkerType = Literal["process", "thread"]
WORKER_TYPES = get_args(WorkerType)
_READ_AT_EACH_START = (
    "collate_fn",
    "generator",
    "multiprocessing_context",
    "num_workers",
    "pin_memory",
    "pin_memory_device",
    "prefetch_factor",
    "timeout",
    "worker_init_fn",
)
MOVED_AHEAD = 2
"""Batches on their way to a device beside the one in use: one that travels, one that waits."""


class Fetches(Protocol):
    """Makes the batches of one iteration after the other, in order."""

    def start(self, epoch: int, first: int, last: int) -> None:
        """Begin to fetch the turns [first, last) of an epoch."""
        ...

    def fetch(self, key: tuple[int, int]) -> Made:
        """The batch of a turn with its report; raises what making it raised, typed errors excepted."""
        ...

    def rest(self) -> None:
        """The iteration has ended, or was abandoned."""
        ...


class Moved:
    """Batches that `thread` sends to a device ahead of their use; `inner` makes them where it is given."""

    def __init__(self, thread: ThreadEngine, mover: Mover, inner: Engine | None = None) -> None:
        self._thread, self._mover, self._inner = thread, mover, inner

    def start(self, epoch: int, first: int, last: int) -> None:
        """See Fetches."""
        self._thread.rest()
        if self._inner is not None:
            self._inner.start(epoch, first, last)
        self._thread.start(epoch, first, last)

    def fetch(self, key: tuple[int, int]) -> Made:
        """See Fetches."""
        made: Made = self._thread.fetch(key)
        return made if made.report.failure else made._replace(batch=self._mover.arrived(made.batch))

    def rest(self) -> None:
        """See Fetches."""
        self._thread.rest()
        if self._inner is not None:
            self._inner.rest()


def read_at_start(loader: torch.utils.data.DataLoader[Any]) -> tuple[Any, ...]:
    """What torch reads of a loader when an iteration begins, so that it may be set until then."""
    return tuple(getattr(loader, name) for name in _READ_AT_EACH_START)


def set_since(loader: torch.utils.data.DataLoader[Any], read: tuple[Any, ...]) -> bool:
    """Whether any of it is another object than what was `read`."""
    return any(map(is_not, read, read_at_start(loader)))


def checked(worker_type: str, device: Any) -> torch.device | None:
    """The device that batches go to, None for none. Raises InvalidInput for what cannot be."""
    if worker_type not in WORKER_TYPES:
        raise InvalidInput(f"worker_type={worker_type!r} is neither 'process' nor 'thread'")
    if device is None:
        return None
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise InvalidInput(f"device={device!r} is no device; give 'cuda', 'cuda:N' or 'cpu'") from None
    if found.type == "cpu":
        return None
    if found.type != "cuda":
        raise InvalidInput(f"device={device!r}: batches move to 'cuda' or stay on 'cpu'")
    if not torch.cuda.is_available():
        raise InvalidInput(f"device={device!r}: torch finds no CUDA device here; leave device out")
    return found


def engine_for(
    loader: torch.utils.data.DataLoader[Any],
    feed: Feed,
    worker_type: str,
    device: torch.device | None,
    on_error: OnError,
) -> Fetches | None:
    """What fetches for a loader with torch's arguments; None when this process makes each batch as it is asked."""
    workers, mover = loader.num_workers, Mover(device) if device is not None else None
    feed.apart = max(1, workers)
    if workers and worker_type == "thread":
        ahead = workers * (loader.prefetch_factor or 1)
        threads = ThreadEngine(
            _maker(feed, mover, loader.pin_memory, on_error, Recycled(ahead + workers)),
            workers,
            ahead,
            loader.timeout,
            loader.persistent_workers,
            loader.worker_init_fn,
        )
        return threads if mover is None else Moved(threads, mover)
    if workers == 0 and mover is not None:
        return Moved(ThreadEngine(_maker(feed, mover, False, on_error), 1, MOVED_AHEAD), mover)
    if workers == 0 and not loader.pin_memory:
        return None
    engine = Engine(Maker(feed, on_error), _settings(loader, feed))
    if mover is None:
        return engine
    sender = mover.send
    return Moved(
        ThreadEngine(lambda: lambda turn: moved(engine.fetch(turn), sender), 1, MOVED_AHEAD),
        mover,
        engine,
    )


def _maker(
    feed: Feed, mover: Mover | None, pinned: bool, on_error: OnError, recycled: Recycled | None = None
) -> Callable[[], Make]:
    """What gives each thread a place of its own in the order; dataset and reader are shared."""

    def maker() -> Make:
        own = copy.copy(feed)
        make = Maker(own, on_error).make
        if mover is not None:
            send, own.empty = mover.send, mover.empty
            return lambda turn: moved(make(turn), send)
        own.empty = recycled.empty if recycled is not None else None
        if pinned and torch.cuda.is_available():
            return lambda turn: moved(make(turn), pin_memory)
        return make

    return maker


def _settings(loader: torch.utils.data.DataLoader[Any], feed: Feed) -> dict[str, Any]:
    """Arguments of torch's own loader for the engine inside."""
    settings: dict[str, Any] = {
        name: getattr(loader, name)
        for name in ("num_workers", "pin_memory", "timeout", "worker_init_fn", "persistent_workers")
    }
    # Without one of its own, torch would draw its workers' seeds from the global generator. Others on each rank.
    seed = mix(feed.spec.seed, feed.share.low)
    settings["generator"] = loader.generator or torch.Generator().manual_seed(seed)
    if loader.num_workers:
        settings["prefetch_factor"] = loader.prefetch_factor
        settings["worker_init_fn"] = EndsWithTrainer(loader.worker_init_fn)
        settings["multiprocessing_context"] = loader.multiprocessing_context
    if loader.pin_memory_device:
        settings["pin_memory_device"] = loader.pin_memory_device
    return settings
