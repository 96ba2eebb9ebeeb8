"""Reads of blocks from peers: into memory and files, of good peers and of bad ones, over several nodes."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachesvc.core.errors import CorruptData, TierFailed
from cachesvc.core.model import ExtentId
from cachesvc.core.placement.place_search import Patience
from cachesvc.daemon.blocks.client import (
    BlockClient,
    PeerAborted,
    PeerBusy,
    PeerFailed,
    PeerLacks,
    PeerLate,
    PeerSilent,
)
from cachesvc.daemon.blocks.idle_connections import IDLE_S
from cachesvc.daemon.blocks.replies import Lent
from cachesvc.daemon.blocks.wire import VERSION, Frame, Kind, pack_end, receive_request
from cachesvc.tiers.fill_progress import FillState, digest_of_digests
from cachesvc.tiers.tier import CHECKSUM_BLOCK_BYTES as BLOCK
from testbed import WAIT_S
from tests.support.membership.blocks import (
    BLOCKS,
    DATA,
    EXTENT,
    SIZE,
    Copy,
    client,
    digests_of,
    resident,
    serving,
)
from tests.support.waiting import wait_until

DIGESTS = digests_of(DATA)
END = Frame(Kind.END).pack() + pack_end(digest_of_digests(DIGESTS), SIZE, VERSION)


def blocks(first: int, count: int, data: bytes = DATA) -> bytes:
    """A frame of blocks with the digests of the true bytes."""
    digests = DIGESTS[8 * first : 8 * (first + count)]
    return Frame(Kind.BLOCKS, first, count).pack() + digests + data[first * BLOCK : (first + count) * BLOCK]


GOOD = b"".join(blocks(first, min(16, BLOCKS - first)) for first in range(0, BLOCKS, 16)) + END
WRONG = DATA[: 20 * BLOCK] + bytes([DATA[20 * BLOCK] ^ 1]) + DATA[20 * BLOCK + 1 :]


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def saying(*answers: bytes) -> Iterator[str]:
    """A peer that takes one connection after another and sends one answer to the first request of each."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            for said in answers:
                with suppress(OSError):
                    connection, _ = listener.accept()
                    with connection:
                        receive_request(connection, WAIT_S)
                        connection.sendall(said)
                        connection.shutdown(socket.SHUT_WR)
                        connection.recv(1)

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(WAIT_S)


def test_a_memfd_can_be_sealed_right_after_a_read() -> None:
    with resident() as lend, serving(lend) as address, client() as peers, Copy() as copy:
        assert copy.read_from(peers, address) == DIGESTS
        fcntl.fcntl(copy.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL)
        assert copy.bytes() == DATA
        assert copy.progress.finish()


def test_a_memfd_can_be_sealed_after_a_failed_read() -> None:
    frames = blocks(0, 16) + blocks(16, 16, WRONG)
    with saying(frames) as address, client() as peers, Copy() as copy:
        with pytest.raises(CorruptData, match=address):
            copy.read_from(peers, address)
        fcntl.fcntl(copy.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_a_file_is_filled_and_what_lies_behind_the_extent_stays(tmp_path: Path) -> None:
    with open(tmp_path / "extent", "w+b") as file:
        file.truncate(SIZE)
        os.pwrite(file.fileno(), b"footer", SIZE)
        with resident() as lend, serving(lend) as address, client() as peers, Copy(file.fileno()) as copy:
            assert copy.read_from(peers, address) == DIGESTS
        assert (tmp_path / "extent").read_bytes() == DATA + b"footer"


def test_a_file_that_cannot_be_written_is_no_fault_of_the_peer(tmp_path: Path) -> None:
    path = tmp_path / "extent"
    path.write_bytes(bytes(SIZE))
    with (
        open(path, "rb") as file,
        resident() as lend,
        serving(lend) as address,
        client() as peers,
        Copy(file.fileno()) as copy,
        pytest.raises(TierFailed, match="cannot write"),
    ):
        copy.read_from(peers, address)


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 16 * BLOCK, 17 * BLOCK])
def test_extents_of_any_size_are_read(size: int) -> None:
    data = DATA[:size]
    with resident(data) as lend, serving(lend) as address, client() as peers, Copy(data=data) as copy:
        assert copy.read_from(peers, address) == digests_of(data)
        assert copy.bytes() == data


