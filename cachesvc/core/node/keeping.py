"""This node's part in a cluster: it keeps what it owns, and fetches that for other nodes too.

Where the claimed data does not fit the node, only owned extents are kept (`Policy.keeps`). A read of an owner's extent on
another node would not bring it to the owner, so the other node asks the owner, which fetches the extent and passes it on.
Such fills have slots of their own: nodes that wait for each other's fills must not hold each other's slots. A node that
cannot read the source is helped in the same way, by any node that has claimed the dataset.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from cachesvc.core.events import PeerWants, Planned, ViewChanged
from cachesvc.core.model import ExtentId
from cachesvc.core.node.prefetch import in_progress
from cachesvc.core.records.dataset_state import DatasetState
from cachesvc.core.records.incremental import IncrementalWork, WorkKind
from cachesvc.core.tiering.copies import Copies
from cachesvc.core.tiering.policy import Requester
from cachesvc.core.tiering.role_changes import RoleChanges

WAITING = 4
"""Extents that wait for a slot, as a multiple of the slots: peers wait for them."""


class Keeping:
    """Extents that are fetched for peers, each from the peer's question to the start of its fill."""

    def __init__(self, copies: Copies, roles: RoleChanges, work: IncrementalWork) -> None:
        self._copies = copies
        self._policy = copies.policy
        self._roles = roles
        self._work = work
        self._wanted: dict[ExtentId, Requester] = {}
        self._streamed = False

    def view_changed(self, event: ViewChanged) -> None:
        """Take another view of the cluster, and give all copies their roles anew where owners changed."""
        others = event.view.capacity_bytes - event.view.weight_of(event.view.me)
        self._policy.shares.others_bytes = others
        if self._policy.ownership.set(event.view):
            self._place_all()

    def planned(self, event: Planned) -> None:
        """Own what local plans read, in place of what the view says."""
        entry = self._copies.entries.get(event.rows[0][0]) if event.rows else None
        dataset = entry.home(event.job) if entry else None
        if dataset is not None:
            found = chain((extent for extent, _, _ in event.rows), event.following) if event.local else ()
            self._set_local(dataset, event.job, frozenset(found))

    def job_ended(self, job: int) -> None:
        """Forget what a job's local plans read."""
        for dataset in self._policy.shares.datasets.values():
            self._set_local(dataset, job, frozenset())

    def _set_local(self, dataset: DatasetState, job: int, extents: frozenset[ExtentId]) -> None:
        if dataset.set_local(job, extents):
            self._work.do((WorkKind.PLACE, dataset.id), self._place(dataset), len(dataset.extents))

    def peer_wants(self, event: PeerWants) -> None:
        """Fetch an extent that a peer asked for, if this node should keep it, or the peer has no source, and there is
        room."""
        if self.lacks(event.extent, event.without_source or event.handed_on) and not self.full:
            requester = Requester.UNPLANNED_READER if event.without_source else Requester.PREFETCH
            self._wanted[event.extent] = Requester.LEAVING_NODE if event.handed_on else requester
            self.feed()

    def lacks(self, extent: ExtentId, may_fetch: bool = False) -> bool:
        """Return whether this node should keep an extent that it neither has nor fetches, and that peers may ask
        for. `may_fetch`: whether it may fetch it at all."""
        entry = self._copies.entries.get(extent)
        if entry is None or not entry.datasets or extent in self._wanted or in_progress(entry):
            return False
        if entry.made_from is not None:  # of a user of this node
            return False
        return may_fetch or (self._policy.reserve.streams and entry.owned)

    @property
    def full(self) -> bool:
        """No more extents may wait for a slot."""
        return len(self._wanted) >= WAITING * self._policy.settings.max_fills

    def will_keep(self, extent: ExtentId) -> bool:
        """Return whether an extent is resident, is being filled, or will be as soon as an eviction ends."""
        entry = self._copies.entries.get(extent)
        return entry is not None and (entry.ready or entry.filling() or extent in self._wanted)

    def prefetches(self, extent: ExtentId) -> bool:
        """Return whether a prefetch here will fetch an extent that this node owns."""
        entry = self._copies.entries.get(extent)
        return (
            entry is not None
            and entry.owned
            and any(
                each.prefetched and extent not in each.stuck and extent not in each.failed
                for each in entry.datasets
            )
        )

    def feed(self) -> None:
        """Start the fills that have room. One that finds none is given up, and the peer fetches the extent itself."""
        if self._policy.ownership.shared and self._streamed != self._policy.reserve.streams:
            self._streamed = self._policy.reserve.streams
            self._place_all()
        for extent in tuple(self._wanted):
            if self._copies.peer_fills >= self._policy.settings.max_fills:
                return
            entry = self._copies.entries.get(extent)
            if entry is None or in_progress(entry):
                del self._wanted[extent]
                continue
            placement = self._policy.place(entry, self._wanted[extent])
            if self._copies.carry_out(placement, entry):
                entry.copies[-1].for_peer = True
            elif placement.room_coming:
                continue
            del self._wanted[extent]

    def _place_all(self) -> None:
        """Mark the owners of all claimed extents, and give their copies the roles that follow. Prefetches begin anew."""
        for dataset in self._policy.shares.datasets.values():
            dataset.prefetch_at = 0
            self._work.do((WorkKind.PLACE, dataset.id), self._place(dataset), len(dataset.extents))

    def _place(self, dataset: DatasetState) -> Iterator[None]:
        for extents in self._work.cut(dataset.extents):
            found = (self._copies.entries.get(extent) for extent, _ in extents)
            entries = [entry for entry in found if entry is not None and dataset in entry.datasets]
            self._policy.ownership.mark(entries)
            self._policy.reserve.retune()
            for entry in entries:
                self._roles.reassess(entry)
            yield
