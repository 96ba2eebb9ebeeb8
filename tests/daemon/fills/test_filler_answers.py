"""Answers of filler processes: invalid ones are rejected, missing processes reported."""

from __future__ import annotations

import json
import resource
import socket
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest

from cachesvc.config import Settings
from cachesvc.core.errors import SourceUnavailable
from cachesvc.daemon.fills.pool import FillerPool
from cachesvc.daemon.processes import jobs

DONE = jobs.JobDone(1, message="m", dataset="0" * 32)


def test_valid_answers_have_their_declared_types() -> None:
    assert jobs.is_well_typed(DONE)
    assert jobs.is_well_typed(jobs.BuildProgress(1, 2, 3))


@pytest.mark.parametrize(
    "wrong",
    [
        replace(DONE, number="1"), replace(DONE, code=None), replace(DONE, code=True), replace(DONE, digests=7),  # type: ignore[arg-type]
        replace(DONE, retry="yes"), replace(DONE, source_bytes=1.5), replace(DONE, dataset=["x"]),  # type: ignore[arg-type]
        jobs.BuildProgress(1, "a", 2),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_answers_with_other_types_are_rejected(wrong: jobs.Answer) -> None:
    assert not jobs.is_well_typed(wrong)


@pytest.mark.parametrize(
    "said",
    [
        b"x", b"[]", b"{}", b'{"kind": "done"}', b'{"kind": "none", "number": 1}', b"\xff", b"1", b"null",
        jobs.BODY_IN_MEMFD,
        json.dumps({"kind": "done", "number": 1, "more": 2}).encode(),
        json.dumps({"kind": ["done"], **asdict(DONE)}).encode(),
    ],
)  # fmt: skip
def test_a_message_that_cannot_be_parsed_raises_a_receive_error(said: bytes) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        theirs.send(said)
        with pytest.raises((ValueError, KeyError, TypeError, AttributeError, IndexError)):
            jobs.receive(ours)


def test_a_job_without_a_process_fails_without_being_lost(tmp_path: Path) -> None:
    settings = Settings(0, (), (), str(tmp_path), str(tmp_path), fillers=1)
    fillers, answers = FillerPool(settings, (), lambda *_: None, lambda _: None), list[jobs.Answer]()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        fillers.submit(partial(jobs.VerifyJob, size_bytes=1, digests=""), (), answers.append)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    (done,) = answers
    assert isinstance(done, jobs.JobDone)
    assert (done.code, done.retry, done.lost) == (SourceUnavailable.code, True, False)
    assert "no filler process can be started" in done.message
