"""Other nodes that may hold what this one needs, as a filler asks them: before the source, by `Peers.Read`.

A peer has extents, not objects, and their ids are digests of object versions: what one node holds under an id is what
another one would fetch. Its bytes are held against the checksums that it made when it filled them. One that does not
answer, or answers nonsense, is left alone for a while; whoever asked goes on to the next, and then to the source.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from xxhash import xxh3_64_intdigest

from cachesvc.config import Tls
from cachesvc.core.errors import CorruptData
from cachesvc.core.model import ExtentId
from cachesvc.daemon.access.tls import Certificates
from cachesvc.sources.fetch import FillTarget
from cachesvc.tiers.checksum import StreamedChecksums

log = logging.getLogger(__name__)
ASKED = 3
"""Peers asked for one extent; which, follows from its id, so that all nodes ask the same ones."""
FIRST_S = 5.0
SLOWEST_BYTES_S = 16 << 20
"""What a peer is given time for: `FIRST_S` and this rate. One that is slower helps nobody."""
AGAIN_S, BUSY_S = 30.0, 1.0
"""How long a peer that sent something wrong is left alone, and one that said that it serves enough. One that did not
answer is left alone for the second first, and twice as long each further time: it may have stood still for once."""
RECONNECT_S = 10.0
"""gRPC's own pause before it connects again grows to this."""


class Peers:
    """Safe to share between threads, not across a fork. `addresses` are HOST:PORT; without `tls` in the clear."""

    def __init__(
        self, addresses: Sequence[str], tls: Tls | None = None, left: Callable[[str], None] = lambda _: None
    ) -> None:
        """`left` hears of each that is left alone. Raises InvalidInput for certificates that cannot be used."""
        self._again_at = dict.fromkeys(addresses, 0.0)
        self._silent_s: dict[str, float] = {}
        """How long those that did not answer, the last time or several in a row, are left alone."""
        self._certificates = Certificates(tls) if addresses and tls else None
        self._stubs: dict[str, Any] = {}
        self._left = left

    def fill(self, extent: ExtentId, size_bytes: int, target: int) -> bytes | None:
        """Write the extent to `target` as one of the peers holds it. Its digests; None where none of those asked has
        it, and then part of it may be written. Raises what writing raises: OutOfSpace, TierFailed."""
        for address in self._of(extent) if size_bytes else ():
            try:
                digests = self._read(address, extent, size_bytes, target)
            except CorruptData as error:
                self._leave(address, AGAIN_S, str(error))
                continue
            if digests is not None:
                return digests
        return None

    def _of(self, extent: ExtentId) -> list[str]:
        """Whom to ask, the first first: by highest random weight (Thaler and Ravishankar, 1998), those that are left
        alone omitted."""
        now = time.monotonic()
        able = [address for address, again_at in self._again_at.items() if again_at <= now]
        return sorted(able, key=lambda each: xxh3_64_intdigest(each.encode() + extent), reverse=True)[:ASKED]

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
                    raise CorruptData("it sent more than the extent has")
                into.write(data, at)
                at += len(data)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                self._again_at[address] = time.monotonic() + BUSY_S
            elif error.code() is grpc.StatusCode.NOT_FOUND:
                self._silent_s.pop(address, None)
            else:
                pause_s = self._silent_s[address] = min(AGAIN_S, self._silent_s.get(address, BUSY_S / 2) * 2)
                self._leave(address, pause_s, f"{error.code().name}: {error.details()}")
            return None
        finally:
            replies.cancel()
        self._silent_s.pop(address, None)
        if at < size_bytes:
            raise CorruptData(f"it sent {at:,} bytes of {size_bytes:,}")
        if passing.checksums(target).digests != digests:
            raise CorruptData("its bytes do not match its checksums")
        return digests

    def _leave(self, address: str, pause_s: float, why: str) -> None:
        self._again_at[address] = time.monotonic() + pause_s
        log.warning("a peer is left alone for a while", extra={"peer": address, "error": why})
        self._left(address)

    def _stub(self, address: str) -> Any:
        if self._certificates is not None and self._certificates.renewed():
            self._stubs = {}  # the connections that there are end with the calls that are under way
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
