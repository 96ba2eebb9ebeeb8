"""The server of the control API: gRPC on its socket, and on TCP when asked, with health and reflection."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cachesvc.client.control import MAX_MESSAGE_BYTES
from cachesvc.config import CONTROL_SOCKET, Settings, control_address
from cachesvc.core.errors import CacheError, InvalidInput
from cachesvc.daemon.access.tenants import Peer
from cachesvc.daemon.access.tls import server_credentials
from cachesvc.daemon.control.call_cap import CALLS, CallCap
from cachesvc.daemon.control.service import Service
from cachesvc.daemon.processes.threads import Threads
from cachesvc.v1 import services
from cachesvc.v1.descriptors import service_descriptor

CONTROL_THREADS = CALLS + 8
"""One for each call, and some to refuse others. Started only when needed."""
NO_THREAD = "no thread can be started; allow more processes or memory (TasksMax=, ulimit -u, ulimit -v)"
STREAMS_EACH = 64
"""Calls at once on one connection: a process has a few."""
IDLE_S = 60.0
"""A connection without a call for so long, or twice that, is closed. The client's next call connects again."""
HANDSHAKE_S = 5.0
"""How long a connection may take to become one of gRPC's."""


def connection_limits(connections: int) -> list[tuple[str, int]]:
    """Return gRPC's options for at most so many connections to each address."""
    return [
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.max_connection_idle_ms", int(IDLE_S * 1000)),
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1000)),
    ]


def control_path(settings: Settings) -> str:
    """Of its socket."""
    return f"{os.path.abspath(settings.socket_dir)}/{CONTROL_SOCKET}"


def control_server(
    settings: Settings, service: Service, caller: Callable[[int], Peer | None], callers: int
) -> grpc.Server:
    """Started. `caller` tells who has a token; `callers`: connections to each address. Raises InvalidInput for an address
    that cannot be bound, CacheError where no thread can be started."""
    limits = [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_concurrent_streams", STREAMS_EACH),
        ("grpc.so_reuseport", 0),
        *connection_limits(callers),
    ]
    server = grpc.server(
        Threads(CONTROL_THREADS, "control"),
        options=limits,
        interceptors=[CallCap(caller)],
    )
    services.add_to_server(server, "Cache", service)
    checks = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    name = service_descriptor("Cache").full_name
    for each in ("", name):
        checks.set(each, health_pb2.HealthCheckResponse.SERVING)
    reflection.enable_server_reflection((name, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    path = control_path(settings)
    Path(path).unlink(missing_ok=True)  # a dead daemon's, or our predecessor's: we hold the lock
    before = os.umask(0o177)
    try:
        server.add_insecure_port(control_address(settings.socket_dir))
    except RuntimeError as error:
        raise InvalidInput(f"{path} cannot be bound ({error}); give --socket another directory") from None
    finally:
        os.umask(before)
    if settings.listen:
        try:
            if settings.tls is None:
                server.add_insecure_port(settings.listen)
            else:
                server.add_secure_port(settings.listen, server_credentials(settings.tls))
        except RuntimeError:
            raise InvalidInput(f"--listen {settings.listen} cannot be bound; is the port taken?") from None
    _check_threads()
    server.start()
    os.chmod(path, settings.socket_mode)
    return server


def _check_threads() -> None:
    """Raises CacheError where no thread can be started: a server that starts and finds so can never be ended."""
    try:
        one = threading.Thread(target=int, name="first")
        one.start()
    except RuntimeError:
        raise CacheError(NO_THREAD) from None
    one.join()
