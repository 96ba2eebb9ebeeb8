"""Lookups of paths that may hang: the one place where the daemon itself touches a source's file system.

All else about sources is done in processes that can be replaced, but the allowlist is asked here, of paths with
their links resolved. On a hung NFS mount that waits in the kernel for as long as it hangs. So each call's lookups
run in a thread that is left behind when one of them is late; no more than `INSIDE` threads are in one mount; and while
one of them is late, whoever would enter that mount is refused at once. Which mount a step enters is known without
a lookup, since what leads to it is real (`sources/links.py`). When the mount answers, those threads end, and
so does the refusal.
"""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import TypeVar

from cachesvc.core.errors import Busy, CacheError, SourceUnavailable
from cachesvc.sources import links
from cachesvc.sources.uri import Allowlist, allowlist, canonical, resolved

log = logging.getLogger(__name__)
LOOKUP_S = 10.0
"""A lookup that takes longer hangs: a busy server takes a second, one that reboots minutes."""
INSIDE = 4
"""What a slow mount may do side by side, and how many threads a hung one keeps."""
ASK_S = 0.1
"""How often a caller looks whether its lookups are late."""
MOUNTS_S = 1.0
"""The table of mounts may be so old: a new mount counts as the one around it until then."""
_MOUNTS = "/proc/self/mountinfo"
_ESCAPED = re.compile(r"\\([0-7]{3})")
_T = TypeVar("_T")


class Lookups:
    """Safe to share between threads. `follow` is one step of a lookup; whatever calls it is called through `run`, which
    bounds how long it may take. `link` does what a step is; an argument for tests, as `clock` is."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, link: links.Follow = links.follow
    ) -> None:
        self._clock = clock
        self._link = link
        self._under_way: dict[int, tuple[float, str]] = {}
        """By thread: since when, and in which mount."""
        self._places: dict[str, threading.Semaphore] = {}
        self._mounts: tuple[float, frozenset[str]] = (-math.inf, frozenset())

    def run(self, work: Callable[[], _T], about: str) -> _T:
        """The result, or error, of work that looks paths up. Raises SourceUnavailable, naming `about`, where a mount on
        the way hangs: at once where that is known, else when the work has waited `LOOKUP_S` for its turn, or has been in
        one lookup for so long. Raises Busy where no thread can be started."""
        done: Future[_T] = Future()
        thread = threading.Thread(target=_settle, args=(work, done), name="lookup", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            raise Busy(
                f"{about}: no thread can be started to look it up; allow more processes or memory"
            ) from None
        while not wait((done,), ASK_S).done:
            since, mount = self._under_way.get(thread.ident or 0, (self._clock(), ""))
            if self._clock() - since > LOOKUP_S:
                log.warning("a lookup hangs", extra={"mount": mount})
                raise _Hung().about(about)
        try:
            return done.result()
        except _Hung as error:
            raise error.about(about) from None

    def follow(self, path: str) -> str:
        """As `links.follow`, for work that `run` runs."""
        mount = self._mount_of(path)
        place = self._places.get(mount) or self._places.setdefault(mount, threading.Semaphore(INSIDE))
        if self._hangs(mount) or not place.acquire(timeout=LOOKUP_S):
            raise _Hung
        thread = threading.get_ident()
        self._under_way[thread] = self._clock(), mount
        try:
            return self._link(path)
        finally:
            del self._under_way[thread]
            place.release()

    def allowlist(self, prefixes: Sequence[str], exact: bool) -> Allowlist:
        """What `uri.allowlist` answers. A prefix whose mount hangs raises SourceUnavailable where it must be `exact`
        (who may use it depends on where it leads). Raises InvalidInput."""
        return allowlist(prefixes, self.follow, lambda prefix: self.place(prefix, "--allow", exact))

    def place(self, prefix: str, option: str, exact: bool = False) -> str:
        """Where a prefix that was given to an option leads, canonical. Unless it must be `exact`, one whose mount hangs
        is taken as it was typed, so that a daemon can start: if links are in it, nothing is below it until the next
        start. Raises InvalidInput."""
        try:
            return self.run(lambda: resolved(canonical(prefix), self.follow), f"{option} {prefix}")
        except SourceUnavailable as error:
            if exact:
                raise
            log.error("a prefix is taken as it was typed", extra={"error": str(error)})
            return canonical(prefix)

    def _hangs(self, mount: str) -> bool:
        now = self._clock()
        inside = tuple(self._under_way.values())
        return any(where == mount and now - since > LOOKUP_S for since, where in inside)

    def _mount_of(self, path: str) -> str:
        """The mount that a path whose folder has no links lies in; one that is mounted at the path itself too."""
        read_at, mounts = self._mounts
        if self._clock() - read_at > MOUNTS_S:
            mounts = mount_points()
            self._mounts = self._clock(), mounts
        while path and path not in mounts:
            path = path.rpartition("/")[0]
        return path or "/"


class _Hung(Exception):
    """A lookup is not answered, or is not even sent since others are not."""

    def about(self, uri: str) -> SourceUnavailable:
        return SourceUnavailable(
            f"{uri}: a mount on its way hangs (a lookup takes over {LOOKUP_S:.0f} s); look at the node's mounts"
        )


def _settle(work: Callable[[], _T], done: Future[_T]) -> None:
    try:
        done.set_result(work())
    except Exception as error:  # raised again in the caller's thread
        done.set_exception(error)
        if not isinstance(error, (CacheError, _Hung)):
            raise


def mount_points() -> frozenset[str]:
    """Where something is mounted, in this process's view; no file system is asked."""
    with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as file:
        points = [line.split(" ", 5)[4] for line in file]
    return frozenset(_ESCAPED.sub(lambda found: chr(int(found[1], 8)), point) for point in points)
