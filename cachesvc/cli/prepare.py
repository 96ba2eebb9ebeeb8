"""`cachesvc prepare`: have a function make what it makes of a dataset's samples, before the job starts. Runs jobs of the
loader's in a process of its own, which imports torch, and reads the rows that it prints."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import click

from cachesvc.cli import options, output, resolve
from cachesvc.cli.loader_process import rows_of
from cachesvc.cli.prefetch import fill
from cachesvc.client.control import Control
from cachesvc.core.errors import CacheError, InvalidInput, install
from cachesvc.core.model import DatasetId


@click.command()
@click.argument("uri")
@click.option(
    "--with", "function", required=True, metavar="MODULE:FUNCTION", help="The prepare= of open_dataset."
)
@click.option("--name", default="", help="The prepare_name= of open_dataset.")
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
        "workers": 0 if dry_run else count,
        "given": {key: value for key, value in given.items() if value},
    }
    target = f"{uri} by {function}"
    with Control(socket) as control, rows_of("loader.prepare_ahead", job, control.directory) as rows:
        found = next(rows, None)
        if found is None:
            raise CacheError(f"{target}: the process that prepares said nothing; see its messages above")
        dataset, seconds = DatasetId(found["dataset"]), found["samples"] * found["sample_s"]
        output.report(
            json,
            f"{target} ({dataset}): {found['samples']:,} samples, {output.size(found['size_bytes'])}; each epoch without"
            f" it takes {output.duration(seconds)} of a core, {output.duration(seconds / count)} on {count}",
            {"event": "estimated", "target": target, "saved_core_s": round(seconds, 3)} | found,
        )
        fill(control, dataset, target, True, json)
        if not dry_run:
            next(rows)  # the processes are ready
            fill(control, dataset, target, False, json)
    return 0
