"""Tells owners and stand-ins what this node holds: changes soon, and everything again now and then.

A directory is soft state. It is complete again after each round of `REFRESH_S`, and at once for a node that has started or
whose share changed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc

from cachesvc.core.model import ExtentId
from cachesvc.core.placement.roster import PROTOCOL_VERSION
from cachesvc.core.placement.view import Member, View
from cachesvc.daemon.peers.members import Members
from cachesvc.daemon.peers.messages import WrongCopy
from cachesvc.daemon.peers.owned_extents import OwnedExtents
from cachesvc.daemon.peers.peer_calls import MOST_IDS, PeerCalls, pack_fills, reason
from cachesvc.v1 import cachesvc_pb2 as pb

log = logging.getLogger(__name__)
FLUSH_S = 0.05
"""Changes of this time go to a node in one call."""
REFRESH_S = 60.0
STEP = 4096
"""Extents whose owners are computed at a time."""
SENDERS = 8
"""Nodes that are told at a time, so that those that do not answer do not delay the others."""


@dataclass(slots=True)
class _Batch:
    """News for one node. The last change of an extent counts."""

    held: dict[ExtentId, bool] = field(default_factory=dict)
    progressing: dict[ExtentId, int] = field(default_factory=dict)
    wrong: dict[bool, list[ExtentId]] = field(default_factory=lambda: {False: [], True: []})
    """Copies of the node that failed their checksums, and those that differ from the source."""
    anew: bool = False


class Announcements:
    """Safe from any thread. One thread sends."""

    def __init__(self, me: str, members: Members, owned: OwnedExtents, calls: PeerCalls) -> None:
        self._me = me
        self._members = members
        self._owned = owned
        self._calls = calls
        self._lock = threading.Lock()
        self._held: set[ExtentId] = set()
        self._generations: dict[ExtentId, int] = {}
        self._changes: dict[ExtentId, bool] = {}
        self._progressing: dict[ExtentId, int] = {}
        self._wrong: list[WrongCopy] = []
        self._all_to: set[str] = set()
        self._wake = threading.Event()
        self._pool = ThreadPoolExecutor(SENDERS, "announce")
        self._placement: frozenset[Member] = frozenset()
        self._present: frozenset[str] = frozenset()

    def start(self) -> None:
        """Send from now on."""
        threading.Thread(target=self._run, name="announcements", daemon=True).start()

    @property
    def extents(self) -> int:
        """The number of extents that this node holds."""
        return len(self._held)

    def held(self, extents: Iterable[ExtentId]) -> bytes:
        """Return a byte for each extent, 1 where this node holds it."""
        with self._lock:
            return bytes(extent in self._held for extent in extents)

    def changed(
        self,
        filled: Iterable[ExtentId],
        dropped: Iterable[ExtentId],
        progressing: Iterable[ExtentId],
        anew: bool,
    ) -> None:
        """Note what this node holds now, and holds no more. Its own directory knows at once."""
        filled, dropped, progressing = list(filled), list(dropped), list(progressing)
        with self._lock:
            fills = [(extent, self._generations.get(extent, 0)) for extent in progressing]
            if anew:
                self._changes.update(dict.fromkeys(self._held, False))
                self._held.clear()
            for extent in dropped:
                self._held.discard(extent)
                self._changes[extent] = False
                self._generations.pop(extent, None)
            for extent in filled:
                self._held.add(extent)
                self._changes[extent] = True
                self._generations.pop(extent, None)
            self._progressing.update(fills)
        self._owned.report(self._me, filled, dropped, fills, anew)
        self._wake.set()

    def leased(self, extent: ExtentId, generation: int) -> None:
        """Note the generation of the lease under which this node fills an extent."""
        with self._lock:
            self._generations[extent] = generation

    def wrong(self, copy: WrongCopy) -> None:
        """Note that a copy from another node was wrong."""
        with self._lock:
            self._wrong.append(copy)
        self._wake.set()

    def view_changed(self, view: View) -> None:
        """Announce everything to all where shares changed, else to the members that are back."""
        present = frozenset(member.name for member in view.candidates) - view.away
        with self._lock:
            moved, self._placement = view.placement() != self._placement, view.placement()
            back, self._present = present - self._present, present
        self.tell_all(present if moved else back)

    def tell_all(self, nodes: Iterable[str]) -> None:
        """Announce everything anew to some nodes."""
        with self._lock:
            self._all_to.update(nodes)
        self._wake.set()

    def _run(self) -> None:
        refresh_at = time.monotonic() + REFRESH_S
        while True:
            self._wake.wait(REFRESH_S / 4)
            time.sleep(FLUSH_S)
            self._wake.clear()
            if time.monotonic() >= refresh_at:
                refresh_at = time.monotonic() + REFRESH_S
                self.tell_all(member.name for member in self._members.view.candidates)
            self._flush()

    def _flush(self) -> None:
        with self._lock:
            changes, self._changes = self._changes, {}
            progressing, self._progressing = self._progressing, {}
            wrong, self._wrong = self._wrong, []
            to_all, self._all_to = self._all_to, set()
            held = list(self._held) if to_all else []
        view = self._members.view
        batches: defaultdict[str, _Batch] = defaultdict(_Batch)
        for extent, nodes in _informed(view, list(changes)):
            for node in nodes:
                batches[node].held[extent] = changes[extent]
        for extent, nodes in _informed(view, list(progressing)):
            for node in nodes:
                batches[node].progressing[extent] = progressing[extent]
        for copy in wrong:
            batches[copy.node].wrong[copy.differs].append(copy.extent)
        for node in to_all:
            batches[node].anew = True
        for extent, nodes in _informed(view, held):
            for node in to_all.intersection(nodes):
                batches[node].held[extent] = True
        others = [
            (node, each) for node, each in batches.items() if node != self._me and node not in view.away
        ]
        list(self._pool.map(self._send, others))  # raises what went wrong

    def _send(self, told: tuple[str, _Batch]) -> None:
        node, batch = told
        try:
            for request in _requests(self._me, batch):
                address = self._members.address_of(node)
                if not address:
                    return  # it is told everything when it is back
                self._calls.report(address, request)
        except grpc.RpcError as error:
            self._members.failed(node, reason(error))


def _requests(me: str, batch: _Batch) -> Iterator[pb.ReportRequest]:
    """The calls that tell a batch: one, unless it names very many extents."""
    filled = [extent for extent, held in batch.held.items() if held]
    dropped = [extent for extent, held in batch.held.items() if not held]
    yield pb.ReportRequest(
        protocol=PROTOCOL_VERSION,
        node=me,
        filled=b"".join(filled[:MOST_IDS]),
        dropped=b"".join(dropped[:MOST_IDS]),
        progressing=pack_fills(batch.progressing.items()),
        anew=batch.anew,
        wrong=b"".join(batch.wrong[False]),
        differing=b"".join(batch.wrong[True]),
    )
    for at in range(MOST_IDS, max(len(filled), len(dropped)), MOST_IDS):
        yield pb.ReportRequest(
            protocol=PROTOCOL_VERSION,
            node=me,
            filled=b"".join(filled[at : at + MOST_IDS]),
            dropped=b"".join(dropped[at : at + MOST_IDS]),
        )


def _informed(view: View, extents: Sequence[ExtentId]) -> Iterable[tuple[ExtentId, tuple[str, ...]]]:
    """The nodes that are to know the holders of each extent: its owner, its stand-in, and that of a node that is away."""
    for start in range(0, len(extents), STEP):
        step = extents[start : start + STEP]
        ranks = view.ranked(step)
        for extent, ranked, present in zip(step, ranks, view.askable(step) if view.away else ranks):
            yield extent, tuple(dict.fromkeys([*ranked, *present]))
