"""Answers requests for blocks on one connection: frames of complete blocks, at once or as a fill completes them."""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import isinf

from cachesvc.daemon.blocks.wire import (
    FRAME_BLOCKS,
    VERSION,
    Frame,
    Kind,
    Range,
    RequestRefused,
    pack_end,
    within,
)
from cachesvc.tiers.checksum import DIGEST_BYTES, block_count
from cachesvc.tiers.fill_progress import FillProgress, FillState, digest_of_digests
from cachesvc.tiers.tier import CHECKSUM_BLOCK_BYTES

FIRST_POLL_S, LAST_POLL_S = 0.002, 0.02
"""The pauses between looks at a fill; they double while no block completes. A futex would wake the reader at once, but
Python has none, and each filler would have to know of its readers. 256 idle connections cost a tenth of a core this way."""
COPY_BYTES = 256 << 10
"""Bytes that are read and encrypted at a time, over TLS; they stay in the processor's cache."""
KEEPALIVE_S = 1.0
"""A WAIT frame is sent after this time without another frame."""
BURST_S = 0.05
"""Unused time that is kept: bytes of this time may be sent at once. Longer bursts would fill the queues of the link, which
the job's own traffic shares."""


@dataclass(frozen=True, slots=True)
class Lent:
    """An extent that is resident, with `digests`, or one that is being filled, with `progress`. The lender keeps the
    descriptor `fd` open meanwhile."""

    fd: int
    size_bytes: int
    digests: bytes | None = None
    progress: FillProgress | None = None
    maker: int = 0
    """Of a resident extent; see `FillProgress.maker`."""


class SendRate:
    """A limit on the bytes per second that all connections together send.

    A token bucket whose senders wait in the order in which they ask: the generic cell rate algorithm of ITU-T I.371,
    annex A. Thread-safe."""

    def __init__(self, bytes_per_s: float, now: Callable[[], float] = time.monotonic) -> None:
        """`bytes_per_s`: infinite for no limit. `now` returns seconds of a clock that never goes back."""
        assert bytes_per_s > 0
        self._bytes_per_s = bytes_per_s
        self._now = now
        self._lock = threading.Lock()
        self._free_at = now()

    def take(self, size_bytes: int) -> float:
        """Take the tokens of `size_bytes`; return the seconds to wait before sending them."""
        if isinf(self._bytes_per_s):
            return 0.0
        with self._lock:
            now = self._now()
            begin = max(self._free_at, now - BURST_S)
            self._free_at = begin + size_bytes / self._bytes_per_s
        return max(0.0, begin - now)


class BlockReplies:
    """Sends the frames of one connection's requests. `closing` ends them early."""

    def __init__(self, connection: socket.socket, rate: SendRate, closing: threading.Event) -> None:
        self._connection = connection
        self._rate = rate
        self._closing = closing
        self._buffer = memoryview(bytearray(COPY_BYTES if self._tls else 0))
        self._said_at = time.monotonic()
        self.version = VERSION
        """The version of the request that is answered."""
        self.sent_bytes = 0
        """Bytes of extents that were sent."""

    @property
    def _tls(self) -> bool:
        return isinstance(self._connection, ssl.SSLSocket)

    def say(self, frame: Frame, more: bytes = b"", flags: int = 0) -> None:
        """Send a frame. Raises OSError."""
        self._connection.sendall(replace(frame, version=self.version).pack() + more, flags)
        self._said_at = time.monotonic()

    def answer(self, lent: Lent, ranges: Sequence[Range]) -> None:
        """Send the wanted blocks and the END frame.

        Raises RequestRefused for ranges that the extent does not have and for a fill that failed; OSError, also where the
        extent cannot be read, since a frame cannot be taken back.
        """
        if not within(ranges, block_count(lent.size_bytes)):
            raise RequestRefused(Kind.INVALID)
        if lent.digests is not None:
            for first, count in _frames(ranges):
                digests = lent.digests[first * DIGEST_BYTES : (first + count) * DIGEST_BYTES]
                self._send(lent, first, count, digests)
            root, maker = digest_of_digests(lent.digests), lent.maker
        else:
            assert lent.progress is not None, "neither resident nor being filled"
            root = self._follow(lent, list(ranges), lent.progress)
            maker = lent.progress.maker
        self.say(Frame.end(maker), pack_end(root, lent.size_bytes, self.version))

    def _follow(self, lent: Lent, wanted: list[Range], progress: FillProgress) -> bytes:
        """Send wanted blocks as they complete; return the digest of digests once the fill is done."""
        pause_s = FIRST_POLL_S
        while True:
            state = progress.state  # read before the flags: when it is DONE, all blocks are found complete
            if state is FillState.ABORTED:
                raise RequestRefused(Kind.ABORTED)
            ready = [run for each in wanted for run in progress.runs(*each)]
            for first, count in _frames(ready):
                self._send(lent, first, count, progress.digests(first, count))
            wanted = _without(wanted, ready) if ready else wanted
            if state is FillState.DONE:
                assert not wanted, "done with missing blocks"
                return progress.root
            if ready:
                pause_s = FIRST_POLL_S
                continue
            self._wait(pause_s)
            pause_s = min(2 * pause_s, LAST_POLL_S)

    def _wait(self, pause_s: float) -> None:
        """Pause, and say WAIT when no frame was sent for a while."""
        if self._closing.wait(pause_s):
            raise ConnectionAbortedError("the server closes")
        if time.monotonic() - self._said_at >= KEEPALIVE_S:
            self.say(Frame(Kind.WAIT))

    def _send(self, lent: Lent, first: int, count: int, digests: bytes) -> None:
        offset = first * CHECKSUM_BLOCK_BYTES
        end = min(offset + count * CHECKSUM_BLOCK_BYTES, lent.size_bytes)
        ready_at = time.monotonic() + self._rate.take(end - offset)
        while (early_s := ready_at - time.monotonic()) > 0:
            self._wait(min(early_s, KEEPALIVE_S))
        self.say(Frame(Kind.BLOCKS, first, count), digests, 0 if self._tls else socket.MSG_MORE)
        if self._tls:
            self._copy(lent.fd, offset, end)
        else:
            self._sendfile(lent.fd, offset, end)

    def _sendfile(self, fd: int, offset: int, end: int) -> None:
        to = self._connection.fileno()
        while offset < end:
            count = os.sendfile(to, fd, offset, end - offset)
            if not count:
                raise OSError(f"a lent extent ends at byte {offset:,}")
            offset += count
            self.sent_bytes += count

    def _copy(self, fd: int, offset: int, end: int) -> None:
        while offset < end:
            count = os.preadv(fd, [self._buffer[: end - offset]], offset)
            if not count:
                raise OSError(f"a lent extent ends at byte {offset:,}")
            self._connection.sendall(self._buffer[:count])
            offset += count
            self.sent_bytes += count


def _frames(runs: Sequence[Range]) -> Iterator[Range]:
    """Cut runs of blocks into frames."""
    for first, count in runs:
        for at in range(first, first + count, FRAME_BLOCKS):
            yield at, min(FRAME_BLOCKS, first + count - at)


def _without(wanted: Sequence[Range], sent: Sequence[Range]) -> list[Range]:
    """Return the wanted ranges without those sent, which are parts of them; both are in ascending order."""
    left: list[Range] = []
    gone = iter([*sent, (1 << 33, 0)])
    run = next(gone)
    for first, count in wanted:
        at, end = first, first + count
        while run[0] < end:
            if run[0] > at:
                left.append((at, run[0] - at))
            at = run[0] + run[1]
            run = next(gone)
        if at < end:
            left.append((at, end - at))
    return left
