"""Finds out where to read extents: asks their owners, in batches.

A question goes to the extent's owner; where that is left out or does not answer, to its stand-in; and where none does, the
extent is read from the source. While one call to a node is under way, further questions for it wait and go with the next
call together.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import grpc

from cachesvc.core.model import ExtentId
from cachesvc.core.placement.directory import SOURCE, Answer
from cachesvc.core.placement.roster import PROTOCOL_VERSION
from cachesvc.core.placement.view import STAND_INS
from cachesvc.daemon.peers.members import Members
from cachesvc.daemon.peers.owned_extents import OwnedExtents, Question
from cachesvc.daemon.peers.peer_calls import PeerCalls, reason
from cachesvc.v1 import cachesvc_pb2 as pb

log = logging.getLogger(__name__)
CALLS = 16
"""Calls to owners at a time."""
BATCH = 256
"""Questions of one call."""
STEP = 4096
"""Extents of one call of a survey."""
NOWHERE = Answer(SOURCE, False, 0)
"""No node is known to have the extent."""
CALL_ERRORS = (grpc.RpcError, ValueError)


@dataclass(frozen=True, slots=True)
class _Pending:
    """A question, the nodes to ask next, and the callback for the answer."""

    question: Question
    nodes: tuple[str, ...]
    done: Callable[[Answer], None]


class Locator:
    """Safe from any thread."""

    def __init__(self, me: str, members: Members, owned: OwnedExtents, calls: PeerCalls) -> None:
        self._me = me
        self._members = members
        self._owned = owned
        self._calls = calls
        self._lock = threading.Lock()
        self._pending: defaultdict[str, list[_Pending]] = defaultdict(list)
        self._busy: set[str] = set()
        self._pool = ThreadPoolExecutor(CALLS, "lookup")

    def locate(self, question: Question, done: Callable[[Answer], None]) -> None:
        """Find out where to read an extent."""
        if self._members.waited:
            self._ask(question, done)
        else:
            self._pool.submit(self._ask_later, question, done)

    def survey(self, extents: Sequence[ExtentId]) -> tuple[list[ExtentId], list[ExtentId]]:
        """Return the extents that other nodes hold, and those that their owners are fetching. Owners fetch what none
        holds, as far as they are to keep it. Blocks for the calls."""
        view = self._members.view
        by_owner: defaultdict[str, list[ExtentId]] = defaultdict(list)
        for start in range(0, len(extents), STEP):
            step = extents[start : start + STEP]
            for extent, nodes in zip(step, view.askable(step, 1)):
                by_owner[nodes[0]].append(extent)
        held: list[ExtentId] = []
        coming: list[ExtentId] = []
        for node, theirs in by_owner.items():
            for start in range(0, len(theirs), STEP):
                step = theirs[start : start + STEP]
                for extent, answer in zip(
                    step, self._peek(node, [Question(each) for each in step], keep=True)
                ):
                    if answer.node != SOURCE:
                        (coming if answer.filling else held).append(extent)
        return held, coming

    def _ask_later(self, question: Question, done: Callable[[Answer], None]) -> None:
        self._members.wait_settled()
        self._ask(question, done)

    def _ask(self, question: Question, done: Callable[[Answer], None]) -> None:
        view = self._members.view
        if view.alone:
            done(NOWHERE)
            return
        left_out = question.left_out
        count = len(view.candidates) if question.without_source else STAND_INS
        (ranked,) = view.askable([question.extent], count + len(left_out))
        asked = [node for node in ranked if node not in left_out]
        self._queue(_Pending(question, tuple(asked[:count]), done))

    def _queue(self, pending: _Pending) -> None:
        if not pending.nodes:
            pending.done(NOWHERE)
            return
        node = pending.nodes[0]
        with self._lock:
            self._pending[node].append(pending)
            if node in self._busy:
                return
            self._busy.add(node)
        self._pool.submit(self._serve, node)

    def _serve(self, node: str) -> None:
        """Ask a node, one call after the other, until no question for it is left."""
        while True:
            with self._lock:
                batch = self._pending[node][:BATCH]
                del self._pending[node][:BATCH]
                if not batch:
                    self._busy.discard(node)
                    return
            self._answer(node, batch)

    def _answer(self, node: str, batch: list[_Pending]) -> None:
        questions = [each.question for each in batch]
        if node == self._me:
            self._conclude(batch, self._owned.find(node, questions), self._owned.recent)
            return
        try:
            answers, recent = self._call(node, questions, peek=False)
        except CALL_ERRORS as error:
            if isinstance(error, grpc.RpcError):
                self._members.failed(node, reason(error))
            for each in batch:  # a stand-in may know the node as a holder
                question = replace(each.question, left_out=(*each.question.left_out, node))
                self._queue(_Pending(question, each.nodes[1:], each.done))
            return
        self._conclude(batch, answers, recent)

    def _conclude(self, batch: list[_Pending], answers: list[Answer], recent: bool) -> None:
        """Hand the answers on. An owner with a recent directory may not know all holders: where it names the source, the
        stand-in is asked, too. A node that does not read the source asks all, the owner first."""
        unsure: defaultdict[str, list[tuple[_Pending, Answer]]] = defaultdict(list)
        for each, answer in zip(batch, answers, strict=True):
            if each.question.without_source and answer.node == SOURCE and len(each.nodes) > 1:
                self._queue(_Pending(each.question, each.nodes[1:], each.done))
            elif recent and answer.node == SOURCE and len(each.nodes) > 1:
                unsure[each.nodes[1]].append((each, answer))
            else:
                each.done(answer)
        for node, asked in unsure.items():
            for (each, answer), second in zip(asked, self._peek(node, [each.question for each, _ in asked])):
                each.done(Answer(second.node, second.filling, answer.generation))

    def _peek(self, node: str, questions: list[Question], keep: bool = False) -> list[Answer]:
        if node == self._me:
            return self._owned.peek(self._me, questions)
        try:
            return self._call(node, questions, peek=True, keep=keep)[0]
        except CALL_ERRORS:
            return [NOWHERE] * len(questions)

    def _call(
        self, node: str, questions: list[Question], peek: bool, keep: bool = False
    ) -> tuple[list[Answer], bool]:
        """Return a node's answers, and whether its directory is recent. Raises one of CALL_ERRORS; ValueError for a node
        that went away meanwhile and for an answer of another length."""
        address = self._members.address_of(node)
        if not address:
            raise ValueError(f"{node} is away")
        asked = [
            pb.ExtentQuestion(extent=each.extent, failed=each.failed, late=each.late, left_out=each.left_out)
            for each in questions
        ]
        request = pb.LookupRequest(
            protocol=PROTOCOL_VERSION, node=self._me, questions=asked, peek=peek, keep=keep
        )
        reply = self._calls.lookup(address, request)
        if len(reply.places) != len(questions):
            raise ValueError(f"{node} answered {len(reply.places)} of {len(questions)} questions")
        return [Answer(each.node, each.filling, each.generation) for each in reply.places], reply.young
