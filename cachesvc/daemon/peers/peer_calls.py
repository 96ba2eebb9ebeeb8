"""Calls to other nodes: one stub for each address, with certificates that are renewed; the ids in their messages, and
the reasons why calls failed."""

from __future__ import annotations

import re
import socket
import struct
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import grpc

from cachesvc.cluster.addresses import split_address
from cachesvc.config import Tls
from cachesvc.core.errors import InvalidInput
from cachesvc.core.limits import PEER_CALL_S
from cachesvc.core.limits import PEER_CALL_S as CALL_S
from cachesvc.core.limits import PEER_RECONNECT_S as RECONNECT_S
from cachesvc.core.model import ExtentId
from cachesvc.core.placement.roster import PROTOCOL_VERSION
from cachesvc.daemon.access.tls import Certificates, TlsContexts, certificate_trouble
from cachesvc.daemon.ports import next_port
from cachesvc.v1 import cachesvc_pb2 as pb
from cachesvc.v1 import services

ID_BYTES = 16
"""The bytes of an extent's id in a message. A fill has 8 more, for its generation."""
MOST_IDS = 1 << 17
"""Extents that one call names: 2 MiB, half of what gRPC accepts."""
TAKE_S = 10.0
"""The time in which a node says which extents it fetches; it may have to load their catalog first."""
KEEPALIVE_S = 10.0
"""How often a call that takes long asks whether the other end is still there."""
_FILL = struct.Struct("<16sQ")


class PeerCalls:
    """Safe from any thread. Raises grpc.RpcError."""

    def __init__(self, tls: Tls | None, tls_name: str) -> None:
        """Raises InvalidInput for unusable certificates."""
        self._certificates = Certificates(tls) if tls else None
        self._contexts = TlsContexts(tls, tls_name) if tls else None
        self._tls_name = tls_name
        self._stubs: dict[str, Any] = {}
        self._lock = threading.Lock()

    def hello(self, address: str, request: pb.HelloRequest) -> pb.HelloReply:
        """Greet the node at an address."""
        reply: pb.HelloReply = self._stub(address).Hello(request, timeout=CALL_S)
        return reply

    def lookup(self, address: str, request: pb.LookupRequest) -> pb.LookupReply:
        """Ask a node where extents are."""
        reply: pb.LookupReply = self._stub(address).Lookup(request, timeout=CALL_S)
        return reply

    def report(self, address: str, request: pb.ReportRequest) -> None:
        """Tell a node what this one holds."""
        self._stub(address).Report(request, timeout=CALL_S)

    def forget_member(self, address: str, request: pb.ForgetRequest) -> None:
        """Have a node forget a member."""
        self._stub(address).Forget(request, timeout=CALL_S)

    def held(self, address: str, extents: Sequence[ExtentId]) -> bytes:
        """Ask a node which extents it holds; return a byte for each, 1 where it does."""
        found = bytearray()
        for at in range(0, len(extents), MOST_IDS):
            ids = b"".join(extents[at : at + MOST_IDS])
            request = pb.HeldRequest(protocol=PROTOCOL_VERSION, extents=ids)
            found += self._stub(address).Held(request, timeout=CALL_S).held
        return bytes(found)

    def take(self, address: str, request: pb.TakeRequest) -> pb.TakeReply:
        """Have a node fetch extents of one that leaves."""
        reply: pb.TakeReply = self._stub(address).Take(request, timeout=TAKE_S)
        return reply

    def relay(self, address: str, request: pb.RelayRequest, timeout_s: float | None) -> Any:
        """Have a node answer a call of the control API; return the call, which yields `NodeAnswer`s."""
        return self._stub(address).Relay(request, timeout=timeout_s)

    def certificate_trouble(self, address: str) -> str:
        """Return what is wrong with the certificate of a node that does not answer calls, or with this one's; "" for
        nothing known. gRPC tells neither side, so this makes a handshake with the port of extents of that node."""
        if self._contexts is None:
            return ""
        host, port = split_address(next_port(address))
        try:
            with (
                socket.create_connection((host, port), CALL_S) as connection,
                self._contexts.connect(connection, host) as secured,
            ):
                secured.recv(1)  # the refusal of this node's certificate comes after the handshake
        except OSError as error:
            return certificate_trouble(error)
        return ""

    def forget(self, addresses: set[str]) -> None:
        """Close the connections to all but these addresses."""
        with self._lock:
            self._stubs = {address: stub for address, stub in self._stubs.items() if address in addresses}

    def reconnect(self, address: str) -> None:
        """Make a new connection for the next call, where gRPC would wait with one that failed before."""
        with self._lock:
            self._stubs.pop(address, None)

    def _stub(self, address: str) -> Any:
        with self._lock:
            if self._certificates is not None and self._certificates.renewed():
                self._stubs = {}  # the old connections end with the calls under way
            stub = self._stubs.get(address)
            if stub is not None:
                return stub
            options: list[tuple[str, int | str]] = [
                ("grpc.enable_http_proxy", 0),
                ("grpc.max_reconnect_backoff_ms", int(RECONNECT_S * 1000)),
                ("grpc.use_local_subchannel_pool", 1),  # else a new channel waits for the failed connection
                ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
                ("grpc.keepalive_timeout_ms", int(CALL_S * 1000)),
                ("grpc.http2.max_pings_without_data", 0),
                ("grpc.max_receive_message_length", -1),
            ]
            if self._tls_name:
                options.append(("grpc.ssl_target_name_override", self._tls_name))
            channel = (
                grpc.insecure_channel(address, options)
                if self._certificates is None
                else grpc.secure_channel(address, self._certificates.client(), options)
            )
            stub = self._stubs[address] = services.Stub(channel, "Peers")
            return stub


def unpack_ids(data: bytes) -> list[ExtentId]:
    """Return the ids of a message. Raises InvalidInput."""
    if len(data) % ID_BYTES:
        raise InvalidInput(f"{len(data):,} bytes are no list of extents")
    return [ExtentId(data[at : at + ID_BYTES]) for at in range(0, len(data), ID_BYTES)]


def pack_fills(fills: Iterable[tuple[ExtentId, int]]) -> bytes:
    """Return extents with their generations as bytes."""
    return b"".join(_FILL.pack(extent, generation) for extent, generation in fills)


def unpack_fills(data: bytes) -> list[tuple[ExtentId, int]]:
    """The inverse of `pack_fills`. Raises InvalidInput."""
    if len(data) % _FILL.size:
        raise InvalidInput(f"{len(data):,} bytes are no list of fills")
    return [(ExtentId(extent), generation) for extent, generation in _FILL.iter_unpack(data)]


_WRAPPED = re.compile(
    r"failed to connect to all addresses; last error: \w+: \S+ (Failed to connect to remote host: )?(connect: )?"
)
_NAMES = re.compile(r"DNS resolution failed for (\S+?):.*|.*[Cc]ould not (?:contact DNS servers|resolve).*")
MAX_REASON = 200
"""Characters of a reason."""


def reason(error: grpc.RpcError) -> str:
    """Return the reason of a failed call on one line, without what gRPC puts around it."""
    code, details = error.code(), " ".join((error.details() or "").split())
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"it did not answer in {PEER_CALL_S:g} s"
    if code is grpc.StatusCode.UNAVAILABLE:
        if _NAMES.fullmatch(details):
            return "its name does not resolve"
        return _WRAPPED.sub("", details)[:MAX_REASON] or "it cannot be reached"
    return f"{code.name}: {details}"[:MAX_REASON]
