"""`cachesvc where`: the nodes of the cluster, ranked by what they hold of a dataset."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

from cachesvc.cli import options, output, resolve
from cachesvc.client.control import Control
from cachesvc.core.errors import InvalidInput, NotFound

if TYPE_CHECKING:
    from cachesvc.v1 import cachesvc_pb2 as pb

HEADS = ["node~", "resident>", "share>", "extents>?", "zone?", "address~?"]
_NUMBERED = re.compile(r"(.*?)(\d+)(\D*)")
_TERM = """\
      - weight: {weight}
        preference:
          matchExpressions:
            - key: kubernetes.io/hostname
              operator: In
              values: [{names}]
"""


@click.command("where")
@click.argument("name", metavar="URI|ID", shell_complete=options.known_uris)
@click.option("--nodes", type=click.IntRange(1), help="Only the N nodes that hold most.", metavar="N")
@click.option("--slurm", is_flag=True, help="Print the nodes as a host list for `sbatch --nodelist`.")
@click.option("--affinity", is_flag=True, help="Print a nodeAffinity that prefers the nodes, for a pod.")
@options.dataset
@options.wide
@options.daemon
def where(
    name: str,
    nodes: int | None,
    slurm: bool,
    affinity: bool,
    wide: bool,
    socket: str | None,
    json: bool,
    **given: Any,
) -> int:
    """Rank the nodes of the cluster by what they hold of a dataset.

    Host list and affinity have only nodes that hold some of it. Nodes that do not answer are named on stderr.
    """
    if slurm and affinity:
        raise click.UsageError("give --slurm or --affinity, not both")
    with Control(socket) as control:
        dataset = resolve.current_version(control, name, options.dataset_options(given), json)
        reply = control.where(dataset)
    asked = [each for each in reply.nodes if not each.why][:nodes]
    output.print_notes([f"{each.name or each.address}: {each.why}" for each in reply.nodes if each.why], json)
    if slurm or affinity:
        holders = [each for each in asked if each.resident_bytes]
        if not holders:
            raise NotFound(f"no node that answers holds any of {name}; fill it: cachesvc prefetch {name}")
        text = (
            host_list(each.name for each in holders)
            if slurm
            else node_affinity(holders, reply.dataset.size_bytes)
        )
        output.report(json, text, {"event": "where", "dataset": dataset, "text": text})
    elif json:
        for each in asked:
            share = each.resident_bytes / max(1, reply.dataset.size_bytes)
            output.emit(output.plain(each) | {"dataset": dataset, "share": share})
    else:
        output.table(HEADS, [_cells(each, reply.dataset.size_bytes) for each in asked], wide)
    return 0


def _cells(node: pb.NodeHolding, size_bytes: int) -> list[str]:
    return [
        f"{node.name} (this node)" if node.me else node.name,
        output.size(node.resident_bytes),
        output.share(node.resident_bytes, size_bytes),
        f"{node.resident_extents:,}",
        node.zone,
        node.address,
    ]


def host_list(names: Iterable[str]) -> str:
    """Return names as a host list of Slurm: n[1-3,7],login. Raises InvalidInput for a name that Slurm cannot read."""
    parts: defaultdict[tuple[str, int, str], set[int]] = defaultdict(set)
    plain = []
    for name in names:
        if not re.fullmatch(r"[\w.-]+", name):
            raise InvalidInput(f"{name!r} is no name of a host; start its daemon with another --node-name")
        if (found := _NUMBERED.fullmatch(name)) is not None:
            before, digits, behind = found.groups()
            parts[before, len(digits), behind].add(int(digits))
        else:
            plain.append(name)
    lists = []
    for (before, width, behind), numbers in parts.items():
        ranges = [
            f"{low:0{width}}" + (f"-{high:0{width}}" if high > low else "") for low, high in _runs(numbers)
        ]
        inside = ranges[0] if len(numbers) == 1 else f"[{','.join(ranges)}]"
        lists.append(f"{before}{inside}{behind}")
    return ",".join([*lists, *plain])


def _runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the runs of following numbers, first and last of each."""
    runs: list[tuple[int, int]] = []
    for each in sorted(numbers):
        if runs and runs[-1][1] == each - 1:
            runs[-1] = (runs[-1][0], each)
        else:
            runs.append((each, each))
    return runs


def node_affinity(nodes: Sequence[pb.NodeHolding], size_bytes: int) -> str:
    """Return the YAML of an affinity, whose weights are the shares in percent that nodes hold. Nodes of one weight are one
    term."""
    weights: defaultdict[int, list[str]] = defaultdict(list)
    for each in nodes:
        weights[max(1, round(100 * each.resident_bytes / max(1, size_bytes)))].append(each.name)
    terms = [
        _TERM.format(weight=weight, names=", ".join(f'"{name}"' for name in names))
        for weight, names in sorted(weights.items(), reverse=True)
    ]
    head = "affinity:\n  nodeAffinity:\n    preferredDuringSchedulingIgnoredDuringExecution:\n"
    return (head + "".join(terms)).rstrip("\n")
