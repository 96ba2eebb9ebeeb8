"""The sharer, a process that serves this node's extents to peers: `python -m cachesvc.daemon.peers.sharer FD`.

It answers gRPC calls with bytes from descriptors that the daemon lends it, and ends when its channel closes.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from contextlib import contextmanager

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from cachesvc.config import Tls
from cachesvc.core.errors import InvalidInput, NotFound, TierFailed
from cachesvc.daemon.access.tls import server_credentials
from cachesvc.daemon.control.statuses import errors_as_statuses
from cachesvc.daemon.processes import jobs
from cachesvc.daemon.processes.logs import configure_logging
from cachesvc.daemon.processes.nice import run_in_background
from cachesvc.daemon.processes.threads import ThreadPool
from cachesvc.v1 import cachesvc_pb2 as pb
from cachesvc.v1 import services

log = logging.getLogger(__name__)
READ_BYTES = 1 << 20
MAX_CALLS = 4
"""Calls at a time; gRPC answers others RESOURCE_EXHAUSTED, and those peers fetch from the source."""
OPEN_S = 10.0
CONNECTION_S = 60.0
"""A connection accepts no calls after this time and is cut after the same time again, so idle or stalled peers free their
places. Other peers reconnect by themselves."""
BIND_S = 0.2
"""The pause between tries to bind; a daemon that is taken over keeps the address until it ends."""
EXTENT_ID_BYTES = 16
_Borrowed = Future[tuple[jobs.LentExtent, int]]


class PeersServicer:
    """Implements the service `Peers` on gRPC's threads; another thread reads the daemon's answers."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._numbers = itertools.count(1)
        self._waiting: dict[int, _Borrowed] = {}

    def listen(self) -> None:
        """Read the daemon's answers, and end this process when the daemon ends."""
        try:
            while (received := jobs.receive(self._channel)) is not None:
                answer, descriptors = received
                assert isinstance(answer, jobs.LentExtent)
                waiting = self._waiting.pop(answer.number, None)
                if waiting is not None and waiting.set_running_or_notify_cancel():
                    waiting.set_result((answer, descriptors[0] if descriptors else -1))
                else:
                    for fd in descriptors:
                        os.close(fd)
        finally:
            # Also after an error, as when the daemon died with an unread message: the next daemon needs the address.
            os._exit(0)

    def Read(self, request: pb.ReadRequest, context: grpc.ServicerContext) -> Iterator[pb.ReadReply]:
        with errors_as_statuses(context), self._borrowed(request.extent) as (lent, fd):
            yield from self._replies(request, lent, fd)

    def _replies(self, request: pb.ReadRequest, lent: jobs.LentExtent, fd: int) -> Iterator[pb.ReadReply]:
        offset = begin = request.offset
        end = min(lent.size_bytes, begin + request.length) if request.length else lent.size_bytes
        reply = pb.ReadReply(digests=jobs.unpack_digests(lent.digests), size_bytes=lent.size_bytes)
        try:
            while offset < end:
                reply.data = os.pread(fd, min(READ_BYTES, end - offset), offset)
                if not reply.data:
                    raise TierFailed(f"extent {request.extent.hex()} ends at byte {offset:,}")
                offset += len(reply.data)
                yield reply
                reply = pb.ReadReply()
        finally:
            jobs.send(self._channel, jobs.BytesSent(lent.number, offset - begin))

    @contextmanager
    def _borrowed(self, extent: bytes) -> Iterator[tuple[jobs.LentExtent, int]]:
        if len(extent) != EXTENT_ID_BYTES:
            raise InvalidInput(f"an extent's id has {EXTENT_ID_BYTES} bytes, not {len(extent):,}")
        number, waiting = next(self._numbers), _Borrowed()
        self._waiting[number] = waiting
        jobs.send(self._channel, jobs.BorrowExtent(number, extent.hex()))
        try:
            lent, fd = waiting.result(OPEN_S)
        except Late:
            if waiting.cancel():
                raise TierFailed(f"extent {extent.hex()} was not opened in {OPEN_S:.0f} s") from None
            lent, fd = waiting.result()
        finally:
            self._waiting.pop(number, None)
        if fd < 0:
            raise NotFound(f"extent {extent.hex()} is not resident here")
        try:
            yield lent, fd
        finally:
            os.close(fd)


def serve(servicer: PeersServicer, address: str, tls: Tls | None) -> None:
    """Serve peers at `address`, HOST:PORT, as soon as it is free."""
    server = grpc.server(
        ThreadPool(MAX_CALLS, "peer"),
        options=[
            ("grpc.so_reuseport", 0),
            ("grpc.max_connection_age_ms", int(CONNECTION_S * 1000)),
            ("grpc.max_connection_age_grace_ms", int(CONNECTION_S * 1000)),
        ],
        maximum_concurrent_rpcs=MAX_CALLS,
    )
    services.add_to_server(server, "Peers", servicer)
    checks = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    checks.set("", health_pb2.HealthCheckResponse.SERVING)
    logged = False
    while True:
        try:
            if tls is None:
                server.add_insecure_port(address)
            else:
                server.add_secure_port(address, server_credentials(tls))
            break
        except RuntimeError:
            if not logged:
                log.warning("an address for peers cannot be bound yet", extra={"share": address})
            logged = True
            time.sleep(BIND_S)
    server.start()
    server.wait_for_termination()


def main() -> None:
    """Run the process until the daemon ends."""
    run_in_background()
    given = json.loads(os.environ.pop("CACHESVC_GIVEN"))
    configure_logging(given["log"])
    servicer = PeersServicer(socket.socket(fileno=int(sys.argv[1])))
    threading.Thread(target=servicer.listen, name="daemon", daemon=True).start()
    serve(servicer, given["share"], Tls(**given["tls"]) if given["tls"] else None)


if __name__ == "__main__":
    main()
