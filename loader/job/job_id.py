"""A number that identifies this process's job: readers of one job have one share of a daemon's fills."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping

LAUNCHERS = (
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"),
    ("MASTER_ADDR", "MASTER_PORT"),
)
"""Environment variables that launchers set equally for all ranks of a job, and differently for each job. The first group
that is set counts."""


def job_number(environ: Mapping[str, str]) -> int:
    """A number from 1 to 2^64 - 1 that is equal in all ranks of a job, also after its restarts. Without a launcher it is
    equal in one process group: the processes that one shell command started."""
    for names in LAUNCHERS:
        if environ.get(names[0]):
            identity = "\0".join(environ.get(name, "") for name in names)
            break
    else:  # with the PID namespace, since each container numbers its processes from 1
        identity = f"{os.stat('/proc/self/ns/pid').st_ino}\0{os.getpgrp()}"
    return int.from_bytes(hashlib.blake2b(identity.encode(), digest_size=8).digest(), "little") or 1
