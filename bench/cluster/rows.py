"""The rows of `python -m bench cluster`, each figure against its goal.

Each row makes a cluster of its own. D is the dataset, of one record for each extent; source bytes are counted by a proxy
before the S3 server.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from bench.grid import Grid
from cachesvc.client.control import Control
from cachesvc.client.grants import DaemonGrants
from cachesvc.client.protocol import Granted
from cachesvc.core.errors import CacheError
from cachesvc.core.tiering.stream_window import WINDOW_SHARE
from testbed.cluster import Cluster, Node
from testbed.namespaces import Unavailable
from testbed.ranks import Ranks
from testbed.records import Records
from testbed.servers import SeaweedFS

SMALL_BYTES = 64 << 10
LARGE_BYTES = 64 << 20
LINK_RATE = 100e6 / 8
"""Bytes/s of the links of a broadcast: 100 Mb/s."""
READ_S = 180.0
"""The time limit of a read."""
READERS = 8
STEP_S = 0.005
"""A training step of a rank under load."""
HEAD = ("case", "measured", "goal", "met", "N", "what was run", "s")


@dataclass(frozen=True)
class Row:
    """A measured value beside its goal. `met`: None where there is no goal."""

    measured: str
    goal: str
    met: bool | None
    nodes: int
    ran: str


@dataclass(frozen=True)
class Bench:
    """The settings of all rows. `extents`: the number of extents of D."""

    root: Path
    server: SeaweedFS
    options: Callable[[Cluster, Node], Sequence[str]]
    extents: int
    numbers: Iterator[int]

    @contextmanager
    def cluster(self, nodes: int, ram: int, **more: Any) -> Iterator[Cluster]:
        """A new cluster whose nodes can reach each other."""
        root = self.root / f"cluster{next(self.numbers)}"
        with Cluster(root, nodes, ram, server=self.server, options=self._options, **more) as cluster:
            cluster.wait_settled()
            yield cluster

    def _options(self, cluster: Cluster, node: Node) -> list[str]:
        """Return the options of a node. Extents from peers are not compared with the source, which would count twice."""
        return [*self.options(cluster, node), "--compare-peers", "0"]

    @property
    def size_bytes(self) -> int:
        """D in bytes."""
        return self.extents * SMALL_BYTES

    def ran(self, what: str) -> str:
        """The text of a row that says what was run, with the size of D."""
        return f"{what}; D = {self.extents:,} extents of 64 KiB"


def cold(bench: Bench, nodes: int, rule: str = "") -> Row:
    """Source bytes while N nodes prefetch at once."""
    with bench.cluster(nodes, 2 * bench.size_bytes, rule=rule) as cluster:
        records = _filled(cluster, bench)
        replies = cluster.prefetch(cluster.nodes, records)
        whole = all(reply.resident_extents == bench.extents for reply in replies)
        ratio = cluster.source.counts.bytes / bench.size_bytes
    what = "all prefetch at once" + (f", the data with the rule {rule}" if rule else "")
    return Row(f"{ratio:.2f} D", "<= 1.02 D", whole and ratio <= 1.02, nodes, bench.ran(what))


def joined(bench: Bench, nodes: int) -> Row:
    """Source bytes of one new node beside full ones."""
    with bench.cluster(nodes, 2 * bench.size_bytes) as cluster:
        records = _filled(cluster, bench)
        for node in cluster.nodes:
            node.prefetch(records)
        cluster.source.reset()
        node = cluster.add()
        cluster.wait_settled()
        whole = node.prefetch(records).resident_extents == bench.extents
        ranges = sum(cluster.source.gets().values())
    what = bench.ran("one more node prefetches beside full ones")
    return Row(f"{ranges} GETs", "0 GETs", whole and ranges == 0, nodes + 1, what)


def hits(bench: Bench, nodes: int, share: float) -> Row:
    """Hits over epochs 2 and 3, where each node has room for a part of D beside its window."""
    ram = int((share + WINDOW_SHARE) * bench.size_bytes) + 2 * SMALL_BYTES
    fetched = []
    with bench.cluster(nodes, ram) as cluster:
        records = _filled(cluster, bench)
        ranks = Ranks(cluster.nodes, records)
        ledger = ranks.read(3, lambda epoch: fetched.append(cluster.source.counts.bytes))
    faults = ledger.faults(3)
    bound = min(1.0, nodes * share)
    rates = [1 - (after - before) / bench.size_bytes for before, after in pairwise(fetched)]
    good = not faults and min(rates, default=0.0) >= bound - 0.03
    what = bench.ran(
        f"3 epochs, a rank for each node, C = {share:.0%} of D; ledger {'exact' if not faults else faults[0]}"
    )
    return Row(" / ".join(f"{rate:.3f}" for rate in rates), f">= {bound - 0.03:.2f}", good, nodes, what)


def stampede(bench: Bench, nodes: int, kill: bool = False) -> Row:
    """GETs of each range while many readers of all nodes open one cold extent; the filling node may be killed."""
    with bench.cluster(nodes, 4 * LARGE_BYTES, extent_bytes=LARGE_BYTES) as cluster:
        records = cluster.source.fill(1, LARGE_BYTES)
        datasets = [_opened(node, records) for node in cluster.nodes]
        if kill:
            cluster.source.proxy.rate = LARGE_BYTES / 16
        with ThreadPoolExecutor(nodes * READERS) as pool:
            asked = [
                pool.submit(_read_one, node, dataset)
                for node, dataset in zip(cluster.nodes, datasets)
                for _ in range(READERS)
            ]
            killed = _kill_filling(cluster) if kill else None
            began = time.monotonic()
            served = [read.result() for read in asked]
            rest_s = time.monotonic() - began
        most = max(cluster.source.gets().values())
    living = [ok for number, ok in enumerate(served) if cluster.nodes[number // READERS] is not killed]
    limit = 2 if kill else 1
    what = f"{READERS} readers on each node open one cold extent of 64 MiB"
    if killed:
        what += f" in 16 s; {killed.name} killed while it fills, the others served {rest_s:.0f} s later"
    measured = f"{most} a range, {sum(living)} of {len(living)} served"
    return Row(measured, f"<= {limit} a range, all served", most <= limit and all(living), nodes, what)


def broadcast(bench: Bench, nodes: int) -> Row:
    """The time until the last node has one extent, over that of one transfer."""
    with bench.cluster(nodes, 4 * LARGE_BYTES, extent_bytes=LARGE_BYTES, kind="namespaces") as cluster:
        one, all_ = (
            cluster.source.fill(1, LARGE_BYTES, name, seed) for seed, name in enumerate(("one", "all"))
        )
        datasets = [_opened(node, all_) for node in cluster.nodes]
        single = _opened(cluster.nodes[0], one)
        for at in range(nodes):
            cluster.slow(at, LINK_RATE)
        cluster.own.shape(LINK_RATE)
        began = time.monotonic()
        served = [_read_one(cluster.nodes[0], single)]
        one_s = time.monotonic() - began
        with ThreadPoolExecutor(nodes) as pool:
            began = time.monotonic()
            served += list(pool.map(_read_one, cluster.nodes, datasets))
            all_s = time.monotonic() - began
    ratio = all_s / one_s
    what = f"one extent of 64 MiB to all nodes over links of 100 Mb/s; one transfer from the source {one_s:.1f} s"
    return Row(f"{ratio:.2f} x", "<= 1.60 x", all(served) and ratio <= 1.6, nodes, what)


def zones(bench: Bench, nodes: int) -> Row:
    """Bytes between two zones while all nodes prefetch."""
    names = ["east" if at < nodes // 2 else "west" for at in range(nodes)]
    with bench.cluster(nodes, 2 * bench.size_bytes, kind="namespaces", zones=names) as cluster:
        records = _filled(cluster, bench)
        with cluster.traffic() as traffic:
            cluster.prefetch(cluster.nodes, records)
        ratio = cluster.source.counts.bytes / bench.size_bytes
    zone = {node.link.address: node.zone for node in cluster.nodes}
    crossed = sum(
        size for (a, b), size in traffic.between.items() if a in zone and b in zone and zone[a] != zone[b]
    )
    good = crossed < SMALL_BYTES and ratio <= 2.04
    goal = "0 bytes of extents, <= 2.04 D"
    what = bench.ran("all prefetch at once in two zones; bytes between them include greetings")
    return Row(f"{crossed:,} bytes, {ratio:.2f} D", goal, good, nodes, what)


def restart(bench: Bench, nodes: int) -> Row:
    """Source bytes of a rolling restart under load, against what lay in RAM alone."""
    ram, nvme = bench.size_bytes // (4 * nodes), 2 * bench.size_bytes
    with bench.cluster(nodes, ram, nvme=nvme) as cluster:
        records = _filled(cluster, bench)
        cluster.prefetch(cluster.nodes, records)
        cluster.source.reset()
        ranks = Ranks(cluster.nodes, records)
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(ranks.read, 1000, pace=partial(time.sleep, STEP_S))
            in_ram = sum(_restart(node) for node in cluster.nodes)
            ranks.stop()
            ledger = reading.result()
        fetched = cluster.source.counts.bytes
    faults = ledger.faults(ranks.epochs)
    good = not faults and fetched <= 1.02 * in_ram
    longest = ledger.longest
    what = f"a restart of each node in turn under load, {ranks.epochs} epochs, longest step {longest.took_s:.1f} s"
    what += f"; ledger {'exact' if not faults else faults[0]}"
    measured = f"{fetched / bench.size_bytes:.3f} D"
    return Row(measured, f"<= {in_ram / bench.size_bytes:.3f} D, in RAM", good, nodes, bench.ran(what))


def moves(bench: Bench, nodes: int) -> Row:
    """Bytes that move when one node joins and one leaves, where the cluster just holds D."""
    ram = int(1.5 * bench.size_bytes / nodes)
    totals: list[tuple[int, int]] = []
    with bench.cluster(nodes, ram) as cluster:
        records = _filled(cluster, bench)

        def between(epoch: int) -> None:
            totals.append((_from_peers(cluster), cluster.source.counts.bytes))
            if epoch == 1:
                cluster.add()
            if epoch == 3:
                cluster.leave(nodes - 1)

        ledger = Ranks(cluster.nodes[:nodes], records).read(6, between)
    faults = ledger.faults(6)
    epochs = [
        ((b[0] - a[0]) / bench.size_bytes, (b[1] - a[1]) / bench.size_bytes) for a, b in pairwise(totals)
    ]
    join, leave = (max(0.0, sum(after) - sum(before)) for before, after in (epochs[:2], epochs[2:4]))
    told = ", ".join(f"{peers:.2f} + {source:.2f}" for peers, source in epochs)
    what = bench.ran(
        "bytes more than in the epoch before, in that after one node joins and in that after one leaves; epochs 2 to 6"
        f" from peers + source, in D: {told}; ledger {'exact' if not faults else faults[0]}"
    )
    goal = 1.2 / nodes
    good = not faults and max(join, leave) <= goal
    return Row(f"{join:.2f} D, {leave:.2f} D", f"<= {goal:.2f} D each", good, nodes, what)


ROWS: dict[str, Callable[[Bench], Row]] = {
    "cold2": lambda bench: cold(bench, 2),
    "cold4": lambda bench: cold(bench, 4),
    "cold8": lambda bench: cold(bench, 8),
    "rule": lambda bench: cold(bench, 4, f"uid:{os.geteuid()}"),
    "joined": lambda bench: joined(bench, 3),
    "hits4": lambda bench: hits(bench, 4, 0.25),
    "hits8": lambda bench: hits(bench, 8, 0.05),
    "stampede": lambda bench: stampede(bench, 8),
    "killed": lambda bench: stampede(bench, 8, kill=True),
    "broadcast": lambda bench: broadcast(bench, 8),
    "zones": lambda bench: zones(bench, 4),
    "restart": lambda bench: restart(bench, 8),
    "moves": lambda bench: moves(bench, 4),
}


def measure(
    names: Sequence[str],
    root: Path,
    server: SeaweedFS,
    options: Callable[[Cluster, Node], Sequence[str]],
    extents: int,
    told: Callable[[str], object],
) -> tuple[Grid, bool]:
    """Measure rows; return the table, and whether every goal is met. `told` gets each row as it comes."""
    bench = Bench(root, server, options, extents, count())
    rows, good = [], True
    for name in names:
        began = time.monotonic()
        try:
            row = ROWS[name](bench)
        except Unavailable as error:
            row = Row("SKIPPED", "", None, 0, str(error))
        except (CacheError, RuntimeError, TimeoutError) as error:
            row = Row("FAILED", "", False, 0, f"{type(error).__name__}: {error}"[:300])
        good = good and row.met is not False
        met = {True: "yes", False: "NO", None: ""}[row.met]
        took = f"{time.monotonic() - began:.0f}"
        rows.append((name, row.measured, row.goal, met, str(row.nodes), row.ran, took))
        told(" | ".join(rows[-1]))
    return Grid("Clusters of real daemons on one host", HEAD, rows), good


def _filled(cluster: Cluster, bench: Bench) -> Records:
    return cluster.source.fill(bench.extents, SMALL_BYTES)


def _opened(node: Node, records: Records) -> Any:
    with Control(node.socket_dir) as control:
        return control.open_dataset([records.uri], records.options).id


def _read_one(node: Node, dataset: Any) -> bool:
    """Read extent 0 as a new reader; return whether it was granted in time."""
    try:
        with closing(DaemonGrants(node.socket_dir, dataset)) as grants:
            (answer,) = grants.acquire([0], READ_S)
            if not isinstance(answer, Granted):
                return False
            os.close(answer.fd)
            return True
    except CacheError:
        return False


def _kill_filling(cluster: Cluster) -> Node:
    """Kill a node that fetches from the source, once a part has passed. Raises TimeoutError."""
    deadline = time.monotonic() + READ_S
    while time.monotonic() < deadline:
        if cluster.source.counts.bytes > LARGE_BYTES // 8 and (filling := cluster.fetching()):
            filling[0].kill()
            return filling[0]
        time.sleep(0.05)
    raise TimeoutError("no node fetches from the source")


def _restart(node: Node) -> int:
    """Restart a node; return the bytes that lay in its RAM."""
    (ram,) = (tier.used_bytes for tier in node.status().tiers if tier.name == "ram")
    node.stop()
    node.start()
    return ram


def _from_peers(cluster: Cluster) -> int:
    return sum(dataset.peer_bytes for node in cluster.nodes for dataset in node.status().datasets)
