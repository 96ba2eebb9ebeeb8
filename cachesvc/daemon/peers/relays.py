"""Calls of the control API that a client makes here and another member answers.

The daemon passes such a call to the peer agent of that member, over mutual TLS. The agent makes it at the control socket of
its own daemon, as any client does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from cachesvc.client.caller_token import CallerIdentity
from cachesvc.client.control import CODE_KEY
from cachesvc.config import ClusterSettings, Tls, control_address
from cachesvc.core.errors import (
    Busy,
    CacheError,
    DaemonUnavailable,
    InvalidInput,
    NotAllowed,
    NotFound,
    from_code,
)
from cachesvc.core.placement.roster import PROTOCOL_VERSION
from cachesvc.daemon.peers.messages import ANSWERING, ClusterReport, NodeRow
from cachesvc.daemon.peers.peer_calls import PeerCalls, reason
from cachesvc.daemon.statuses import errors_as_statuses
from cachesvc.v1 import cachesvc_pb2 as pb
from cachesvc.v1.descriptors import service_descriptor

READS = frozenset({"Status", "List", "Prefetches"})
"""Calls that any client may have relayed."""
CHANGES = frozenset(
    {"OpenDataset", "Prefetch", "StartPrefetch", "CancelPrefetch", "Pin", "Evict", "Verify", "Drain"}
)
"""Calls that are relayed for the daemon's own user alone."""
RELAYED = 4
"""Calls of other nodes that are relayed to this daemon at a time: a command of an operator makes one."""
FOREVER_S = 1e9


class Relays:
    """The calling side, in the daemon. Safe from any thread."""

    def __init__(
        self, settings: ClusterSettings, tls: Tls | None, report: Callable[[], ClusterReport]
    ) -> None:
        """`report` returns the cluster as the agent told it last. Raises InvalidInput for unusable certificates."""
        self._me, self._own_address, self._report = settings.node_name, settings.advertise, report
        self._calls = PeerCalls(tls, settings.tls_name)

    def answers(self, node: str) -> bool:
        """Tell whether a member, given by name or address, answers greetings."""
        return any(row.state in ANSWERING for row in self._rows(node))

    def call(
        self,
        node: str,
        method: str,
        request: bytes,
        own_user: bool,
        timeout_s: float | None = None,
        began: Callable[[Any], object] = lambda call: None,
    ) -> Iterator[bytes]:
        """Yield the answers of a member, given by name or address, to a call. `began` gets the call, to cancel it.

        Raises NotFound where there is no such member, NotAllowed and InvalidInput for calls that are not relayed,
        DaemonUnavailable where the member does not answer, and the errors of the call itself.
        """
        if method not in READS | CHANGES:
            raise InvalidInput(f"other nodes answer no {method}")
        if method in CHANGES and not own_user:
            raise NotAllowed(f"only the user who runs the daemon may call {method} on other nodes")
        row = self._answering(node)
        self._calls.forget({each.address for each in self._report().rows})
        wanted = pb.RelayRequest(
            protocol=PROTOCOL_VERSION, node=self._me, method=method, request=request, own_user=own_user
        )
        try:
            address = self._own_address if row.name == self._me else row.address
            call = self._calls.relay(address, wanted, timeout_s)
            began(call)
            for answer in call:
                yield answer.reply
        except grpc.RpcError as error:
            raise _typed(error, row) from None

    def relayed(
        self, asked: pb.NodeCall, own_user: bool, context: grpc.ServicerContext
    ) -> Iterator[pb.NodeAnswer]:
        """Yield the answers to a client's call, which ends when the client leaves. Raises as `call`."""

        def began(call: Any) -> None:
            if not context.add_callback(call.cancel):
                call.cancel()

        left_s = time_left(context)
        for each in self.call(asked.node, asked.method, asked.request, own_user, left_s, began):
            yield pb.NodeAnswer(reply=each)

    def _answering(self, node: str) -> NodeRow:
        rows = self._rows(node)
        if not rows:
            raise NotFound(f"the cluster has no member {node!r}; see `cachesvc nodes`")
        row = next((row for row in rows if row.state in ANSWERING), rows[0])
        if row.state not in ANSWERING:
            raise DaemonUnavailable(f"it is {row.state}" + (f": {row.why}" if row.why else ""))
        return row

    def _rows(self, node: str) -> list[NodeRow]:
        return [row for row in self._report().rows if node and node in (row.name, row.address)]


def _typed(error: Any, row: NodeRow) -> CacheError:
    for key, value in error.trailing_metadata() or ():
        if key == CODE_KEY:
            return from_code(int(value), error.details())
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        release = row.traits.release or "of before 0.3"
        return DaemonUnavailable(f"its release, {release}, answers no calls of other nodes; update it")
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DaemonUnavailable("it did not answer in time")
    return DaemonUnavailable(f"it does not answer: {reason(error)}")


def time_left(context: grpc.ServicerContext) -> float | None:
    """Return the time that a call has, in seconds; None for no limit, which gRPC states as a large number."""
    left_s = context.time_remaining()
    return None if left_s is None or left_s > FOREVER_S else left_s


class OwnDaemon:
    """The answering side, in the peer agent: a client of the agent's own daemon. Safe from any thread."""

    def __init__(self, socket_dir: str) -> None:
        self._identity, self._lock = CallerIdentity(socket_dir), threading.Lock()
        self._channel = grpc.insecure_channel(
            control_address(socket_dir), [("grpc.max_receive_message_length", -1)]
        )
        self._service = service_descriptor("Cache").full_name
        self._slots = threading.BoundedSemaphore(RELAYED)

    def answer(self, request: pb.RelayRequest, context: grpc.ServicerContext) -> Iterator[pb.NodeAnswer]:
        """Make a call of another node here, and yield its answers."""
        with errors_as_statuses(context):
            if request.method not in (READS | CHANGES if request.own_user else READS):
                raise NotAllowed(f"other nodes may not call {request.method} here")
            if not self._slots.acquire(blocking=False):
                raise Busy(f"{RELAYED} calls of other nodes are under way here")
        try:
            yield from self._relayed(request, context)
        finally:
            self._slots.release()

    def _relayed(self, request: pb.RelayRequest, context: grpc.ServicerContext) -> Iterator[pb.NodeAnswer]:
        with errors_as_statuses(context), self._lock:
            token = self._identity.metadata() if request.own_user else ()
        method = self._channel.unary_stream(f"/{self._service}/{request.method}", None, None)
        call: Any = method(request.request, timeout=time_left(context), metadata=token)
        if not context.add_callback(call.cancel):  # the caller has gone
            call.cancel()
        try:
            for reply in call:
                yield pb.NodeAnswer(reply=reply)
        except grpc.RpcError as error:
            failure: Any = error
            context.set_trailing_metadata(tuple(failure.trailing_metadata() or ()))
            context.abort(failure.code(), failure.details())
