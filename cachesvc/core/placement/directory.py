"""The directory of the extents that a node owns, or stands in for: which nodes hold each one, and which are filling it.

A node that asks for an extent is told to read it from another node, or to fetch it from the source. Either way it is noted
as filling the extent, and later nodes may be sent to it: a node that is filling passes on the blocks that it has. A node
is sent where the fewest others read. So N nodes that want one extent at once form a chain, and each link carries the
extent once. The source is named to the first of them only.

No node is sent to one that reads, over however many others, from itself. A note of a fill is a lease: it ends when its
node reports the extent filled or dropped, or when it was not renewed for `FILL_LEASE_S`. The fills that read from it go
on, and ask again if they must.

A node that waits too long for a fill reports it *late*. No node is sent to that fill, or to one that it reads from, until
it makes progress or asks anew. So where the first of a chain stands still, one of those behind it is told to use the
source, and the others follow that one, in whichever order they ask.

The directory is soft state: a node may forget all of it, and the cost is a duplicate fetch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from cachesvc.core.limits import FILL_LEASE_S
from cachesvc.core.model import ExtentId

SOURCE = ""
"""The name of the source, where a node is told to read from."""


@dataclass(slots=True, eq=False)
class _Place:
    """A node that holds an extent or is filling it."""

    node: str
    generation: int
    filling: bool = True
    renewed_at: float = 0.0
    upstream: str = SOURCE
    """Where a fill reads the extent. The node named may have left the directory meanwhile."""
    sent_count: int = 0
    """Nodes that were sent here."""
    late: bool = False
    """A node waited too long for this fill."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The place to read an extent: from `node`, which may still be `filling` it, or from the source where `node` is
    `SOURCE`. `generation` numbers the lease of the asking node."""

    node: str
    filling: bool
    generation: int


class ExtentDirectory:
    """Places by extent. Methods cost O(places of one extent) for each extent, unless they say otherwise."""

    def __init__(self, keeper: str = "") -> None:
        """`keeper`: the node that owns the extents. Copies on other nodes may be evicted at any time, so a node is sent to
        the keeper where it has the choice."""
        self._keeper = keeper
        self._places: dict[ExtentId, list[_Place]] = {}
        self._noted: dict[str, set[ExtentId]] = {}
        """The extents of each node's places."""
        self._generation = 0

    def __len__(self) -> int:
        return len(self._places)

    def lookup(
        self,
        asker: str,
        extent: ExtentId,
        now: float,
        failed: Collection[str] = (),
        away: Collection[str] = (),
        behind: Collection[str] = (),
        late: Collection[str] = (),
    ) -> Answer:
        """Tell `asker` where to read an extent, and note it as filling it. The answer is never a node that `failed` to
        give it, one that is `away`, or one that would make a circle: nodes `behind` the asker may be reading from it,
        and other nodes from them. The leases of nodes that `failed` end. `late`: nodes from which the asker waited too long
        for the extent."""
        self._note_late(asker, extent, late)
        others = [
            place
            for place in self._places.get(extent, ())
            if place.node != asker
            and (not place.filling or (now - place.renewed_at <= FILL_LEASE_S and place.node not in failed))
        ]
        slow = {place.node for place in others if place.late or (not place.filling and place.node in late)}
        chosen = self._choose(others, {asker, *behind}, {*failed, *away, *slow})
        lease = _Place(asker, self._next_generation(), renewed_at=now)
        if chosen is not None:
            lease.upstream = chosen.node
            chosen.sent_count += 1
        self._set(extent, [*others, lease])
        return Answer(lease.upstream, chosen is not None and chosen.filling, lease.generation)

    def holders(self, extent: ExtentId) -> list[str]:
        """The nodes that hold an extent."""
        return [place.node for place in self._places.get(extent, ()) if not place.filling]

    def upstream(self, node: str, extent: ExtentId) -> str:
        """Return the node that `node` was told to read an extent from; SOURCE also where nothing is noted."""
        place = self._find(node, extent)
        return SOURCE if place is None else place.upstream

    def wanted(self, extent: ExtentId, now: float) -> bool:
        """Return whether some node holds an extent or has the lease to fill it."""
        return any(
            not place.filling or (now - place.renewed_at <= FILL_LEASE_S and not place.late)
            for place in self._places.get(extent, ())
        )

    def filled(self, node: str, extents: Iterable[ExtentId]) -> None:
        """Note that a node holds extents, whether it asked for them or announces them."""
        for extent in extents:
            place = self._find(node, extent)
            if place is None:
                place = _Place(node, self._next_generation())
                self._set(extent, [*self._places.get(extent, ()), place])
            place.filling, place.late, place.upstream = False, False, SOURCE

    def renew(self, node: str, fills: Iterable[tuple[ExtentId, int]], now: float) -> list[ExtentId]:
        """Note that a node's fills, each named by its extent and the generation of its lease, make progress. The extents
        whose lease has ended meanwhile: another node may be filling them too."""
        ended = []
        for extent, generation in fills:
            place = self._find(node, extent)
            if place is None or place.generation != generation:
                ended.append(extent)
            else:
                place.renewed_at, place.late = now, False
        return ended

    def dropped(self, node: str, extents: Iterable[ExtentId]) -> None:
        """Note that a node neither holds extents any more nor fills them."""
        for extent in extents:
            self._remove(node, extent)

    def forget(self, node: str) -> None:
        """Forget everything about a node that has left. O(places of the node)."""
        for extent in tuple(self._noted.get(node, ())):
            self._remove(node, extent)

    def announced_anew(self, node: str, extents: Iterable[ExtentId], now: float) -> None:
        """Replace the note of all extents that a node holds. Of its leases those that have ended are forgotten.
        O(places of the node)."""
        held = set(extents)
        for extent in self._noted.get(node, set()) - held:
            place = self._find(node, extent)
            if place is not None and not (place.filling and now - place.renewed_at <= FILL_LEASE_S):
                self._remove(node, extent)
        self.filled(node, held)

    def extents(self) -> list[ExtentId]:
        """The extents about which something is noted. O(directory)."""
        return list(self._places)

    def nodes(self) -> set[str]:
        """The nodes about which something is noted."""
        return set(self._noted)

    def _choose(
        self, places: Collection[_Place], behind: set[str], left_out: Collection[str]
    ) -> _Place | None:
        """The place that the fewest fills read from. Of several, one that is complete; of these, the keeper's; then the one
        to which the fewest nodes were ever sent, and the first noted. Never one of those `behind`, or one that reads from
        them."""
        readers = Counter(place.upstream for place in places if place.filling)
        left_out = {*left_out, *_downstream(places, behind)}
        usable = (place for place in places if place.node not in left_out)
        return min(
            usable,
            key=lambda each: (
                readers[each.node],
                each.filling,
                each.node != self._keeper,
                each.sent_count,
                each.generation,
            ),
            default=None,
        )

    def _note_late(self, asker: str, extent: ExtentId, late: Collection[str]) -> None:
        """Mark the fills for which a node waited, each with those that it reads from. Fills that have asked anew since the
        node did are not to blame: they have just been sent elsewhere."""
        lease = self._find(asker, extent)
        for node in late:
            place = self._find(node, extent)
            while place is not None and place.filling and not place.late:
                if lease is not None and place.generation > lease.generation:
                    break
                place.late = True
                place = self._find(place.upstream, extent)

    def _next_generation(self) -> int:
        self._generation += 1
        return self._generation

    def _find(self, node: str, extent: ExtentId) -> _Place | None:
        return next((place for place in self._places.get(extent, ()) if place.node == node), None)

    def _remove(self, node: str, extent: ExtentId) -> None:
        self._set(extent, [place for place in self._places.get(extent, ()) if place.node != node])

    def _set(self, extent: ExtentId, places: list[_Place]) -> None:
        before = {place.node for place in self._places.get(extent, ())}
        after = {place.node for place in places}
        for node in after - before:
            self._noted.setdefault(node, set()).add(extent)
        for node in before - after:
            noted = self._noted[node]
            noted.discard(extent)
            if not noted:
                del self._noted[node]
        if places:
            self._places[extent] = places
        else:
            self._places.pop(extent, None)


def _downstream(places: Collection[_Place], names: set[str]) -> set[str]:
    """Nodes, and the fills that read from them directly or over others."""
    nodes = set[str]()
    while names:
        nodes |= names
        names = {place.node for place in places if place.filling and place.upstream in names} - nodes
    return nodes
