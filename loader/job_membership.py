"""A loader's membership in its job: its topology, and the agreement of all ranks on what they are about to read."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from cachesvc.core.errors import CacheError, InvalidInput
from cachesvc.core.limits import AGREE_S
from cachesvc.core.order.digests import SampleSum, parse_sum
from cachesvc.core.order.epoch_order import EpochOrder
from loader.batches.feed import Feed
from loader.batches.held_parts import claim
from loader.datasets.dataset import Dataset
from loader.datasets.wrapped import as_view
from loader.job.agreement import KEPT, agree, tell_failure
from loader.job.checkpoint import EpochPosition
from loader.job.rank_drift import DriftWatch
from loader.job.rank_failures import Agreement
from loader.job.store import JobStore, awaited, job_store
from loader.job.topology import Topology, check_unchanged
from loader.order_setup import OrderArguments

_log = logging.getLogger("cachesvc")


class JobMembership:
    """One loader's part in its job, in one process. Methods take the loader's arguments as they are now."""

    def __init__(self) -> None:
        self._topology: Topology | None = None
        self._agreement: Agreement | None = None
        self._headline_logged = False
        self._order_rank: int | None = None
        """The rank whose part of global batches this one reads, once the nodes have chosen by what they hold."""

    def topology(self, given: OrderArguments) -> Topology:
        """This process's place in the job, resolved at the first use. Raises InvalidInput."""
        if self._topology is None:
            self._topology = given.topology()
        return self._topology

    def place(self, given: OrderArguments) -> Topology:
        """The topology, with the rank whose part of global batches this process reads. Raises InvalidInput."""
        found = self.topology(given)
        return found if self._order_rank is None else replace(found, rank=self._order_rank)

    def check_topology(self, given: OrderArguments) -> None:
        """Raise StateMismatch where the place that was used has changed since."""
        if self._topology is not None:
            check_unchanged(self._topology, given.topology())

    def compare_again(self) -> None:
        """Have the ranks compare at the next iteration, since this loader was moved: one that is moved alone is found."""
        self._agreement = None

    def agree(
        self,
        given: OrderArguments,
        identity: str,
        feed: Feed,
        place: EpochPosition,
        data: Dataset,
        prefetch: int,
        drift_s: float,
    ) -> Agreement | None:
        """The agreement for an iteration that begins; None for a single process. The ranks compare where none is in force;
        rank 0 logs the first.

        `identity` names all the data; `data` is one dataset of it. Ranks may be `prefetch` batches apart; being further
        apart for `drift_s` is logged. Raises as `agreement.agree`.
        """
        topology, store = self.topology(given), self._store(given)
        if not self._is_agreed():
            facts = facts_of(identity, feed, place, given.epochs) | {KEPT: " ".join(data.opened.link.kept)}
            if store is not None:
                name = agree(topology, facts, store)
                own = store.below(f"peers/{name}").connected_anew()
                if self._order_rank is None:
                    self._order_rank = claim(topology, feed, store.below(f"parts/{name}"))
                accumulate = feed.share.accumulate
                drift = DriftWatch(own, topology.process, prefetch, accumulate, drift_s)
                self._agreement = Agreement(own, topology, drift, accumulate)
            if not self._headline_logged and topology.rank == 0:
                _log.info("%s", headline(topology, facts, data.via))
                for warning in warnings_of(feed, topology):
                    _log.warning("%s", warning)
            self._headline_logged = True
        return self._agreement

    def summed(self, given: OrderArguments, place: str, before: SampleSum, own: SampleSum) -> SampleSum:
        """The sum of `before` and of what each rank adds. All processes call it at the same place. Raises InvalidInput for
        several ranks without a process group, and as `agreement.agree`."""
        topology, store = self.topology(given), self._store(given)
        if store is None and topology.world_size > 1:
            raise InvalidInput("digest() adds up what all ranks handed over: initialise a process group")
        if store is None:
            return before + own
        name = agree(topology, {"place of digest()": place, "digest before": before.digest.hex()}, store)
        parts = store.below(f"digests/{name}")
        parts.put(str(topology.process), [topology.rank, own.digest.hex()])
        found: dict[int, SampleSum] = {}  # tensor-parallel peers are one rank
        for process in range(topology.processes):
            rank, part = awaited(parts, str(process), AGREE_S, f"process {process}'s part of the digest")
            found[rank] = parse_sum(part)
        return sum(found.values(), before)

    def warn_of_state(self) -> None:
        """Warn, when a state is saved, of another rank at another place."""
        if self._agreement is not None:
            self._agreement.drift.warn_of_state()

    @contextmanager
    def failures_told(self, given: OrderArguments) -> Iterator[None]:
        """Tell the other ranks of an error in this block, unless the ranks have agreed already: they would wait for this
        one in vain."""
        try:
            yield
        except Exception as error:
            if not self._is_agreed():
                with suppress(CacheError):  # no place in the job, say
                    store = self._store(given)
                    if store is not None:
                        tell_failure(self.topology(given), f"{type(error).__name__}: {error}", store)
            raise

    def _is_agreed(self) -> bool:
        return self._agreement is not None and not self._agreement.over.is_set()

    def _store(self, given: OrderArguments) -> JobStore | None:
        """The job's store; None for a loader of a single process."""
        return job_store() if given.shard and self.topology(given).processes > 1 else None


