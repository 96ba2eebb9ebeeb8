"""Reads blocks of extents from other nodes (`blocks/wire.py`), also while those nodes are filling them.

Each block is compared with its digest as it arrives and marked in the fill's progress, so that this node gives it on at
once, and the next peer is asked for the missing blocks alone.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from cachesvc.config import Tls
from cachesvc.core.errors import CorruptData, OutOfSpace
from cachesvc.core.limits import PEER_LEAST_RATE
from cachesvc.core.limits import PEER_SILENT_S as SILENT_S
from cachesvc.core.model import ExtentId
from cachesvc.core.placement.place_search import Patience
from cachesvc.daemon.access.tls import TlsContexts, certificate_trouble
from cachesvc.daemon.blocks.idle_connections import Connection, IdleConnections
from cachesvc.daemon.blocks.wire import (
    FRAME_BLOCKS,
    MAX_RANGES,
    VERSION,
    VERSIONS,
    ConnectionEnded,
    Frame,
    Kind,
    Range,
    Request,
    TooSlow,
    host_and_port,
    receive,
    receive_end,
    receive_frame,
    receive_into,
    set_timeout,
)
from cachesvc.system.buffers import Buffers
from cachesvc.system.fill_target import CACHED_BYTES, FillTarget, open_target
from cachesvc.tiers.checksum import DIGEST_BYTES, block_digest
from cachesvc.tiers.fill_progress import FillProgress, digest_of_digests
from cachesvc.tiers.tier import CHECKSUM_BLOCK_BYTES

MAX_ADDRESSES = 4096
"""Peers whose version is remembered."""
BUFFERS_BYTES = 64 << 20
"""The limit of all buffers, which only extents on disks need."""
_NO_EXTENT = ExtentId(bytes(16))
"""No extent has this id."""
_PART_BLOCKS = CACHED_BYTES // CHECKSUM_BLOCK_BYTES


class PeerFailed(Exception):
    """A peer did not give an extent: it cannot be reached, ended the connection or failed. Another peer may give the
    rest. This error and its kinds stay within the filler."""


class PeerLacks(PeerFailed):
    """The peer neither has the extent nor is filling it."""


class PeerBusy(PeerFailed):
    """The peer serves as many connections as it can."""


class PeerAborted(PeerFailed):
    """The peer was filling the extent, and its fill failed."""


class PeerSilent(PeerFailed):
    """The peer sent nothing for `silent_s`, although it is to say once a second that it waits."""


class PeerLate(PeerFailed):
    """The peer works, and its blocks come too late."""


class _OtherVersion(Exception):
    """The peer does not speak the version of the request, and `version` is its newest."""

    def __init__(self, version: int) -> None:
        super().__init__(version)
        self.version = version


_FAILURES: dict[Kind, tuple[type[PeerFailed], str]] = {
    Kind.ABORTED: (PeerAborted, "its fill of the extent failed"),
    Kind.NOT_FOUND: (PeerLacks, "it does not have the extent"),
    Kind.BUSY: (PeerBusy, "it serves as many connections as it can"),
    Kind.FAILED: (PeerFailed, "it cannot read the extent"),
    Kind.INVALID: (PeerFailed, "it takes the request for invalid"),
}


class BlockClient:
    """Keeps connections to peers. Safe to share between threads, not across a fork."""

    def __init__(
        self,
        tls: Tls | None = None,
        tls_name: str = "",
        silent_s: float = SILENT_S,
        now: Callable[[], float] = time.monotonic,
        versions: range = VERSIONS,
    ) -> None:
        """`tls_name`: the name that the certificates of all peers bear, "" where each bears its own host. `versions` of the
        protocol are spoken. Raises InvalidInput for unusable certificates."""
        self._tls = TlsContexts(tls, tls_name) if tls else None
        self._silent_s = silent_s
        self._versions = versions
        self._spoken: dict[str, int] = {}
        """The version to begin with at an address that does not speak the newest one."""
        self._idle = IdleConnections(now)
        self._buffers = Buffers(BUFFERS_BYTES)
        self._pid = os.getpid()

    def close(self) -> None:
        """Close the idle connections."""
        self._idle.close()

    def read(
        self,
        address: str,
        extent: ExtentId,
        size_bytes: int,
        target_fd: int,
        progress: FillProgress,
        patience: Patience,
    ) -> bytes:
        """Read the blocks that `progress` lacks from the peer at HOST:PORT into `target_fd`; return all digests.

        Returns once the peer has committed the extent and its digest of digests agrees; the caller then commits and
        calls `progress.finish`. After an error `progress` has the blocks that came.

        A peer is late when no block came for `patience.wait_s`, when it sends less than PEER_LEAST_RATE, and after
        `patience.limit_s` in all.

        Raises a kind of PeerFailed, or CorruptData for wrong bytes, after which another peer can give the rest; OutOfSpace
        and TierFailed of the target. After CorruptData with all blocks marked, one of the peers asked so far sent wrong
        bytes with matching digests: abort `progress` and fill anew.
        """
        assert os.getpid() == self._pid, "used across a fork"
        with open_target(target_fd, size_bytes, self._buffers) as target:
            reading = _Reading(address, extent, target, progress, patience)
            while True:
                wanted = progress.missing(MAX_RANGES)
                root = self._request(reading, wanted)
                if any(progress.runs(*each) != [each] for each in wanted):
                    raise CorruptData(f"peer {address} left out blocks of extent {extent.hex()}")
                if not progress.missing(1):
                    break
        digests = progress.digests(0, progress.blocks)
        if digest_of_digests(digests) != root:
            raise CorruptData(
                f"peer {address} has other bytes of extent {extent.hex()} than it or others sent"
            )
        return digests

    def check(self, address: str) -> None:
        """Ask the peer at HOST:PORT for an extent that does not exist, so that both it and its daemon have to answer.
        Raises PeerFailed."""
        with suppress(PeerLacks):
            self._request(_Question(address, _NO_EXTENT), ())

    def size_of(self, address: str, extent: ExtentId, most_bytes: int) -> int:
        """Ask the peer at HOST:PORT for the size of an extent that it holds. Raises PeerFailed; PeerLacks
        where it tells none, as an older release does, or one above `most_bytes`."""
        question = _Question(address, extent)
        self._request(question, ())
        if not 0 < question.size_bytes <= most_bytes:
            raise PeerLacks(f"peer {address} names no size of the extent up to {most_bytes:,} bytes")
        return question.size_bytes

    def _agree(self, address: str, asked: int, theirs: int) -> None:
        """Note the version to speak with a peer that does not speak `asked`, and whose newest is `theirs`. Raises
        PeerFailed where there is none."""
        version = min(theirs, self._versions[-1])
        if version not in self._versions or version == asked:
            raise PeerFailed(
                f"peer {address} speaks version {theirs} of the protocol, and this node {self._versions[0]} to"
                f" {self._versions[-1]}"
            )
        if len(self._spoken) >= MAX_ADDRESSES:
            self._spoken.clear()
        self._spoken[address] = version

    def _request(self, reading: _Reading | _Question, wanted: Sequence[Range]) -> bytes:
        """Send one request, perhaps again in an older version, and receive its frames; return the digest of digests."""
        try:
            return self._ask(reading, wanted)
        except _OtherVersion as other:
            self._agree(reading.address, reading.version, other.version)
        try:
            return self._ask(reading, wanted)
        except _OtherVersion as other:
            raise PeerFailed(
                f"peer {reading.address} answers in version {other.version} of the protocol now"
            ) from None

    def _ask(self, reading: _Reading | _Question, wanted: Sequence[Range]) -> bytes:
        """Send one request and receive its frames; return the digest of digests."""
        reading.version = self._spoken.get(reading.address, self._versions[-1])
        message = Request(reading.extent, tuple(wanted), reading.version).pack()
        reading.answered = False
        try:
            generation = self._tls.renew() if self._tls else 0
            idle = self._idle.take(reading.address, generation)
            if idle is not None:
                try:
                    return self._exchange(Connection(idle, generation), reading, message)
                except TimeoutError:
                    raise
                except (OSError, ConnectionEnded):
                    if reading.answered:
                        raise
                    # The peer closed the connection while it was idle: make a new one.
            made = Connection(self._connect(reading.address), generation)
            return self._exchange(made, reading, message)
        except TooSlow as error:
            raise PeerLate(f"peer {reading.address}: {error}") from error
        except TimeoutError as error:
            raise PeerSilent(f"peer {reading.address}: {error}") from error
        except (OSError, ConnectionEnded, ValueError) as error:
            if (
                isinstance(error, OSError) and error.errno == errno.EFAULT
            ):  # of the memory that is received into
                raise OutOfSpace("no memory left for the extent; lower the budget") from error
            why = isinstance(error, OSError) and certificate_trouble(error)
            raise PeerFailed(f"peer {reading.address}: {why or error}") from error

    def _exchange(self, made: Connection, reading: _Reading | _Question, message: bytes) -> bytes:
        keep = False
        try:
            _send(made.connection, message)
            root = reading.receive(made.connection)
            keep = True
            return root
        except PeerLacks:
            keep = True
            raise
        finally:
            if keep:
                self._idle.give_back(reading.address, made)
            else:
                made.connection.close()

    def _connect(self, address: str) -> socket.socket:
        host, port = host_and_port(address)
        connection = socket.create_connection((host, port), self._silent_s)
        try:
            set_timeout(connection, self._silent_s, self._tls is not None)
            return self._tls.connect(connection, host) if self._tls else connection
        except BaseException:
            connection.close()
            raise


def _send(connection: socket.socket, message: bytes) -> None:
    """Send a request. Raises OSError: where the other side has ended the handshake, the alert that says why."""
    try:
        connection.sendall(message)
    except TimeoutError:
        raise
    except OSError:
        connection.recv(1)  # raises the alert
        raise


class _Question:
    """A request for no blocks: whether a peer holds an extent, and its size. A peer that answers works, and so does its
    daemon."""

    def __init__(self, address: str, extent: ExtentId) -> None:
        self.address, self.extent = address, extent
        self.answered = False
        self.version = VERSION
        self.size_bytes = 0

    def receive(self, connection: socket.socket) -> bytes:
        """Receive the answer. Raises PeerFailed, TimeoutError, ConnectionEnded, OSError, ValueError."""
        frame = receive_frame(connection)
        self.answered = True
        _check_version(self.address, frame, self.version)
        if frame.kind is not Kind.END:
            raise _failure(self.address, frame)
        root, self.size_bytes = receive_end(connection, self.version)
        return root


class _Reading:
    """One extent on its way from one peer."""

    def __init__(
        self, address: str, extent: ExtentId, target: FillTarget, progress: FillProgress, patience: Patience
    ) -> None:
        self.address = address
        self.extent = extent
        self.answered = False
        """Whether a frame came for the current request."""
        self.version = VERSION
        """The version of the current request."""
        self._target = target
        self._progress = progress
        self._wait_s = patience.wait_s
        now = time.monotonic()
        self._limit_at = now + patience.limit_s
        self._late_at = min(now + patience.wait_s, self._limit_at)

    def receive(self, connection: socket.socket) -> bytes:
        """Receive frames up to the END frame; return the digest of digests. Raises PeerFailed, CorruptData, OutOfSpace,
        TierFailed, TimeoutError, ConnectionEnded, OSError, ValueError."""
        while True:
            frame = receive_frame(connection)
            self.answered = True
            _check_version(self.address, frame, self.version)
            if frame.kind is Kind.BLOCKS:
                self._receive_blocks(connection, frame)
            elif frame.kind is Kind.END:
                self._progress.maker = frame.maker
                return receive_end(connection, self.version)[0]
            elif frame.kind is not Kind.WAIT:
                raise _failure(self.address, frame)
            elif time.monotonic() > self._late_at:
                raise PeerLate(f"peer {self.address} does not have the next block in time")

    def _receive_blocks(self, connection: socket.socket, frame: Frame) -> None:
        self._check(frame)
        digests = receive(connection, frame.count * DIGEST_BYTES, self._late_at)
        for at in range(0, frame.count, _PART_BLOCKS):
            part = digests[at * DIGEST_BYTES : (at + _PART_BLOCKS) * DIGEST_BYTES]
            self._receive_part(connection, frame.first + at, part)

    def _moved(self, size_bytes: int) -> None:
        """Give the peer time for its next bytes."""
        longest = min(time.monotonic() + self._wait_s, self._limit_at)
        self._late_at = min(longest, self._late_at + size_bytes / PEER_LEAST_RATE)

    def _check(self, frame: Frame) -> None:
        """Refuse blocks that are complete already, which readers may have, and blocks that the extent does not have."""
        end = frame.first + frame.count
        fits = 0 < frame.count <= FRAME_BLOCKS and end <= self._progress.blocks
        if not fits or self._progress.runs(frame.first, frame.count):
            raise CorruptData(
                f"peer {self.address} sent blocks of extent {self.extent.hex()} that nobody wants"
            )

    def _receive_part(self, connection: socket.socket, first: int, digests: bytes) -> None:
        at = first * CHECKSUM_BLOCK_BYTES
        count = len(digests) // DIGEST_BYTES
        size_bytes = min(count * CHECKSUM_BLOCK_BYTES, self._progress.size_bytes - at)
        with self._target.room(at, size_bytes) as room:
            receive_into(connection, room, self._late_at)
            found = b"".join(
                block_digest(room[begin : begin + CHECKSUM_BLOCK_BYTES])
                for begin in range(0, size_bytes, CHECKSUM_BLOCK_BYTES)
            )
            if found != digests:
                raise CorruptData(
                    f"peer {self.address} sent bytes of extent {self.extent.hex()} that do not match their digests,"
                    f" among {count} blocks from block {first}"
                )
            self._target.store(room, at)
        self._progress.add(first, digests)
        self._moved(size_bytes)


def _check_version(address: str, frame: Frame, version: int) -> None:
    """Raise _OtherVersion or PeerFailed for an answer that is not in the version of its request."""
    if frame.kind is Kind.VERSION:
        raise _OtherVersion(frame.version)
    if frame.version != version:
        raise PeerFailed(f"peer {address} answers in version {frame.version} of the protocol, not {version}")


def _failure(address: str, frame: Frame) -> PeerFailed:
    failure, why = _FAILURES.get(frame.kind, (PeerFailed, "its answer makes no sense"))
    return failure(f"peer {address}: {why}")
