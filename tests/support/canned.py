"""A fake daemon whose gRPC service gives answers that a test chose."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from cachesvc.client.control import CODE_KEY
from cachesvc.config import CONTROL_SOCKET, GRANTS_SOCKET
from cachesvc.core import wire
from cachesvc.core.wire import Op
from cachesvc.v1 import cachesvc_pb2 as pb
from cachesvc.v1 import services

OLD, NEW = "0" * 31 + "1", "0" * 31 + "2"
URI = "s3://bucket/train"
DATASET = pb.Dataset(
    id=NEW, uri=f"{URI}/", format="webdataset", samples=1000, extents=10, size_bytes=10 << 20
)


@dataclass
class CannedCache:
    """gRPC service with answers that a test sets; `asked` holds the requests. `refusal`: the error of every call;
    `hang`: a prefetch does not end by itself; `status`: the whole status, in place of one made of `datasets` and `tier`."""

    prefetch: list[pb.PrefetchReply] = field(default_factory=list)
    verify: list[pb.VerifyReply] = field(default_factory=list)
    datasets: list[pb.DatasetStatus] = field(default_factory=list)
    tier: pb.TierStatus = field(
        default_factory=lambda: pb.TierStatus(name="ram", budget_bytes=1 << 30, used_bytes=1 << 29)
    )
    refusal: Any = None
    hang: bool = False
    status: pb.StatusReply | None = None
    asked: list[Any] = field(default_factory=list)

    def _hear(self, request: Any, context: grpc.ServicerContext) -> None:
        self.asked.append(request)
        if self.refusal is not None:
            context.set_trailing_metadata(((CODE_KEY, str(self.refusal.code)),))
            context.abort(grpc.StatusCode.UNKNOWN, str(self.refusal))

    def OpenDataset(self, request: Any, context: grpc.ServicerContext) -> Iterator[pb.OpenDatasetReply]:
        self._hear(request, context)
        yield pb.OpenDatasetReply(indexed_bytes=1, total_bytes=2)
        yield pb.OpenDatasetReply(dataset=DATASET)

    def Prefetch(self, request: Any, context: grpc.ServicerContext) -> Iterator[pb.PrefetchReply]:
        self._hear(request, context)
        yield from self.prefetch
        while self.hang and context.is_active():
            yield pb.PrefetchReply(extents=10, size_bytes=10 << 20)

    def Verify(self, request: Any, context: grpc.ServicerContext) -> Iterator[pb.VerifyReply]:
        self._hear(request, context)
        yield from self.verify

    def Status(self, request: Any, context: grpc.ServicerContext) -> pb.StatusReply:
        self._hear(request, context)
        if self.status is not None:
            return self.status
        return pb.StatusReply(version="9.9", pid=42, uptime_s=61, tiers=[self.tier], datasets=self.datasets)

    def List(self, request: Any, context: grpc.ServicerContext) -> pb.ListReply:
        self._hear(request, context)
        return pb.ListReply(datasets=self.datasets)

    def Pin(self, request: Any, context: grpc.ServicerContext) -> pb.PinReply:
        self._hear(request, context)
        return pb.PinReply()

    def Evict(self, request: Any, context: grpc.ServicerContext) -> pb.EvictReply:
        self._hear(request, context)
        return pb.EvictReply(evicted_bytes=3 << 20, busy_bytes=1 << 20)


@contextmanager
def _identifying(directory: Path) -> Iterator[None]:
    """Serve a grants socket that greets each client and stays connected, since clients retry while either socket is
    missing."""
    held: list[socket.socket] = []

    def greet(listener: socket.socket) -> None:
        with suppress(OSError):  # the listener was closed
            while True:
                held.append(listener.accept()[0])
                held[-1].recv(wire.MAX_MESSAGE_BYTES)
                held[-1].send(wire.encode(Op.WELCOME, size=1))

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"{directory}/{GRANTS_SOCKET}")
        listener.listen()
        greeting = threading.Thread(target=greet, args=(listener,))
        greeting.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            greeting.join()
            for each in held:
                each.close()
    (directory / GRANTS_SOCKET).unlink()


@contextmanager
def canned_daemon(directory: Path) -> Iterator[CannedCache]:
    """Serve `CannedCache` with a real gRPC server on the control socket in a directory."""
    servicer = CannedCache()
    with _identifying(directory), futures.ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool)
        services.add_to_server(server, "Cache", servicer)
        server.add_insecure_port(f"unix:{directory}/{CONTROL_SOCKET}")
        server.start()
        yield servicer
        server.stop(None).wait()
