"""The daemon's side of the peer agent: asks it where extents are, tells it what this node holds, and lends it extents.

The agent faces the network, so it has no credentials, and it gets a read-only descriptor for each read of a peer. Where it
dies, it is started again, and meanwhile extents are read from the source.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import cachesvc
from cachesvc.config import Settings
from cachesvc.core import events
from cachesvc.core.commands import FindCopy
from cachesvc.core.errors import NotReady, from_code
from cachesvc.core.limits import LOCATE_S
from cachesvc.core.model import ExtentId
from cachesvc.core.placement.place_search import Verdict
from cachesvc.core.placement.traits import Traits
from cachesvc.core.placement.view import Member, View
from cachesvc.daemon.blocks.wire import VERSION as BLOCKS_VERSION
from cachesvc.daemon.fills.sent_bytes import SentBytes
from cachesvc.daemon.fills.shared_fills import Located, SharedFills
from cachesvc.daemon.loop.loop import Loop
from cachesvc.daemon.peers import messages
from cachesvc.daemon.peers.lending import Lending, end_agent
from cachesvc.daemon.peers.notices import Notices
from cachesvc.daemon.peers.residency_changes import ResidencyChanges
from cachesvc.daemon.processes.datagrams import RECEIVE_ERRORS, send
from cachesvc.daemon.processes.spawn import environment_of_agent, spawn
from cachesvc.daemon.runner import Runner
from cachesvc.sources.timed_reads import SourceCounters

log = logging.getLogger(__name__)
END_S = 2.0
GOODBYE_S = 3.0
"""How long the agent may take to say goodbye, before a daemon that stops ends it."""
RESTART_S = 1.0
"""The pause before a process that died is replaced."""
TICK_S = 1.0
WITHDRAWN_BYTES = 1
"""The weight of a node that leaves: it owns one extent in as many as the others have bytes."""
START_S = 60.0
"""The time in which an agent starts. One that sends nothing for it, or later for `LOCATE_S`, though a question is open, is
replaced."""


_Answer: TypeAlias = (
    messages.ExtentLocated
    | messages.ExtentsSurveyed
    | messages.NodeForgotten
    | messages.HoldersFound
    | messages.HandedOn
)


Take: TypeAlias = Callable[[messages.TakeExtents, Callable[[messages.ExtentsTaken], object]], object]


@dataclass(frozen=True, slots=True)
class _Question:
    """A question to the agent: the answer in its place where the agent gives none until `until`."""

    unanswered: _Answer
    then: Callable[[Any], None]
    until: float = math.inf


class ClusterLink:
    """Runs on the loop's thread, except the thread that reads the agent's messages."""

    def __init__(
        self,
        settings: Settings,
        weight_bytes: int,
        runner: Runner,
        loop: Loop,
        lending: Lending,
        shared_fills: SharedFills,
        sent: SentBytes,
        source_counters: Callable[[], SourceCounters],
        allowed: Callable[[], tuple[str, ...]],
    ) -> None:
        """`source_counters` and `allowed` return the counters of all sources, and the prefixes that are allowed now."""
        cluster = settings.cluster
        assert cluster is not None, "no cluster"
        self._given = {  # of `agent.Given`, whose module imports a lot
            "cluster": cluster,
            "weight_bytes": weight_bytes,
            "tls": settings.tls,
            "log_format": settings.log_format,
            "log": settings.log,
            "socket_dir": os.path.abspath(settings.socket_dir),
            "traits": Traits(
                release=cachesvc.__version__,
                extent_bytes=settings.extent_bytes,
                domain="zone" if cluster.by_zone else "none",
                blocks=BLOCKS_VERSION,
            ),
        }
        self._source_counters, self._allowed, self._told = source_counters, allowed, messages.NodeChanged()
        self._runner, self._node, self._loop = runner, runner.node, loop
        self._lending, self._shared_fills, self.sent = lending, shared_fills, sent
        self._closed, self._leaving = threading.Event(), threading.Event()
        self._channel: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="cluster", daemon=True)
        self._numbers = itertools.count(1)
        self._questions: dict[int, _Question] = {}
        self._heard_at, self._patience_s = 0.0, START_S
        self._changes = ResidencyChanges(runner.node, lending, loop.post, self._send)
        self._tick_at = 0.0
        self.report = messages.ClusterReport(me=cluster.node_name)
        """The cluster as the agent told it last."""
        me = Member(cluster.node_name, weight_bytes, cluster.zone)
        self.take: Take = lambda message, send: send(messages.ExtentsTaken(message.number))
        """Fetches extents of a node that leaves, and sends the answer."""
        self.leaves_for_good = False
        """The others forget this node at its end."""
        self._notices = Notices()
        self._list_wait_s, self._list_until = cluster.wait_s, 0.0
        self._view = View(cluster.node_name, (me,), by_zone=cluster.by_zone)

    def awaits_members(self) -> bool:
        """Tell whether this node waits for its first list of members, and for an answer or a failure of each."""
        return not self.report.settled and time.monotonic() < self._list_until

    def start(self) -> None:
        """Start the agent, which listens as soon as its addresses are free."""
        self._list_until = time.monotonic() + self._list_wait_s + LOCATE_S
        self._runner.handle(events.ViewChanged(self._view))
        self._runner.listeners.append(self._changes.handled)
        self._runner.timers.append(self)
        self._thread.start()

    def close(self) -> None:
        """End the agent for good. It says goodbye to the other nodes, if that takes no longer than `GOODBYE_S`."""
        self._leaving.set()
        if self._send(messages.Leave(self.leaves_for_good)) and self._thread.is_alive():
            self._thread.join(GOODBYE_S)
        self._closed.set()
        if (channel := self._channel) is not None:
            with suppress(OSError):
                channel.shutdown(socket.SHUT_RDWR)
        if self._thread.is_alive():
            self._thread.join(2 * END_S)

    # What the daemon's other parts call.

    def forget(self, name: str) -> messages.NodeForgotten:
        """Have all present members forget one that is away, on another thread than the loop's.

        Raises NotFound where there is no such member, InvalidInput for one that is present, NotReady where the agent does
        not answer.
        """
        number = next(self._numbers)
        unanswered = messages.NodeForgotten(
            number, NotReady.code, "the peer agent does not answer; try again"
        )
        answer, until = Future[messages.NodeForgotten](), time.monotonic() + LOCATE_S
        self._ask(messages.ForgetNode(number, name), unanswered, answer.set_result, until)
        found = answer.result()
        if found.code:
            raise from_code(found.code, found.error)
        return found

    def locate(
        self,
        extent: ExtentId,
        failed: tuple[str, ...],
        late: tuple[str, ...],
        then: Callable[[Located], None],
    ) -> None:
        """Find out where to read an extent; `then` is called exactly once, with the source where the agent does not
        answer."""
        number = next(self._numbers)
        unanswered, until = messages.ExtentLocated(number), time.monotonic() + LOCATE_S
        if not self.report.list_read:  # the agent answers once the list is read, or its time is over
            until = max(until, self._list_until)
        question = _Question(
            unanswered, lambda at: then(Located(at.node, at.address, at.filling, at.compare)), until
        )
        self._questions[number] = question
        if not self._send(messages.LocateExtent(number, extent, failed, late)):
            self._answered(unanswered)

    def find_copy(self, command: FindCopy) -> None:
        """Find out whether another node has a complete copy of a prepared extent, and tell the core."""

        def then(at: Located) -> None:
            found = bool(at.node) and not at.filling
            self._runner.handle(events.CopyFound(command.extent, found))

        self.locate(command.extent, (), (), then)

    def survey(self, extents: Sequence[ExtentId], then: Callable[[messages.ExtentsSurveyed], None]) -> None:
        """Find out which extents other nodes hold, and have their owners fetch the others; `then` is called once.
        Call it on another thread than the loop's: a message about a million extents takes half a second."""
        number = next(self._numbers)
        message, unanswered = messages.SurveyExtents(number, tuple(extents)), messages.ExtentsSurveyed(number)
        self._ask(message, unanswered, then)

    def holders(self, extents: Sequence[ExtentId]) -> messages.HoldersFound:
        """Find out which extents each other node holds, on another thread than the loop's."""
        number, answer = next(self._numbers), Future[messages.HoldersFound]()
        message, unanswered = messages.FindHolders(number, tuple(extents)), messages.HoldersFound(number)
        self._ask(message, unanswered, answer.set_result)
        return answer.result()

    def withdraw(self, weight_bytes: int | None = None) -> None:
        """Own nothing from now on, since this node leaves; with its weight, own its part again."""
        self._send(messages.Withdraw(WITHDRAWN_BYTES if weight_bytes is None else weight_bytes))

    def hand_on(self, node: str, dataset: str, extents: Sequence[ExtentId]) -> messages.HandedOn:
        """Have another node fetch extents from here, on another thread than the loop's."""
        number, answer = next(self._numbers), Future[messages.HandedOn]()
        message = messages.HandOn(number, node, dataset, tuple(extents))
        self._ask(message, messages.HandedOn(number), answer.set_result, time.monotonic() + LOCATE_S)
        return answer.result()

    def _ask(
        self,
        message: messages.ToAgent,
        unanswered: _Answer,
        then: Callable[[Any], None],
        until: float = math.inf,
    ) -> None:
        """Ask the agent, on another thread than the loop's."""
        self._loop.call(
            partial(self._questions.update, {unanswered.number: _Question(unanswered, then, until)})
        )
        if not self._send(message):
            self._loop.post(partial(self._answered, unanswered))

    def tick(self) -> None:
        """Renew the leases of fills that make progress, and answer peers that wait for a fill which does not begin, and
        fills that wait for the agent."""
        self._tick_at = time.monotonic() + TICK_S
        if progressing := self._shared_fills.progressing(time.monotonic()):
            self._send(messages.ResidencyChanged(progressing=tuple(progressing)))
        self._tell_state()
        self._notices.update(self.report, time.monotonic())
        node = self._node
        self._shared_fills.give_up(
            lambda extent: not node.will_keep(extent) or node.where(extent) is not None
        )
        self._end_waits()

    def _tell_state(self) -> None:
        """Tell the agent what it says in greetings."""
        asked, tiers = self._source_counters(), self._node.policy.tiers.values()
        free_bytes = sum(max(0, each.budget_bytes - each.used_bytes) for each in tiers if not each.lost)
        requests = asked.bytes, asked.retries, asked.throttled
        state = messages.NodeChanged(requests, free_bytes, self._allowed())
        if state != self._told and self._send(state):
            self._told = state

    def _end_waits(self) -> None:
        now = time.monotonic()
        for each in (late := [each.unanswered for each in self._questions.values() if each.until <= now]):
            self._answered(each)
        channel = self._channel
        if late and channel is not None and now - self._heard_at > self._patience_s:
            end_agent(channel)

    def next_deadline(self) -> float:
        """The time at which `tick` is due next, in seconds of the clock."""
        return self._tick_at

    def wrong_copy(self, node: str, extent: ExtentId, differs: bool) -> None:
        """Tell a node that it sent wrong bytes of an extent."""
        self._send(messages.WrongCopy(extent, node, differs))

    def judged(self, verdicts: Sequence[Verdict]) -> None:
        """Tell the agent what a fill learned of nodes, and of the source."""
        for verdict in verdicts:
            self._send(messages.PlaceJudged(verdict))

    def _send(self, message: messages.ToAgent) -> bool:
        """Send a message to the agent; return whether it went out."""
        channel = self._channel
        if channel is None:
            return False
        try:
            send(channel, message)
        except TimeoutError:  # the next message would stop the loop as long
            end_agent(channel)
            return False
        except OSError:  # the agent has ended
            return False
        return True

    # The agent's process.

    def _run(self) -> None:
        while not self._leaving.is_set():
            try:
                process, channel = spawn("cachesvc.daemon.peers.agent", self._given, environment_of_agent())
            except OSError as error:
                log.warning("the peer agent cannot be started", extra={"error": error.strerror})
            else:
                with channel:
                    self._heard_at, self._patience_s = time.monotonic(), START_S
                    self._channel = channel
                    self._loop.post(self._began)
                    self._serve(channel)
                    self._channel = None
                process.kill()
                code: int | None = None
                with suppress(subprocess.TimeoutExpired):  # the process hangs in a disk
                    code = process.wait(END_S)
                if not self._leaving.is_set():
                    log.warning("the peer agent ended unexpectedly", extra={"code": code})
                self._loop.post(self._ended)
            self._leaving.wait(RESTART_S)

    def _began(self) -> None:
        """Tell a new agent all that this node holds."""
        self._send(messages.ResidencyChanged(anew=True))
        self._told = messages.NodeChanged()
        self._tell_state()
        for tier in self._node.policy.tiers:
            self._changes.note(self._node.resident_in(tier))

    def _ended(self) -> None:
        questions, self._questions = self._questions, {}
        for each in questions.values():
            each.then(each.unanswered)

    def _serve(self, channel: socket.socket) -> None:
        """Answer the process until it ends or sends an invalid message."""
        while not self._closed.is_set():
            try:
                received = messages.receive_in_daemon(channel)
            except TimeoutError:
                continue
            except RECEIVE_ERRORS:
                return
            self._heard_at, self._patience_s = time.monotonic(), LOCATE_S
            if received is None:
                return
            message, descriptors = received
            for fd in descriptors:  # none is expected
                os.close(fd)
            if isinstance(message, messages.BorrowExtent):
                self._loop.post(partial(self._lending.lend, channel, message))
            else:
                self._loop.post(partial(self._handle, message))

    def _handle(self, message: messages.ToDaemon) -> None:
        if isinstance(message, _Answer):
            self._answered(message)
        elif isinstance(message, messages.KeepExtents):
            self._keep(message)
        elif isinstance(message, messages.TakeExtents):
            self.take(message, self._send)
        elif isinstance(message, messages.ClusterState):
            self._changed(message.report)
        elif isinstance(message, messages.WrongCopy) and message.differs:
            self.sent.told(message.node, message.extent)
        elif isinstance(message, messages.WrongCopy):
            self._lending.check(message.extent)

    # What the agent asks for.

    def _answered(self, answer: _Answer) -> None:
        question = self._questions.pop(answer.number, None)
        if question is not None:
            question.then(answer)

    def _changed(self, report: messages.ClusterReport) -> None:
        self.report = report
        if report.settled and (view := report.view()) != self._view:
            self._view = view
            self._runner.handle(events.ViewChanged(view))

    def _keep(self, wanted: messages.KeepExtents) -> None:
        node = self._node

        def kept_here(extent: ExtentId) -> bool:
            return node.will_keep(extent) or (wanted.later and node.keeping.prefetches(extent))

        for extent in wanted.extents:
            if node.keeping.full:
                break
            if node.keeping.lacks(extent, wanted.without_source):
                self._runner.handle(events.PeerWants(extent, wanted.without_source))
        kept = tuple(extent for extent in wanted.extents if kept_here(extent))
        self._send(messages.ExtentsKept(wanted.number, kept))
