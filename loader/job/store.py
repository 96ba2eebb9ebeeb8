"""The values and counters that all processes of a job see, in the process group's key-value store."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from cachesvc.core.errors import DeadlineExceeded
from cachesvc.system.deadline import Deadline
from loader.job.topology import process_group

if TYPE_CHECKING:
    from torch.distributed import Store

POLL_S = 0.5
"""The interval at which a process polls the store: one or two requests of 50 us; shorter in the first second."""
WARN_AFTER_S = 30.0
"""A wait this long for another process is logged."""
_log = logging.getLogger("cachesvc")


class JobStore:
    """JSON values and counters whose keys begin with `path`. No method waits for another process. All raise RuntimeError
    (torch's DistError) where the store's host is gone, usually process 0."""

    def __init__(self, store: Store, path: str = "cachesvc") -> None:
        self._store, self._path = store, path

    def below(self, name: str) -> JobStore:
        """The part of the store below this name."""
        return JobStore(self._store, f"{self._path}/{name}")

    def connected_anew(self) -> JobStore:
        """The same values over an own connection, on which no other thread's wait delays a request."""
        clone = getattr(self._store, "clone", None)  # torch before 2.8 has none
        return self if clone is None else JobStore(clone(), self._path)

    def put(self, key: str, value: object) -> None:
        """Write a value."""
        self._store.set(f"{self._path}/{key}", json.dumps(value))

    def read(self, key: str) -> Any:
        """The value; None before one is written."""
        path = f"{self._path}/{key}"
        return json.loads(self._store.get(path)) if self._store.check([path]) else None

    def put_first(self, key: str, value: object) -> Any:
        """Write a value unless there is one; returns the first one."""
        return json.loads(self._store.compare_set(f"{self._path}/{key}", "", json.dumps(value)))

    def count(self, key: str, more: int = 0) -> int:
        """A counter's value, after `more` was added."""
        return self._store.add(f"{self._path}/{key}", more)

    def arrive(self, key: str, process: int) -> bool:
        """Count a process, at its first call only, in the counter `key`; returns whether this call is the first."""
        is_first = self.count(f"{key}/{process}", 1) == 1
        if is_first:
            self.count(key, 1)
        return is_first


def job_store() -> JobStore | None:
    """The store of the process group; None without an initialised group."""
    if process_group() is None:
        return None
    return JobStore(sys.modules["torch.distributed"].distributed_c10d._get_default_store())


def awaited(store: JobStore, key: str, timeout_s: float, what: str) -> Any:
    """The value of a key, once another process has written it. Raises DeadlineExceeded."""
    for _ in polls(timeout_s, what):
        if (found := store.read(key)) is not None:
            return found
    raise DeadlineExceeded(f"{what} did not come in {timeout_s:.0f} s: look for that process's own error")


def polls(timeout_s: float, awaited: str) -> Iterator[None]:
    """Yield for each poll until the timeout, at growing intervals, and log a long wait. The store's own wait would not see
    a new round, and logs each timeout."""
    deadline, pause_s, warned = Deadline(timeout_s), 0.01, False
    yield
    while deadline.pause(min(pause_s, timeout_s)):
        yield
        pause_s = min(2 * pause_s, POLL_S)
        if not warned and WARN_AFTER_S <= deadline.waited_s < timeout_s:
            warned = True
            _log.warning(
                "waiting for %s, up to %.0f s more: it may start slowly, or only this rank was moved (set_epoch,"
                " skip, load_state_dict, other data) or iterates (look at a batch by peek(), and give a loader of one rank"
                " alone shard=False)",
                awaited,
                timeout_s - deadline.waited_s,
            )
