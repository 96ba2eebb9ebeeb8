"""Programs of other projects' trainers, which tests run to their end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from testbed import ROOT

LIMIT_S = 600.0
"""The limit of a job of two ranks, each of which imports a trainer, on a busy machine."""
SETTINGS = {"CACHESVC": "off", "GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu"}


def ran(*arguments: str, folder: Path = ROOT, **env: str) -> None:
    """Run Python with these arguments in a folder."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **SETTINGS, **env},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]


def torchrun(ranks: int) -> list[str]:
    """The arguments by which torchrun starts ranks."""
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def numbered(path: Path, count: int) -> Path:
    """Write records of which record n holds n."""
    np.save(path, np.arange(count, dtype="<i8").reshape(count, 1))
    return path
