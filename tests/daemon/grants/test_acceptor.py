"""Connections to the grants socket beyond a limit are refused with a typed error."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachesvc.core import wire
from cachesvc.core.errors import DaemonUnavailable
from cachesvc.core.wire import Op
from cachesvc.daemon.access.tenants import Peer
from cachesvc.daemon.grants.acceptor import Acceptor
from tests.support.users import ALICE, BOB, as_root

LIMIT = 8


class Clients:
    """Clients of several users at one acceptor."""

    def __init__(self) -> None:
        self.accepted: list[tuple[socket.socket, Peer]] = []
        self.acceptor = Acceptor("grants.sock", 0o666, LIMIT, lambda *each: self.accepted.append(each))
        self._clients: list[socket.socket] = []

    def connect(self, uid: int) -> str:
        """Connect as a user; return the error that the client is sent, "" where it is accepted."""
        client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._clients.append(client)
        os.seteuid(uid)  # the kernel notes the effective user at connect
        try:
            client.connect("grants.sock")
            client.send(b"HELLO")  # it does not wait to be accepted
        finally:
            os.seteuid(0)
        before = len(self.accepted)
        self.acceptor.accept()
        if len(self.accepted) > before:
            return ""
        message = wire.decode(client.recv(4096))
        assert (message.op, message.size) == (Op.FAILED, DaemonUnavailable.code)
        assert client.recv(4096) == b""
        return message.text

    def leave(self, uid: int) -> None:
        """End one connection of a user."""
        each = next(each for each in self.accepted if each[1].uid == uid)
        self.accepted.remove(each)
        each[0].close()
        self.acceptor.left(each[1])

    def close(self) -> None:
        self.acceptor.close()
        for each in (*self._clients, *(channel for channel, _ in self.accepted)):
            each.close()


@pytest.fixture
def clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Clients]:
    monkeypatch.chdir(tmp_path)  # other users may not look up the folders above it
    tmp_path.chmod(0o755)
    before = len(os.listdir("/proc/self/fd"))
    made = Clients()
    yield made
    made.close()
    assert len(os.listdir("/proc/self/fd")) == before


@as_root
def test_one_user_gets_half_of_all_connections_and_the_daemons_own_user_all(clients: Clients) -> None:
    assert [clients.connect(BOB) for _ in range(LIMIT // 2)] == [""] * (LIMIT // 2)
    assert "this user has half of all connections" in clients.connect(BOB)
    assert clients.connect(ALICE) == ""
    assert [clients.connect(0) for _ in range(3)] == [""] * 3
    assert f"the daemon has {LIMIT} readers" in clients.connect(0)
    clients.leave(BOB)
    assert clients.connect(BOB) == ""