@settings(max_examples=25)
@given(st.permutations(range(BLOCKS)), st.sets(st.integers(0, BLOCKS - 1)))
def test_blocks_may_complete_in_any_order_at_both_ends(order: list[int], had: set[int]) -> None:
    with (
        Copy() as theirs,
        Copy() as ours,
        serving(theirs.lend) as address,
        client() as peers,
        ThreadPoolExecutor() as pool,
    ):
        for index in had:
            ours.fill(index)
        reading = pool.submit(ours.read_from, peers, address)
        for index in order:
            theirs.fill(index)
        assert theirs.progress.finish()
        assert reading.result(WAIT_S) == DIGESTS
        assert ours.bytes() == DATA


def test_more_gaps_than_one_request_names_are_filled() -> None:
    data = DATA[: 1 << 10] * 64 * 600
    with resident(data) as lend, serving(lend) as address, client() as peers, Copy(data=data) as copy:
        for index in range(0, 600, 2):
            copy.fill(index)
        assert copy.read_from(peers, address) == digests_of(data)
        assert copy.bytes() == data


def test_blocks_go_over_two_nodes_while_the_first_fills_them() -> None:
    with ExitStack() as stack:
        first, second, third = (stack.enter_context(Copy()) for _ in range(3))
        pool = stack.enter_context(ThreadPoolExecutor())
        peers = stack.enter_context(client())
        from_first, from_second = (stack.enter_context(serving(each.lend)) for each in (first, second))

        def relay() -> None:
            second.read_from(peers, from_first)
            second.progress.finish()

        relaying = pool.submit(relay)
        reading = pool.submit(third.read_from, peers, from_second)
        for index in reversed(range(BLOCKS)):
            first.fill(index)
            wait_until(lambda at=index: third.progress.complete(at) == BLOCKS - at)
        assert not reading.done()
        assert second.progress.state is FillState.FILLING
        assert first.progress.finish()
        assert reading.result(WAIT_S) == DIGESTS
        relaying.result(WAIT_S)
        assert second.bytes() == third.bytes() == DATA


def test_the_maker_of_an_extent_goes_on_with_it() -> None:
    made = 0xFEDCBA9876543210

    @contextmanager
    def lend(extent: ExtentId) -> Iterator[Lent]:
        with resident() as own, own(extent) as lent:
            yield replace(lent, maker=made)

    with (
        serving(lend) as first,
        Copy() as middle,
        serving(middle.lend) as second,
        Copy() as copy,
        client() as reader,
    ):
        middle.read_from(reader, first)
        assert middle.progress.maker == made
        middle.progress.finish()
        copy.read_from(reader, second)
        assert copy.progress.maker == made


def test_an_abort_is_passed_on_and_another_peer_gives_the_rest() -> None:
    sent: list[int] = []
    with ExitStack() as stack:
        first, second, third = (stack.enter_context(Copy()) for _ in range(3))
        pool = stack.enter_context(ThreadPoolExecutor())
        peers = stack.enter_context(client())
        from_first, from_second = (stack.enter_context(serving(each.lend)) for each in (first, second))
        lend = stack.enter_context(resident())
        other = stack.enter_context(serving(lend, on_sent=sent.append))

        def relay() -> None:
            try:
                second.read_from(peers, from_first)
            finally:
                second.progress.abort()

        relaying = pool.submit(relay)
        reading = pool.submit(third.read_from, peers, from_second)
        first.fill(5, 10)
        wait_until(lambda: third.progress.complete(5) == 10)
        first.progress.abort()
        with pytest.raises(PeerAborted):
            relaying.result(WAIT_S)
        with pytest.raises(PeerAborted):
            reading.result(WAIT_S)
        assert third.read_from(peers, other) == DIGESTS
        assert third.bytes() == DATA
    assert sent == [SIZE - 10 * BLOCK]


