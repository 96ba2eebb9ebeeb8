"""Messages between processes: invalid ones are refused, long ones and their descriptors arrive."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import msgspec
import pytest

from cachesvc.catalog.options import Options
from cachesvc.daemon.processes import jobs
from cachesvc.daemon.processes.datagrams import BODY_IN_MEMFD, MAX_DATAGRAM_BYTES, RECEIVE_ERRORS, send
from cachesvc.sources.timed_reads import SourceCounters
from tests.support.descriptors import descriptors

DONE = jobs.Answered(1, jobs.JobDone(message="m", dataset="0" * 32))
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    with ExitStack() as ends:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        yield ends.enter_context(ours), ends.enter_context(theirs)


@pytest.mark.parametrize("message", [DONE, jobs.SourceRequests(SourceCounters(1, 2, 3))])
def test_a_message_arrives_as_it_was_sent(pair: Pair, message: jobs.Answered | jobs.SourceRequests) -> None:
    send(pair[1], message)
    assert jobs.receive_answer(pair[0]) == (message, [])


def changed(**fields: object) -> bytes:
    done = {"type": "JobDone", **fields}
    return msgspec.msgpack.encode({"type": "Answered", "number": 1, "answer": done})


@pytest.mark.parametrize(
    "said",
    [
        b"x", b"", b"\xff", b"[]", BODY_IN_MEMFD, msgspec.msgpack.encode({}), msgspec.msgpack.encode({"type": "None"}),
        changed(type="none"), changed(code=None), changed(code=True), changed(code="1"), changed(digests=7),
        changed(retry="yes"), changed(source_bytes=1.5), changed(dataset=["x"]), b"\x91" * 100_000,
    ],
)  # fmt: skip
def test_an_invalid_message_is_a_receive_error_and_leaves_no_descriptor(pair: Pair, said: bytes) -> None:
    before = descriptors()
    with open(os.devnull) as file:
        socket.send_fds(pair[1], [said or b"\0"], [file.fileno()])
        with pytest.raises(RECEIVE_ERRORS):
            jobs.receive_answer(pair[0])
    assert descriptors() == before


def test_a_message_longer_than_a_datagram_arrives_with_its_descriptors(pair: Pair) -> None:
    uris = ["s3://bucket/" + "x" * 1000 + str(number) for number in range(MAX_DATAGRAM_BYTES // 1000)]
    sent = jobs.Submitted(7, jobs.BuildJob(uris, Options(format="records"), "", refresh=False))
    with open(os.devnull) as file:
        send(pair[1], sent, (file.fileno(),))
    received = jobs.receive_job(pair[0])
    assert received is not None
    message, (fd,) = received
    assert message == sent
    assert os.fstat(fd).st_rdev == os.stat(os.devnull).st_rdev
    os.close(fd)
