"""The answers of a block server, spoken to through bare sockets."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachesvc.core.errors import Busy, TierFailed
from cachesvc.core.model import ExtentId
from cachesvc.daemon.blocks.replies import BURST_S, Lent, SendRate
from cachesvc.daemon.blocks.server import Handshakes
from cachesvc.daemon.blocks.wire import (
    MAX_RANGES,
    VERSION,
    ConnectionEnded,
    Frame,
    Kind,
    Range,
    Request,
    receive,
    receive_end,
    receive_frame,
)
from cachesvc.tiers.fill_progress import digest_of_digests
from cachesvc.tiers.tier import CHECKSUM_BLOCK_BYTES as BLOCK
from testbed import WAIT_S
from testbed.servers import free_ports
from tests.support.clock import Clock
from tests.support.membership.blocks import BLOCKS, DATA, EXTENT, SIZE, Copy, digests_of, resident, serving
from tests.support.waiting import wait_until

ROOT = digest_of_digests(digests_of(DATA))


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of a server of one resident extent."""
    with resident() as lend, serving(lend) as found:
        yield found


@contextmanager
def connected(address: str) -> Iterator[socket.socket]:
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), WAIT_S) as found:
        yield found


def ask(connection: socket.socket, *ranges: Range, extent: ExtentId = EXTENT) -> None:
    connection.sendall(Request(extent, ranges).pack())


def being_served(address: str) -> socket.socket:
    """Return a connection with a request that is being served. It asks again while it is answered BUSY: a server notes that
    a connection is idle just after its reader has the answer."""
    host, port = address.split(":")
    while True:
        connection = socket.create_connection((host, int(port)), WAIT_S)
        ask(connection, (0, BLOCKS))
        frame = receive_frame(connection)
        if frame.kind is not Kind.BUSY:
            assert frame == Frame(Kind.BLOCKS, 0, 1)
            return connection
        connection.close()


def receive_blocks(connection: socket.socket) -> dict[int, bytes]:
    """Receive frames up to the END frame; return the bytes by the index of the first block."""
    found: dict[int, bytes] = {}
    while (frame := receive_frame(connection)).kind is Kind.BLOCKS:
        digests = receive(connection, 8 * frame.count)
        begin, end = frame.first * BLOCK, min(SIZE, (frame.first + frame.count) * BLOCK)
        found[frame.first] = receive(connection, end - begin)
        assert digests == digests_of(found[frame.first])
    assert frame.kind is Kind.END
    assert receive_end(connection, VERSION) == (ROOT, SIZE)
    return found


def is_closed(connection: socket.socket) -> bool:
    """Tell whether the server closes the connection and sends nothing else before."""
    try:
        receive(connection, 1)
    except ConnectionEnded as ended:
        return ended.received_bytes == 0
    return False


def test_a_connection_serves_one_request_after_another(address: str) -> None:
    with connected(address) as connection:
        ask(connection, (0, BLOCKS))
        assert b"".join(receive_blocks(connection).values()) == DATA
        ask(connection, extent=ExtentId(bytes(16)))
        assert receive_frame(connection) == Frame(Kind.NOT_FOUND)
        ask(connection, (3, 1), (5, 2), (BLOCKS - 1, 1))
        found = receive_blocks(connection)
        assert found == {
            3: DATA[3 * BLOCK : 4 * BLOCK],
            5: DATA[5 * BLOCK : 7 * BLOCK],
            BLOCKS - 1: DATA[(BLOCKS - 1) * BLOCK :],
        }
        ask(connection)
        assert receive_blocks(connection) == {}


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        (b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", Kind.INVALID),
        (struct.pack("<4sHH", b"csvB", VERSION + 1, 9) + b"more of another version" * 500, Kind.VERSION),
        (struct.pack("<4sHH", b"csvB", 0, 0), Kind.VERSION),
        (struct.pack("<4sHH16s", b"csvB", VERSION, MAX_RANGES + 1, EXTENT), Kind.INVALID),
        (Request(EXTENT, ((0, BLOCKS + 1),)).pack(), Kind.INVALID),
        (Request(EXTENT, ((BLOCKS, 1),)).pack(), Kind.INVALID),
        (Request(EXTENT, ((0, 0xFFFFFFFF),)).pack(), Kind.INVALID),
        (Request(EXTENT, ((0xFFFFFFFF, 0xFFFFFFFF),)).pack(), Kind.INVALID),
        (Request(EXTENT, ((2, 0),)).pack(), Kind.INVALID),
        (Request(EXTENT, ((2, 2), (3, 1))).pack(), Kind.INVALID),
        (Request(EXTENT, ((2, 2), (0, 1))).pack(), Kind.INVALID),
    ],
)
def test_an_invalid_request_is_answered_and_its_connection_closed(
    address: str, sent: bytes, kind: Kind
) -> None:
    with connected(address) as connection:
        connection.sendall(sent)
        assert receive_frame(connection) == Frame(kind, version=VERSION)
        assert is_closed(connection)
    with connected(address) as connection:
        ask(connection)
        assert receive_blocks(connection) == {}


