"""Says what a job waits for and the one change that helps most, from two statuses some seconds apart. Pure.

Ranks report the parts of their steps' time that they waited, by cause. The largest part decides the branch below. The state
of sources, tiers, nodes and cores decides the change.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import dropwhile
from statistics import mean

from cachesvc.cli.output import plural, share, size
from cachesvc.v1 import cachesvc_pb2 as pb

LEAST_WAIT = 0.05
"""A job that waits for less of its time than this is limited by its own steps."""
STUCK_S = 5.0
"""A reader that waits for so long counts, although no rank has reported it yet."""
EVEN = 0.6
"""A source whose mean rate is this part of its best rate is read evenly: it gives no more."""
STEPS = 12
"""Steps of the history that are compared: a minute, without the time before the source was first asked."""
SLOW_NODE = 0.5
"""A node that sends at less than this part of the others' mean rate is slow."""
DISK_BYTES_PER_S = 500 << 20
"""An NVMe disk reads at several times this rate; a slower one that readers wait for is the cause by itself."""
CAUSES = (
    "nothing",
    "source fails",
    "throttling",
    "full link",
    "cold cache",
    "small cache",
    "small window",
    "slow disk",
    "little RAM",
    "slow node",
    "network",
    "few workers",
    "decoding",
    "hand-over",
    "transfer",
    "room",
)
"""What a job may wait for, as `--json` names it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """`cause` is one of `CAUSES`; `part`: of the job's time that it waits, 0 to 1; `evidence`: at most three lines."""

    cause: str
    part: float
    says: str
    evidence: tuple[str, ...]
    change: str


@dataclass(frozen=True, slots=True)
class Situation:
    """A job in its node's status `now`, and the status `before`. `cores`: of this node."""

    before: pb.StatusReply
    now: pb.StatusReply
    job: pb.JobStatus
    cores: int

    @property
    def parts(self) -> Counter[str]:
        """See `parts_of`."""
        return parts_of(self.job)

    @property
    def datasets(self) -> list[pb.DatasetStatus]:
        """The datasets that the job reads."""
        wanted = {reader.dataset for reader in self.job.readers}
        return [row for row in self.now.datasets if row.dataset.id in wanted]

    @property
    def uri(self) -> str:
        """The URI of the largest of them."""
        return (
            max(self.datasets, key=lambda row: row.dataset.size_bytes).dataset.uri if self.datasets else "URI"
        )

    @property
    def missing_bytes(self) -> int:
        """Bytes of all data that readers use for which the tiers have no room."""
        room = sum(tier.budget_bytes for tier in self.now.tiers if not tier.lost)
        return max(0, sum(row.dataset.size_bytes for row in self.now.datasets if row.readers) - room)

    def spent(self) -> str:
        """One line on what the steps waited for."""
        named = [f"{100 * part:.0f} % {cause}" for cause, part in self.parts.most_common(3)]
        rate = f"{self.job.batches_per_s:.1f} batches/s"
        return (
            f"of the time of its steps {', '.join(named)}; {rate}"
            if named
            else f"no rank reported waits; {rate}"
        )


def parts_of(job: pb.JobStatus) -> Counter[str]:
    """Return the part of the steps' time by cause, as the slowest rank reports each."""
    found: Counter[str] = Counter()
    for reader in job.readers:
        for wait in reader.waits:
            found[wait.cause] = max(found[wait.cause], wait.share)  # type: ignore[assignment]
    return found


def diagnose(found: Situation) -> Finding:
    """Return what the job waits for."""
    stuck = max(found.job.readers, key=lambda each: each.waiting_s, default=None)
    parts = found.parts
    if stuck is not None and stuck.waiting_s >= STUCK_S:
        cause = _of_wait(found, stuck)
        part = max(parts[cause], min(1.0, stuck.waiting_s / (stuck.waiting_s + STUCK_S)))
    elif not parts or found.job.waiting < LEAST_WAIT:
        change = "nothing here: its own steps, or what is between them, are the limit"
        return Finding("nothing", found.job.waiting, "waits for nothing", (found.spent(),), change)
    else:
        ((cause, part),) = parts.most_common(1)
    rule = {"source": _source, "peer": _peer, "disk": _disk, "decode": _decode, "room": _room}.get(
        cause, _after
    )
    name, says, evidence, change = rule(found, cause)
    return Finding(name, part, says, (found.spent(), *evidence)[:3], change)


_Found = tuple[str, str, list[str], str]


def _of_wait(found: Situation, stuck: pb.ReaderStatus) -> str:
    """The cause of a reader's wait under way."""
    if "slot or room" in stuck.waits_for:
        return "room"
    names = {node.name for node in found.now.nodes}
    reads = {fill.reads for fill in found.now.fills if fill.dataset == stuck.dataset}
    if reads and reads <= names:
        return "peer"
    return "disk" if reads and reads <= {tier.name for tier in found.now.tiers} else "source"


