"""Which job this process belongs to: readers of one job have one share of a daemon's fills."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping

LAUNCHERS = (
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"),
    ("MASTER_ADDR", "MASTER_PORT"),
)
"""What launchers set alike for all ranks of a job, and differently for each job; the first that is there counts."""


def job_number(environ: Mapping[str, str]) -> int:
    """A number from 1 to 2^64 - 1 that is the same in all ranks of a job, also over restarts of it. Where no launcher
    set anything it is the same in one process group: what one command of a shell started."""
    for names in LAUNCHERS:
        if environ.get(names[0]):
            told = "\0".join(environ.get(name, "") for name in names)
            break
    else:
        told = f"{os.stat('/proc/self/ns/pid').st_ino}\0{os.getpgrp()}"  # containers count from 1 each
    return int.from_bytes(hashlib.blake2b(told.encode(), digest_size=8).digest(), "little") or 1
