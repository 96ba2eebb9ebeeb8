"""How batches come to be made beside the training step: by nobody, by torch's processes, or by threads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from operator import is_not
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from cachesvc.core.errors import InvalidInput
from loader.batches.bad_samples import OnError
from loader.batches.buffer_pool import Recycled
from loader.batches.feed import Feed
from loader.batches.maker import Made, Maker, moved
from loader.batches.to_device import Mover
from loader.process.parent_watch import EndsWithTrainer
from loader.workers.threads import Make, ThreadEngine
from loader.workers.torch_processes import Engine

WorkerType = Literal["process", "thread"]
WORKER_TYPES = get_args(WorkerType)
MOVED_AHEAD = 2
"""Batches on their way to a device beside the one in use: one that travels, one that waits."""


class Given(NamedTuple):
    """The arguments of how batches come to be made, as they are when an iteration begins: until then torch lets them
    be set."""

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

    def check(self) -> None:
        """As torch, when an iteration begins: all may be set until then. Raises InvalidInput."""
        if self.num_workers and self.prefetch_factor == 0:
            raise InvalidInput("prefetch_factor=0: no worker would make a batch; give 1 or more")
        if self.timeout and not self.num_workers:
            raise InvalidInput(
                f"timeout={self.timeout} is of batches that workers make, and num_workers is 0: give some, or no timeout"
            )

    @property
    def reported(self) -> bool:
        """Whether batches come with reports, from workers or from torch's own machinery in this process."""
        return self.num_workers > 0 or self.pin_memory or self.device is not None

    def set_since(self, before: Given) -> bool:
        """Whether any of it is another object than it was."""
        return any(map(is_not, self, before))


def given_to(
    loader: torch.utils.data.DataLoader[Any], worker_type: str, device: torch.device | None
) -> Given:
    """What a loader has of torch's arguments, with ours."""
    return Given(
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
    )


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


def engine_for(feed: Feed, given: Given, on_error: OnError) -> Fetches | None:
    """What fetches the batches of a feed; None when this process makes each as it is asked."""
    workers, device = given.num_workers, given.device
    mover = Mover(device) if device is not None else None
    feed.apart = max(1, workers)
    if workers and given.worker_type == "thread":
        ahead = workers * (given.prefetch_factor or 1)
        threads = ThreadEngine(
            _maker(feed, mover, given.pin_memory, on_error, Recycled(ahead + workers)),
            workers,
            ahead,
            given.timeout,
            given.persistent_workers,
            given.worker_init_fn,
        )
        return threads if mover is None else Moved(threads, mover)
    if workers == 0 and mover is not None:
        return Moved(ThreadEngine(_maker(feed, mover, False, on_error), 1, MOVED_AHEAD), mover)
    if workers == 0 and not given.pin_memory:
        return None
    engine = Engine(Maker(feed, on_error), _settings(given))
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


def _settings(given: Given) -> dict[str, Any]:
    """Arguments of torch's own loader for the engine inside."""
    settings: dict[str, Any] = {
        "num_workers": given.num_workers,
        "pin_memory": given.pin_memory,
        "timeout": given.timeout,
        "worker_init_fn": given.worker_init_fn,
        "persistent_workers": given.persistent_workers,
        "generator": given.generator,
    }
    if given.num_workers:
        settings["prefetch_factor"] = given.prefetch_factor
        settings["worker_init_fn"] = EndsWithTrainer(given.worker_init_fn)
        settings["multiprocessing_context"] = given.multiprocessing_context
    if given.pin_memory_device:
        settings["pin_memory_device"] = given.pin_memory_device
    return settings
