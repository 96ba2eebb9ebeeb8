"""Descriptors that readers do not take: one user's keep nobody else's from being granted."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from cachesvc.catalog.build import Options
from cachesvc.client.control import Control
from cachesvc.core import wire
from cachesvc.core.model import ReaderId
from cachesvc.core.wire import Op
from cachesvc.daemon.access.tenants import Peer
from cachesvc.daemon.grants.in_flight import LOOKS, Unread
from cachesvc.daemon.grants.readers import Reader
from testbed import WAIT_S
from testbed.node import Daemon
from tests.support.users import BOB, as_root

PR_CAPBSET_DROP, CAPABILITIES = 24, 41
OPEN_FILES = 1024
EXTENTS = 16


def as_anybody() -> None:
    """Without root's privileges: the kernel's bounds hold for whoever has none. Before the exec."""
    for capability in range(CAPABILITIES):
        ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))


class Unprivileged(Daemon):
    """A daemon whose descriptors under way the kernel bounds."""

    def spawn(self, *more: str) -> subprocess.Popen[bytes]:
        with open(self.root / "daemon.log", "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "cachesvc", "serve", *self._options, *more],
                stdout=log,
                stderr=log,
                preexec_fn=as_anybody,
            )


def connected(daemon: Daemon, dataset: str, user: int = 0) -> socket.socket:
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel.settimeout(WAIT_S)
    os.seteuid(user)  # the kernel notes the effective user of the moment
    try:
        channel.connect(f"{daemon.socket_dir}/grants.sock")
    finally:
        os.seteuid(0)
    channel.send(wire.encode(Op.HELLO, wire.MAGIC, digest=bytes.fromhex(dataset)))
    assert wire.decode(channel.recv(4096)).op is Op.WELCOME
    return channel


def asked(channel: socket.socket, op: Op, value: int) -> Op:
    channel.send(wire.encode(op, 7, value))
    answer, given, _, _ = socket.recv_fds(channel, 4096, 4)
    for fd in given:
        os.close(fd)
    return wire.decode(answer).op


@as_root
def test_one_user_s_unread_grants_keep_nobody_else_from_being_granted(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o755)
    (tmp_path / "0.bin").write_bytes(bytes(EXTENTS * 4096))
    options = ["--ram", "1MiB", "--extent-bytes", "4096", "--fillers", "1", "--allow", str(tmp_path)]
    with Unprivileged(tmp_path / "node", [*options, "--socket-mode", "666"]) as daemon:
        os.chmod(daemon.socket_dir, 0o755)
        with Control(daemon.socket_dir) as control:
            wanted = Options(format="records", record_bytes=1024)
            dataset = control.open_dataset([str(tmp_path / "0.bin")], wanted).id
        with contextlib.ExitStack() as stack:
            ours = stack.enter_context(connected(daemon, dataset))
            assert [asked(ours, Op.GET, each) for each in range(EXTENTS)] == [Op.GRANT] * EXTENTS
            hoard = [stack.enter_context(connected(daemon, dataset, BOB)) for _ in range(12)]
            for channel in hoard[:8]:  # grants
                for number in range(200):
                    channel.send(wire.encode(Op.GET, number, 0))
            for channel in hoard[8:]:  # catalogs, beyond what a buffer holds
                with contextlib.suppress(OSError):
                    for number in range(2000):
                        channel.send(wire.encode(Op.CATALOG, number))
            assert [asked(ours, Op.GET, each) for each in range(EXTENTS)] == [Op.GRANT] * EXTENTS
            with connected(daemon, dataset) as other:
                assert asked(other, Op.CATALOG, 0) is Op.CATALOG
            answers = list(taken(hoard[7]))
            assert Op.REFUSED in answers, "the kernel alone bounds what one user has under way"
            for channel in hoard:  # whoever takes its own has room again
                list(taken(channel))
            again = stack.enter_context(connected(daemon, dataset, BOB))
            assert [asked(again, Op.GET, each) for each in range(EXTENTS)] == [Op.GRANT] * EXTENTS


def taken(channel: socket.socket) -> Iterator[Op]:
    channel.setblocking(False)
    with contextlib.suppress(OSError):
        while True:
            answer, given, _, _ = socket.recv_fds(channel, 4096, 4)
            for fd in given:
                os.close(fd)
            if not answer:
                return
            yield wire.decode(answer).op


class Users:
    """Readers at both ends, and what a count of all that is under way would be."""

    def __init__(self, most: int) -> None:
        self.unread = Unread(most, lambda reader: reader.channel.close())
        self.most = most
        self.readers: list[Reader] = []
        self.theirs: list[socket.socket] = []
        self.under_way: list[int] = []

    def close(self) -> None:
        for one in self.theirs:
            one.close()
        for reader in self.readers:
            self.unread.leave(reader)

    def connect(self, user: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.setblocking(False)
        self.readers.append(Reader(ReaderId(len(self.readers)), ours, Peer(user, frozenset()), 0))
        self.theirs.append(theirs)
        self.under_way.append(0)

    def of(self, user: int) -> int:
        pairs = zip(self.readers, self.under_way, strict=True)
        return sum(count for reader, count in pairs if reader.peer.uid == user)

    def send(self, number: int) -> None:
        reader = self.readers[number]
        if reader.channel.fileno() < 0 or number in self.unread._left:
            return
        before = self.of(reader.peer.uid)
        may = self.unread.may_send(reader)
        # The other way round it may be stricter: it has not seen yet what others have read.
        assert not may or before < 2 * (self.most - sum(self.under_way))
        if may:
            reader.channel.send(b"x")
            self.unread.sent(reader)
            self.under_way[number] += 1

    def take(self, number: int, all_of_it: bool) -> None:
        while self.under_way[number]:
            assert self.theirs[number].recv(9) == b"x"
            self.under_way[number] -= 1
            if not all_of_it:
                return

    def leave(self, number: int) -> None:
        reader = self.readers[number]
        if reader.channel.fileno() >= 0 and number not in self.unread._left:
            self.unread.leave(reader)
            assert (reader.channel.fileno() < 0) == (not self.under_way[number])


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_a_user_has_no_more_under_way_than_twice_what_it_leaves_free(data: st.DataObject) -> None:
    users = Users(data.draw(st.integers(3, 40)))
    for _ in range(data.draw(st.integers(1, LOOKS))):
        users.connect(data.draw(st.integers(0, 2)))
    number = st.integers(0, len(users.readers) - 1)
    try:
        for what, one in data.draw(st.lists(st.tuples(st.sampled_from("ssssttTl"), number), max_size=80)):
            {"s": users.send, "t": lambda n: users.take(n, False), "T": lambda n: users.take(n, True)}.get(
                what, users.leave
            )(one)
        for one in range(len(users.readers)):
            users.take(one, True)
        for user in range(3):  # nothing is under way, and nothing counts as if it were
            users.connect(user)
            assert users.unread.may_send(users.readers[-1])
        assert users.unread.count() == 0
    finally:
        users.close()
    assert users.unread._by_user.total() == 0
    assert not users.unread._have


def test_who_left_is_counted_until_it_takes_what_it_was_sent_or_dies() -> None:
    users = Users(100)
    for user in (1, 1):
        users.connect(user)
    for one in (0, 1):
        users.send(one)
        users.leave(one)
    assert users.unread.held(1) == users.unread.count() == 2
    users.take(0, True)
    users.theirs[1].close()
    assert users.unread.count() == 0
    assert [reader.channel.fileno() for reader in users.readers] == [-1, -1]
    users.close()
