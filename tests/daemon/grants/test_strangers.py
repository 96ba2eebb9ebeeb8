"""What clients send and cannot be closed counts: it takes places, and from some number on no more of it is received."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cachesvc.core import wire
from cachesvc.core.model import DatasetId, ReaderId
from cachesvc.core.wire import Op
from cachesvc.daemon.grants.deferred_close import A_USER, Disposal
from cachesvc.daemon.grants.plans import Plans
from cachesvc.daemon.grants.readers import Connection
from cachesvc.daemon.grants.server import GrantsServer
from tests.support.plans import Held, Known, Listed, memory
from tests.support.users import BOB, as_root

PLACES = 8
PASSED = wire.encode(Op.PASSED, 0, 1)


class Hung(Disposal):
    """Closes what it is given at once, and says that it has more."""

    def __init__(self) -> None:
        super().__init__()
        self.more: Counter[int] = Counter()
        self.taken: list[tuple[int, int]] = []

    def take(self, user: int, descriptors: Iterable[int]) -> None:
        given = list(descriptors)
        self.taken.append((user, len(given)))
        for fd in given:
            os.close(fd)

    def held(self, user: int) -> int:
        return self.more[user]

    def count(self) -> int:
        return self.more.total()

    def full(self, user: int) -> bool:
        return self.held(user) >= A_USER


class Bench:
    path = "grants.sock"

    def __init__(self) -> None:
        self.watched: dict[int, Callable[[], object]] = {}
        self.disposal, answers, lane = Hung(), Listed(), Held()
        self._ids = iter(range(1, 100))
        given: Any = answers, Plans(lane), self.disposal  # type: ignore[arg-type]
        watch, unwatch = self.watched.__setitem__, self.watched.__delitem__
        self.server = GrantsServer(
            self.path, 0o666, *given, watch, unwatch, self._ids.__next__, PLACES, 99, None
        )
        (self._listener,) = self.watched
        self.clients: list[socket.socket] = []

    def knock(self, user: int = 0) -> int:
        """One more client, of that user; how many readers there are."""
        client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.clients.append(client)
        os.seteuid(user)  # the kernel notes the effective user of the moment
        try:
            client.connect(self.path)
        finally:
            os.seteuid(0)
        self.watched[self._listener]()
        return len(self.server.handed()[1])

    def reader(self) -> tuple[socket.socket, Callable[[], bool]]:
        """A client with a dataset, and the reading of its next message: whether it is still connected."""
        client, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.clients.append(client)
        number, fd = ReaderId(next(self._ids)), other.detach()
        connection = Connection(number, number, fd, True, DatasetId("0a"), True, 0, True)
        assert self.server.adopt(connection, Known(connection.wanted))

        def read() -> bool:
            self.watched[fd]()
            return self.server.here(number)

        return client, read


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.chdir(tmp_path)  # others may not look up what lies above it
    tmp_path.chmod(0o755)
    before = len(os.listdir("/proc/self/fd"))
    made = Bench()
    yield made
    made.server.close()
    for client in made.clients:
        client.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_message_with_a_descriptor_of_what_is_no_memory_is_the_last(bench: Bench) -> None:
    client, read = bench.reader()
    fd = memory(b"")
    socket.send_fds(client, [PASSED], [fd])
    assert read()
    socket.send_fds(client, [PASSED], [fd, client.fileno()])
    assert not read()
    assert bench.disposal.taken == [(os.geteuid(), 1)], "the memory is closed at once"
    os.close(fd)


def test_while_too_much_cannot_be_closed_no_message_that_brings_more_is_received(bench: Bench) -> None:
    client, read = bench.reader()
    bench.disposal.more[os.geteuid()] = A_USER
    client.send(PASSED)
    assert read(), "it brings nothing"
    fd = memory(b"")
    socket.send_fds(client, [PASSED], [fd])
    os.close(fd)
    assert not read()
    assert bench.disposal.taken == [(os.geteuid(), 1)], "with the connection, in which it still is"


@as_root
def test_what_cannot_be_closed_takes_places_of_all_and_of_its_users_half(bench: Bench) -> None:
    bench.disposal.more[BOB] = PLACES // 2 - 1
    assert bench.knock(BOB) == 1
    assert bench.knock(BOB) == 1, "half of all are its own"
    assert bench.knock(BOB + 1) == 2
    assert bench.knock() == 3
    bench.disposal.more[BOB] = PLACES - 3
    assert bench.knock() == 3, "all are taken"
    bench.disposal.more[BOB] = PLACES - 4
    assert bench.knock() == 4
