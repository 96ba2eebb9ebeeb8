"""Builds the gRPC server of the control API: on its Unix socket, and on TCP with `--listen`; with health and reflection.

It bounds the calls of each user. A call beyond the limit is refused at once and its client retries, so no call waits for a
thread behind calls that never end. gRPC assigns a thread to a unary call before its request arrives, and runs the method
afterwards. A caller that sends no request would hold a thread uncounted. So the server treats every request as a stream,
and counts a call from its start.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cachesvc.client.control import MAX_MESSAGE_BYTES
from cachesvc.config import CONTROL_SOCKET, Settings, control_address
from cachesvc.core.errors import Busy, CacheError, InvalidInput, NotReady
from cachesvc.daemon.access.quotas import UserCap
from cachesvc.daemon.access.tenants import ANONYMOUS, NO_USER, Peer, token_of
from cachesvc.daemon.access.tls import server_credentials
from cachesvc.daemon.control.service import Service
from cachesvc.daemon.events.event import failed, record
from cachesvc.daemon.processes.threads import ThreadPool
from cachesvc.daemon.statuses import abort
from cachesvc.daemon.unix_sockets import identity, remove
from cachesvc.v1 import services
from cachesvc.v1.descriptors import service_descriptor

CALLS = 256
"""A prefetch, verify or opening holds a thread while it streams, and all ranks of a node open at once."""
CALLS_PER_USER = 96
"""Less than half: one user can call both with its token and without."""
CONTROL_THREADS = CALLS + 8
"""One for each admitted call, and some to refuse others. Threads start only when needed."""
NO_THREAD = "no thread can be started; allow more processes or memory (TasksMax=, ulimit -u, ulimit -v)"
STREAMS_EACH = 64
"""Concurrent calls on one connection: a process has a few."""
IDLE_S = 60.0
"""A connection without calls is closed after one to two times this timeout. The client's next call connects again."""
HANDSHAKE_S = 5.0
"""The timeout of a connection's HTTP/2 handshake."""
STOP_GRACE_S = 2.0
"""How long calls under way may take at the end."""


def connection_limits(connections: int) -> list[tuple[str, int]]:
    """Return gRPC's options that admit so many connections to each address and close idle ones."""
    return [
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.max_connection_idle_ms", int(IDLE_S * 1000)),
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1000)),
    ]


def control_path(settings: Settings) -> str:
    """Return the path of the control socket."""
    return f"{os.path.abspath(settings.socket_dir)}/{CONTROL_SOCKET}"


class ControlServer:
    """The server on its socket. `caller` returns the user of a token; `connections` limits those to each address.

    The methods, and the constructor, raise as `_started_server`.
    """

    def __init__(
        self, settings: Settings, service: Service, caller: Callable[[int], Peer | None], connections: int
    ) -> None:
        self._path = control_path(settings)
        self._started = partial(_started_server, settings, service, caller, connections)
        self._start()

    def is_in_place(self) -> bool:
        """Tell whether the socket's path still leads to this server."""
        return self._file is not None and identity(self._path) == self._file

    def start_again(self) -> None:
        """Bind the socket again, since its file was removed. Calls under way end, and clients repeat them."""
        # gRPC removes whatever lies at the path when a server stops, so this one stops first.
        self._server.stop(None).wait()
        self._start()

    def close(self) -> None:
        """Stop, and remove the socket's file. Calls under way may go on for `STOP_GRACE_S`."""
        self._server.stop(STOP_GRACE_S)
        remove(self._path, self._file)

    def _start(self) -> None:
        self._server = self._started()
        self._file = identity(self._path)


def _started_server(
    settings: Settings, service: Service, caller: Callable[[int], Peer | None], connections: int
) -> grpc.Server:
    """Start and return a gRPC server. Raises InvalidInput or NotReady for an address that cannot be bound, CacheError
    where no thread can be started."""
    limits = [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_concurrent_streams", STREAMS_EACH),
        ("grpc.so_reuseport", 0),
        *connection_limits(connections),
    ]
    server = grpc.server(
        ThreadPool(CONTROL_THREADS, "control"),
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
    Path(path).unlink(missing_ok=True)  # of a dead daemon or our predecessor: we hold the lock
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
            raise NotReady(f"--listen {settings.listen} cannot be bound; is the port taken?") from None
    _check_threads()
    server.start()
    os.chmod(path, settings.socket_mode)
    return server


def _check_threads() -> None:
    """Raise CacheError where no thread can be started: a gRPC server that fails to start one can never be stopped."""
    try:
        probe = threading.Thread(target=int, name="probe")
        probe.start()
    except RuntimeError:
        raise CacheError(NO_THREAD) from None
    probe.join()


class CallCap(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Counts the calls of every method of the server, health and reflection too."""

    def __init__(self, caller: Callable[[int], Peer | None]) -> None:
        """`caller` returns the user who was given a token."""
        self._caller = caller
        self._cap = UserCap(CALLS_PER_USER, CALLS)

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Count a call and return its method, which stops counting it at its end; or return a refusal."""
        method = continuation(handler_call_details)
        if method is None:
            return None
        token = token_of(handler_call_details.invocation_metadata)
        peer = None if token is None else self._caller(token)
        uid = ANONYMOUS if peer is None else peer.uid
        if not self._cap.take(uid):
            return grpc.stream_stream_rpc_method_handler(partial(_refuse, uid))
        return _counted(method, partial(self._cap.give_back, uid))


def _refuse(uid: int, _requests: Iterator[bytes], context: grpc.ServicerContext) -> None:
    callers = "callers without a token hold" if uid == ANONYMOUS else f"user {uid} holds"
    error = Busy(f"{callers} a full share of the daemon's control calls; try again when some have ended")
    record(failed("refused", error, uid=uid if uid != ANONYMOUS else NO_USER))
    abort(context, error)


def _counted(method: Any, ended: Callable[[], None]) -> grpc.RpcMethodHandler[Any, Any]:
    """Return the same method with its request as a stream. `ended` is called when a call is over."""
    behave = method.unary_unary or method.unary_stream or method.stream_unary or method.stream_stream

    def run(requests: Iterator[Any], context: grpc.ServicerContext) -> Any:
        parsed = (_parsed(method, request, context) for request in requests)
        return behave(parsed if method.request_streaming else _only(parsed, context), context)

    def answer(requests: Iterator[Any], context: grpc.ServicerContext) -> Any:
        try:
            return run(requests, context)
        finally:
            ended()

    def answers(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        try:
            yield from run(requests, context)
        finally:
            ended()

    if method.response_streaming:
        return grpc.stream_stream_rpc_method_handler(answers, None, method.response_serializer)
    return grpc.stream_unary_rpc_method_handler(answer, None, method.response_serializer)


def _parsed(method: Any, request: bytes, context: grpc.ServicerContext) -> Any:
    """Parse a message of a call on the call's own thread. Ends the call where it does not parse."""
    try:
        return method.request_deserializer(request)
    except DecodeError:
        abort(context, InvalidInput("the call's message is none of this method; see cachesvc.proto"))


def _only(requests: Iterator[Any], context: grpc.ServicerContext) -> Any:
    request = next(requests, None)
    if request is None:
        abort(context, InvalidInput("the call has no message"))
    return request
