"""Implements the gRPC service `Peers`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import grpc

from cachesvc.core.errors import InvalidInput
from cachesvc.core.model import ExtentId
from cachesvc.core.placement.roster import OLDEST_VERSION, PROTOCOL_VERSION
from cachesvc.daemon.peers.owned_extents import OwnedExtents, Question
from cachesvc.daemon.peers.peer_calls import ID_BYTES, unpack_fills, unpack_ids
from cachesvc.daemon.statuses import errors_as_statuses
from cachesvc.v1 import cachesvc_pb2 as pb


class PeersServicer:
    """Answers other nodes on gRPC's threads. `hello` makes the answer to a greeting; `wrong` gets the name of a node, the
    extents whose copies from here were wrong, and whether they differ from the source. `heard` gets the name of a node that
    greets this one, `left` the name and instance of one that says goodbye, and `forget` the name of a member to forget.
    `held` says which extents this node holds, and `relay` has the daemon answer calls of clients of other nodes. `take`
    has it fetch extents of a dataset from a node that leaves, given its name."""

    def __init__(
        self,
        owned: OwnedExtents,
        hello: Callable[[], pb.HelloReply],
        wrong: Callable[[str, list[ExtentId], bool], None],
        heard: Callable[[str], None],
        left: Callable[[str, str], None],
        forget: Callable[[str], bool],
        held: Callable[[list[ExtentId]], bytes],
        relay: Callable[[pb.RelayRequest, grpc.ServicerContext], Iterator[pb.NodeAnswer]],
        take: Callable[[str, str, list[ExtentId]], tuple[bytes, bool]],
    ) -> None:
        self._owned = owned
        self._hello = hello
        self._wrong = wrong
        self._heard, self._left, self._forget, self._held = heard, left, forget, held
        self._relay, self._take = relay, take

    def Hello(self, request: pb.HelloRequest, context: grpc.ServicerContext) -> pb.HelloReply:
        if request.leaving:
            self._left(request.name, request.instance)
        else:
            self._heard(request.name)
        return self._hello()  # to any version: the caller decides what it makes of ours

    def Lookup(self, request: pb.LookupRequest, context: grpc.ServicerContext) -> pb.LookupReply:
        with errors_as_statuses(context):
            _check_protocol(request.protocol)
            questions = [
                Question(_id(each.extent), tuple(each.failed), tuple(each.late), tuple(each.left_out))
                for each in request.questions
            ]
            if request.peek:
                answers = self._owned.peek(request.node, questions, request.keep)
            else:
                answers = self._owned.find(request.node, questions)
            places = [
                pb.ExtentPlace(node=each.node, filling=each.filling, generation=each.generation)
                for each in answers
            ]
            return pb.LookupReply(places=places, young=self._owned.recent)

    def Forget(self, request: pb.ForgetRequest, context: grpc.ServicerContext) -> pb.ForgetReply:
        with errors_as_statuses(context):
            _check_protocol(request.protocol)
            return pb.ForgetReply(known=self._forget(request.node))

    def Held(self, request: pb.HeldRequest, context: grpc.ServicerContext) -> pb.HeldReply:
        with errors_as_statuses(context):
            _check_protocol(request.protocol)
            return pb.HeldReply(held=self._held(unpack_ids(request.extents)))

    def Relay(self, request: pb.RelayRequest, context: grpc.ServicerContext) -> Iterator[pb.NodeAnswer]:
        with errors_as_statuses(context):
            _check_protocol(request.protocol)
        yield from self._relay(request, context)

    def Take(self, request: pb.TakeRequest, context: grpc.ServicerContext) -> pb.TakeReply:
        with errors_as_statuses(context):
            _check_protocol(request.protocol)
            taken, unknown = self._take(request.node, request.dataset, unpack_ids(request.extents))
            return pb.TakeReply(taken=taken, unknown=unknown)

    def Report(self, request: pb.ReportRequest, context: grpc.ServicerContext) -> pb.ReportReply:
        with errors_as_statuses(context):
            _check_protocol(request.protocol)
            self._owned.report(
                request.node,
                unpack_ids(request.filled),
                unpack_ids(request.dropped),
                unpack_fills(request.progressing),
                request.anew,
            )
            self._wrong(request.node, unpack_ids(request.wrong), False)
            self._wrong(request.node, unpack_ids(request.differing), True)
            return pb.ReportReply()


def _check_protocol(protocol: int) -> None:
    if protocol < OLDEST_VERSION:
        raise InvalidInput(
            f"this node speaks protocol {PROTOCOL_VERSION}, and the caller {protocol}: update the caller"
        )


def _id(extent: bytes) -> ExtentId:
    if len(extent) != ID_BYTES:
        raise InvalidInput(f"an extent's id has {ID_BYTES} bytes, not {len(extent):,}")
    return ExtentId(extent)
