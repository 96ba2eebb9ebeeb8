"""A node that leaves for good: it owns nothing any more, and other nodes fetch from it what it alone holds."""

from __future__ import annotations

import logging

import grpc

from cachesvc.core.model import ExtentId
from cachesvc.core.placement.roster import PROTOCOL_VERSION
from cachesvc.daemon.peers import messages
from cachesvc.daemon.peers.daemon_channel import DaemonChannel
from cachesvc.daemon.peers.members import Members
from cachesvc.daemon.peers.owned_extents import OwnedExtents
from cachesvc.daemon.peers.peer_calls import PeerCalls, reason
from cachesvc.v1 import cachesvc_pb2 as pb

log = logging.getLogger(__name__)


class Leaving:
    """Both sides, in the peer agent. Safe from any thread."""

    def __init__(
        self, me: str, members: Members, owned: OwnedExtents, calls: PeerCalls, daemon: DaemonChannel
    ) -> None:
        self._me, self._members, self._owned = me, members, owned
        self._calls, self._daemon = calls, daemon

    def withdraw(self, weight_bytes: int) -> None:
        """Take another weight, and have the others greet this node to learn it."""
        self._members.weigh(weight_bytes)
        told = pb.TakeRequest(protocol=PROTOCOL_VERSION, node=self._me)
        self._members.ask_present(lambda address: self._calls.take(address, told))

    def hand_on(self, message: messages.HandOn) -> None:
        """Have another node fetch extents from here, and tell the daemon what it says."""
        request = pb.TakeRequest(
            protocol=PROTOCOL_VERSION,
            node=self._me,
            dataset=message.dataset,
            extents=b"".join(message.extents),
        )
        answer = messages.HandedOn(message.number)
        try:
            if address := self._members.address_of(message.node):
                reply = self._calls.take(address, request)
                answer = messages.HandedOn(message.number, reply.taken, reply.unknown)
        except grpc.RpcError as error:
            log.warning("extents cannot be handed on", extra={"node": message.node, "error": reason(error)})
        self._daemon.send(answer)

    def take(self, node: str, dataset: str, extents: list[ExtentId]) -> tuple[bytes, bool]:
        """Have the daemon fetch extents from a node that leaves; return `taken` and `unknown` of `TakeReply`. Without
        extents, learn from it that it leaves. Raises TierFailed where the daemon does not answer."""
        if not extents:
            self._members.greet_soon(node)
            return b"", False
        self._owned.report(node, extents, (), (), False)  # so that this node is told to read them there
        return self._daemon.take(dataset, extents)
