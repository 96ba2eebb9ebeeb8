"""`cachesvc tokenize`: write the tokens of text once, as shards that the format `tokens` reads."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import click

from cachesvc.cli import options, output, resolve
from cachesvc.cli.loader_process import rows_of
from cachesvc.cli.progress_bar import ProgressBar
from cachesvc.core.errors import InvalidInput, install

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
    with ProgressBar("tokenize", json) as progress, rows_of("loader.token_shards", job, socket) as rows:
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
