"""`python -m bench scale [NODES EXTENTS]`: a cluster of 100 nodes and 10,000 extents, simulated with the daemon's own core.

It prints the tables of docs/scale.md, and writes its plot. It takes some ten minutes of one core, and 1 GiB.
"""

from __future__ import annotations

import resource
import time
from collections import Counter
from pathlib import Path

from bench.grid import Grid
from cachesvc.core.limits import GREET_S
from cachesvc.core.order.epoch_order import ShuffleScope
from cachesvc.core.placement.roster import PROTOCOL_VERSION, Endpoint, Greeting, Roster
from cachesvc.core.placement.view import Member, View
from cachesvc.simulate.simulated_node import NodeSpec, tiers_of
from cachesvc.simulate.simulation import Simulation
from cachesvc.simulate.trace import Workload

ROOMS: dict[ShuffleScope, tuple[float, ...]] = {"job": (0.5, 0.8, 1.25), "node": (0.5, 1.0)}
"""The room of all nodes together, as a multiple of the data."""
LOST_AT = 1.25
GREETED_S = 120.0
PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "scale.svg"
WIDTH, HEIGHT, EDGE = 640, 360, 48
COLOURS = {"bound": "#888", "job": "#2563eb", "node": "#16a34a"}


def main(nodes: int = 100, extents: int = 10_000) -> None:
    """Print the tables, and write the plot."""
    rows, hits = [], {scope: list[tuple[float, float]]() for scope in ROOMS}
    for scope, rooms in ROOMS.items():
        for room in rooms:
            row, hit_rate = _epochs(nodes, extents, room, scope)
            rows.append(row)
            hits[scope].append((room, hit_rate))
            print(" | ".join(row), flush=True)
    head = ("`shuffle_scope`", "room / data", "bound", "less windows", "hits", "source, cold / data", "source, warm / data",
            "between nodes, warm / data", "source after a loss / data", "minutes", "GiB")  # fmt: skip
    print(Grid(f"{nodes} nodes, {extents:,} extents", head, rows).markdown())
    print(_moved(nodes, extents))
    print(_greetings(nodes))
    PICTURE.write_text(plot(hits))


def _epochs(nodes: int, extents: int, room: float, scope: ShuffleScope) -> tuple[list[str], float]:
    """One row, and the hit rate of the warm epoch. A job has one rank on each node. With `LOST_AT` a third epoch follows,
    after another machine has taken the place of a node."""
    began, sent, lost = time.monotonic(), [0], room == LOST_AT
    work = Workload(
        extents, 4, batch=4 * nodes, epochs=2 + lost, ranks=nodes, nodes=nodes, shuffle_scope=scope
    )
    simulation = Simulation(NodeSpec(tiers_of(int(room * work.size_bytes / nodes))), work)

    def between(ended: int) -> None:
        sent.append(simulation.peer_bytes)
        if ended == 2:
            simulation.replace("node000")

    cold, warm, *after = simulation.run(between)
    size, bound = work.size_bytes, min(1.0, room)
    windows = sum(tier.reserve_bytes for node in simulation.nodes for tier in node.core.policy.tiers.values())
    sources = [each.source_bytes / size for each in (cold, warm, *after)]
    figures = (
        bound,
        min(bound, room - windows / size),
        warm.hit_rate,
        *sources[:2],
        (sent[2] - sent[1]) / size,
    )
    took = f"{(time.monotonic() - began) / 60:.1f}"
    memory = f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f}"
    shown = [f"{each:.3f}" for each in (*figures, *sources[2:])]
    return [f"`{scope}`", f"{room:g}", *shown, *[""] * (not lost), took, memory], warm.hit_rate


def _moved(nodes: int, extents: int) -> str:
    """Return a sentence on which extents change their owner when one node goes away."""
    members = tuple(Member(f"node{at:03}", 1) for at in range(nodes))
    every = [Workload(extents).extent(at) for at in range(extents)]
    before, after = (
        [row[0] for row in View("node001", each).ranked(every, 1)] for each in (members, members[1:])
    )
    moved = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert {old for old, _ in moved} <= {"node000"}
    most = max(Counter(new for _, new in moved).values())
    return (
        f"{len(moved)} of {extents:,} extents have another owner without one of {nodes} nodes, all of them that node's, and"
        f" no other node gets more than {most} of them."
    )


def _greetings(nodes: int) -> str:
    """Return a sentence on how often members greet each other, where all answer at once."""
    greetings = [Greeting(f"node{at:03}", str(at), PROTOCOL_VERSION, 1) for at in range(nodes)]
    listed = [Endpoint(each.name) for each in greetings]
    rosters = [Roster(each, 600.0) for each in greetings]
    by_name, count, now = dict(zip((each.name for each in greetings), greetings, strict=True)), 0, 0.0
    for roster in rosters:
        roster.listed(listed, now)
    while now < GREETED_S:
        for roster in rosters:
            for address in roster.due(now):
                roster.greeted(address, by_name[address], now)
                count += now >= GREET_S
        now = min(roster.next_deadline() for roster in rosters)
    each = count / (GREETED_S - GREET_S) / nodes
    return f"{each * nodes:,.0f} greetings a second in all, {each:.1f} from each node and as many to it."


def plot(hits: dict[ShuffleScope, list[tuple[float, float]]]) -> str:
    """Draw hit rates over the room, as SVG."""
    widest = max(room for points in hits.values() for room, _ in points)

    def at(room: float, hit_rate: float) -> str:
        return f"{EDGE + room / widest * (WIDTH - 2 * EDGE):.1f},{HEIGHT - EDGE - hit_rate * (HEIGHT - 2 * EDGE):.1f}"

    def text(x: float, y: float, words: str, anchor: str = "middle", colour: str = "#555") -> str:
        return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="{colour}">{words}</text>'

    bound = [(0.0, 0.0), (1.0, 1.0), (widest, 1.0)]
    lines = {"bound": bound, **{str(name): points for name, points in hits.items()}}
    names = {"bound": "bound: min(1, room)", "job": 'shuffle_scope="job"', "node": 'shuffle_scope="node"'}
    drawn = [
        f'<polyline points="{" ".join(at(*each) for each in points)}" fill="none" stroke="{COLOURS[name]}"/>'
        for name, points in lines.items()
    ]
    drawn += [
        f'<circle cx="{x}" cy="{y}" r="4" fill="{COLOURS[name]}"/>'
        for name, points in hits.items()
        for x, y in (at(*each).split(",") for each in points)
    ]
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, y = (float(each) for each in at(0, tick).split(","))
        drawn.append(text(x - 6, y + 4, f"{tick:g}", "end"))
        drawn.append(f'<line x1="{x:.0f}" x2="{WIDTH - EDGE}" y1="{y:.0f}" y2="{y:.0f}" stroke="#8884"/>')
    for room in sorted({room for points in hits.values() for room, _ in points}):
        drawn.append(text(float(at(room, 0).split(",")[0]), HEIGHT - EDGE + 18, f"{room:g}"))
    drawn.append(text(WIDTH / 2, HEIGHT - 8, "room of all nodes / data"))
    drawn += [
        text(WIDTH - EDGE - 8, HEIGHT - EDGE - 60 + 18 * row, names[name], "end", COLOURS[name])
        for row, name in enumerate(names)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="13">'
        f"<title>Hits of warm epochs over the room of all nodes</title>{''.join(drawn)}</svg>\n"
    )
