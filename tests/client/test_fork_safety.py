"""A process forked at any moment has a gRPC of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from testbed import WAIT_S
from testbed.node import Daemon
from tests.support import datasets

FORKS = 40
"""Without a wait a fifth of them hang, more or fewer."""
FORK_WARNS = "ignore:This process:DeprecationWarning"
"""Python 3.12 and newer tell `__main__` of every fork beside threads, such as that of a trainer's presence."""
AT_ONCE = """
import os, signal, sys
from loader import DataLoader, open_dataset

def opened():
    return open_dataset(sys.argv[1], format="records", dtype="(1,)i8")

data = opened()
for number in range(int(sys.argv[2])):
    batches = iter(DataLoader(data, 5, shuffle=True))
    next(batches)
    child = os.fork()
    if not child:
        signal.alarm(20)
        seen = sum(map(len, DataLoader(opened() if number % 2 else data, 5, shuffle=True)))
        os._exit(0 if seen == 60 else 1)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if ended:
        sys.exit(f"child {number} ended with {ended}")
"""


@pytest.fixture
def node(tmp_path: Path) -> Daemon:
    datasets.array_file(tmp_path / "r.bin", np.arange(60, dtype="<i8").reshape(60, 1))
    return Daemon(tmp_path / "node", ["--allow", f"file://{tmp_path}/", "--ram", "64MiB"])


@pytest.mark.slow
def test_children_forked_right_after_a_call_to_the_daemon_can_iterate(tmp_path: Path, node: Daemon) -> None:
    with node:
        done = subprocess.run(
            [sys.executable, "-W", FORK_WARNS, "-c", AT_ONCE, f"file://{tmp_path}/r.bin", str(FORKS)],
            env={**os.environ, **node.env},
            stderr=subprocess.PIPE,
            text=True,
            timeout=WAIT_S,
        )
    assert (done.returncode, done.stderr) == (0, "")
