"""Nodes under a virtual clock, each with the real search and health, over the real directory: one has no source, or it is
slow for all. All chance comes from a seed."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable
from functools import partial

import pytest

from cachesvc.core.limits import FILL_LATE_S
from cachesvc.core.model import ExtentId
from cachesvc.core.placement.directory import SOURCE, ExtentDirectory
from cachesvc.core.placement.peer_health import PlacesHealth
from cachesvc.core.placement.place_search import (
    LATE_FACTOR,
    LEARNED_FILLS,
    MOST_DOUBLINGS,
    SOURCE_FACTOR,
    FillTimes,
    Hedges,
    LateRead,
    PlaceSearch,
)
from cachesvc.core.rates.circuit_breaker import PEER_TRIP

SIZE, COPY_S = 64 << 20, 0.05
SICK = "n0"


class Fill:
    """One node's fill under way."""

    def __init__(self, extent: ExtentId, search: PlaceSearch, began: float) -> None:
        self.extent, self.search, self.began = extent, search, began
        self.place, self.filling, self.since = SOURCE, False, began
        self.tries = 0


class Cluster:
    """`nodes` nodes that read the same extents, each in an order of its own, one after the other. A fetch from the source
    takes `source_s`, and for the sick node, if there is one, for ever."""

    def __init__(self, nodes: int, extents: int, source_s: float, sick: bool, seed: int) -> None:
        chance = random.Random(seed)
        self.names = [f"n{number}" for number in range(nodes)]
        self.extents = [ExtentId(number.to_bytes(16, "big")) for number in range(extents)]
        self.left = {name: chance.sample(self.extents, extents) for name in self.names}
        self.health = {name: PlacesHealth() for name in self.names}
        self.times = {name: FillTimes() for name in self.names}
        self.hedges = {name: Hedges() for name in self.names}
        self.waits: dict[str, list[float]] = {name: [] for name in self.names}
        self.fetched = 0
        self._directory, self._source_s, self._sick = ExtentDirectory(), source_s, sick
        self._now, self._count = 0.0, 0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._fills: dict[str, Fill] = {}
        for name in self.names:
            self._after(chance.random() / 100, partial(self._next, name))

    def run(self) -> None:
        while self._due and any(self.left.values()) | bool(self._fills):
            self._now, _, act = heapq.heappop(self._due)
            act()

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._due, (self._now + seconds, self._count, act))

    def _next(self, name: str) -> None:
        if self.left[name]:
            extent = self.left[name].pop()
            search = PlaceSearch(SIZE, self.times[name], self.hedges[name])
            self._fills[name] = Fill(extent, search, self._now)
            self._ask(name)

    def _ask(self, name: str) -> None:
        fill, health = self._fills[name], self.health[name]
        left_out = health.left_out(self._now)
        found = self._directory.lookup(
            name, fill.extent, self._now, fill.search.failed, left_out, late=fill.search.late
        )
        if not health.begin(found.node, self._now) and found.node not in (SOURCE, *left_out):
            return self._ask(name)
        if found.node == SOURCE and SOURCE in (*fill.search.late, *left_out):
            return self._help(name, fill)
        fill.place, fill.filling, fill.since = found.node, found.filling, self._now
        fill.tries += 1
        patience = fill.search.begin(found.node)
        if found.node == SOURCE:
            self.hedges[name].began(fill.extent, self._now)
            if not (self._sick and name == SICK):
                self._after(self._source_s, partial(self._came, name, fill, fill.tries))
        elif not found.filling:
            self._after(COPY_S, partial(self._came, name, fill, fill.tries))
        if patience.wait_s < math.inf:
            self._after(patience.wait_s, partial(self._late, name, fill, fill.tries))
        return None

    def _help(self, name: str, fill: Fill) -> None:
        """Have another node, which has the extents open too, read the source for one that does not."""
        helper = next(each for each in self.names if each != name)
        self._directory.dropped(name, [fill.extent])
        self._directory.lookup(helper, fill.extent, self._now)
        self._after(self._source_s, partial(self._helped, helper, fill.extent))
        fill.place, fill.filling, fill.since = helper, True, self._now
        fill.tries += 1
        fill.search.begin(helper)

    def _helped(self, helper: str, extent: ExtentId) -> None:
        self.fetched += 1
        self._filled(helper, extent)

    def _filled(self, name: str, extent: ExtentId) -> None:
        """Note that a node holds an extent: those that follow its fill have it soon."""
        self._directory.filled(name, [extent])
        for other, theirs in self._fills.items():
            if theirs.extent == extent and theirs.place == name:
                self._after(COPY_S, partial(self._came, other, theirs, theirs.tries))

    def _came(self, name: str, fill: Fill, tries: int) -> None:
        if self._fills.get(name) is not fill or fill.tries != tries:
            return
        del self._fills[name]
        if fill.place == SOURCE:
            self.fetched += 1
            self.hedges[name].ended(fill.extent, True, self._now)
        for verdict in fill.search.gave(fill.place, fill.filling, SIZE, self._now - fill.since):
            self.health[name].judge(verdict, self._now)
        self._filled(name, fill.extent)
        self.waits[name].append(self._now - fill.began)
        self._next(name)

    def _late(self, name: str, fill: Fill, tries: int) -> None:
        if self._fills.get(name) is not fill or fill.tries != tries:
            return
        if fill.place == SOURCE:
            self.hedges[name].ended(fill.extent, False, self._now)
        fill.search.late_at(fill.place, "late", LateRead(self._now, fill.filling))
        self._ask(name)


@pytest.mark.parametrize("nodes", [3, 8])
@pytest.mark.parametrize("seed", range(8))
def test_a_member_without_a_source_holds_up_each_other_one_a_few_times(nodes: int, seed: int) -> None:
    cluster = Cluster(nodes, 200, source_s=0.5, sick=True, seed=seed)
    cluster.run()
    assert [len(waits) for waits in cluster.waits.values()] == [200] * nodes
    assert cluster.fetched <= 1.02 * 200
    for name, waits in cluster.waits.items():
        longest = FILL_LATE_S * (SOURCE_FACTOR if name == SICK else 1) + 1.0
        assert max(waits) <= longest, name
        probes = math.ceil(math.log2(1 + sum(waits) / PEER_TRIP.first_s))
        assert sum(wait > FILL_LATE_S for wait in waits) <= PEER_TRIP.failures + probes, name


@pytest.mark.parametrize("source_s", [0.5, 3.0, 12.0, 40.0])
@pytest.mark.parametrize("seed", range(4))
def test_a_source_that_is_slow_for_all_is_not_asked_more_and_shuts_out_nobody(
    source_s: float, seed: int
) -> None:
    cluster = Cluster(4, 60, source_s, sick=False, seed=seed)
    cluster.run()
    assert [len(waits) for waits in cluster.waits.values()] == [60] * 4
    unlearned = 4 * LEARNED_FILLS if source_s > FILL_LATE_S else 0
    assert cluster.fetched <= 60 + unlearned
    for name, health in cluster.health.items():
        assert not [other for other in cluster.names if other != name and health.of(other).breaker.open]
    assert (
        max(map(max, cluster.waits.values())) <= LATE_FACTOR * max(source_s, FILL_LATE_S) * 2**MOST_DOUBLINGS
    )
