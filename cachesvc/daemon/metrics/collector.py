"""Collects the daemon's metrics for Prometheus. Each scrape reads the core's own counters; no second set is kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import REGISTRY
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)

import cachesvc
from cachesvc.core.errors import kinds
from cachesvc.core.histogram import Histogram
from cachesvc.core.model import DatasetId
from cachesvc.core.node.node import Node
from cachesvc.core.placement.traits import KINDS
from cachesvc.core.safe_text import redacted
from cachesvc.core.stalls import CAUSES, QUANTILES
from cachesvc.daemon.access.tls import CertificateWatch
from cachesvc.daemon.control.activity import job_messages, waited_share
from cachesvc.daemon.datasets import Datasets
from cachesvc.daemon.disks.tier_threads import TierThreads
from cachesvc.daemon.events.journal import Journal
from cachesvc.daemon.fills.fill_counts import FillCounts
from cachesvc.daemon.fills.pool import FillerPool
from cachesvc.daemon.fills.sent_bytes import RESULTS
from cachesvc.daemon.grants.reader_events import ReaderEvents
from cachesvc.daemon.grants.server import GrantsServer
from cachesvc.daemon.loop.loop import Loop
from cachesvc.daemon.metrics.families import family, histogram, histograms
from cachesvc.daemon.peers.cluster_link import ClusterLink
from cachesvc.daemon.peers.messages import ANSWERING, ClusterReport
from cachesvc.daemon.reload.reloader import Reloader
from cachesvc.daemon.residency import resident, sizes_of
from cachesvc.system.kubelet import kubelet_disk_free

MAX_RANKS = 64
"""Ranks with metrics of their own."""
MAX_PEERS = 256
"""Other nodes with metrics of their own."""
PRIVATE = "private"
"""The common label of all datasets that are restricted to some users (`daemon/access/tenants.py`): a scraper is no user."""
WAIT_QUANTILES = "cachesvc_loader_wait_quantile_seconds"
_GAUGE, _COUNTER = GaugeMetricFamily, CounterMetricFamily
STATES = ("present", "slow", "unreadable", "wrong", "away", "left", "refused", "unknown")
"""The states of nodes."""
_OF_TIERS = (
    (_GAUGE, "tier_budget_bytes", "budget_bytes", "Budget of a tier."),
    (_GAUGE, "tier_used_bytes", "used_bytes", "Bytes resident, reserved or being evicted."),
    (
        _GAUGE,
        "tier_held_bytes",
        "held_bytes",
        "The part of the budget that readers have mapped since before this daemon started.",
    ),
    (
        _GAUGE,
        "tier_unplanned_bytes",
        "unplanned_bytes",
        "Bytes of readers without a plan, where these have a share.",
    ),
    (_GAUGE, "tier_lost", "lost", "1 while a tier answers with errors."),
    (_COUNTER, "corrupt_extents", "corrupt_count", "Copies that failed their checksums."),
    (_COUNTER, "scrubbed_bytes", "scrubbed_bytes", "Bytes verified in the background."),
    (_COUNTER, "evicted_bytes", "evicted_bytes", "Bytes evicted to make room."),
    (_COUNTER, "tier_granted_bytes", "granted_bytes", "Bytes of extents granted to readers."),
)
"""The kind and name of a metric, the attribute of a tier's status, and what it is."""
_OF_SOURCES = {
    "requests": "Read requests to sources, retries included.",
    "retries": "Retried requests.",
    "throttled": "Responses that asked for fewer requests.",
    "hedges": "Late reads for which a second request was sent.",
    "hedge_bytes": "Bytes received by second requests.",
}
_OF_DEMANDS = {
    "hits": "Demands of a resident extent.",
    "ahead": "Demands of an extent that a plan had fetched ahead.",
    "misses": "Demands that waited.",
    "refused": "Demands answered with: read elsewhere.",
}