def test_a_request_that_ends_early_ends_its_connection_alone(address: str) -> None:
    with connected(address) as connection:
        connection.sendall(Request(EXTENT, ((0, 1),)).pack()[:-3])
        connection.shutdown(socket.SHUT_WR)
        assert is_closed(connection)
    with connected(address) as connection:
        ask(connection)
        assert receive_blocks(connection) == {}


@pytest.mark.parametrize(("error", "kind"), [(Busy("now"), Kind.BUSY), (TierFailed("no"), Kind.FAILED)])
def test_errors_of_the_lender_are_answered(error: Exception, kind: Kind) -> None:
    @contextmanager
    def lend(extent: ExtentId) -> Iterator[Lent]:
        raise error
        yield

    with serving(lend) as address, connected(address) as connection:
        ask(connection, (0, 1))
        assert receive_frame(connection) == Frame(kind)
        assert is_closed(connection)


def test_an_extent_that_is_shorter_than_lent_ends_the_connection() -> None:
    with resident() as lend:

        @contextmanager
        def longer(extent: ExtentId) -> Iterator[Lent]:
            with lend(extent) as lent:
                yield Lent(lent.fd, SIZE + BLOCK, digests_of(DATA + bytes(BLOCK)))

        with serving(longer) as address, connected(address) as connection:
            ask(connection, (BLOCKS - 1, 2))
            assert receive_frame(connection) == Frame(Kind.BLOCKS, BLOCKS - 1, 2)
            with pytest.raises(ConnectionEnded):
                receive(connection, 2 * BLOCK + 16)


def test_at_the_limit_idle_connections_give_way_and_working_ones_do_not() -> None:
    with Copy() as copy, serving(copy.lend, max_connections=2) as address, ExitStack() as stack:
        copy.fill(0)
        idle = stack.enter_context(connected(address))
        ask(idle, (0, 1), extent=ExtentId(bytes(16)))
        assert receive_frame(idle) == Frame(Kind.NOT_FOUND)
        for _ in range(2):
            stack.callback(being_served(address).close)
        assert is_closed(idle)
        refused = stack.enter_context(connected(address))
        ask(refused, (0, 1))
        assert receive_frame(refused) == Frame(Kind.BUSY)
        assert is_closed(refused)


def test_a_fill_that_makes_no_progress_is_told_to_be_alive() -> None:
    with Copy() as copy, serving(copy.lend) as address, connected(address) as connection:
        ask(connection, (0, BLOCKS))
        assert receive_frame(connection) == Frame(Kind.WAIT)
        assert receive_frame(connection) == Frame(Kind.WAIT)
        copy.fill(7, 2)
        assert receive_frame(connection) == Frame(Kind.BLOCKS, 7, 2)


def test_a_reader_that_waits_for_its_turn_is_told_that_the_node_is_alive() -> None:
    with resident() as lend, serving(lend, bytes_per_s=1.0) as address, connected(address) as connection:
        ask(connection, (0, 17))  # two frames; the first is free, and the second is to come in twelve days
        assert receive_frame(connection) == Frame(Kind.BLOCKS, 0, 16)
        receive(connection, 16 * (8 + BLOCK))
        assert receive_frame(connection) == Frame(Kind.WAIT)


