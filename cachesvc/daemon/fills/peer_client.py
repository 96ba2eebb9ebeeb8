"""A filler's client of other nodes, which may hold an extent: it calls `Peers.Read` before it asks the source.

An extent's id is a digest of object versions, so extents of the same id are the same on all nodes. The received bytes
are checked against the peer's checksums. A peer that does not answer or sends wrong data is paused for a while; the
client tries the next peer, and at last the source.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from xxhash import xxh3_64_intdigest

from cachesvc.config import PEERS_PER_EXTENT, Tls
from cachesvc.core.errors import CorruptData
from cachesvc.core.model import ExtentId
from cachesvc.daemon.access.tls import Certificates
from cachesvc.sources.fetch import FillTarget
from cachesvc.tiers.checksum import StreamedChecksums

log = logging.getLogger(__name__)
FIRST_S = 5.0
SLOWEST_BYTES_S = 16 << 20
"""The timeout of a read is `FIRST_S` plus the time that the extent takes at this rate."""
LONG_PAUSE_S, SHORT_PAUSE_S = 30.0, 1.0
"""A peer that sent wrong data is paused for the first, one that is busy for the second. The pause of a peer that does not
answer starts with the second and doubles up to the first."""
RECONNECT_S = 10.0
"""The limit of gRPC's own backoff between connections."""


class PeerClient:
    """Safe to share between threads, not across a fork. `addresses` are HOST:PORT; without `tls` reads are in the clear."""

    def __init__(
        self,
        addresses: Sequence[str],
        tls: Tls | None = None,
        on_pause: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`on_pause` is called with the address of each paused peer. Raises InvalidInput for unusable certificates."""
        self._paused_until = dict.fromkeys(addresses, 0.0)
        self._last_pause_s: dict[str, float] = {}
        """The last pause of each peer that did not answer its last read."""
        self._certificates = Certificates(tls) if addresses and tls else None
        self._stubs: dict[str, Any] = {}
        self._on_pause = on_pause

    def fill(self, extent: ExtentId, size_bytes: int, target: int) -> bytes | None:
        """Read the extent from a peer into the descriptor `target`; return its digests.

        Returns None where no peer has it; part of it may be written then. Raises OutOfSpace or TierFailed of a write.
        """
        for address in self._ranked(extent) if size_bytes else ():
            try:
                digests = self._read(address, extent, size_bytes, target)
            except CorruptData as error:
                self._pause(address, LONG_PAUSE_S, str(error))
                continue
            if digests is not None:
                return digests
        return None

    def _ranked(self, extent: ExtentId) -> list[str]:
        """Addresses to ask, in order, by highest random weight (Thaler and Ravishankar, 1998), without paused peers."""
        now = time.monotonic()
        ready = [address for address, until in self._paused_until.items() if until <= now]
        ready.sort(key=lambda each: xxh3_64_intdigest(each.encode() + extent), reverse=True)
        return ready[:PEERS_PER_EXTENT]

    def _read(self, address: str, extent: ExtentId, size_bytes: int, target: int) -> bytes | None:
        import grpc

        from cachesvc.v1 import cachesvc_pb2 as pb

        passing, digests, at = StreamedChecksums(size_bytes), b"", 0
        into = FillTarget(target, passing.add)
        timeout_s = FIRST_S + size_bytes / SLOWEST_BYTES_S
        replies = self._stub(address).Read(pb.ReadRequest(extent=extent), timeout=timeout_s)
        try:
            for reply in replies:
                digests = digests or reply.digests
                data = memoryview(reply.data)
                if at + len(data) > size_bytes:
                    raise CorruptData("it sent more bytes than the extent has")
                into.write(data, at)
                at += len(data)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                self._paused_until[address] = time.monotonic() + SHORT_PAUSE_S
            elif error.code() is grpc.StatusCode.NOT_FOUND:
                self._last_pause_s.pop(address, None)
            else:
                pause_s = min(LONG_PAUSE_S, self._last_pause_s.get(address, SHORT_PAUSE_S / 2) * 2)
                self._last_pause_s[address] = pause_s
                self._pause(address, pause_s, f"{error.code().name}: {error.details()}")
            return None
        finally:
            replies.cancel()
        self._last_pause_s.pop(address, None)
        if at < size_bytes:
            raise CorruptData(f"it sent {at:,} bytes of {size_bytes:,}")
        if passing.checksums(target).digests != digests:
            raise CorruptData("its bytes do not match its checksums")
        return digests

    def _pause(self, address: str, pause_s: float, why: str) -> None:
        self._paused_until[address] = time.monotonic() + pause_s
        log.warning("a peer is not asked for a while", extra={"peer": address, "error": why})
        self._on_pause(address)

    def _stub(self, address: str) -> Any:
        if self._certificates is not None and self._certificates.renewed():
            self._stubs = {}  # the old connections end with the calls under way
        stub = self._stubs.get(address)
        if stub is not None:
            return stub
        os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
        import grpc

        from cachesvc.v1 import services

        options = [
            ("grpc.enable_http_proxy", 0),
            ("grpc.max_reconnect_backoff_ms", int(RECONNECT_S * 1000)),
        ]
        channel = (
            grpc.insecure_channel(address, options)
            if self._certificates is None
            else grpc.secure_channel(address, self._certificates.client(), options)
        )
        stub = self._stubs[address] = services.Stub(channel, "Peers")
        return stub
