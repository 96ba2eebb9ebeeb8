"""Bounds the control calls of each user. A call beyond the limit is refused at once and its client retries, so no call
waits for a thread behind calls that never end.

gRPC assigns a thread to a unary call before its request arrives, and runs the method afterwards. A caller that sends no
request would hold a thread uncounted. So the server treats every request as a stream, and counts a call from its start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from cachesvc.core.errors import Busy, InvalidInput
from cachesvc.daemon.access.quotas import UserCap
from cachesvc.daemon.access.tenants import ANONYMOUS, NO_USER, Peer, token_of
from cachesvc.daemon.events.event import failed, record
from cachesvc.daemon.statuses import abort

CALLS = 256
"""A prefetch, verify or opening holds a thread while it streams, and all ranks of a node open at once."""
CALLS_PER_USER = 96
"""Less than half: one user can call both with its token and without."""


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