@dataclass(eq=False)
class MetricsCollector:
    """A Prometheus collector. `cluster` is None without one."""

    _loop: Loop
    _node: Node
    _datasets: Datasets
    _grants: GrantsServer
    _counts: FillCounts
    _fillers: FillerPool
    _cluster: ClusterLink | None
    _requests: ReaderEvents
    _threads: TierThreads
    _journal: Journal
    _reloader: Reloader
    _certificate: CertificateWatch | None
    _present: frozenset[DatasetId] = frozenset()
    _labels: dict[DatasetId, str] = field(default_factory=dict)
    """The last label of each reported dataset. A dataset that the daemon has forgotten still counts in the private sum,
    since a counter that falls looks like one that restarted."""

    def register(self) -> None:
        """Add the metrics to the process's default registry."""
        REGISTRY.register(self)

    def describe(self) -> Iterator[Metric]:
        """Describe no metric: else `register` would collect, and wait for a loop that does not run yet."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Read all metrics on the loop's thread. The walks over extents run before, on the caller's thread."""
        known = self._datasets.all()
        bytes_of = {
            each.id: each.bytes_of(
                (extent for extent, _ in resident(self._node, each)), sizes_of(self._node, each)
            )
            for each in known
        }
        about = "Free part of the disk that the kubelet watches, from 0 to 1."
        disk = GaugeMetricFamily("cachesvc_kubelet_disk_free_ratio", about, kubelet_disk_free())
        return iter([disk, *self._loop.call(lambda: self._read(bytes_of))])

    def _read(self, resident_bytes: dict[DatasetId, int]) -> list[Metric]:
        info = GaugeMetricFamily("cachesvc_build_info", "1, of this release.", labels=["version"])
        info.add_metric([cachesvc.__version__], 1)
        failed = CounterMetricFamily("cachesvc_failed_fills", "Fills that failed.", labels=["error"])
        for error in kinds():  # also kinds that never occurred, else the first one would look like a restart
            failed.add_metric([error.__name__], self._counts.failures[error.__name__])
        stale, reading = self._datasets.stale_openings, self._grants.readers().total()
        return [
            info,
            *self._tiers(),
            failed,
            CounterMetricFamily(
                "cachesvc_stale_openings", "Openings of the last version while its source was down.", stale
            ),
            *self._sources(),
            self._certificates(),
            *self._cluster_metrics(),
            *self._dataset_metrics(resident_bytes),
            GaugeMetricFamily("cachesvc_readers", "Connections that read a dataset.", reading),
            GaugeMetricFamily(
                "cachesvc_bypassed", "1 while an operator bypasses the cache.", self._grants.bypass.on
            ),
            GaugeMetricFamily("cachesvc_fills", "Fills running.", len(self._node.copies.filling)),
            *self._stall_metrics(),
            *self._rank_metrics(),
            *self._histograms(),
            *self._quota_metrics(),
            *self._reload_metrics(),
        ]

    def _histograms(self) -> Iterator[Metric]:
        """Read the histograms, which have no label `dataset`, so that they add up over nodes."""
        yield histograms("fill_seconds", "Fills, until readers are granted.", "origin", self._counts.waits)
        yield histograms("grant_seconds", "Requests of readers for an extent.", "answer", self._grants.waits)
        about = "Waits of training steps for their batches."
        yield histogram("step_wait_seconds", about, self._requests.step_waits)

    def _quota_metrics(self) -> Iterator[Metric]:
        """Read how full quotas are, without names: these may be secret."""
        states = self._node.policy.shares.datasets.values()
        pinned = sum(each.kept_bytes for each in states if each.pinned)
        yield GaugeMetricFamily("cachesvc_pinned_bytes", "Bytes that pins keep.", pinned)
        kept: Counter[int] = Counter()
        for each in states:
            kept[each.user] += each.kept_bytes
        uses = [("dataset", each.kept_bytes, each.quota_bytes) for each in states]
        uses += [("user", kept[each.user], each.user_quota_bytes) for each in states]
        fullest: dict[str, float] = {}
        for of, used, quota_bytes in uses:
            if quota_bytes is not None:
                fullest[of] = max(fullest.get(of, 0.0), used / max(1, quota_bytes))
        about = "Use of the fullest quota, from 0 to 1, of datasets and of users."
        yield family(GaugeMetricFamily, "quota_use_ratio", about, "of", fullest.items())

    def _reload_metrics(self) -> Iterator[Metric]:
        about = "Events since the start; see `cachesvc events`."
        yield family(CounterMetricFamily, "events", about, "kind", self._journal.counts.items())
        about = "1 unless the last reload of the settings failed."
        yield GaugeMetricFamily("cachesvc_config_last_reload_successful", about, self._reloader.succeeded)
        about = "Unix time of the last reload that succeeded, or of the start."
        name = "cachesvc_config_last_reload_success_timestamp_seconds"
        yield GaugeMetricFamily(name, about, self._reloader.succeeded_at)

    def _tiers(self) -> Iterator[Metric]:
        tiers = self._node.policy.tiers.values()
        for kind, name, attribute, about in _OF_TIERS:
            yield family(kind, name, about, "tier", [(each.name, getattr(each, attribute)) for each in tiers])

        calls = {each.name: self._threads.of(each.name) for each in tiers}
        filled = [(name, self._counts.filled_bytes[name]) for name in calls]
        yield family(_COUNTER, "tier_filled_bytes", "Bytes filled into a tier.", "tier", filled)
        waits = {str(name): sum((lane.waits for lane in lanes), Histogram()) for name, lanes in calls.items()}
        yield histograms("tier_call_seconds", "Calls on a tier: open, reserve, commit, evict.", "tier", waits)

    def _sources(self) -> Iterator[Metric]:
        """Read the counters of all sources together, since a source's name may belong to a tenant."""
        counters = self._fillers.source_requests
        for name, about in _OF_SOURCES.items():
            yield CounterMetricFamily(f"cachesvc_source_{name}", about, getattr(counters, name))
        about = "Read requests to sources, those that failed included."
        yield histogram("source_request_seconds", about, counters.waits)
        about = "Bytes that sources sent, without hedges."
        yield CounterMetricFamily("cachesvc_source_read_bytes", about, counters.bytes)

    def _certificates(self) -> Metric:
        """Read the end of this node's certificate; no value without one."""
        ends = self._certificate.ends if self._certificate is not None else 0
        about = "End of this node's certificate, in Unix time."
        return GaugeMetricFamily("cachesvc_certificate_not_after_timestamp_seconds", about, ends or None)

    def _cluster_metrics(self) -> list[Metric]:
        """Read the counters of the peer agent and the states of members."""
        if self._cluster is None:
            return []
        report, counts = self._cluster.report, self._counts
        states = Counter(row.state for row in report.rows)
        of_state = [(state, states[state]) for state in STATES]
        nodes = family(GaugeMetricFamily, "nodes", "Nodes of the cluster, by state.", "state", of_state)
        received = "Bytes received from other nodes, for failed fills too."
        counters = {
            "received_bytes": (received, counts.received.total()),
            "sent_bytes": ("Bytes sent to other nodes.", report.sent_bytes),
            "lookups": ("Questions where an extent is that this node answered.", report.lookups),
            "redirects": ("Answers that named a node and not the source.", report.redirects),
            "failures": ("Nodes that failed to give an extent, or were late.", counts.peer_failures),
            "hedged_bytes": ("Asked of the source since a node was late.", counts.hedged_bytes),
            "refused_connections": ("Connections that did not prove to be a member's.", report.refused),
        }
        compared = "Extents from other nodes that were compared with the source."
        results = [(result, self._cluster.sent.results[result]) for result in RESULTS]
        warned = Counter(each.kind for each in report.warnings)
        about = "Warnings about the cluster that hold now."
        of_kind = [(kind, warned[kind]) for kind in KINDS]
        return [
            nodes,
            family(GaugeMetricFamily, "cluster_warnings", about, "kind", of_kind),
            GaugeMetricFamily(
                "cachesvc_cluster_list_read", "1 once the list of members was read.", int(report.list_read)
            ),
            *self._peer_metrics(report),
            histogram("peer_read_seconds", "Reads of extents from other nodes.", counts.peer_waits),
            *(CounterMetricFamily(f"cachesvc_peer_{name}", *each) for name, each in counters.items()),
            family(CounterMetricFamily, "peer_compared_extents", compared, "result", results),
        ]

    def _peer_metrics(self, report: ClusterReport) -> list[Metric]:
        """Read the states of `MAX_PEERS` members, those that are not present first: labels must be bounded."""
        rows = [row for row in report.rows if row.name and row.name != report.me and row.state != "refused"]
        rows = sorted(rows, key=lambda row: (row.state == "present", row.name))[:MAX_PEERS]
        present = [(row.name, row.state in ANSWERING) for row in rows]
        times = [(row.name, row.round_trip_us / 1e6) for row in rows if row.state in ANSWERING]
        gave = [(row.name, self._counts.received[row.name]) for row in rows]
        ends = [(row.name, row.traits.certificate_ends) for row in rows if row.traits.certificate_ends]
        return [
            family(GaugeMetricFamily, "peer_present", "1 while a node answers.", "node", present),
            family(GaugeMetricFamily, "peer_round_trip_seconds", "Time of a greeting.", "node", times),
            family(_COUNTER, "peer_gave_bytes", "Bytes received from a node.", "node", gave),
            family(
                GaugeMetricFamily,
                "peer_certificate_not_after_timestamp_seconds",
                "End of a node's certificate.",
                "node",
                ends,
            ),
        ]

    def _dataset_metrics(self, resident_bytes: dict[DatasetId, int]) -> Iterator[Metric]:
        """Read the resident bytes of each dataset, and the counters of its readers."""
        reported = self._reported(resident_bytes)
        counters = [(label, self._node.counters(dataset)) for label, dataset in reported]

        def of_each(value: Callable[[DatasetId], float]) -> list[tuple[str, float]]:
            return [(label, value(dataset)) for label, dataset in reported]

        info = GaugeMetricFamily(
            "cachesvc_dataset_info", "1, for the name of a dataset.", labels=["dataset", "uri"]
        )
        for label, dataset in reported:
            if label != PRIVATE and (known := self._datasets.known(dataset)) is not None:
                info.add_metric([label, redacted(known.catalog.uri)], 1)
        yield info
        here = of_each(lambda dataset: resident_bytes.get(dataset, 0))
        yield family(GaugeMetricFamily, "resident_bytes", "Bytes of a dataset on this node.", "dataset", here)
        for name, about in _OF_DEMANDS.items():
            values = [(label, getattr(each, name)) for label, each in counters]
            yield family(CounterMetricFamily, name, about, "dataset", values)
        fetched = of_each(self._counts.source_bytes)
        yield family(CounterMetricFamily, "source_bytes", "Fetched from the source.", "dataset", fetched)
        received = of_each(self._counts.peer_bytes)
        about = "Bytes received from other nodes."
        yield family(CounterMetricFamily, "peer_bytes", about, "dataset", received)
        public = [(label, each) for label, each in counters if label != PRIVATE]  # rates do not add up
        # 0: no job claims the dataset, so its bound is unknown
        bounds = [(label, each.bound) for label, each in public if each.bound]
        yield family(GaugeMetricFamily, "hit_bound", "The best possible hit rate.", "dataset", bounds)
        of_bound = [(label, each.epochs[-1].of_bound) for label, each in public if each.epochs]
        about = "Hit rate of the latest epoch over its bound."
        yield family(GaugeMetricFamily, "epoch_hits_of_bound", about, "dataset", of_bound)

    def _stall_metrics(self) -> list[Metric]:
        """Read the step statistics that the ranks of this node report."""
        labelled = [(self._label(dataset), stalls) for dataset, stalls in self._requests.stalls.items()]
        labelled = [(label, each) for label, each in labelled if label == PRIVATE or label in self._present]
        batches = [(label, each.steps) for label, each in labelled]
        steps = family(
            CounterMetricFamily, "loader_batches", "Batches handed to training steps.", "dataset", batches
        )
        waits: Counter[tuple[str, str]] = Counter()
        for label, each in labelled:
            for cause, waited_us in zip(CAUSES, each.waited_us, strict=True):
                waits[(label, cause)] += waited_us
        waited = CounterMetricFamily(
            "cachesvc_loader_wait_seconds", "Waits of training steps, by cause.", labels=["dataset", "cause"]
        )
        for labels, waited_us in waits.items():
            waited.add_metric(labels, waited_us / 1e6)
        # Only a summary may have the label `quantile`. Its sum is `waited`.
        quantiles = SummaryMetricFamily(WAIT_QUANTILES, "A step's wait, as the latest rank reported it.")
        for label, each in labelled:
            if label != PRIVATE:
                for quantile, wait in zip(QUANTILES, each.quantiles_us, strict=True):
                    quantiles.add_sample(WAIT_QUANTILES, {"dataset": label, "quantile": quantile}, wait / 1e6)
        return [steps, waited, quantiles]

    def _rank_metrics(self) -> Iterator[Metric]:
        """Read what ranks reported last, of `MAX_RANKS` that wait longest."""
        jobs = job_messages(self._node, self._grants.connected(), (), None)
        ranks = [(waited_share(each), job.id, each) for job in jobs for each in job.readers]
        ranks = sorted(
            (each for each in ranks if each[0] or each[2].batches_per_s), key=lambda each: -each[0]
        )
        waits = GaugeMetricFamily(
            "cachesvc_rank_waiting_ratio", "Part of the time that a rank waited.", labels=["job", "reader"]
        )
        rates = GaugeMetricFamily(
            "cachesvc_rank_batches_per_second", "Batches that a rank took.", labels=["job", "reader"]
        )
        for share, job, reader in ranks[:MAX_RANKS]:
            waits.add_metric([job, str(reader.number)], share)
            rates.add_metric([job, str(reader.number)], reader.batches_per_s)
        yield from (waits, rates)

    def _reported(self, resident_bytes: Mapping[DatasetId, int]) -> list[tuple[str, DatasetId]]:
        """Return the labels and ids of the datasets that are present (some of it is resident, or a job or a pin claims it),
        and of private datasets that were present before. The provisional dataset of an index build is left out of the
        private sum, since its bytes count for the dataset that the build makes."""
        claimed = self._node.policy.shares.datasets
        known = self._datasets.listed(self._grants.readers())
        listed = {each.id: each for each in known if resident_bytes.get(each.id) or each.id in claimed}
        self._present = frozenset(listed)
        labelled = [(self._label(each), each) for each in listed]
        reported = [each for each in labelled if each[0] != PRIVATE or not listed[each[1]].provisional]
        self._labels |= {dataset: label for label, dataset in reported}
        gone = [each for each, label in self._labels.items() if label == PRIVATE and each not in listed]
        return reported + [(PRIVATE, each) for each in gone]

    def _label(self, dataset: DatasetId) -> str:
        """Return the label of a dataset. Any user who reaches the port sees it."""
        known = self._datasets.known(dataset)
        if known is None:
            return self._labels.get(dataset, PRIVATE)
        return PRIVATE if known.rules else dataset