def test_an_address_is_taken_as_soon_as_its_predecessor_leaves_it() -> None:
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    with resident() as lend, ExitStack() as stack:
        first = stack.enter_context(ExitStack())
        first.enter_context(serving(lend, address=address))
        bound = threading.Event()

        def second() -> None:
            with serving(lend, address=address), connected(address) as connection:
                ask(connection)
                assert receive_blocks(connection) == {}
                bound.set()

        thread = threading.Thread(target=second)
        thread.start()
        first.close()
        assert bound.wait(WAIT_S)
        thread.join(WAIT_S)


def test_sent_bytes_are_counted_also_of_a_reader_that_leaves() -> None:
    sent: list[int] = []
    with Copy() as copy, serving(copy.lend, on_sent=sent.append) as address:
        copy.fill(0, 3)
        with connected(address) as connection:
            ask(connection, (0, BLOCKS))
            assert receive_frame(connection) == Frame(Kind.BLOCKS, 0, 3)
            receive(connection, 3 * (8 + BLOCK))
        wait_until(lambda: sent == [3 * BLOCK])


def test_closing_ends_connections_and_leaves_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    threads = threading.active_count()
    with Copy() as copy, ExitStack() as stack:
        with serving(copy.lend) as address:
            waiting = stack.enter_context(connected(address))
            ask(waiting, (0, BLOCKS))
            assert receive_frame(waiting).kind is Kind.WAIT
        assert is_closed(waiting)
        for thread in threading.enumerate():
            if thread.name == "peer":
                thread.join(WAIT_S)
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == before


RATE = 1000.0


@given(st.lists(st.tuples(st.integers(1, 500), st.floats(0, 2)), min_size=1, max_size=50))
def test_no_interval_carries_more_than_its_rate_a_burst_and_one_send(sends: list[tuple[int, float]]) -> None:
    clock, sent = Clock(), []
    rate = SendRate(RATE, clock)
    for size, pause_s in sends:
        clock.now += pause_s
        sent.append((clock.now + rate.take(size), size))
    assert all(earlier[0] <= later[0] + 1e-9 for earlier, later in pairwise(sent)), "in the order of asking"
    for first, (begin_s, _) in enumerate(sent):
        for last in range(first, len(sent)):
            carried = sum(size for _, size in sent[first:last])
            assert carried <= RATE * (sent[last][0] - begin_s + BURST_S) + 1e-6


def test_senders_that_always_have_something_get_the_whole_rate() -> None:
    clock = Clock()
    rate = SendRate(RATE, clock)
    for _ in range(100):
        clock.now += rate.take(50)
    assert clock.now == pytest.approx(99 * 50 / RATE)


def test_without_a_limit_there_is_no_wait() -> None:
    rate = SendRate(inf)
    assert [rate.take(1 << 40) for _ in range(3)] == [0, 0, 0]


def test_a_crowd_drives_out_its_own_oldest_connection() -> None:
    ended: list[str] = []
    pool: Handshakes[str] = Handshakes(ended.append, limit=3)
    for connection, host in (("m1", "member"), ("s1", "stranger"), ("s2", "stranger"), ("s3", "stranger")):
        pool.began(connection, host)
    assert ended == ["s1"]
    assert not pool.finished("s1"), "an ended connection is no member's, whatever its handshake gives"
    assert pool.finished("m1")
    assert not pool.finished("m1")
    assert pool.refused == 1


@given(st.lists(st.sampled_from("ssssssssm"), max_size=300))
def test_a_host_below_its_part_of_the_pool_loses_no_connection(hosts: list[str]) -> None:
    """A member that has few handshakes at a time finishes all of them, however many a stranger begins."""
    ended: list[tuple[str, int]] = []
    pool: Handshakes[tuple[str, int]] = Handshakes(ended.append, limit=4)
    waiting: list[tuple[str, int]] = []
    for number, host in enumerate(hosts):
        pool.began((host, number), host)
        waiting += [(host, number)] if host == "m" else []
        if len(waiting) == 2:
            assert pool.finished(waiting.pop(0))
    assert not [each for each in ended if each[0] == "m"]
