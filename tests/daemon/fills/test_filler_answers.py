"""What a child process answers is not believed; what is logged is one line."""

from __future__ import annotations

import json
import logging
import resource
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import datetime
from functools import partial
from pathlib import Path

import pytest

from cachesvc.config import Settings
from cachesvc.core.errors import SourceUnavailable
from cachesvc.daemon.fills.pool import Fillers
from cachesvc.daemon.processes import jobs
from cachesvc.daemon.processes.logs import FLOOD_LINES, FLOOD_S, MESSAGES, OURS, Flood
from cachesvc.daemon.serve import configure_logging

DONE = jobs.Done(1, message="m", dataset="0" * 32)


def test_sound_answers_hold_what_their_types_say() -> None:
    assert jobs.typed(DONE)
    assert jobs.typed(jobs.Progress(1, 2, 3))


@pytest.mark.parametrize(
    "wrong",
    [
        replace(DONE, number="1"), replace(DONE, code=None), replace(DONE, code=True), replace(DONE, digests=7),  # type: ignore[arg-type]
        replace(DONE, retry="yes"), replace(DONE, source_bytes=1.5), replace(DONE, dataset=["x"]),  # type: ignore[arg-type]
        jobs.Progress(1, "a", 2), jobs.LeftAlone(["x"]),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_answers_of_other_types_do_not(wrong: jobs.Answer | jobs.LeftAlone) -> None:
    assert not jobs.typed(wrong)


@pytest.mark.parametrize(
    "said",
    [
        b"x", b"[]", b"{}", b'{"kind": "done"}', b'{"kind": "none", "number": 1}', b"\xff", b"1", b"null", jobs.IN_MEMFD,
        json.dumps({"kind": "done", "number": 1, "more": 2}).encode(),
        json.dumps({"kind": ["done"], **asdict(DONE)}).encode(),
    ],
)  # fmt: skip
def test_what_does_not_parse_is_one_of_the_errors_that_end_the_child(said: bytes) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        theirs.send(said)
        with pytest.raises((ValueError, KeyError, TypeError, AttributeError, IndexError)):
            jobs.receive(ours)


@pytest.fixture
def own_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The log of a process of ours, in this one."""
    for place in (sys, threading):
        monkeypatch.setattr(place, "excepthook", place.excepthook)
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)
    for name in OURS:
        logging.getLogger(name).setLevel(logging.NOTSET)


def test_a_log_record_is_one_line_whatever_an_object_is_called(
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


def test_a_flood_of_one_warning_is_cut_and_counted() -> None:
    now = 0.0
    flood = Flood(lambda: now)

    def told(message: str, level: int = logging.WARNING) -> logging.LogRecord | None:
        record = logging.LogRecord("x", level, __file__, 1, message, None, None)
        return record if flood.filter(record) else None

    first = [told("a fill failed") for _ in range(3 * FLOOD_LINES)]
    assert [bool(record) for record in first] == FLOOD_LINES * [True] + 2 * FLOOD_LINES * [False]
    assert vars(first[FLOOD_LINES - 1])["more"] == "left out for 60 s"
    assert told("another matter")
    assert all(told("connected", logging.INFO) for _ in range(3 * FLOOD_LINES))
    now = FLOOD_S
    record = told("a fill failed")
    assert record is not None
    assert vars(record)["left_out"] == 2 * FLOOD_LINES
    for number in range(3 * MESSAGES):
        assert told(f"one of many: {number}")
    assert len(flood._windows) <= MESSAGES


def test_a_job_for_which_no_process_can_be_started_ended_none(tmp_path: Path) -> None:
    settings = Settings(0, (), (), str(tmp_path), str(tmp_path), fillers=1)
    fillers, answers = Fillers(settings, (), lambda *_: None, lambda _: None), list[jobs.Answer]()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        fillers.submit(partial(jobs.Verify, size_bytes=1, digests=""), (), answers.append)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    (done,) = answers
    assert isinstance(done, jobs.Done)
    assert (done.code, done.retry, done.lost) == (SourceUnavailable.code, True, False)
    assert "no process can be started" in done.message
