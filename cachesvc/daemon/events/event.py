"""An event, and the one call that records it: in the log, and in the journal where this process has one."""

from __future__ import annotations

import logging
import time
from typing import Any

import msgspec

from cachesvc.core.errors import (
    CacheError,
    CorruptData,
    NotAllowed,
    NotFound,
    SourceChanged,
    SourceUnavailable,
)

EVENTS = "cachesvc.events"
"""The logger of events."""
EVENT_OBJECT = "recorded"
"""The attribute of a log record that holds its event."""
KINDS = {
    "started": "serving",
    "stopped": "stopping",
    "upgraded": "another release serves",
    "crashed": "the daemon before this one ended unexpectedly",
    "adopted": "adopted copies in RAM",
    "opened": "a dataset is opened",
    "prefetched": "a prefetch ended",
    "pinned": "a dataset is pinned",
    "unpinned": "a dataset is not pinned any more",
    "evicted": "a dataset is evicted by hand",
    "refused": "a request is refused",
    "bypassed": "the readers of this node read from the source, as an operator wants it",
    "bypass_ended": "the readers of this node read through the cache again",
    "source_failed": "a source failed",
    "fill_failed": "a fill failed",
    "tier_lost": "a tier is lost",
    "tier_back": "a tier works again",
    "tier_taken": "files of others take all the room of a cache directory; free some there",
    "tier_room": "a cache directory has room again",
    "corrupt": "a corrupt extent is dropped",
    "unreadable": "an unreadable extent is dropped",
    "repaired": "a dropped extent is filled again",
    "reloaded": "the settings are reloaded",
    "reload_failed": "the settings cannot be reloaded, and stay as they are",
    "member_present": "a node is present",
    "member_away": "a node is away",
    "member_left": "a node said goodbye",
    "member_refused": "a node is refused",
    "member_silent": "a listed node does not answer",
    "member_gone": "a node left the cluster, and its extents belong to the others",
    "cluster_warning": "a warning about the cluster",
    "cluster_mended": "a warning about the cluster ended",
    "drained": "what this node alone held is handed on, and it leaves the cluster",
    "left_out": "nothing is read from a node for a while",
    "read_again": "a node is read from again",
    "wrong_bytes": "a node sent wrong bytes, and what came from it is dropped",
    "wrong_bytes_here": "another node found that this one sent wrong bytes",
}
"""Each kind of event, and its log line."""
SOURCE_ERRORS = (NotAllowed, NotFound, CorruptData, SourceChanged, SourceUnavailable)
_WARNINGS = {"member_away", "member_refused", "member_silent", "cluster_warning", "tier_taken"}
_ERRORS = {"crashed", "tier_lost", "corrupt", "unreadable", "wrong_bytes", "wrong_bytes_here"}
_log = logging.getLogger(EVENTS)


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """One event. Fields that do not apply have their defaults, and are absent in JSON.

    `time`: seconds of Unix time. `uid`, `pid` and `job`: the process that asked, as the kernel states it, and the job that
    it says it belongs to. `size_bytes`: how much. `error`: the name of a type in `core/errors.py`. `left_out`: events of
    the same cause that were not kept since the last one.
    """

    kind: str
    time: float = msgspec.field(default_factory=time.time)
    uid: int = -1
    pid: int = 0
    job: str = ""
    uri: str = ""
    dataset: str = ""
    extent: str = ""
    tier: str = ""
    node: str = ""
    size_bytes: int = 0
    extents: int = 0
    error: str = ""
    why: str = ""
    left_out: int = 0

    def fields(self) -> dict[str, Any]:
        """Return the fields that apply, without kind and time."""
        given: dict[str, Any] = msgspec.to_builtins(self)
        return {name: value for name, value in given.items() if name not in ("kind", "time")}


def words(event: Event) -> str:
    """Return an event as one line for people, without its time and user."""
    what = event.uri or event.dataset[:12] or event.node
    where = " in ".join(filter(None, [what, event.tier]))
    return ": ".join(filter(None, [KINDS.get(event.kind, event.kind), where, event.error, event.why]))


def record(event: Event) -> None:
    """Log an event, and keep it in the journal. Safe from any thread; waits for no disk."""
    level = logging.WARNING if event.error or event.kind in _WARNINGS else logging.INFO
    if event.kind in _ERRORS:
        level = logging.ERROR
    _log.log(level, KINDS[event.kind], extra={"event": event.kind, **event.fields(), EVENT_OBJECT: event})


def failed(kind: str, error: CacheError, **about: Any) -> Event:
    """Return the event of an error."""
    return Event(kind, error=type(error).__name__, why=str(error), **about)
