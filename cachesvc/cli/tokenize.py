"""`cachesvc tokenize`: write the tokens of text once, as shards that the format `tokens` reads."""

from __future__ import annotations

import importlib.util
import json as json_module
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from cachesvc.cli import options, output, resolve
from cachesvc.cli.progress_bar import ProgressBar
from cachesvc.core.errors import INTERRUPTED, CacheError, InvalidInput, from_code, install

SHARD_BYTES = 256 << 20
"""Source of one shard: four extents of the usual size, and minutes of work that an interruption can cost."""


@click.command()
@click.argument("src")
@click.argument("dst")
@click.option(
    "--tokenizer",
    required=True,
    metavar="NAME|FILE",
    help="A tokenizer.json, or a name at Hugging Face's hub.",
)
@click.option("--field", default="", help="The field that holds the text.  [default: text, or the whole row]")
@click.option("--eos", default="", metavar="TOKEN", help="Token to add at the end of each document.")
@click.option("--format", default="", help="Format of SRC; inferred unless given.")
@options.split
@click.option(
    "--on-error",
    type=click.Choice(["raise", "skip"]),
    default="raise",
    help="skip leaves out damaged tars.",
)
@click.option("--processes", type=click.IntRange(1, 1024), help="Processes.  [default: the cores]")
@click.option(
    "--shard-bytes", type=options.SIZE, default=SHARD_BYTES, help="Source of one shard.  [default: 256MiB]"
)
@options.daemon
def tokenize(
    src: str,
    dst: str,
    tokenizer: str,
    processes: int | None,
    shard_bytes: int,
    socket: str | None,
    json: bool,
    **given: Any,
) -> int:
    """Write the tokens of SRC once, into the folder DST.

    SRC is a dataset of text in any format, and each row is a document. DST gets shards of Megatron's .bin and .idx; open
    it with format="tokens", and pack it. Run it again to continue after an interruption. It needs the extras torch and
    tokenize.
    """
    if "://" in dst:
        raise InvalidInput(f"{dst} is no folder: write the shards to a folder, and copy that")
    missing = [name for name in ("torch", "tokenizers") if importlib.util.find_spec(name) is None]
    if missing:
        raise InvalidInput(f"{' and '.join(missing)} missing: {install('torch,tokenize')}")
    job = given | {
        "source": resolve.absolute_uri(src),
        "folder": os.path.abspath(dst),
        "tokenizer": tokenizer,
        "processes": processes or len(os.sched_getaffinity(0)),
        "shard_bytes": max(1, shard_bytes),
    }
    row: dict[str, Any] = {}
    with ProgressBar("tokenize", json) as progress, _rows(job, socket) as rows:
        for row in rows:
            if "done_bytes" in row:
                progress.update(row["done_bytes"], row["total_bytes"])
    output.report(
        json,
        f"{src}: {row['rows']:,} rows, {row['tokens']:,} tokens of {row['dtype']} in {row['shards']:,} shards,"
        f" {output.size(row['size_bytes'])}, {row['written_shards']:,} of them written now; in {dst}",
        {"event": "tokenized", "source": src, "folder": dst} | row,
    )
    return 0


@contextmanager
def _rows(job: dict[str, Any], socket: str | None) -> Iterator[Iterator[dict[str, Any]]]:
    """Run the job in a process of its own, which imports torch and ends with this block; yield what it prints. The
    iterator raises the job's error, and CacheError where the process is killed."""
    environment = os.environ | ({"CACHESVC_SOCKET": socket, "CACHESVC": "require"} if socket else {})
    command = [sys.executable, "-m", "loader.token_shards", json_module.dumps(job)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield _checked(process)
        finally:
            process.terminate()


def _checked(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None, "stdout is a pipe"
    for line in process.stdout:
        row: dict[str, Any] = json_module.loads(line)
        if "error" in row:
            raise from_code(row["code"], row["error"])
        yield row
    code = process.wait()
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        raise CacheError(f"the process that tokenises ended with exit code {code}; see its messages above")