def _source(found: Situation, _: str) -> _Found:
    now, before = found.now, found.before
    failed = [event for event in now.events if event.kind == "source_failed" and event.time > now.now_s - 60]
    if failed:
        return (
            "source fails",
            "waits for a source that fails",
            [failed[-1].words],
            "mend the source or the credentials that the event names; cachesvc events shows the others",
        )
    throttled = now.sources.throttled - before.sources.throttled
    if throttled > 0:
        asked, took_s = now.sources.requests - before.sources.requests, now.now_s - before.now_s
        return (
            "throttling",
            "waits for a source that throttles",
            [
                f"{throttled:,} of {plural(asked, 'answer')} in the last {took_s:.0f} s asked for fewer requests"
            ],
            "have the source allow more requests, or ask it for less: more --ram or --nvme, or --cluster",
        )
    recent = list(dropwhile(lambda rate: not rate, list(now.history.source)[-STEPS:])) or [
        now.throughput.source
    ]
    best, usual = max(recent), mean(recent)
    rate = f"the source gave {size(usual)}/s in the last minute, {size(best)}/s at best"
    row = max(found.datasets, key=lambda each: each.dataset.size_bytes, default=None)
    kept = f"{share(row.resident_bytes, row.dataset.size_bytes)} of {row.dataset.uri} is here" if row else ""
    cold = row is not None and (not row.epochs or row.epochs[-1].number == 0)
    even = usual >= EVEN * best
    fill = f"fill the cache before the job: cachesvc prefetch {found.uri}"
    if cold and even:
        says = "waits for the source, which gives no more"
        return "full link", says, [rate, kept], f"{fill}; nodes that share: --cluster"
    missing = found.missing_bytes
    if cold or not missing:
        says = (
            "waits for the source in its first epoch" if cold else "waits for extents that are not here yet"
        )
        return "cold cache", says, [rate, kept], fill
    if even and row is not None:
        hits = f"hit rate {share(row.hit_rate, 1)}, at most {share(row.bound, 1)} with this cache"
        return (
            "small cache",
            "waits for what the cache has no room for",
            [hits, rate],
            f"give the cache {size(missing)} more (--ram, --nvme), which keeps all of it; or --cluster",
        )
    return (
        "small window",
        "waits for the source, which is read in bursts",
        [rate, kept],
        "a larger window= in the DataLoader fetches further ahead, so that the source is read evenly",
    )


def _peer(found: Situation, _: str) -> _Found:
    others = [node for node in found.now.nodes if not node.me]
    asked = Counter(fill.reads for fill in found.now.fills)
    rates = [node.bytes_per_s for node in others if node.bytes_per_s]
    for node in sorted(others, key=lambda node: (-asked[node.name], node.bytes_per_s)):
        slow = len(rates) > 1 and 0 < node.bytes_per_s < SLOW_NODE * mean(rates)
        if node.state in ("slow", "unreadable", "wrong") or slow:
            about = f"node {node.name} is {node.state} and sends {size(node.bytes_per_s)}/s"
            usual = f"{plural(asked[node.name], 'fill')} read from it; the mean node sends {size(mean(rates or [0]))}/s"
            change = f"look at {node.name}: its --peer-bandwidth, its link, its disks (cachesvc status there)"
            return "slow node", f"waits for node {node.name}", [about, usual], change
    return (
        "network",
        "waits for other nodes",
        [
            f"peers gave {size(found.now.throughput.peers)}/s",
            f"{plural(len(found.now.fills), 'fill')} under way",
        ],
        "more --ram or --nvme on each node, so that less comes from others; or a faster network between them",
    )


def _disk(found: Situation, _: str) -> _Found:
    disks = [tier for tier in found.now.tiers if tier.name != "ram"]
    for tier in disks:
        if tier.stalled or tier.lost:
            state = "is lost" if tier.lost else "does not answer"
            return (
                "slow disk",
                f"waits for {tier.name}, which {state}",
                [f"{tier.name} {state}; it holds {size(tier.used_bytes)}"],
                f"look at the disk of {tier.name} (dmesg, smartctl); without it the daemon goes on with its other tiers",
            )
    if not disks:
        return (
            "slow disk",
            "waits for local files",
            ["the data is read where it lies, not from a cache directory"],
            f"keep it in RAM: cachesvc prefetch {found.uri}, with enough --ram",
        )
    ram = sum(tier.budget_bytes for tier in found.now.tiers if tier.name == "ram")
    wanted = sum(row.dataset.size_bytes for row in found.datasets)
    rate = found.now.throughput.nvme
    given = f"cache directories gave {size(rate)}/s; {size(wanted)} of data, {size(ram)} of RAM"
    if rate < DISK_BYTES_PER_S and found.parts["disk"] > 2 * LEAST_WAIT:
        return (
            "slow disk",
            "waits for the disk of a cache directory",
            [given],
            f"move --nvme to a faster disk, or keep the data in RAM: --ram {size(wanted)}",
        )
    return (
        "little RAM",
        "waits for reads of cache directories",
        [given],
        f"more --ram: {size(wanted)} keeps all of it there",
    )


def _decode(found: Situation, _: str) -> _Found:
    ranks = sum(1 for reader in found.job.readers if reader.batches_per_s)
    workers = max(0, found.job.readers_connected - ranks)
    busy = f"{plural(ranks, 'rank')} with {plural(workers, 'worker')} on {plural(found.cores, 'core')}"
    if workers + ranks < found.cores:
        each = max(1, (found.cores - ranks) // max(1, ranks))
        return (
            "few workers",
            "waits for samples to be decoded",
            [busy],
            f"num_workers={each} in the DataLoader of each rank",
        )
    return (
        "decoding",
        "waits for samples to be decoded, with all cores in use",
        [busy],
        "do the work once for all epochs and jobs: prepare= in open_dataset (cachesvc prepare), cachesvc tokenize for text",
    )


def _room(found: Situation, _: str) -> _Found:
    full = [f"{tier.name} {share(tier.used_bytes, tier.budget_bytes)} full" for tier in found.now.tiers]
    return (
        "room",
        "waits for a slot or room for a fill",
        [", ".join(full), f"{plural(found.now.fills_running, 'fill')} under way"],
        "more --ram or --nvme, or a smaller window= in the DataLoader",
    )


def _after(_: Situation, cause: str) -> _Found:
    if cause == "transfer":
        change = "pin_memory=True, or device= in the DataLoader, so that copies run beside the step"
        return "transfer", "waits for copies to the device", [], change
    return (
        "hand-over",
        "waits for batches on their way from workers",
        [],
        "fewer workers, or a smaller batch for each",
    )
