"""`cachesvc try`: plain torch beside cachesvc on a user's own data, for a minute, with a daemon of its own."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
import tempfile
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from cachesvc import config_files
from cachesvc.cli import options, output, resolve
from cachesvc.cli.loader_process import rows_of
from cachesvc.cli.run import ENDING, sharing, signal_handlers
from cachesvc.config import check_socket_dir
from cachesvc.core.errors import CacheError, InvalidInput, TierFailed, install
from cachesvc.core.model import EXTENT_BYTES
from cachesvc.system.footprint import default_fillers, footprint_bytes, largest_ram_bytes
from cachesvc.system.memory import allowed_bytes
from cachesvc.tiers.probe import room

MOST_RAM = 2 << 30
"""The daemon's RAM while it is tried: no more than a minute of most sources."""
TRIED = 0.8
"""The part of the RAM that the tried data may fill, so that all of it stays."""
DISK_BYTES = 256 << 20
STEP_BYTES = 8 << 20
BOUND = 0.8
"""A first pass at less than this part of the second one's rate is limited by the source."""
WAYS = {"plain": "plain torch", "cachesvc": "cachesvc"}
CAUSES = {
    "decode": "making samples (decoding, and your function): more or faster cores, or cachesvc prepare",
    "hand-over": "moving samples out of the worker processes: smaller samples, or worker_type='thread'",
    "disk": "reading local files: keep them in RAM",
    "source": "the source",
}


@dataclass(frozen=True, slots=True)
class Sizing:
    """The options that keep the data, the part of it that they keep, and what to say of it."""

    options: tuple[str, ...]
    part: float
    says: str


