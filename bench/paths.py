"""`python -m bench.paths`: eight processes that each map one file of safetensors of 1 GB by `cachesvc.path`, warm.

Prints the seconds until all have their tensors, and until all have read each page of them, and the proportional share of
memory (PSS) of all mappings together.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import tempfile
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

import cachesvc
from testbed.node import Daemon

PROCESSES, TENSORS, TENSOR_BYTES = 8, 50, 20_000_000
PAGE_BYTES = 4096
RUNS = 5


def pss_bytes() -> int:
    """Return this process's share of the daemon's memory that it maps."""
    maps = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    found = (re.search(r"Pss: +([0-9]+)", each) for each in maps if "memfd:" in each)
    return sum(int(each[1]) for each in found if each) << 10


def reads(uri: str, turn: Barrier, said: Any) -> None:
    """Load the tensors when it is this process's turn, as often as the bench runs."""
    for _ in range(RUNS + 1):  # the first one fetches
        turn.wait()
        began = time.monotonic()
        with cachesvc.path(uri) as path, safe_open(path, "pt") as weights:
            tensors = [weights.get_tensor(name) for name in weights.keys()]  # noqa: SIM118
        loaded = time.monotonic()
        total = sum(int(each.view(torch.uint8)[::PAGE_BYTES].sum()) for each in tensors)
        read = time.monotonic()
        turn.wait()  # all have mapped it
        said.put((began, loaded, read, pss_bytes(), total))
        turn.wait()
        del tensors


def main() -> None:
    """Print the median, least and greatest figures."""
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        folder.mkdir()
        tensors = {
            f"w{n:02}": torch.randint(0, 255, (TENSOR_BYTES,), dtype=torch.uint8) for n in range(TENSORS)
        }
        save_file(tensors, str(folder / "model.safetensors"))
        del tensors
        with Daemon(Path(name) / "node", ["--ram", "1280MiB", "--allow", f"{folder}/"]) as daemon:
            os.environ.update(daemon.env, CACHESVC="require")
            turn, said = context.Barrier(PROCESSES), context.Queue()
            given = str(folder / "model.safetensors"), turn, said
            readers = [context.Process(target=reads, args=given) for _ in range(PROCESSES)]
            for each in readers:
                each.start()
            runs = [[said.get() for _ in readers] for _ in range(RUNS + 1)][1:]
            for each in readers:
                each.join()
    assert len({row[4] for run in runs for row in run}) == 1, "all read the same"
    first = [min(row[0] for row in run) for run in runs]
    figures = {
        "all have their tensors, s": [max(row[1] for row in run) - at for run, at in zip(runs, first)],
        "all have read each page, s": [max(row[2] for row in run) - at for run, at in zip(runs, first)],
        "PSS of all mappings, MB": [sum(row[3] for row in run) / 1e6 for run in runs],
    }
    for figure, found in figures.items():
        found.sort()
        print(f"{figure:28} {found[len(found) // 2]:8,.2f} ({found[0]:,.2f} to {found[-1]:,.2f})")


if __name__ == "__main__":
    main()
