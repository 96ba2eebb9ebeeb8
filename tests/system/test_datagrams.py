"""The end of a stranger's connection: nothing is left in it, or it is closed by somebody else."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from cachesvc.system.datagrams import emptied

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


def test_a_connection_of_which_all_is_read_takes_no_more(pair: Pair) -> None:
    ours, theirs = pair
    for said in (b"a", b"", b"bcd", b""):
        theirs.send(said)
    assert emptied(ours)
    with pytest.raises(BrokenPipeError):
        theirs.send(b"late")


@pytest.mark.parametrize("before", [[], [b"a"], [b""], [b"", b"a", b""]], ids=str)
@pytest.mark.parametrize("said", [b"", b"b"])
def test_a_connection_with_a_descriptor_in_it_is_not_empty(
    pair: Pair, before: list[bytes], said: bytes
) -> None:
    ours, theirs = pair
    for each in before:
        theirs.send(each)
    reading, writing = os.pipe()
    socket.send_fds(theirs, [said], [writing])
    os.close(writing)
    assert not emptied(ours)
    os.set_blocking(reading, False)
    with pytest.raises(BlockingIOError):
        os.read(reading, 1)  # the other end is open still: nothing was closed
    ours.close()
    assert os.read(reading, 1) == b""
    os.close(reading)
