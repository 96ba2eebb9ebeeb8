"""The log of daemon, fillers and builder: lines for people, or one JSON object a line; no secrets."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import Any

from pythonjsonlogger.json import JsonFormatter

from cachesvc.core.errors import InvalidInput
from cachesvc.core.safe_text import printable, redacted

log = logging.getLogger(__name__)
FLOOD_LINES = 20
FLOOD_S = 60.0
"""Lines of one message that show what is wrong; metrics count all of it."""
OURS = ("cachesvc", "__main__")
"""Loggers whose level CACHESVC_LOG sets; fillers and sharer are `__main__`."""
MESSAGES = 1000
"""Different ones that are remembered: ours are a hundred, and no library may make it more without end."""


def configure_logging(kind: str) -> None:
    """`text` or `json`, on stderr, also of what nobody catches; the level of our own lines is CACHESVC_LOG's. Raises
    InvalidInput where that is none."""
    level = (os.environ.get("CACHESVC_LOG") or "INFO").upper()
    if not isinstance(logging.getLevelName(level), int):
        raise InvalidInput(f"CACHESVC_LOG={level} is no level; set it to DEBUG, INFO or WARNING")
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(Flood())
    as_json = _JsonFormatter("%(asctime)s %(levelname)s %(name)s %(message)s")
    handler.setFormatter(as_json if kind == "json" else _TextFormatter())
    # Of libraries only warnings: at DEBUG those of the sources say keys, signatures and whole requests.
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in OURS:
        logging.getLogger(name).setLevel(level)
    logging.getLogger("grpc._common").disabled = True  # a trace for each request that does not parse
    sys.excepthook = _uncaught
    threading.excepthook = lambda given: _uncaught(given.exc_type, given.exc_value, given.exc_traceback)


def _uncaught(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    """What Python itself would write as it is, and past a log of JSON."""
    if error is not None and not issubclass(kind, KeyboardInterrupt | SystemExit):
        log.critical("an error that nobody expected", exc_info=(kind, error, trace))


class Flood(logging.Filter):
    """Lets so many lines of one warning or error pass in so long, and says of the next how many were left out: an
    object that was overwritten fails a fill for each of its extents, and an expired key all fills of a node."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now = now
        self._windows: dict[object, _Window] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether it is told."""
        if record.levelno < logging.WARNING:
            return True
        now = self._now()
        window = self._windows.get(record.msg)
        if window is None or now - window.since >= FLOOD_S:
            if window is not None and window.lines > FLOOD_LINES:
                record.left_out = window.lines - FLOOD_LINES
            if window is None and len(self._windows) >= MESSAGES:
                self._windows.clear()
            window = self._windows[record.msg] = _Window(now)
        window.lines += 1
        if window.lines == FLOOD_LINES:
            record.more = f"left out for {FLOOD_S - (now - window.since):.0f} s"
        return window.lines <= FLOOD_LINES


@dataclass(slots=True)
class _Window:
    since: float
    lines: int = 0


class _JsonFormatter(JsonFormatter):
    """Secrets are taken out of a record's texts, tracebacks too, before they are JSON: afterwards they could take
    backslashes and quotes of it with them."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """With the offset from UTC: lines of many nodes come together."""
        return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")

    def process_log_record(self, log_data: dict[str, Any]) -> dict[str, Any]:
        beside = str(log_data)
        return {name: _without_secrets(value, beside) for name, value in log_data.items()}


def _without_secrets(value: object, beside: str) -> object:
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, list | tuple):
        return [_without_secrets(each, beside) for each in value]
    return redacted(str(value), beside)


class _TextFormatter(logging.Formatter):
    """`12:00:01 INFO serving socket=/run/cachesvc`: extras as key=value; without secrets."""

    _plain = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

    def format(self, record: logging.LogRecord) -> str:
        extras = " ".join(f"{k}={v}" for k, v in vars(record).items() if k not in self._plain)
        head = f"{self.formatTime(record, '%H:%M:%S')} {record.levelname} {record.getMessage()}"
        trace = f"\n{self.formatException(record.exc_info)}" if record.exc_info else ""
        return redacted(printable(f"{head} {extras}".rstrip()) + trace)
