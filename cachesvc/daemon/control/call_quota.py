"""Places at the control API, shared out by user: whoever holds many leaves room for the next one.

A call takes its place when it arrives, before there is a thread for it, and gives it back when a thread is done with
it. No queue: a call that gets a place gets a thread, one that gets none is refused at once and asks again. So nobody's
calls wait behind calls that never end.

gRPC runs a method only when its request has come, and holds a thread until then. A caller that never sends it would
hold a place that nobody counts, so every method is given its request as a stream, and takes it under its place.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from cachesvc.core.errors import Busy, InvalidInput
from cachesvc.daemon.access.tenants import STRANGER, Peer, token_of
from cachesvc.daemon.control.statuses import abort

PLACES = 256
"""A prefetch, verify or opening holds one while it streams, and with it a thread: all ranks of a node open at once."""
OWN_PLACES = 32
"""Of them, for the daemon's own user: its operator, its probes."""


class Places:
    """Who holds how many. A user takes no more than twice what is left free: 150 when alone, the next one 50, then 16, 6
    and 2, so that there is room for one more until five users hoard. The daemon's own takes what there is.
    Safe from any thread."""

    def __init__(self, own: int) -> None:
        self._own = own
        self._held: Counter[int] = Counter()
        self._lock = threading.Lock()

    def take(self, user: int) -> bool:
        """Take a place for a call; False: the user has its share, or none is left."""
        with self._lock:
            free = PLACES - self._held.total()
            admitted = free > 0 if user == self._own else self._held[user] < 2 * (free - OWN_PLACES)
            if admitted:
                self._held[user] += 1
            return admitted

    def leave(self, user: int) -> None:
        """Give a place back."""
        with self._lock:
            self._held[user] -= 1
            if not self._held[user]:
                del self._held[user]


class Doorman(grpc.ServerInterceptor):  # type: ignore[misc,type-arg]
    """Stands before every method of the server, health and reflection too."""

    def __init__(self, caller: Callable[[int], Peer | None]) -> None:
        """`caller`: whose token it is."""
        self._caller = caller
        self._places = Places(os.geteuid())

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The method, which gives back the place that its call takes here; or a refusal."""
        method = continuation(handler_call_details)
        if method is None:
            return None
        token = token_of(handler_call_details.invocation_metadata)
        peer = None if token is None else self._caller(token)
        user = STRANGER if peer is None else peer.uid
        if not self._places.take(user):
            return grpc.stream_stream_rpc_method_handler(partial(_refuse, user))
        return _placed(method, partial(self._places.leave, user))


def _refuse(user: int, _requests: Iterator[bytes], context: grpc.ServicerContext) -> None:
    whose = "callers without a token hold" if user == STRANGER else f"user {user} holds"
    abort(
        context, Busy(f"{whose} a full share of the daemon's control calls; try again when some have ended")
    )


def _placed(method: Any, leave: Callable[[], None]) -> grpc.RpcMethodHandler[Any, Any]:
    """The same method, as gRPC calls it when the request is yet to come."""
    behave = method.unary_unary or method.unary_stream or method.stream_unary or method.stream_stream

    def asked(requests: Iterator[Any], context: grpc.ServicerContext) -> Any:
        parsed = (_parsed(method, said, context) for said in requests)
        return behave(parsed if method.request_streaming else _the_one(parsed, context), context)

    def answer(requests: Iterator[Any], context: grpc.ServicerContext) -> Any:
        try:
            return asked(requests, context)
        finally:
            leave()

    def answers(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        try:
            yield from asked(requests, context)
        finally:
            leave()

    if method.response_streaming:
        return grpc.stream_stream_rpc_method_handler(answers, None, method.response_serializer)
    return grpc.stream_unary_rpc_method_handler(answer, None, method.response_serializer)


def _parsed(method: Any, said: bytes, context: grpc.ServicerContext) -> Any:
    """A message of a call, on the call's own thread; ends the call where it is none."""
    try:
        return method.request_deserializer(said)
    except DecodeError:
        abort(context, InvalidInput("the call's message is none of this method; see cachesvc.proto"))


def _the_one(requests: Iterator[Any], context: grpc.ServicerContext) -> Any:
    said = next(requests, None)
    if said is None:
        abort(context, InvalidInput("the call has no message"))
    return said
