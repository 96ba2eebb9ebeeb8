"""`cachesvc simulate`: predict the cache's work for a job by running its decisions on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar, get_args

import click

from cachesvc.cli import options, output
from cachesvc.core.errors import InvalidInput
from cachesvc.core.model import EXTENT_BYTES
from cachesvc.core.order.epoch_order import ShuffleScope

BAR = 40
"""Columns of the plot: a bar of full length is a hit rate of 1."""
DAY_S = 86_400
"""Limit of a step and of a first byte; it keeps sums of them finite."""
MAX_NODES = 256
_F = TypeVar("_F", bound=Callable[..., Any])


def _given(name: str, kind: click.ParamType[Any], default: float, text: str) -> Callable[[_F], _F]:
    return click.option(name, type=kind, default=default, show_default=True, help=text)


@click.command()
@_given("--shards", click.IntRange(1), 2000, "Extents of the dataset.")
@_given("--samples", click.IntRange(1), 16, "Samples of a shard.")
@click.option(
    "--shard-bytes", type=options.SIZE, default=EXTENT_BYTES, help="Bytes of a shard.  [default: 64MiB]"
)
@click.option(
    "--cache",
    "caches",
    type=options.Number(0, 1, min_open=True),
    multiple=True,
    default=(0.1, 0.35, 0.5, 0.8),
    show_default=True,
    help="A node's cache as a part of the data; repeatable.",
)
@click.option(
    "--ram", type=options.Number(0, 1, min_open=True), default=1.0, help="RAM's part of it.  [default: all]"
)
@click.option(
    "--policy",
    "names",
    multiple=True,
    help="keep, undeclared, lru, random or belady; repeatable.  [default: all]",
)
@_given("--epochs", click.IntRange(2), 8, "The first one is cold.")
@_given("--batch", click.IntRange(1), 16, "Samples of a global batch.")
@_given("--window", click.IntRange(0), 4, "Shuffled together; 0: all.")
@_given("--ranks", click.IntRange(1), 1, "Readers of a node.")
@_given("--nodes", click.IntRange(1, MAX_NODES), 1, "Nodes of one cluster.")
@click.option(
    "--shuffle-scope",
    type=click.Choice(get_args(ShuffleScope)),
    default="job",
    show_default=True,
    help="As of the DataLoader.",
)
@_given("--step-s", options.Number(0, DAY_S, min_open=True), 0.05, "Compute a step.")
@_given("--latency-s", options.Number(0, DAY_S), 0.02, "The source's first byte.")
@click.option(
    "--source-rate", type=options.SIZE, default=2 * 10**9, help="Bytes/s of the source.  [default: 2GB]"
)
@_given("--faults", options.Number(0, 0.5), 0.0, "Part of fetches that fail.")
@_given("--seed", click.IntRange(0, 2**64 - 1), 0, "Same seed, same run.")
@click.option("--json", is_flag=True, help="One JSON object a policy and cache size.")
def simulate(**given: Any) -> int:
    """Run epochs on simulated nodes.

    The decisions are the daemon's own, the clock is virtual, and the source has a seed.

    keep is the daemon's policy for a dataset that a job has declared, undeclared its policy for other reads; lru, random
    and belady are references. Several nodes place extents and share them as the daemons of a cluster do, over links of
    10 Gbit/s; for the references and the formulas their caches are one. The expected rates are closed formulas. Nothing
    is measured on this machine.
    """
    from cachesvc.simulate import compare

    rows = []
    for cache in given["caches"]:
        for name in given["names"] or compare.POLICIES:
            if name not in compare.POLICIES:
                raise InvalidInput(f"no policy {name!r}; choose from {', '.join(compare.POLICIES)}")
            result = _run(name, cache, given)
            row = _row(cache, result, compare.EXPECTED[name](given["nodes"] * cache), given["nodes"])
            rows.append(row)
            if given["json"]:
                output.emit(row)
    if not given["json"]:
        _draw(rows)
    return 0


def _run(name: Any, cache: float, given: dict[str, Any]) -> Any:
    from cachesvc.simulate.compare import simulate as run
    from cachesvc.simulate.simulated_node import NodeSpec, SourceSpec, tiers_of
    from cachesvc.simulate.trace import Workload

    if not given["source_rate"]:
        raise InvalidInput("a source of 0 bytes/s never answers; give --source-rate above 0")
    work = Workload(
        shards=given["shards"],
        samples_per_shard=given["samples"],
        shard_bytes=given["shard_bytes"],
        batch=given["batch"],
        window=given["window"],
        epochs=given["epochs"],
        ranks=given["ranks"] * given["nodes"],
        nodes=given["nodes"],
        seed=given["seed"],
        shuffle_scope=given["shuffle_scope"],
    )
    capacity = int(cache * work.size_bytes)
    ram = int(capacity * given["ram"])
    if max(ram, capacity - ram) < work.shard_bytes:
        raise InvalidInput(
            f"--cache {cache:g} leaves no tier with room for one shard; give more, or more --shards"
        )
    source = SourceSpec(given["latency_s"], bytes_per_s=given["source_rate"], fault_rate=given["faults"])
    spec = NodeSpec(tiers_of(ram, capacity - ram), source=source, step_s=given["step_s"])
    return run(name, spec, work)


def _row(cache: float, result: Any, expected: float, nodes: int) -> dict[str, Any]:
    return {
        "policy": result.policy,
        "nodes": nodes,
        "cache": cache,
        "hit_rate": result.hit_rate,
        "bound": result.bound,
        "of_bound": result.hit_rate / result.bound,
        "expected": expected,
        "source_bytes": result.source_bytes,
        "peak_bytes_per_s": result.peak,
        "peak_ratio": result.peak_ratio,
        "stall_s": result.stall_s,
        "epoch_s": result.epoch_s,
        "epochs": [asdict(epoch) for epoch in result.epochs],
    }


def _draw(rows: list[dict[str, Any]]) -> None:
    heads = [
        "cache",
        "policy",
        "hits>",
        "expected>",
        "bound>",
        "of bound>",
        "peak rate>",
        "to mean>",
        "stall>",
        "epoch>",
    ]
    output.table([*heads, "hits (#) below the bound (.)"], [_cells(row) for row in rows])


def _cells(row: dict[str, Any]) -> list[str]:
    hits, bound = round(BAR * row["hit_rate"]), round(BAR * row["bound"])
    return [
        f"{row['cache']:g}",
        row["policy"],
        f"{row['hit_rate']:.3f}",
        f"{row['expected']:.3f}",
        f"{row['bound']:.3f}",
        f"{row['of_bound']:.3f}",
        f"{output.size(row['peak_bytes_per_s'])}/s",
        f"{row['peak_ratio']:.2f}",
        f"{row['stall_s']:.1f} s",
        f"{row['epoch_s']:.1f} s",
        "#" * hits + "." * (bound - hits),
    ]