def facts_of(identity: str, feed: Feed, place: EpochPosition, epochs: int | None) -> dict[str, str | int]:
    """The facts that must be equal on every rank of a job: all that defines the order, and the place in it."""
    return asdict(feed.spec) | {
        "version": identity,
        "batch_size": feed.share.batch_size,
        "epochs": "None" if epochs is None else epochs,
        "epochs already done": place.epochs_done,
        "epoch": place.epoch,
        "batches already consumed": place.turn,
        "steps": feed.order(place.epoch).steps,
        "edges": feed.run_edges,
    }


def headline(topology: Topology, facts: Mapping[str, Any], via: str) -> str:
    """The line that rank 0 logs when a job starts."""
    each, whole = facts["batch_size"], facts["global_batch"]
    return (
        f"{topology.world_size} ranks ({topology.source}), {each} x {whole // each} = {whole} a step, "
        f"epoch {facts['epoch']}, version {facts['version'][:4]}, seed {facts['seed']}, {facts['steps']:,} steps, "
        f"{facts['last']}, via {via}"
    )


def warnings_of(feed: Feed, topology: Topology) -> Iterator[str]:
    """Yield the warnings of rank 0 at the beginning of a run: orders that mix less than their user may expect."""
    spec = feed.spec
    if spec.shuffle_scope == "node" and topology.world_size > 1 and not spec.by_node:
        yield (
            f"shuffle_scope='node' changes nothing: the {topology.world_size} ranks ({topology.source}) count as one node;"
            " torchrun, mpirun and srun say how many there are"
        )
    if spec.shuffle and (line := _sorted_labels(feed)):
        yield line


def _sorted_labels(feed: Feed) -> str:
    """A line about labels of which a window holds fewer than half as many as of data in random order; else ""."""
    view, layout, spec = as_view(feed.dataset), feed.layout, feed.spec
    labels = None if view is None else view.catalog.labels
    if view is None or labels is None or labels.ndim != 1 or labels.dtype.kind == "f" or not layout.parts:
        return ""
    order = feed.order(0)
    assert isinstance(order, EpochOrder), "that of a dataset"
    own = order.own_extents(0, 1)
    extents = np.flatnonzero(np.diff(layout.extent_first)) if own is None else own
    window = np.random.default_rng(0).permutation(extents)[: spec.window_extents or None]
    ranges = [np.arange(layout.extent_first[each], layout.extent_first[each + 1]) for each in window.tolist()]
    if not ranges:
        return ""
    ordinals = np.concatenate(ranges)
    found = labels[view.ids_of(feed.orders.indices_of(ordinals))]
    classes, seen = max(len(view.classes), int(found.max()) + 1), np.unique(found[found >= 0]).size
    if seen * 2 >= classes * (1 - (1 - 1 / max(1, classes)) ** found.size):
        return ""
    where = (
        f"the {len(window):,} extents of a window have"
        if spec.window_extents
        else "the extents of a node have"
    )
    return (
        f"samples are sorted by label: {where} {seen:,} of {classes:,} classes, and a node's part of a batch no more; "
        + ("give a larger window=, or window='all'" if spec.window_extents else "give shuffle_scope='job'")
        + ", or store the samples in random order once"
    )
