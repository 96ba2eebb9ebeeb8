"""The daemon's counters for Prometheus, read from the core at each scrape: nothing is counted twice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

import cachesvc
from cachesvc.core.errors import kinds
from cachesvc.core.model import DatasetId
from cachesvc.core.stalls import CAUSES, QUANTILES
from cachesvc.daemon.peers.sharing import Sharing
from cachesvc.daemon.runner import Runner

PRIVATE = "private"
"""The label of all datasets together that only some users may use (`daemon/access/tenants.py`): scrapers name no user."""
WAIT_QUANTILES = "cachesvc_loader_wait_quantile_seconds"


class MetricsCollector:
    """A Prometheus collector over a runner."""

    def __init__(self, runner: Runner, sharing: Sharing) -> None:
        self._runner = runner
        self._sharing = sharing
        self._labels: dict[DatasetId, str] = {}
        """As they were last told of. The daemon may have forgotten a dataset since; its part in a sum stays, since a
        counter that falls looks like one that began anew."""

    def register(self) -> None:
        """Serve these from the process's default registry."""
        REGISTRY.register(self)

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering would otherwise collect, and wait for a loop that does not run yet."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """One reading, on the event loop's thread; what takes a walk over all extents is counted before."""
        resident = {each.id: self._runner.resident_bytes(each) for each in self._runner.datasets.all()}
        return iter(self._runner.loop.call(lambda: self._read(resident)))

    def _read(self, resident_bytes: dict[DatasetId, int]) -> list[Metric]:
        status = self._runner.node.status()
        budget = GaugeMetricFamily("cachesvc_tier_budget_bytes", "Budget of a tier.", labels=["tier"])
        used = GaugeMetricFamily(
            "cachesvc_tier_used_bytes", "Resident, reserved and leaving.", labels=["tier"]
        )
        held = GaugeMetricFamily(
            "cachesvc_tier_held_bytes",
            "Of the budget, what readers have mapped since before this daemon started.",
            labels=["tier"],
        )
        lost = GaugeMetricFamily("cachesvc_tier_lost", "1 while a tier answers with errors.", labels=["tier"])
        corrupt = CounterMetricFamily(
            "cachesvc_corrupt_extents", "Copies that failed their checksums.", labels=["tier"]
        )
        scrubbed = CounterMetricFamily(
            "cachesvc_scrubbed_bytes", "Verified in the background.", labels=["tier"]
        )
        evicted = CounterMetricFamily("cachesvc_evicted_bytes", "Given up for others.", labels=["tier"])
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
        sent = CounterMetricFamily(
            "cachesvc_peer_sent_bytes", "Read by other nodes.", value=self._sharing.sent_bytes
        )
        alone = CounterMetricFamily("cachesvc_peer_failures", "Times a node did not answer.", labels=["peer"])
        for peer, times in self._runner.left_alone().items():
            alone.add_metric([peer], times)
        failed = CounterMetricFamily("cachesvc_failed_fills", "Fills that failed.", labels=["error"])
        for error in kinds():  # those that never came, too: the first could not be told from a restart
            failed.add_metric([error.__name__], self._runner.fills.failures[error.__name__])
        info = GaugeMetricFamily("cachesvc_build_info", "1, of this release.", labels=["version"])
        info.add_metric([cachesvc.__version__], 1)
        tiers = [info, budget, used, held, lost, corrupt, scrubbed, evicted, sent, alone, failed]
        return [*tiers, *self._sources(), *self._datasets(resident_bytes), readers, fills, *self._stalls()]

    def _sources(self) -> list[Metric]:
        """What was asked of the sources: of all together, since a source's name may be a tenant's."""
        asked = self._runner.asked()
        told = {
            "requests": ("Reads asked of sources, each try.", asked.requests),
            "retries": ("Tries after the first.", asked.retries),
            "throttled": ("Answers that asked for fewer requests.", asked.throttled),
            "hedges": ("Late reads that were asked a second time.", asked.hedges),
            "hedge_bytes": ("Bytes that came for those.", asked.hedge_bytes),
            "read_bytes": ("Bytes that sources sent, without hedges.", asked.bytes),
        }
        return [CounterMetricFamily(f"cachesvc_source_{name}", *each) for name, each in told.items()]

    def _datasets(self, resident_bytes: dict[DatasetId, int]) -> list[Metric]:
        """How much of each is here, and how its readers fared."""
        resident = GaugeMetricFamily(
            "cachesvc_resident_bytes", "Bytes of a dataset on this node.", labels=["dataset"]
        )
        hits = CounterMetricFamily("cachesvc_hits", "Demands of a resident extent.", labels=["dataset"])
        ahead = CounterMetricFamily(
            "cachesvc_ahead", "Demands of an extent that a plan had fetched ahead.", labels=["dataset"]
        )
        misses = CounterMetricFamily("cachesvc_misses", "Demands that waited.", labels=["dataset"])
        refused = CounterMetricFamily(
            "cachesvc_refused", "Demands that were told to read it elsewhere.", labels=["dataset"]
        )
        source = CounterMetricFamily("cachesvc_source_bytes", "Fetched from the source.", labels=["dataset"])
        peer = CounterMetricFamily("cachesvc_peer_bytes", "Had from other nodes.", labels=["dataset"])
        bound = GaugeMetricFamily("cachesvc_hit_bound", "The best possible hit rate.", labels=["dataset"])
        of_bound = GaugeMetricFamily(
            "cachesvc_epoch_hits_of_bound", "Hit rate of the latest epoch over its bound.", labels=["dataset"]
        )
        told = self._told()
        counters = [(label, self._runner.node.counters(dataset)) for label, dataset in told]
        _tell(resident, (((label,), resident_bytes.get(dataset, 0)) for label, dataset in told))
        _tell(hits, (((label,), each.hits) for label, each in counters))
        _tell(ahead, (((label,), each.ahead) for label, each in counters))
        _tell(misses, (((label,), each.misses) for label, each in counters))
        _tell(refused, (((label,), each.refused) for label, each in counters))
        _tell(source, (((label,), self._runner.fills.source_bytes(dataset)) for label, dataset in told))
        _tell(peer, (((label,), self._runner.fills.peer_bytes(dataset)) for label, dataset in told))
        for label, each in counters:
            if label == PRIVATE:
                continue  # a sum of rates means nothing
            if each.bound:  # nothing is known of what nobody claims
                bound.add_metric([label], each.bound)
            if each.epochs:
                of_bound.add_metric([label], each.epochs[-1].of_bound)
        return [resident, hits, ahead, misses, refused, source, peer, bound, of_bound]

    def _stalls(self) -> list[Metric]:
        """What the ranks of this node report of their steps."""
        steps = CounterMetricFamily(
            "cachesvc_loader_batches", "Batches handed to training steps.", labels=["dataset"]
        )
        waited = CounterMetricFamily(
            "cachesvc_loader_wait_seconds", "What they waited for, by cause.", labels=["dataset", "cause"]
        )
        # The label `quantile` belongs to summaries alone. This one has no sum: that is `waited`.
        quantiles = SummaryMetricFamily(WAIT_QUANTILES, "A step's wait, as the latest rank reported it.")
        told = [(self._label(dataset), stalls) for dataset, stalls in self._runner.stalls.items()]
        _tell(steps, (((label,), each.steps) for label, each in told))
        _tell(
            waited,
            (
                ((label, cause), spent / 1e6)
                for label, each in told
                for cause, spent in zip(CAUSES, each.waited_us, strict=True)
            ),
        )
        for label, each in told:
            if label != PRIVATE:
                for quantile, wait in zip(QUANTILES, each.quantiles_us, strict=True):
                    quantiles.add_sample(WAIT_QUANTILES, {"dataset": label, "quantile": quantile}, wait / 1e6)
        return [steps, waited, quantiles]

    def _told(self) -> list[tuple[str, DatasetId]]:
        """Labels and datasets: those that are listed, and private ones that were. What is read to be indexed is in the
        sum of private ones once it is: its bytes are those of the dataset that comes of it."""
        listed = {each.id: each for each in self._runner.listed()}
        labelled = [(self._label(each), each) for each in listed]
        told = [each for each in labelled if each[0] != PRIVATE or not listed[each[1]].provisional]
        self._labels |= {dataset: label for label, dataset in told}
        gone = [each for each, label in self._labels.items() if label == PRIVATE and each not in listed]
        return told + [(PRIVATE, each) for each in gone]

    def _label(self, dataset: DatasetId) -> str:
        """A dataset's name to everybody who may reach the port."""
        known = self._runner.datasets.known(dataset)
        if known is None:
            return self._labels.get(dataset, PRIVATE)
        return PRIVATE if known.rules else dataset


def _tell(
    family: CounterMetricFamily | GaugeMetricFamily, values: Iterable[tuple[tuple[str, ...], float]]
) -> None:
    """Add up what has the same labels."""
    sums: dict[tuple[str, ...], float] = {}
    for labels, value in values:
        sums[labels] = sums.get(labels, 0) + value
    for labels, value in sums.items():
        family.add_metric(labels, value)
