"""The log of daemon, fillers and builder: lines for people, or one JSON object a line; no secrets."""

from __future__ import annotations

import logging
import os
import sys

from pythonjsonlogger.json import JsonFormatter

from cachesvc.core.errors import InvalidInput
from cachesvc.core.secrets import redacted


def configure_logging(kind: str) -> None:
    """`text` or `json`, on stderr; the level is CACHESVC_LOG's. Raises InvalidInput where that is none."""
    level = (os.environ.get("CACHESVC_LOG") or "INFO").upper()
    if not isinstance(logging.getLevelName(level), int):
        raise InvalidInput(f"CACHESVC_LOG={level} is no level; set it to DEBUG, INFO or WARNING")
    handler = logging.StreamHandler(sys.stderr)
    as_json = JsonFormatter("%(asctime)s %(levelname)s %(name)s %(message)s")
    handler.setFormatter(_Redacted(as_json if kind == "json" else _TextFormatter()))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("grpc._common").disabled = True  # a trace for each request that does not parse
    for name in ("boto3", "botocore", "urllib3"):  # at DEBUG they say keys and signatures
        logging.getLogger(name).setLevel(logging.WARNING)


class _Redacted(logging.Formatter):
    """Another formatter's lines, tracebacks too, without secrets."""

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        return redacted(self._inner.format(record))


class _TextFormatter(logging.Formatter):
    """`12:00:01 INFO serving socket=/run/cachesvc`: extras as key=value."""

    _plain = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

    def format(self, record: logging.LogRecord) -> str:
        extras = " ".join(f"{k}={v}" for k, v in vars(record).items() if k not in self._plain)
        head = f"{self.formatTime(record, '%H:%M:%S')} {record.levelname} {record.getMessage()}"
        trace = f"\n{self.formatException(record.exc_info)}" if record.exc_info else ""
        line = f"{head} {extras}".rstrip()  # names of objects may hold line ends and worse
        return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line) + trace
