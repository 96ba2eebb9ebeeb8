"""The log of the daemon and its processes: text or one JSON object a line, without secrets."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import Any

from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter

from cachesvc.core.safe_text import printable, redacted
from cachesvc.daemon.events.event import EVENT_OBJECT

log = logging.getLogger(__name__)
FLOOD_LINES = 20
FLOOD_S = 60.0
"""Lines of one message that are logged within `FLOOD_S` seconds; metrics count every event."""
PRODUCT_LOGGERS = ("cachesvc", "__main__")
"""Loggers whose level `--log` sets; fillers and peer agent are `__main__`."""
MESSAGES = 1000
"""Distinct messages whose lines are counted. The product has about a hundred; this bounds those of libraries."""


def configure_logging(kind: str, level: str = "INFO") -> None:
    """Log to stderr as `text` or `json`, uncaught errors included. `level` is that of the product's loggers."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(Flood())
    hidden = [*RESERVED_ATTRS, EVENT_OBJECT]
    as_json = _JsonFormatter("%(asctime)s %(levelname)s %(name)s %(message)s", reserved_attrs=hidden)
    handler.setFormatter(as_json if kind == "json" else _TextFormatter())
    # Libraries log only warnings: at DEBUG those of the sources log keys, signatures and whole requests.
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    set_level(level)
    logging.getLogger("grpc._common").disabled = True  # it logs a traceback for each malformed request
    sys.excepthook = _uncaught
    threading.excepthook = lambda given: _uncaught(given.exc_type, given.exc_value, given.exc_traceback)


def set_level(level: str) -> None:
    """Set the level of the product's loggers, and of the log as a whole: events reach the journal at every level."""
    for name in PRODUCT_LOGGERS:
        logging.getLogger(name).setLevel(level)
    for handler in logging.getLogger().handlers:
        handler.setLevel(level)


def _uncaught(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    """Log an uncaught error; Python itself would print it with its secrets, and not as JSON."""
    if error is not None and not issubclass(kind, KeyboardInterrupt | SystemExit):
        log.critical("an uncaught error", exc_info=(kind, error, trace))


class Flood(logging.Filter):
    """Limits the lines of one warning or error, of each host where they name one, and adds to the next window's first line
    how many were left out.

    An object that was overwritten fails a fill for each of its extents, and an expired key fails all fills of a node.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now = now
        self.windows: dict[object, _Window] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether to log the record."""
        if record.levelno < logging.WARNING:
            return True
        now = self._now()
        key = record.msg, getattr(record, "host", "")
        window = self.windows.get(key)
        if window is None or now - window.since >= FLOOD_S:
            if window is not None and window.lines > FLOOD_LINES:
                record.left_out = window.lines - FLOOD_LINES
            if window is None and len(self.windows) >= MESSAGES:
                self.windows.clear()
            window = self.windows[key] = _Window(now)
        window.lines += 1
        if window.lines == FLOOD_LINES:
            record.more = f"left out for {FLOOD_S - (now - window.since):.0f} s"
        return window.lines <= FLOOD_LINES


@dataclass(slots=True)
class _Window:
    since: float
    lines: int = 0


class _JsonFormatter(JsonFormatter):
    """Removes secrets from a record's texts and tracebacks before they become JSON: afterwards a match could include
    quotes and backslashes of the JSON."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """Return an ISO time with the offset from UTC, since lines of many nodes are merged."""
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
    """Formats `12:00:01 INFO serving socket=/run/cachesvc`: extras as key=value, without secrets."""

    _plain = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", EVENT_OBJECT}

    def format(self, record: logging.LogRecord) -> str:
        extras = " ".join(f"{k}={v}" for k, v in vars(record).items() if k not in self._plain)
        head = f"{self.formatTime(record, '%H:%M:%S')} {record.levelname} {record.getMessage()}"
        trace = f"\n{self.formatException(record.exc_info)}" if record.exc_info else ""
        return redacted(printable(f"{head} {extras}".rstrip()) + trace)
