"""Predicts hit rates and epoch times for a dataset of D bytes, shuffled each epoch, and caches of C bytes, by formulas.

With uniform shuffles no demand-fill policy hits more than f = C/D, and keeping a fixed part reaches it. The N nodes of a
cluster keep disjoint parts where the data does not fit one of them, and so hit F = min(1, N f) together.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes that train together.

    `cache_bytes` and the rates (bytes/s) are per node, except the source's, which all nodes share. `samples_per_s` is the
    rate at which the whole job could consume samples (0: unknown).
    """

    nodes: int
    cache_bytes: int
    source_bytes_per_s: float
    peer_bytes_per_s: float
    local_bytes_per_s: float
    samples_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Forecast:
    """One epoch: the shares of reads by origin, which add up to 1, and its duration."""

    local: float
    peer: float
    source: float
    epoch_s: float
    cold_epoch_s: float
    source_bytes: int
    source_bytes_per_s: float
    bound_by: str


def forecast(size_bytes: int, samples: int, cluster: Cluster, shared: bool = False) -> Forecast:
    """Predict an epoch after the first, in which each of the `size_bytes` is read by one node. `shared`: the nodes are
    members of one cluster."""
    n, fraction = cluster.nodes, min(1.0, cluster.cache_bytes / max(size_bytes, 1))
    local = fraction if fraction == 1 or not shared else min(fraction, 1 / n)
    peer = min(1.0, n * fraction) - local if shared else 0.0
    source = 1.0 - local - peer
    compute_s = samples / cluster.samples_per_s if cluster.samples_per_s else 0.0
    times = {
        "compute": compute_s,
        "source": size_bytes * source / cluster.source_bytes_per_s,
        "peers": size_bytes * peer / (n * cluster.peer_bytes_per_s),
        "cache": size_bytes / (n * cluster.local_bytes_per_s),
    }
    slowest = max(times, key=lambda name: times[name])
    epoch_s = times[slowest]
    return Forecast(
        local=local,
        peer=peer,
        source=source,
        epoch_s=epoch_s,
        cold_epoch_s=max(compute_s, size_bytes / cluster.source_bytes_per_s, times["cache"]),
        source_bytes=round(size_bytes * source),
        source_bytes_per_s=size_bytes * source / epoch_s if epoch_s else 0.0,
        bound_by=slowest,
    )
