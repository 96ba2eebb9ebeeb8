"""Hands on what this node alone holds, before it leaves the cluster for good.

The node gives up its weight first, so the next members in rank own its extents from then on. Each of them is asked to
fetch its extents from here, and asked again until it holds them. One that has no room for an extent, or does not know its
dataset, gives way to the next in rank.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from cachesvc.core.errors import CacheError, DaemonUnavailable, DeadlineExceeded
from cachesvc.core.model import ExtentId
from cachesvc.core.placement.view import View
from cachesvc.daemon.datasets import Datasets, ServedDataset
from cachesvc.daemon.events.event import Event, record
from cachesvc.daemon.loop.loop import Loop
from cachesvc.daemon.loop.waiting import Caller
from cachesvc.daemon.peers.cluster_link import WITHDRAWN_BYTES, ClusterLink
from cachesvc.daemon.peers.taken_extents import COMING, HELD, NO_ROOM
from cachesvc.daemon.runner import Runner
from cachesvc.v1 import cachesvc_pb2 as pb

log = logging.getLogger(__name__)
RANKS = 8
"""Members that are asked for one extent, one after the other."""
BATCH = 256
"""Extents that one member is asked to fetch at a time."""
REFUSED = 10
"""A member that has no room for an extent is asked so often, since it may be making room just now."""
SILENT = 3
"""A member that does not answer so often in a row is not asked again."""
PAUSE_S = 0.2
SETTLE_S = 5.0
"""How long the drain waits until the members have learned that this node owns nothing."""


@dataclass(slots=True)
class _Extent:
    """An extent that is to be handed on. `places`: the members to ask, the next owner last."""

    id: ExtentId
    size_bytes: int
    dataset: str
    places: list[str]
    no_room: bool = False
    unknown: bool = False
    refused: int = 0


class Drain:
    """Runs on the thread of a call, or of the daemon's end. One at a time."""

    def __init__(
        self,
        loop: Loop,
        runner: Runner,
        datasets: Datasets,
        cluster: ClusterLink,
        weight_bytes: int,
    ) -> None:
        """`weight_bytes`: of this node while it is a member."""
        self._loop, self._runner, self._datasets = loop, runner, datasets
        self._cluster, self._weight_bytes = cluster, weight_bytes
        self._one, self._ends = threading.Lock(), False

    def run(self, timeout_s: float, caller: Caller) -> Iterator[pb.DrainReply]:
        """Yield the progress until all is handed on that others take, or the time is over; then end the daemon.

        Raises CacheError while another drain runs, DaemonUnavailable where no other member answers, and DeadlineExceeded
        where the caller leaves; the node stays a member then.
        """
        if not self._one.acquire(blocking=False):
            raise CacheError("this node is being drained already")
        until, left = time.monotonic() + timeout_s, False
        try:
            if not self._others():
                raise DaemonUnavailable("no other member answers, so nothing can be handed on")
            before = self._cluster.report.view()
            self._cluster.withdraw()
            self._settle(until)
            reply = pb.DrainReply()
            waiting = self._to_hand_on(before, reply)
            yield reply
            silent: dict[str, int] = defaultdict(int)
            while waiting and time.monotonic() < until:
                waiting = self._ask(waiting, silent, reply)
                yield reply
                if not caller.is_active():
                    raise DeadlineExceeded("the caller did not wait for the end of the drain")
                time.sleep(PAUSE_S if waiting else 0.0)
            reply.done = left = self._cluster.leaves_for_good = True
            why = "" if reply.moved_extents == reply.extents else "not all of what this node alone held"
            record(Event("drained", extents=reply.moved_extents, size_bytes=reply.moved_bytes, why=why))
            self._loop.stop()
            yield reply
        finally:
            if not left:
                self._cluster.withdraw(self._weight_bytes)
            self._one.release()

    def stop(self, timeout_s: float) -> None:
        """End the daemon after a drain of so long at most; at once for 0 and when asked again. Runs on the loop's
        thread."""
        if not timeout_s or self._ends:
            self._loop.stop()
            return
        self._ends = True
        threading.Thread(target=self._end, args=(timeout_s,), name="drain", daemon=True).start()

    def _end(self, timeout_s: float) -> None:
        try:
            for _ in self.run(timeout_s, self):
                pass
        except CacheError as error:
            log.warning("this node is not drained", extra={"error": str(error)})
        self._loop.stop()

    def is_active(self) -> bool:
        """See `Caller`: the end of the daemon waits."""
        return True

    def _others(self) -> list[str]:
        """The members of this node's zone that answer."""
        view = self._cluster.report.view()
        return [each for each in view.names if each != view.me and each not in view.away]

    def _settle(self, until: float) -> None:
        """Wait until the agent has this node's new weight, and the others had time to greet it."""
        until = min(until, time.monotonic() + SETTLE_S)
        while time.monotonic() < until:
            view = self._cluster.report.view()
            if any(each.name == view.me and each.weight_bytes == WITHDRAWN_BYTES for each in view.members):
                time.sleep(2 * PAUSE_S)
                return
            time.sleep(PAUSE_S)

    def _to_hand_on(self, before: View, reply: pb.DrainReply) -> list[_Extent]:
        """Find the extents to hand on, and their next owners. `before`: the view in which this node owned extents."""
        node = self._runner.node
        tiers = tuple(node.policy.tiers)
        held = self._loop.call(lambda: set[ExtentId]().union(*map(node.resident_in, tiers)))
        places = self._places(before, sorted(held))
        sizes = self._loop.call(lambda: {extent: self._runner.node.size_of(extent) for extent in places})
        reply.extents, reply.size_bytes = len(sizes), sum(sizes.values())
        found: list[_Extent] = []
        for dataset in self._homes(set(places)):
            for extent in dataset.extent_ids:
                if (size_bytes := sizes.pop(extent, None)) is not None:
                    found.append(_Extent(extent, size_bytes, dataset.id, places[extent]))
        reply.own_bytes = sum(sizes.values())
        return found

    def _places(self, before: View, held: list[ExtentId]) -> dict[ExtentId, list[str]]:
        """Return the extents that no other member holds, and those that this node owned and the next owner does not hold:
        others may have these on their way through a window only. And the members to ask, the next owner last."""
        view, others = self._cluster.report.view(), set(self._others())
        elsewhere = self._cluster.holders(held).held
        places = {}
        for n, (extent, owned, ranked) in enumerate(zip(held, before.owned(held), view.ranked(held, RANKS))):
            asked = [name for name in reversed(ranked) if name in others]
            at = {name for name, each in elsewhere.items() if name in others and each[n]}
            if not at or (owned and asked and asked[-1] not in at):
                places[extent] = asked
        return places

    def _homes(self, wanted: set[ExtentId]) -> Iterator[ServedDataset]:
        """Yield datasets that have some of the extents, each extent once: those that are loaded, then those on disk."""
        known = self._loop.call(self._datasets.all)
        loaded = (each for each in known if not each.made_from)
        seen = {each.id for each in known}
        on_disk = (each for each in self._datasets.stored_ids() if each not in seen)
        read = (self._datasets.load(each) for each in on_disk)
        later = (done.result() for done in read if done.exception() is None)
        for dataset in (*loaded, *(each for each in later if not each.made_from)):
            if not wanted.isdisjoint(dataset.index_of):
                wanted -= dataset.index_of.keys()
                yield dataset

    def _ask(self, waiting: list[_Extent], silent: dict[str, int], reply: pb.DrainReply) -> list[_Extent]:
        """Ask each member to fetch some of its extents; return those that are still to be handed on."""
        groups: dict[tuple[str, str], list[_Extent]] = defaultdict(list)
        left: list[_Extent] = []
        for each in waiting:
            if self._runner.node.where(each.id) is None:  # readers of this node needed its room
                reply.extents, reply.size_bytes = reply.extents - 1, reply.size_bytes - each.size_bytes
                continue
            while each.places and silent[each.places[-1]] >= SILENT:
                each.places.pop()
            group = groups[each.places[-1], each.dataset] if each.places else None
            if group is None:
                self._give_up(each, reply)
            elif len(group) < BATCH:
                group.append(each)
            else:
                left.append(each)
        for (name, dataset), asked in groups.items():
            answer = self._cluster.hand_on(name, dataset, [each.id for each in asked])
            silent[name] = 0 if answer.taken or answer.unknown else silent[name] + 1
            states = answer.taken or bytes([NO_ROOM if answer.unknown else COMING]) * len(asked)
            for each, state in zip(asked, states):
                if state == HELD:
                    reply.moved_extents += 1
                    reply.moved_bytes += each.size_bytes
                    continue
                each.refused = each.refused + 1 if state == NO_ROOM else 0
                if answer.unknown or each.refused == REFUSED:
                    each.places.pop()
                    each.refused = 0
                    each.no_room |= not answer.unknown
                    each.unknown |= answer.unknown
                left.append(each)
        return left

    def _give_up(self, extent: _Extent, reply: pb.DrainReply) -> None:
        if extent.no_room:
            reply.unfit_bytes += extent.size_bytes
        elif extent.unknown:
            reply.unknown_bytes += extent.size_bytes
