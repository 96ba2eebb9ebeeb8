"""Collects the daemon's metrics for Prometheus. Each scrape reads the core's own counters; no second set is kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

import cachesvc
from cachesvc.core.errors import kinds
from cachesvc.core.model import DatasetId
from cachesvc.core.stalls import CAUSES, QUANTILES
from cachesvc.daemon.runner import Runner

PRIVATE = "private"
"""The common label of all datasets that are restricted to some users (`daemon/access/tenants.py`): a scraper is no user."""
WAIT_QUANTILES = "cachesvc_loader_wait_quantile_seconds"


class MetricsCollector:
    """A Prometheus collector of a runner's metrics."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._labels: dict[DatasetId, str] = {}
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
        resident = {each.id: self._runner.resident_bytes(each) for each in self._runner.datasets.all()}
        return iter(self._runner.loop.call(lambda: self._read(resident)))

    def _read(self, resident_bytes: dict[DatasetId, int]) -> list[Metric]:
        status = self._runner.node.status()
        budget = GaugeMetricFamily("cachesvc_tier_budget_bytes", "Budget of a tier.", labels=["tier"])
        used = GaugeMetricFamily(
            "cachesvc_tier_used_bytes", "Bytes resident, reserved or being evicted.", labels=["tier"]
        )
        held = GaugeMetricFamily(
            "cachesvc_tier_held_bytes",
            "The part of the budget that readers have mapped since before this daemon started.",
            labels=["tier"],
        )
        lost = GaugeMetricFamily("cachesvc_tier_lost", "1 while a tier answers with errors.", labels=["tier"])
        corrupt = CounterMetricFamily(
            "cachesvc_corrupt_extents", "Copies that failed their checksums.", labels=["tier"]
        )
        scrubbed = CounterMetricFamily(
            "cachesvc_scrubbed_bytes", "Bytes verified in the background.", labels=["tier"]
        )
        evicted = CounterMetricFamily(
            "cachesvc_evicted_bytes", "Bytes evicted to make room.", labels=["tier"]
        )
        for tier in status.tiers:
            evicted.add_metric([tier.tier], tier.evicted_bytes)
            corrupt.add_metric([tier.tier], tier.corrupt_count)
            scrubbed.add_metric([tier.tier], tier.scrubbed_bytes)
            budget.add_metric([tier.tier], tier.budget_bytes)
            used.add_metric([tier.tier], tier.used_bytes)
            held.add_metric([tier.tier], tier.held_bytes)
            lost.add_metric([tier.tier], float(tier.lost))
        reading = self._runner.grants.readers().total() if self._runner.grants else 0
        readers = GaugeMetricFamily("cachesvc_readers", "Connections that read a dataset.", value=reading)
        fills = GaugeMetricFamily("cachesvc_fills", "Fills running.", value=status.fills)
        failed = CounterMetricFamily("cachesvc_failed_fills", "Fills that failed.", labels=["error"])
        for error in kinds():  # also kinds that never occurred, else the first one would look like a restart
            failed.add_metric([error.__name__], self._runner.fills.counts.failures[error.__name__])
        stale = CounterMetricFamily(
            "cachesvc_stale_openings",
            "Openings of the last version while its source was down.",
            value=self._runner.datasets.stale_openings,
        )
        info = GaugeMetricFamily("cachesvc_build_info", "1, of this release.", labels=["version"])
        info.add_metric([cachesvc.__version__], 1)
        tiers = [info, budget, used, held, lost, corrupt, scrubbed, evicted, failed, stale]
        return [
            *tiers,
            *self._sources(),
            *self._cluster(),
            *self._datasets(resident_bytes),
            readers,
            fills,
            *self._stalls(),
        ]

    def _sources(self) -> list[Metric]:
        """Read the counters of all sources together, since a source's name may belong to a tenant."""
        asked = self._runner.source_requests()
        counters = {
            "requests": ("Read requests to sources, retries included.", asked.requests),
            "retries": ("Retried requests.", asked.retries),
            "throttled": ("Responses that asked for fewer requests.", asked.throttled),
            "hedges": ("Late reads for which a second request was sent.", asked.hedges),
            "hedge_bytes": ("Bytes received by second requests.", asked.hedge_bytes),
            "read_bytes": ("Bytes that sources sent, without hedges.", asked.bytes),
        }
        return [CounterMetricFamily(f"cachesvc_source_{name}", *each) for name, each in counters.items()]

    def _cluster(self) -> list[Metric]:
        """Read the counters of the peer agent and the states of members."""
        link = self._runner.cluster
        if link is None:
            return []
        report, fills = link.report, self._runner.fills
        nodes = GaugeMetricFamily("cachesvc_nodes", "Nodes of the cluster, by state.", labels=["state"])
        states = Counter(row.state for row in report.rows)
        for state in ("present", "away", "refused", "unknown"):
            nodes.add_metric([state], states[state])
        counters = {
            "received_bytes": (
                "Bytes received from other nodes, for failed fills too.",
                fills.counts.received_bytes,
            ),
            "reads": ("Reads of extents from other nodes.", fills.counts.peer_reads),
            "read_seconds": ("Time that these reads took.", fills.counts.receive_s),
            "sent_bytes": ("Bytes sent to other nodes.", report.sent_bytes),
            "lookups": ("Questions where an extent is that this node answered.", report.lookups),
            "redirects": ("Answers that named a node and not the source.", report.redirects),
            "failures": ("Nodes that failed to give an extent.", fills.counts.peer_failures),
        }
        return [
            nodes,
            *(CounterMetricFamily(f"cachesvc_peer_{name}", *each) for name, each in counters.items()),
        ]

    def _datasets(self, resident_bytes: dict[DatasetId, int]) -> list[Metric]:
        """Read the resident bytes of each dataset, and the counters of its readers."""
        resident = GaugeMetricFamily(
            "cachesvc_resident_bytes", "Bytes of a dataset on this node.", labels=["dataset"]
        )
        hits = CounterMetricFamily("cachesvc_hits", "Demands of a resident extent.", labels=["dataset"])
        ahead = CounterMetricFamily(
            "cachesvc_ahead", "Demands of an extent that a plan had fetched ahead.", labels=["dataset"]
        )
        misses = CounterMetricFamily("cachesvc_misses", "Demands that waited.", labels=["dataset"])
        refused = CounterMetricFamily(
            "cachesvc_refused", "Demands answered with: read elsewhere.", labels=["dataset"]
        )
        source = CounterMetricFamily("cachesvc_source_bytes", "Fetched from the source.", labels=["dataset"])
        peer = CounterMetricFamily(
            "cachesvc_peer_bytes", "Bytes received from other nodes.", labels=["dataset"]
        )
        bound = GaugeMetricFamily("cachesvc_hit_bound", "The best possible hit rate.", labels=["dataset"])
        of_bound = GaugeMetricFamily(
            "cachesvc_epoch_hits_of_bound", "Hit rate of the latest epoch over its bound.", labels=["dataset"]
        )
        reported = self._reported()
        counters = [(label, self._runner.node.counters(dataset)) for label, dataset in reported]
        _add_sums(resident, (((label,), resident_bytes.get(dataset, 0)) for label, dataset in reported))
        _add_sums(hits, (((label,), each.hits) for label, each in counters))
        _add_sums(ahead, (((label,), each.ahead) for label, each in counters))
        _add_sums(misses, (((label,), each.misses) for label, each in counters))
        _add_sums(refused, (((label,), each.refused) for label, each in counters))
        _add_sums(
            source,
            (((label,), self._runner.fills.counts.source_bytes(dataset)) for label, dataset in reported),
        )
        _add_sums(
            peer, (((label,), self._runner.fills.counts.peer_bytes(dataset)) for label, dataset in reported)
        )
        for label, each in counters:
            if label == PRIVATE:
                continue  # rates do not add up
            if each.bound:  # 0: no job claims the dataset, so its bound is unknown
                bound.add_metric([label], each.bound)
            if each.epochs:
                of_bound.add_metric([label], each.epochs[-1].of_bound)
        return [resident, hits, ahead, misses, refused, source, peer, bound, of_bound]

    def _stalls(self) -> list[Metric]:
        """Read the step statistics that the ranks of this node report."""
        steps = CounterMetricFamily(
            "cachesvc_loader_batches", "Batches handed to training steps.", labels=["dataset"]
        )
        waited = CounterMetricFamily(
            "cachesvc_loader_wait_seconds",
            "Waits of training steps, by cause.",
            labels=["dataset", "cause"],
        )
        # Only a summary may have the label `quantile`. Its sum is `waited`.
        quantiles = SummaryMetricFamily(WAIT_QUANTILES, "A step's wait, as the latest rank reported it.")
        labelled = [(self._label(dataset), stalls) for dataset, stalls in self._runner.stalls.items()]
        _add_sums(steps, (((label,), each.steps) for label, each in labelled))
        _add_sums(
            waited,
            (
                ((label, cause), spent / 1e6)
                for label, each in labelled
                for cause, spent in zip(CAUSES, each.waited_us, strict=True)
            ),
        )
        for label, each in labelled:
            if label != PRIVATE:
                for quantile, wait in zip(QUANTILES, each.quantiles_us, strict=True):
                    quantiles.add_sample(WAIT_QUANTILES, {"dataset": label, "quantile": quantile}, wait / 1e6)
        return [steps, waited, quantiles]

    def _reported(self) -> list[tuple[str, DatasetId]]:
        """Return the labels and ids of the listed datasets, and of private datasets that were listed before. The
        provisional dataset of an index build is left out of the private sum, since its bytes count for the dataset that the
        build makes."""
        listed = {each.id: each for each in self._runner.listed()}
        labelled = [(self._label(each), each) for each in listed]
        reported = [each for each in labelled if each[0] != PRIVATE or not listed[each[1]].provisional]
        self._labels |= {dataset: label for label, dataset in reported}
        gone = [each for each, label in self._labels.items() if label == PRIVATE and each not in listed]
        return reported + [(PRIVATE, each) for each in gone]

    def _label(self, dataset: DatasetId) -> str:
        """Return the label of a dataset. Any user who reaches the port sees it."""
        known = self._runner.datasets.known(dataset)
        if known is None:
            return self._labels.get(dataset, PRIVATE)
        return PRIVATE if known.rules else dataset


def _add_sums(
    family: CounterMetricFamily | GaugeMetricFamily, values: Iterable[tuple[tuple[str, ...], float]]
) -> None:
    """Add the sum of the values of each label set to a family."""
    sums: dict[tuple[str, ...], float] = {}
    for labels, value in values:
        sums[labels] = sums.get(labels, 0) + value
    for labels, value in sums.items():
        family.add_metric(labels, value)
