"""The directory of the extents that a node owns, or stands in for: which nodes hold each one, and which are filling it.

A node that asks for an extent is told to read it from another node, or to fetch it from the source. Either way it is noted
as filling the extent, and later nodes may be sent to it: a node that is filling passes on the blocks that it has. A node
is sent where the fewest others read, so N nodes that want one extent at once form a chain, and each link carries the
extent once.

A note ends when its node reports the extent filled, dropped or failed, or when it was not renewed for `LEASE_S`. The
directory is soft state: a node may forget all of it, and the cost is a duplicate fetch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from cachesvc.core.model import ExtentId

LEASE_S = 10.0
"""A fill that has made no progress for this time is given to another node."""


@dataclass(slots=True, eq=False)
class _Place:
    """A node that holds an extent or is filling it."""

    node: str
    generation: int
    filling: bool = True
    renewed_at: float = 0.0
    upstream: _Place | None = None
    """The node that it reads the extent from; None where that is the source."""
    readers: set[str] = field(default_factory=set)
    """The nodes that read the extent from this one."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Where a node is to read an extent: from `node`, which may still be `filling` it, or from the source where `node` is
    "". `generation` numbers the fill that the asking node was noted with."""

    node: str
    filling: bool
    generation: int


class Directory:
    """Places by extent. All methods are O(places of one extent) unless they say otherwise."""

    def __init__(self) -> None:
        self._places: dict[ExtentId, dict[str, _Place]] = {}
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
    ) -> Answer:
        """Tell `asker` where to read an extent, and note it as filling it. Nodes that `failed` for it before and nodes that
        are `away` are left out; a fill of a node that failed is forgotten."""
        places = self._places.setdefault(extent, {})
        self._expire(extent, places, now)
        for node in failed:
            if (place := places.get(node)) is not None and place.filling:
                self._remove(extent, node)
        places = self._places.setdefault(extent, {})
        if (former := places.get(asker)) is not None:
            self._detach(places, former)
            readers = former.readers
        else:
            readers = set()
        chosen = self._choose(places, asker, {*failed, *away})
        self._generation += 1
        place = _Place(asker, self._generation, renewed_at=now, upstream=chosen, readers=readers)
        places[asker] = place
        if chosen is None:
            return Answer("", False, place.generation)
        chosen.readers.add(asker)
        return Answer(chosen.node, chosen.filling, place.generation)

    def held(self, extent: ExtentId, away: Collection[str] = ()) -> bool:
        """Return whether some node holds an extent."""
        return any(
            not place.filling and node not in away for node, place in self._places.get(extent, {}).items()
        )

    def holders(self, extent: ExtentId) -> list[str]:
        """The nodes that hold an extent."""
        return [node for node, place in self._places.get(extent, {}).items() if not place.filling]

    def wanted(self, extent: ExtentId) -> bool:
        """Return whether some node holds an extent or is filling it."""
        return bool(self._places.get(extent))

    def filled(self, node: str, extents: Iterable[ExtentId], now: float) -> None:
        """Note that a node holds extents, whether it asked for them or announces them. O(extents)."""
        for extent in extents:
            places = self._places.setdefault(extent, {})
            place = places.get(node)
            if place is None:
                self._generation += 1
                place = places[node] = _Place(node, self._generation)
            place.filling, place.renewed_at = False, now
            self._detach(places, place)

    def renew(self, node: str, extents: Iterable[ExtentId], now: float) -> None:
        """Note that a node's fills of extents make progress. O(extents)."""
        for extent in extents:
            place = self._places.get(extent, {}).get(node)
            if place is not None:
                place.renewed_at = now

    def dropped(self, node: str, extents: Iterable[ExtentId]) -> None:
        """Note that a node neither holds extents any more nor fills them. O(extents)."""
        for extent in extents:
            self._remove(extent, node)

    def forget(self, node: str) -> None:
        """Forget everything about a node: it has left, or announces all that it holds anew. O(directory)."""
        for extent in [extent for extent, places in self._places.items() if node in places]:
            self._remove(extent, node)

    def _choose(self, places: dict[str, _Place], asker: str, left_out: Collection[str]) -> _Place | None:
        """The place with the fewest readers; of several, one that is complete, then the first noted. Never one that reads
        from the asker itself."""
        usable = (
            place
            for place in places.values()
            if place.node != asker and place.node not in left_out and not _reads_from(place, asker)
        )
        return min(usable, key=lambda each: (len(each.readers), each.filling, each.generation), default=None)

    def _expire(self, extent: ExtentId, places: dict[str, _Place], now: float) -> None:
        stale = [p.node for p in places.values() if p.filling and now - p.renewed_at > LEASE_S]
        for node in stale:
            self._remove(extent, node)

    def _remove(self, extent: ExtentId, node: str) -> None:
        places = self._places.get(extent)
        place = places.pop(node, None) if places else None
        if places is None or place is None:
            return
        self._detach(places, place)
        for other in places.values():
            if other.upstream is place:
                other.upstream = None
        if not places:
            del self._places[extent]

    def _detach(self, places: dict[str, _Place], place: _Place) -> None:
        if place.upstream is not None:
            place.upstream.readers.discard(place.node)
            place.upstream = None


def _reads_from(place: _Place, node: str) -> bool:
    upstream = place.upstream
    while upstream is not None:
        if upstream.node == node:
            return True
        upstream = upstream.upstream
    return False
