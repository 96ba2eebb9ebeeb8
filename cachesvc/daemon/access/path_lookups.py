"""Resolves paths on mounts that may hang: the only place where the daemon itself touches a source's file system.

Other work on sources runs in processes that can be replaced. The allowlist is checked here, against paths with their
links resolved, and on a hung NFS mount a lookup waits in the kernel. So the lookups of a call run in a thread of their
own, which is abandoned when a lookup is late. A mount has at most `THREADS_PER_MOUNT` of these threads at a time. While
one of them is late, further lookups in that mount fail at once. The mount of a step is known without a lookup, since
the path up to that step has no links (`sources/links.py`). When the mount answers, the threads end and lookups succeed
again.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from cachesvc.core.errors import Busy, SourceUnavailable
from cachesvc.core.limits import LOOKUP_S
from cachesvc.sources import links
from cachesvc.sources.limited_calls import LimitedCall
from cachesvc.sources.uri import Allowlist, allowlist, canonical, resolved
from cachesvc.tiers.mounts import all_mounts

log = logging.getLogger(__name__)
THREADS_PER_MOUNT = 4
"""The concurrent lookups in a slow mount, and the threads that a hung mount keeps."""
POLL_S = 0.1
"""The interval at which a caller checks for a late lookup."""
MOUNTS_S = 1.0
"""The greatest age of the table of mounts. Until it is read again, a new mount counts as part of its parent mount."""
_T = TypeVar("_T")


class Lookups:
    """Runs lookups with a time limit. `follow` is one step of a lookup; call it only in work that `run` runs. Safe from any
    thread. `link` performs a step; like `clock` it is an argument for tests."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, link: links.Follow = links.follow
    ) -> None:
        self._clock = clock
        self._link = link
        self._under_way: dict[int, tuple[float, str]] = {}
        """By thread: the start of its lookup, and the mount."""
        self._slots: dict[str, threading.Semaphore] = {}
        self._mounts: tuple[float, frozenset[str]] = (-math.inf, frozenset())

    def run(self, work: Callable[[], _T], uri: str) -> _T:
        """Return the result of work that resolves paths, or raise its error. Raises SourceUnavailable, with `uri` in its
        text, where a mount on the way hangs: at once where that is known, else when the work has waited `LOOKUP_S` for a
        slot or for one lookup. Raises Busy where no thread can be started."""
        thread: list[int] = []

        def looked_up() -> _T:
            thread.append(threading.get_ident())
            return work()

        try:
            call = LimitedCall(looked_up, "lookup")
        except RuntimeError:
            raise Busy(
                f"{uri}: no thread can be started to look it up; allow more processes or memory"
            ) from None
        while not call.ends_within(POLL_S):
            since, mount = self._under_way.get(thread[0] if thread else 0, (self._clock(), ""))
            if self._clock() - since > LOOKUP_S:
                log.warning("a lookup hangs", extra={"mount": mount})
                raise _Hung().typed(uri)
        try:
            return call.result()
        except _Hung as error:
            raise error.typed(uri) from None

    def follow(self, path: str) -> str:
        """Follow one link like `links.follow`, within the limits of its mount."""
        mount = self._mount_of(path)
        slot = self._slots.get(mount) or self._slots.setdefault(mount, threading.Semaphore(THREADS_PER_MOUNT))
        if self._hangs(mount) or not slot.acquire(timeout=LOOKUP_S):
            raise _Hung
        thread = threading.get_ident()
        self._under_way[thread] = self._clock(), mount
        try:
            return self._link(path)
        finally:
            del self._under_way[thread]
            slot.release()

    def allowlist(self, prefixes: Sequence[str], exact: bool) -> Allowlist:
        """Return `uri.allowlist` of some prefixes. `exact`: raise SourceUnavailable for a prefix whose mount hangs, since
        the users who may use it depend on its resolved path. Raises InvalidInput."""
        return allowlist(prefixes, self.follow, lambda prefix: self.resolve(prefix, "--allow", exact))

    def resolve(self, prefix: str, option: str, exact: bool = False) -> str:
        """Return the resolved, canonical prefix of an option. Where its mount hangs, `exact` raises SourceUnavailable;
        otherwise the prefix is used as it was typed, so that the daemon can start. If it has links, no data is below it
        until the next start. Raises InvalidInput."""
        try:
            return self.run(lambda: resolved(canonical(prefix), self.follow), f"{option} {prefix}")
        except SourceUnavailable as error:
            if exact:
                raise
            log.error("a prefix is taken as it was typed", extra={"error": str(error)})
            return canonical(prefix)

    def _hangs(self, mount: str) -> bool:
        now = self._clock()
        lookups = tuple(self._under_way.values())
        return any(where == mount and now - since > LOOKUP_S for since, where in lookups)

    def _mount_of(self, path: str) -> str:
        """Return the mount of a path whose folder has no links; a mount at the path itself counts."""
        read_at, mounts = self._mounts
        if self._clock() - read_at > MOUNTS_S:
            mounts = mount_points()
            self._mounts = self._clock(), mounts
        while path and path not in mounts:
            path = path.rpartition("/")[0]
        return path or "/"


class _Hung(Exception):
    """A lookup is late, or was not tried since others in its mount are late."""

    def typed(self, uri: str) -> SourceUnavailable:
        """Return the error that a caller sees."""
        return SourceUnavailable(
            f"{uri}: a mount on its way hangs (a lookup takes over {LOOKUP_S:.0f} s); look at the node's mounts"
        )


def mount_points() -> frozenset[str]:
    """Return the mount points that this process sees, without touching their file systems."""
    return frozenset(mount.point for mount in all_mounts())
