"""The log of daemon, fillers and builder: lines for people, or one JSON object a line; no secrets."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from pythonjsonlogger.json import JsonFormatter

from cachesvc.core.errors import InvalidInput
from cachesvc.core.secrets import redacted
from cachesvc.core.text import printable


def configure_logging(kind: str) -> None:
    """`text` or `json`, on stderr; the level is CACHESVC_LOG's. Raises InvalidInput where that is none."""
    level = (os.environ.get("CACHESVC_LOG") or "INFO").upper()
    if not isinstance(logging.getLevelName(level), int):
        raise InvalidInput(f"CACHESVC_LOG={level} is no level; set it to DEBUG, INFO or WARNING")
    handler = logging.StreamHandler(sys.stderr)
    as_json = _JsonFormatter("%(asctime)s %(levelname)s %(name)s %(message)s")
    handler.setFormatter(as_json if kind == "json" else _TextFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("grpc._common").disabled = True  # a trace for each request that does not parse
    for name in ("boto3", "botocore", "urllib3"):  # at DEBUG they say keys and signatures
        logging.getLogger(name).setLevel(logging.WARNING)


class _JsonFormatter(JsonFormatter):
    """Secrets are taken out of a record's texts, tracebacks too, before they are JSON: afterwards they could take
    backslashes and quotes of it with them."""

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
