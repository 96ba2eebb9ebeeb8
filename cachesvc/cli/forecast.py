"""What a cache of a given size can do for a dataset: pure formulas.

With uniform shuffles each epoch no demand-fill policy hits more than f = C/D, and keeping a fixed part
reaches it. Nodes that cooperate hold one copy an extent: F = min(1, N*C/D), of which a share of 1/N is local.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes that train together; `cache_bytes` and the rates (bytes/s) are per node, except the source's,
    which all nodes share. `samples_per_s` is what the whole job could consume (0: unknown)."""

    nodes: int
    cache_bytes: int
    source_bytes_per_s: float
    peer_bytes_per_s: float
    local_bytes_per_s: float
    samples_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Forecast:
    """One epoch: shares of reads by origin (they add up to 1), and seconds."""

    local: float
    peer: float
    source: float
    epoch_s: float
    cold_epoch_s: float
    source_bytes: int
    source_bytes_per_s: float
    bound_by: str


def forecast(size_bytes: int, samples: int, cluster: Cluster, cooperative: bool) -> Forecast:
    """Steady-state epoch over `size_bytes` (each byte is read once an epoch, by one node)."""
    n, fraction = cluster.nodes, cluster.cache_bytes / max(size_bytes, 1)
    if fraction >= 1 or not cooperative:
        local, peer = min(1.0, fraction), 0.0
    else:
        shared = min(1.0, n * fraction)
        local, peer = shared / n, shared * (n - 1) / n
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
