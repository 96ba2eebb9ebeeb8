"""`cachesvc estimate`: predict size, fit, hit rate and epoch time before data is moved, by formulas.

With uniform shuffles no demand-fill policy hits more than f = C/D, for a dataset of D bytes and caches of C, and keeping a
fixed part reaches it. The N nodes of a cluster keep disjoint parts where the data does not fit one of them, and so hit
F = min(1, N f) together.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import click

from cachesvc.cli import options, output
from cachesvc.core.errors import InvalidInput
from cachesvc.core.model import EXTENT_BYTES
from cachesvc.system.footprint import default_fillers, default_ram_bytes, footprint_bytes
from cachesvc.system.memory import allowed_bytes

GIB = 1 << 30
LOCAL_BYTES_PER_S = 2 * GIB
"""Rate of one NVMe drive; RAM is faster, and compute is then the limit."""


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


@click.command()
@click.argument("name", metavar="URI|ID", shell_complete=options.known_uris)
@options.dataset
@click.option(
    "--nodes", type=click.IntRange(1, 1_000_000), default=1, show_default=True, help="Nodes of the job."
)
@click.option("--ram", type=options.SIZE, help="RAM budget of a node.  [default: 10 % of this cgroup's]")
@click.option("--nvme", type=options.SIZE, default=0, help="NVMe budget of a node, all directories together.")
@click.option(
    "--sample-rate", type=options.Number(0), default=0.0, help="Samples/s that the whole job can consume."
)
@click.option(
    "--source-rate", type=options.SIZE, default=GIB, help="Bytes/s of the source, all nodes.  [default: 1GiB]"
)
@click.option(
    "--peer-rate", type=options.SIZE, default=GIB, help="Bytes/s between nodes, a node.  [default: 1GiB]"
)
@click.option(
    "--local-rate",
    type=options.SIZE,
    default=LOCAL_BYTES_PER_S,
    help="Bytes/s of a node's cache.  [default: 2GiB]",
)
@options.daemon
def estimate(
    name: str,
    nodes: int,
    ram: int | None,
    nvme: int,
    sample_rate: float,
    source_rate: int,
    peer_rate: int,
    local_rate: int,
    socket: str | None,
    json: bool,
    **given: Any,
) -> int:
    """Predict hit rate and epoch time from sizes and rates.

    Formulas give the prediction, and nothing is measured: the rates are assumptions that the options replace. It holds for
    shuffled epochs after the first.
    """
    if not (source_rate and peer_rate and local_rate):
        raise InvalidInput(
            "a rate of 0 bytes/s never ends; give --source-rate, --peer-rate and --local-rate above 0"
        )
    from cachesvc.cli.catalog_file import catalog_file

    with catalog_file(socket, name, options.dataset_options(given), json) as (catalog, _):
        size_bytes, samples = int(catalog.extent_sizes.sum()), catalog.samples
    own_bytes = footprint_bytes(default_fillers(), EXTENT_BYTES)
    ram_bytes = default_ram_bytes(allowed_bytes(), own_bytes) if ram is None else ram
    cluster = Cluster(nodes, ram_bytes + nvme, source_rate, peer_rate, local_rate, sample_rate)
    ways = {"private": False, "cooperative": True}
    forecasts = {way: forecast(size_bytes, samples, cluster, shared) for way, shared in ways.items()}
    fit = _fit(size_bytes, cluster)
    if json:
        row = {
            "dataset": catalog.id,
            "target": name,
            "size_bytes": size_bytes,
            "samples": samples,
            "fit": fit,
        }
        output.emit(
            row | {"cluster": asdict(cluster)} | {way: asdict(each) for way, each in forecasts.items()}
        )
        return 0
    output.say(
        f"{name} ({catalog.id}): {samples:,} samples, {output.size(size_bytes)}; {nodes:,} x"
        f" {output.size(cluster.cache_bytes)} of cache: {fit}"
    )
    rows = [_row("each node alone", forecasts["private"])]
    if nodes > 1:
        rows.append(_row("with --cluster", forecasts["cooperative"]))
    output.table(
        ["", "local>", "peers>", "source>", "first epoch>", "epoch>", "source rate>", "bound by"], rows
    )
    return 0


def _fit(size_bytes: int, cluster: Cluster) -> str:
    if size_bytes <= cluster.cache_bytes:
        return "fits one node"
    if size_bytes <= cluster.nodes * cluster.cache_bytes:
        return "fits the nodes together: with --cluster each keeps its part"
    missing = size_bytes - cluster.nodes * cluster.cache_bytes
    return f"fits nowhere ({output.size(missing)} too much); a fixed part is kept, the rest streams"


def _row(title: str, found: Forecast) -> list[str]:
    return [
        title,
        output.share(found.local, 1.0),
        output.share(found.peer, 1.0),
        output.share(found.source, 1.0),
        output.duration(found.cold_epoch_s),
        output.duration(found.epoch_s),
        f"{output.size(found.source_bytes_per_s)}/s",
        found.bound_by,
    ]
