"""Keeps events: the latest in memory for clients, and two files of JSON lines in the state directory.

A thread writes the files, since a disk may hang. Events of one cause are kept once a minute.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cachesvc.core.safe_text import redacted
from cachesvc.daemon.events.event import EVENT_OBJECT, EVENTS, KINDS, Event

log = logging.getLogger(__name__)
FILE = "events.jsonl"
FILE_BYTES = 1 << 20
"""The size at which a file becomes the older one of two: some 5,000 events."""
KEPT = 4096
"""The latest events, which are in memory too; 2 MB."""
WAITING = 1024
"""Events that wait for the disk; those beyond are in memory and in the log alone."""
REPEAT_S = 60.0
CAUSES = 1000
CLOSE_S = 2.0
"""How long the end waits for the disk."""
_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class _Cause:
    """When an event of this cause was kept, and how many were left out since."""

    kept_at: float
    left_out: int = 0


class Journal(logging.Handler):
    """A handler of the events' logger. Events of an error are kept once a minute for each cause: the kind, the error, and
    the user, dataset, tier or node."""

    def __init__(
        self, directory: str, file_bytes: int = FILE_BYTES, now: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._path, self._file_bytes, self._now = Path(directory, FILE), file_bytes, now
        self._latest: deque[Event] = deque(maxlen=KEPT)
        try:
            self._latest.extend(read_events(directory))
        except OSError as error:
            log.error("events cannot be read", extra={"file": str(self._path), "error": error.strerror})
        self.counts = Counter(dict.fromkeys(KINDS, 0))
        """The events of each kind since the start, those of one cause too that are not kept."""
        self._listeners: list[Callable[[Event], None]] = []
        self._causes: dict[tuple[object, ...], _Cause] = {}
        self._waiting: queue.Queue[Event | None] = queue.Queue(WAITING)
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)

    def start(self) -> None:
        """Keep events from now on."""
        self._thread.start()
        logger = logging.getLogger(EVENTS)
        logger.setLevel(logging.INFO)  # whatever the level of the log is
        logger.addHandler(self)

    def close(self) -> None:
        """Write what waits, unless the disk hangs, and keep no more events."""
        logging.getLogger(EVENTS).removeHandler(self)
        if self._thread.is_alive():
            with suppress(queue.Full):
                self._waiting.put(None, timeout=CLOSE_S)
                self._thread.join(CLOSE_S)
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the event of a log record; the handler's lock is held."""
        event = record.__dict__[EVENT_OBJECT]
        self.counts[event.kind] += 1
        event = self._admitted(event)
        if event is None:
            return
        texts = {name: redacted(value) for name, value in event.fields().items() if isinstance(value, str)}
        event = msgspec.structs.replace(event, **texts)
        self._latest.append(event)
        for listener in self._listeners:
            listener(event)
        with suppress(queue.Full):
            self._waiting.put_nowait(event)

    def since(self, began: float) -> list[Event]:
        """Return the kept events from `began` on, in seconds of Unix time, the oldest first. Safe from any thread."""
        with self._locked():
            return [event for event in self._latest if event.time >= began]

    def listen(self, listener: Callable[[Event], None], began: float) -> list[Event]:
        """Return `since(began)`, and give each later event to `listener` until `ignore`."""
        with self._locked():
            self._listeners.append(listener)
            return self.since(began)

    def ignore(self, listener: Callable[[Event], None]) -> None:
        """Give no more events to a listener."""
        with self._locked():
            self._listeners.remove(listener)

    def _locked(self) -> threading.RLock:
        assert self.lock is not None, "a handler without a lock"
        return self.lock

    def _admitted(self, event: Event) -> Event | None:
        if not event.error:
            return event
        now = self._now()
        cause = (event.kind, event.error, event.uid, event.dataset or event.uri, event.tier, event.node)
        before = self._causes.get(cause)
        if before is not None and now - before.kept_at < REPEAT_S:
            before.left_out += 1
            return None
        if before is None and len(self._causes) >= CAUSES:
            self._causes.clear()
        self._causes[cause] = _Cause(now)
        return msgspec.structs.replace(event, left_out=before.left_out) if before else event

    def _run(self) -> None:
        line_end = b"\n"  # the last line that is there may have been cut short
        while (event := self._waiting.get()) is not None:
            try:
                self._write(line_end + _encode(event) + b"\n")
                line_end = b""
                self._failed = False
            except OSError as error:
                if not self._failed:
                    self._failed = True
                    log.error("events are not kept", extra={"file": str(self._path), "error": error.strerror})

    def _write(self, line: bytes) -> None:
        with suppress(FileNotFoundError):
            if self._path.stat().st_size + len(line) > self._file_bytes:
                os.replace(self._path, _older(self._path))
        with open(self._path, "ab", opener=_private) as file:
            file.write(line)


def read_events(directory: str) -> Iterator[Event]:
    """Yield the events in the files of a state directory, the oldest first, without lines that a crash cut short. Raises
    OSError where a file cannot be read; without files there are no events."""
    path = Path(directory, FILE)
    for each in (_older(path), path):
        with suppress(FileNotFoundError), open(each, "rb") as file:
            for line in file:
                with suppress(msgspec.DecodeError):
                    yield msgspec.json.decode(line, type=Event)


def _older(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


def _private(path: str, flags: int) -> int:
    """Open a file that only this user may read: it names all users' data."""
    return os.open(path, flags, 0o600)
