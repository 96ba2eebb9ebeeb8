"""`cachesvc serve` as run from a shell."""

from __future__ import annotations

import subprocess
import sys

from testbed import ROOT, WAIT_S


def serve(*options: str) -> subprocess.CompletedProcess[str]:
    """Run `cachesvc serve`, which must end by itself."""
    command = [sys.executable, "-m", "cachesvc", "serve", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, cwd=ROOT)


def complaint(ended: subprocess.CompletedProcess[str]) -> str:
    """The error message, which must be the only line on stderr."""
    assert ended.stderr.startswith("cachesvc: "), ended.stderr
    assert ended.stderr.count("\n") == 1, ended.stderr
    return ended.stderr