@contextmanager
def peer_process(*rate: str) -> Iterator[tuple[str, int]]:
    """A process that serves half of a fill, or the whole extent at a rate; its address and process id."""
    command = [sys.executable, "-m", "tests.support.membership.blocks", *rate]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip(), process.pid
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGKILL, PeerFailed), (signal.SIGSTOP, PeerSilent)], ids=["killed", "hung"]
)
def test_of_a_node_that_dies_the_blocks_that_came_are_kept(
    number: signal.Signals, error: type[PeerFailed]
) -> None:
    sent: list[int] = []
    with (
        peer_process() as (address, pid),
        resident() as lend,
        serving(lend, on_sent=sent.append) as other,
        client(silent_s=3) as peers,
        Copy() as copy,
        ThreadPoolExecutor() as pool,
    ):
        reading = pool.submit(copy.read_from, peers, address)
        wait_until(lambda: copy.progress.complete(0) == BLOCKS // 2)
        os.kill(pid, number)
        with pytest.raises(error, match=address):
            reading.result(WAIT_S)
        assert copy.read_from(peers, other) == DIGESTS
        assert copy.bytes() == DATA
    assert sent == [SIZE - BLOCKS // 2 * BLOCK]


@pytest.mark.slow
@pytest.mark.parametrize("at_least", [1, 17, 33])
@pytest.mark.parametrize("in_memory", [True, False])
def test_a_node_that_is_killed_while_it_sends_leaves_whole_blocks(
    tmp_path: Path, at_least: int, in_memory: bool
) -> None:
    with ExitStack() as stack:
        address, pid = stack.enter_context(peer_process(f"{20 * BLOCK}"))
        other = stack.enter_context(serving(stack.enter_context(resident())))
        file = stack.enter_context(open(tmp_path / "extent", "w+b"))
        copy = stack.enter_context(Copy(-1 if in_memory else file.fileno()))
        peers = stack.enter_context(client())
        reading = stack.enter_context(ThreadPoolExecutor()).submit(copy.read_from, peers, address)
        wait_until(lambda: copy.progress.complete(0) >= at_least)
        os.kill(pid, signal.SIGKILL)
        with suppress(PeerFailed):  # the last frame may have been on its way
            assert reading.result(WAIT_S) == DIGESTS
        for first, count in copy.progress.runs(0, BLOCKS):
            found = os.pread(copy.fd, count * BLOCK, first * BLOCK)
            assert found == DATA[first * BLOCK : (first + count) * BLOCK]
        assert copy.read_from(peers, other) == DIGESTS
        assert copy.bytes() == DATA


def test_a_filler_that_makes_no_progress_is_given_up() -> None:
    with Copy() as theirs, serving(theirs.lend) as address, client() as peers, Copy() as copy:
        theirs.fill(0)
        with pytest.raises(PeerLate, match="next block"):
            copy.read_from(peers, address, wait_s=0.1)
        assert copy.progress.complete(0) == 1


LIES: dict[str, tuple[bytes, type[Exception], int]] = {
    "another byte": (blocks(0, 16) + blocks(16, 16, WRONG), CorruptData, 20),
    "other digests": (GOOD.replace(DIGESTS[:8], bytes(8)), CorruptData, 0),
    "another extent": (GOOD[: -len(END)] + Frame(Kind.END).pack() + bytes(24), CorruptData, BLOCKS),
    "no blocks": (END, CorruptData, 0),
    "few blocks": (blocks(0, 16) + END, CorruptData, 16),
    "blocks twice": (blocks(0, 4) + blocks(3, 1, WRONG), CorruptData, 4),
    "too large a frame": (Frame(Kind.BLOCKS, 0, 17).pack(), CorruptData, 0),
    "an empty frame": (Frame(Kind.BLOCKS, 0, 0).pack(), CorruptData, 0),
    "blocks behind the end": (Frame(Kind.BLOCKS, BLOCKS - 1, 2).pack(), CorruptData, 0),
    "blocks far behind the end": (Frame(Kind.BLOCKS, 0xFFFFFFFF, 16).pack(), CorruptData, 0),
    "an unknown frame": (b"\xff" * 100, PeerFailed, 0),
    "half a head": (GOOD[:5], PeerFailed, 0),
    "half the digests": (GOOD[:30], PeerFailed, 0),
    "half a block": (GOOD[: BLOCK // 2], PeerFailed, 0),
    "half the blocks": (blocks(0, 16) + blocks(16, 16)[:-1], PeerFailed, 28),
    "no end": (GOOD[: -len(END)], PeerFailed, BLOCKS),
    "half an end": (GOOD[:-1], PeerFailed, BLOCKS),
    "nothing": (b"", PeerFailed, 0),
    "another version": (Frame(Kind.VERSION, version=77).pack(), PeerFailed, 0),
    "the same version": (Frame(Kind.VERSION).pack(), PeerFailed, 0),
    "busy": (Frame(Kind.BUSY).pack(), PeerBusy, 0),
    "not found": (Frame(Kind.NOT_FOUND).pack(), PeerLacks, 0),
    "aborted": (blocks(0, 1) + Frame(Kind.ABORTED).pack(), PeerAborted, 1),
    "failed": (Frame(Kind.FAILED).pack(), PeerFailed, 0),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_bad_answer_is_a_typed_error_and_the_next_peer_gives_the_rest(lie: str) -> None:
    answer, error, kept = LIES[lie]
    sent: list[int] = []
    with (
        saying(answer) as address,
        resident() as lend,
        serving(lend, on_sent=sent.append) as other,
        client() as peers,
        Copy() as copy,
    ):
        with pytest.raises(error) as raised:
            copy.read_from(peers, address)
        assert address in str(raised.value)
        assert sum(count for _, count in copy.progress.runs(0, BLOCKS)) == kept
        assert copy.read_from(peers, other) == DIGESTS
        assert copy.bytes() == DATA
        rest = sum(len(DATA[i * BLOCK : (i + 1) * BLOCK]) for i in range(kept, BLOCKS))
        wait_until(lambda: sum(sent) >= rest)  # what was sent is counted behind the sending
    assert sum(sent) == rest


def test_a_good_answer_of_the_bare_peer_is_taken() -> None:
    with saying(Frame(Kind.WAIT).pack() + GOOD) as address, client() as peers, Copy() as copy:
        assert copy.read_from(peers, address) == DIGESTS


def test_a_peer_that_cannot_be_reached_is_a_typed_error() -> None:
    with client() as peers, Copy() as copy:
        for address in ("127.0.0.1:1", "127.0.0.1:0", "nonsense"):
            with pytest.raises(PeerFailed):
                copy.read_from(peers, address)


def test_a_peer_that_says_nothing_is_given_up() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        client(silent_s=0.2) as peers,
        Copy() as copy,
        pytest.raises(PeerSilent),
    ):
        copy.read_from(peers, f"127.0.0.1:{silent.getsockname()[1]}")


@contextmanager
def trickling(every_s: float) -> Iterator[str]:
    """A peer that sends a byte of a block now and then, for ever."""
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                receive_request(connection, WAIT_S)
                for byte in GOOD:
                    if ended.wait(every_s):
                        break
                    connection.sendall(bytes([byte]))

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        ended.set()
        thread.join(WAIT_S)


def test_a_peer_that_trickles_is_given_up() -> None:
    """It is never silent, and it would take weeks."""
    with trickling(0.01) as address, client(silent_s=1.0) as peers, Copy() as copy:
        with pytest.raises(PeerLate):
            copy.read_from(peers, address, wait_s=0.5)
        assert copy.progress.complete(0) == 0


def test_a_peer_with_steady_progress_is_late_after_the_limit() -> None:
    with (
        resident() as lend,
        serving(lend, bytes_per_s=4 * BLOCK) as address,
        client() as peers,
        Copy() as copy,
    ):
        with pytest.raises(PeerLate):
            peers.read(address, EXTENT, SIZE, copy.fd, copy.progress, Patience(WAIT_S, 0.1))
        assert copy.progress.complete(0) < BLOCKS


def test_a_peer_tells_the_size_of_an_extent_that_it_holds() -> None:
    with resident() as lend, serving(lend) as address, client() as peers:
        assert peers.size_of(address, EXTENT, SIZE) == SIZE
        with pytest.raises(PeerLacks):
            peers.size_of(address, EXTENT, SIZE - 1)
        with pytest.raises(PeerLacks):
            peers.size_of(address, ExtentId(bytes(16)), SIZE)
    with resident() as lend, serving(lend, versions=range(1, 2)) as older, client() as peers:
        with pytest.raises(PeerLacks):
            peers.size_of(older, EXTENT, SIZE)
        with Copy() as copy:
            assert copy.read_from(peers, older) == DIGESTS


def test_a_check_tells_whether_a_port_and_its_node_answer() -> None:
    with resident() as lend, serving(lend) as address, client() as peers:
        peers.check(address)
    with client() as peers, pytest.raises(PeerFailed):
        peers.check(address)
    with (
        saying(Frame(Kind.FAILED).pack()) as address,
        client() as peers,
        pytest.raises(PeerFailed, match="cannot"),
    ):
        peers.check(address)
    with trickling(WAIT_S) as address, client(silent_s=0.1) as peers, pytest.raises(PeerSilent):
        peers.check(address)


def test_connections_are_used_again_and_replaced_once_the_peer_closed_them() -> None:
    with saying(GOOD, GOOD) as address, client() as peers:
        for _ in range(2):  # the peer closes each connection after its answer
            with Copy() as copy:
                assert copy.read_from(peers, address) == DIGESTS
    before = open_descriptors()
    with resident() as lend, serving(lend) as address, client() as peers:
        extents = [ExtentId(bytes([n]) * 16) for n in range(20)]
        with Copy() as copy:
            for extent in extents:
                with pytest.raises(PeerLacks):
                    peers.read(address, extent, SIZE, copy.fd, copy.progress, Patience())
            copy.read_from(peers, address)
        # three of the lent extent and its progress, the listener, and both ends of one connection
        assert open_descriptors() - before == 6
    wait_until(lambda: open_descriptors() == before)


def test_many_threads_share_a_client() -> None:
    def read(_: int) -> bytes:
        with Copy() as copy:
            copy.read_from(peers, address)
            return copy.bytes()

    with resident() as lend, serving(lend) as address, client() as peers, ThreadPoolExecutor(8) as pool:
        assert set(pool.map(read, range(24))) == {DATA}


def test_memory_of_other_seals_is_written_like_a_file() -> None:
    plain = os.memfd_create("plain")
    with resident() as lend, serving(lend) as address, client() as peers, Copy(plain) as copy:
        assert copy.read_from(peers, address) == DIGESTS
        assert copy.bytes() == DATA
    os.close(plain)


def test_a_disk_without_room_is_no_fault_of_the_peer(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with ExitStack() as stack:
        file = stack.enter_context(open(tmp_path / "extent", "w+b"))
        address = stack.enter_context(serving(stack.enter_context(resident())))
        peers, copy = stack.enter_context(client()), stack.enter_context(Copy(file.fileno()))
        stack.callback(signal.signal, signal.SIGXFSZ, previous)
        stack.callback(resource.setrlimit, resource.RLIMIT_FSIZE, limits)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3 * BLOCK, limits[1]))
        with pytest.raises(TierFailed):
            copy.read_from(peers, address)


def test_connections_to_addresses_that_are_never_asked_again_are_closed() -> None:
    now = [0.0]
    with (
        resident() as lend,
        serving(lend) as gone,
        serving(lend) as here,
        closing(BlockClient(now=lambda: now[0])) as peers,
    ):
        with Copy() as copy:
            copy.read_from(peers, gone)
        before = open_descriptors()
        now[0] = IDLE_S
        with Copy() as copy:
            copy.read_from(peers, here)
        wait_until(lambda: open_descriptors() == before)
