"""Rates of `fio` over the same files: the limit of reading from a disk, where fio is installed."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

BATCHED = "fio, a batch at a time"
PATTERNS = {
    "fio, one read at a time": ["--ioengine=psync"],
    "fio, two jobs": ["--ioengine=psync", "--numjobs=2", "--size=50%", "--offset_increment=50%"],
    BATCHED: ["--ioengine=io_uring", "--iodepth={batch}"],
}
"""fio options by the number of outstanding reads. Our reader announces a whole batch at once."""


def limits(files: Sequence[Path], read_bytes: int, batch: int) -> dict[str, Callable[[], float]]:
    """Functions by pattern name; each makes one pass over `files`, all that are below their folder, and returns bytes per
    second. A pass reads `read_bytes` at a time in random order, each offset once, through the page cache. The dict is
    empty without fio, and leaves out patterns that the kernel refuses (io_uring in most containers)."""
    fixed = _reading(files)
    if fixed is None:
        return {}
    fixed += ["--rw=randread", f"--bs={read_bytes}", "--file_service_type=random"]
    arguments = {
        name: [*fixed, *(one.format(batch=batch) for one in more)] for name, more in PATTERNS.items()
    }
    return {name: functools.partial(_rate, command) for name, command in arguments.items() if _runs(command)}


def sequential(files: Sequence[Path]) -> Callable[[], float] | None:
    """A function that reads `files`, all that are below their folder, once, one after the other, and returns bytes per
    second; None without fio."""
    fixed = _reading(files)
    if fixed is None:
        return None
    return functools.partial(_rate, [*fixed, "--rw=read", "--bs=1M", "--file_service_type=sequential"])


def _reading(files: Sequence[Path]) -> list[str] | None:
    program = shutil.which("fio")
    if program is None:
        return None
    fixed = [program, "--name=limit", "--readonly", "--output-format=json", "--group_reporting", "--direct=0"]
    folder = os.path.commonpath([path.parent for path in files])
    return [*fixed, f"--opendir={folder}"]


def _runs(command: Sequence[str]) -> bool:
    return subprocess.run([*command, "--number_ios=1"], capture_output=True).returncode == 0


def _rate(command: Sequence[str]) -> float:
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (job,) = json.loads(said[said.index("{") :])["jobs"]  # warnings may precede the JSON
    return float(job["read"]["bw_bytes"])
