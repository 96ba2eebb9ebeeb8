"""`cachesvc prepare`: have a function make what it makes of a dataset's samples, before the job starts. Runs jobs of the
loader's in a process of its own, which imports torch, and reads the rows that it writes."""

from __future__ import annotations

import importlib.util
import os
import re
from typing import TYPE_CHECKING, Any

import click

from cachesvc.cli import options, output, resolve
from cachesvc.cli.loader_process import rows_of
from cachesvc.cli.prefetch import fill
from cachesvc.cli.prefetch_part import fill_parts
from cachesvc.client.control import Control
from cachesvc.core.errors import CacheError, InvalidInput, OutOfSpace, install
from cachesvc.core.model import DatasetId

if TYPE_CHECKING:
    from cachesvc.catalog.columns import Ints
    from cachesvc.saved_runs.run_data import Leaf


def _shard(text: str) -> tuple[int, int]:
    """Return the numbers of `3/8`: shard 3 of the shards 0 to 7."""
    match = re.fullmatch(r"([0-9]{1,7})/([0-9]{1,7})", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise InvalidInput(f"{text!r} is no shard; write 0/8 to 7/8 for one of eight")
    return int(match[1]), int(match[2])


@click.command()
@click.argument("uri")
@click.option(
    "--with", "function", required=True, metavar="MODULE:FUNCTION", help="The prepare= of open_dataset."
)
@click.option("--name", default="", help="The prepare_name= of open_dataset.")
@click.option(
    "--max-bytes",
    type=options.SIZE,
    default=0,
    help="The prepare_max_bytes of open_dataset, for samples of unlike shapes.",
)
@click.option(
    "--shard",
    type=options.Parsed("i/n", _shard),
    help="Prepare one of N equal shares, I from 0 on, as a task of a Slurm array or an Indexed Job does.",
)
@click.option("--workers", type=click.IntRange(1, 1024), help="Processes that prepare.  [default: the cores]")
@click.option(
    "--dry-run", is_flag=True, help="Only say how large it will be, whether it fits, and what it saves."
)
@options.dataset
@options.daemon
def prepare(
    uri: str,
    function: str,
    name: str,
    max_bytes: int,
    shard: tuple[int, int] | None,
    workers: int | None,
    dry_run: bool,
    socket: str | None,
    json: bool,
    **given: Any,
) -> int:
    """Prepare the samples of a dataset before a job.

    It does what open_dataset(URI, prepare=FUNCTION) does while it is read.

    Says first, from the first hundred samples, how large the result will be, and what an epoch saves. Exits 0 only when
    every extent is resident, and 8 before anything is prepared where it does not fit. It needs the extra torch.
    """
    if importlib.util.find_spec("torch") is None:
        raise InvalidInput(f"torch missing: {install('torch')}")
    count = workers or len(os.sched_getaffinity(0))
    job = {
        "uri": resolve.absolute_uri(uri),
        "function": function,
        "name": name,
        "max_bytes": max_bytes,
        "workers": 0 if dry_run else count,
        "given": {key: value for key, value in given.items() if value},
    }
    target = f"{uri} by {function}" + (f", shard {shard[0]}/{shard[1]}" if shard else "")
    with Control(socket) as control, rows_of("loader.prepare_ahead", job, control.directory) as rows:
        found = next(rows, None)
        if found is None:
            raise CacheError(f"{target}: the process that prepares said nothing; see its messages above")
        dataset = DatasetId(found["dataset"])
        part = None
        if shard is not None:
            size_bytes = found["size_bytes"] / found["samples"]
            part, found["samples"] = _share(dataset, *shard, control.directory)
            found["size_bytes"] = round(size_bytes * found["samples"])
        seconds = found["samples"] * found["sample_s"]
        output.report(
            json,
            f"{target} ({dataset}): {found['samples']:,} samples, {output.size(found['size_bytes'])}; each epoch without"
            f" it takes {output.duration(seconds)} of a core, {output.duration(seconds / count)} on {count}",
            {"event": "estimated", "target": target, "saved_core_s": round(seconds, 3)} | found,
        )
        if part is None and not max_bytes:
            fill(control, dataset, target, True, json)
        else:
            _check_room(control, dataset, found["size_bytes"], target, json)
        if not dry_run:
            next(rows)  # the processes are ready
            if part is None:
                fill(control, dataset, target, False, json)
            else:
                fill_parts([part], control.directory, json)
    return 0


def _share(dataset: DatasetId, shard: int, shards: int, directory: str) -> tuple[tuple[Leaf, Ints], int]:
    """Return the extents of a shard, and its samples. The extents follow one another, so that shards share few source
    extents."""
    import numpy as np

    from cachesvc.saved_runs.catalogs import catalog_of
    from cachesvc.saved_runs.data import DataSource
    from cachesvc.saved_runs.run_data import Leaf

    source = DataSource(dataset)
    catalog = catalog_of(source, directory)
    count = len(catalog.extent_sizes)
    begin, end = (count * each // shards for each in (shard, shard + 1))
    samples = int(catalog.extent_first[end] - catalog.extent_first[begin])
    return (Leaf(source, catalog, None), np.arange(begin, end)), samples


def _check_room(control: Control, dataset: DatasetId, size_bytes: int, target: str, as_json: bool) -> None:
    """Say whether `size_bytes` of a dataset fit, which may be resident already. Raises OutOfSpace."""
    (whole,) = control.prefetch(dataset, dry_run=True)
    room = whole.size_bytes - whole.unfit_bytes
    unfit = max(0, size_bytes - room)
    row = {
        "event": "fit",
        "dataset": dataset,
        "target": target,
        "size_bytes": size_bytes,
        "unfit_bytes": unfit,
    }
    fit = f"{output.size(unfit)} do not fit" if unfit else "fits"
    output.report(
        as_json, f"{target} ({dataset}): {output.size(size_bytes)}; {fit}", row | {"fits": not unfit}
    )
    if unfit:
        raise OutOfSpace(
            f"{target} does not fit: {unfit:,} bytes of {size_bytes:,} have no room; give the daemon more --ram or"
            " --nvme, or prepare shards on more nodes"
        )