@click.command("try")
@click.argument("uri")
@click.option(
    "--with", "function", default="", metavar="MODULE:FUNCTION", help="The transform= of open_dataset."
)
@click.option(
    "--seconds", type=options.Number(1, 3600), default=60, show_default=True, help="Time of all passes."
)
@click.option(
    "--workers", type=click.IntRange(0, 256), help="num_workers of both.  [default: the cores, 8 at most]"
)
@click.option(
    "--nvme", metavar="DIR", help="A folder on the disk that would keep the data, to be measured too."
)
@options.dataset
@click.option("--json", is_flag=True, help="Print JSON, one object a line.")
def trial(
    uri: str,
    function: str,
    seconds: float,
    workers: int | None,
    nvme: str | None,
    json: bool,
    **given: Any,
) -> int:
    """Try your own data for a minute: plain torch beside cachesvc.

    Reads a part of URI four times: with a plain torch DataLoader, and through a daemon of its own in a temporary folder,
    each a first and a second time. Says what limits, how much RAM and NVMe to give, and the lines to paste. The source is
    listed first, which is not counted. Nothing is left behind. It needs the extra torch.
    """
    if importlib.util.find_spec("torch") is None:
        raise InvalidInput(f"torch missing: {install('torch')}")
    count = min(8, len(os.sched_getaffinity(0))) if workers is None else workers
    name, allowed = resolve.absolute_uri(uri), allowed_bytes()
    largest = largest_ram_bytes(allowed, footprint_bytes(default_fillers(), EXTENT_BYTES))
    ram_bytes = max(2 * EXTENT_BYTES, min(MOST_RAM, largest // 2))
    given = {key: value for key, value in given.items() if value not in ("", 0, (), "raise")}
    with (
        tempfile.TemporaryDirectory(prefix="cachesvc-try-") as folder,
        signal_handlers(ENDING, lambda number, _: sys.exit(128 + number)),
        _sharing(folder, ram_bytes),
    ):
        job = {
            "uri": name,
            "function": function,
            "workers": count,
            "seconds": seconds,
            "folder": f"{folder}/cache",
            "kept_bytes": int(TRIED * ram_bytes),
            "given": given,
        }
        with rows_of("loader.trial", job, folder) as rows:
            data = next(rows, None)
            if data is None:
                raise CacheError(f"{uri}: the process that reads said nothing; see its messages above")
            about = (
                f"{uri} ({data['format']}): {data['samples']:,} samples, {output.size(data['size_bytes'])}"
            )
            tried = f"{data['tried']:,} of them are read, {seconds:g} s in all, with {output.plural(count, 'worker')}"
            output.report(json, f"{about}; {tried}", {"event": "opened", "workers": count} | data)
            sample_bytes = data["size_bytes"] / max(1, data["samples"])
            rates: dict[tuple[str, bool], float] = {}
            waits: dict[str, float] = {}
            for row in rows:
                rates[row["way"], row["warm"]] = rate = row["samples"] / row["took_s"]
                waits = row["waits"]
                title = f"{WAYS[row['way']]}, {'second' if row['warm'] else 'first'} pass:"
                line = f"  {title:<26}{rate:>10,.0f} samples/s{output.size(rate * sample_bytes):>12}/s"
                output.report(json, line, {"event": "pass", "samples_per_s": rate} | row)
    disk = disk_bytes_per_s(nvme) if nvme else None
    free_bytes = room(Path(nvme)).free_bytes if nvme else 0
    sizing = sized(data["size_bytes"], largest, nvme, free_bytes)
    limits = limited(rates, waits, sample_bytes, disk)
    row = {"event": "advice", "limits": limits, "options": sizing.options, "part": sizing.part}
    lines = [*limits, sizing.says, "", *pasted(name, function, count, given, sizing)]
    output.report(json, "\n".join(lines), row | {"disk_bytes_per_s": disk})
    return 0


def limited(
    rates: dict[tuple[str, bool], float], waits: dict[str, float], sample_bytes: float, disk: float | None
) -> list[str]:
    """Return what limits the first epoch and later ones, in words. `rates`: samples a second by way and pass. `waits`: the
    seconds that the second pass waited, by cause. `disk`: its bytes a second, if it was measured."""
    first, later = rates["cachesvc", False], rates["cachesvc", True]
    cause = max(waits, key=lambda each: waits[each], default="decode")
    limit = CAUSES.get(cause, cause)
    found = [f"later epochs are limited by {limit}"]
    if first < BOUND * later:
        found.insert(
            0, f"the first epoch is limited by the source, which gave {output.size(first * sample_bytes)}/s"
        )
    else:
        found = [f"all epochs, the first too, are limited by {limit}"]
    if disk is not None:
        slower = disk < later * sample_bytes
        found.append(
            f"the disk reads {output.size(disk)}/s, which {'limits epochs from it' if slower else 'is enough'}:"
            f" they need {output.size(later * sample_bytes)}/s"
        )
    return found


def sized(size_bytes: int, largest_ram: int, nvme: str | None, free_bytes: int) -> Sizing:
    """Return the budgets that keep data of this size on a node that can give so much RAM and disk, in bytes."""
    needed = math.ceil(1.02 * size_bytes)
    if needed <= largest_ram:
        ram = max(needed, 2 * EXTENT_BYTES)
        return Sizing(("--ram", _budget(ram)), 1.0, f"{output.size(needed)} of RAM keeps all of it")
    ram = largest_ram // 2
    if nvme is None:
        return Sizing(
            ("--ram", _budget(ram), "--nvme", f"DIR={_budget(needed)}"),
            1.0,
            f"{output.size(needed)} of NVMe keeps all of it; RAM at most {output.share(largest_ram, needed)}",
        )
    part = min(1.0, 0.95 * free_bytes / needed)
    disk = min(needed, int(0.95 * free_bytes))
    says = f"{output.size(disk)} of {nvme} keeps {output.share(part, 1.0)} of it"
    more = "" if part == 1.0 else "; more nodes with --cluster, or a larger disk, keep the rest"
    return Sizing(("--ram", _budget(ram), "--nvme", f"{nvme}={_budget(disk)}"), part, says + more)


def pasted(uri: str, function: str, workers: int, given: dict[str, Any], sizing: Sizing) -> list[str]:
    """Return the lines to paste: the daemon's command and the script's beginning."""
    module, _, called = function.partition(":")
    arguments = {**given, **({"transform": None} if function else {})}
    named = "".join(
        f", {key}={called if key == 'transform' else repr(value)}" for key, value in arguments.items()
    )
    prefix = uri if uri.endswith("/") or "*" not in uri else uri.rpartition("/")[0] + "/"
    return [
        f"cachesvc serve {' '.join(sizing.options)} --allow {prefix}",
        "",
        "from cachesvc.torch import DataLoader, open_dataset",
        *([f"from {module} import {called.partition('.')[0]}"] if function else []),
        f"data = open_dataset({uri!r}{named})",
        f"loader = DataLoader(data, batch_size=64, shuffle=True, num_workers={workers})",
    ]


def disk_bytes_per_s(directory: str) -> float:
    """Write a file, and return the bytes a second at which the disk, not the page cache, gives it back. Raises
    TierFailed."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            for _ in range(DISK_BYTES // STEP_BYTES):
                file.write(os.urandom(STEP_BYTES))
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            begun = time.perf_counter()
            for offset in range(0, DISK_BYTES, STEP_BYTES):
                os.pread(file.fileno(), STEP_BYTES, offset)
            return DISK_BYTES / (time.perf_counter() - begun)
    except OSError as error:
        raise TierFailed(f"{directory} cannot be measured ({error.strerror}); give another --nvme") from None


def _budget(size_bytes: int) -> str:
    """Return a budget as it is typed, rounded up."""
    unit = 30 if size_bytes >= 1 << 30 else 20
    return f"{-(-size_bytes // (1 << unit))}{'GiB' if unit == 30 else 'MiB'}"


def _sharing(folder: str, ram_bytes: int) -> AbstractContextManager[bool]:
    """Return a block with a daemon, which takes the sections `[[source]]` of this node's files and nothing else. Raises
    InvalidInput for a folder whose path is too long for sockets."""
    try:
        check_socket_dir(folder)
    except InvalidInput as error:
        raise InvalidInput(f"{str(error).partition(';')[0]}; set TMPDIR to a shorter folder") from None
    sections = [
        word for each in config_files.own_sections() for word in ("--source", config_files.source_text(each))
    ]
    given = ["--config", "/dev/null", "--socket", folder, "--state-dir", f"{folder}/state"]
    serve = [sys.executable, "-m", "cachesvc", "serve", *given, "--ram", str(ram_bytes), *sections]
    own = {name: value for name, value in os.environ.items() if not name.startswith("CACHESVC_")}
    return sharing(folder, serve, own)
