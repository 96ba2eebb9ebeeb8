"""The log: one line a record, JSON without secrets, and repeated warnings limited."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Iterator
from datetime import datetime

import pytest

from cachesvc.daemon.processes.logs import (
    FLOOD_LINES,
    FLOOD_S,
    MESSAGES,
    PRODUCT_LOGGERS,
    Flood,
    configure_logging,
)


@pytest.fixture
def own_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restores this process's logging after the test."""
    for place in (sys, threading):
        monkeypatch.setattr(place, "excepthook", place.excepthook)
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)
    for name in PRODUCT_LOGGERS:
        logging.getLogger(name).setLevel(logging.NOTSET)


def test_a_log_record_is_one_line_for_any_object_name(
    own_log: None, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging("text")
    logging.getLogger("x").warning(
        "a fill failed", extra={"error": "s3://b/a\n12:00:00 INFO forged\x1b[2J\u2028é"}
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(r"error=s3://b/a\n12:00:00 INFO forged\x1b[2J\u2028é")


def test_a_record_of_the_json_log_is_json_without_secrets(
    own_log: None, capsys: pytest.CaptureFixture[str]
) -> None:
    error = ValueError('s3://u:S3CR3T@b/ and "u:S3CR3T@b", s3://b/r?key=S3CR3T".jpg, https://h/x#S3CR3T\\')
    configure_logging("json")
    try:
        raise error
    except ValueError:
        logging.getLogger("x").exception(
            'no such bucket "u:S3CR3T@b"', extra={"error": str(error), "n": 7, "all": [error, True]}
        )
    (line,) = capsys.readouterr().err.splitlines()
    found = json.loads(line)
    assert "S3CR3T" not in line
    assert found["error"] == 's3://***@b/ and "***@b", s3://b/r?key=***".jpg, https://h/x#***'
    assert found["all"] == [found["error"], True]
    assert (found["n"], found["message"]) == (7, 'no such bucket "***@b"')
    assert found["exc_info"].startswith("Traceback")
    assert datetime.fromisoformat(found["asctime"]).tzinfo is not None


def test_repeated_warnings_are_limited_and_counted() -> None:
    now = 0.0
    flood = Flood(lambda: now)

    def told(message: str, level: int = logging.WARNING, **extra: str) -> logging.LogRecord | None:
        record = logging.LogRecord("x", level, __file__, 1, message, None, None)
        vars(record).update(extra)
        return record if flood.filter(record) else None

    first = [told("a fill failed") for _ in range(3 * FLOOD_LINES)]
    assert [bool(record) for record in first] == FLOOD_LINES * [True] + 2 * FLOOD_LINES * [False]
    assert vars(first[FLOOD_LINES - 1])["more"] == "left out for 60 s"
    assert told("another matter")
    assert told("a fill failed", host="10.0.0.9"), "a host silences no other"
    assert all(told("connected", logging.INFO) for _ in range(3 * FLOOD_LINES))
    now = FLOOD_S
    record = told("a fill failed")
    assert record is not None
    assert vars(record)["left_out"] == 2 * FLOOD_LINES
    for number in range(3 * MESSAGES):
        assert told(f"one of many: {number}")
    assert len(flood.windows) <= MESSAGES
