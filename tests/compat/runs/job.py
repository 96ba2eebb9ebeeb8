"""Runs of every trainer, in one rank of torchrun's: `python -m tests.compat.runs.job ROWS FOLDER PHASE`.

Writes to FOLDER/PHASE-RANK.json the samples that this rank saw in each run. Phase "first": whole runs and interrupted
runs. Phases "again" and "other": resume the interrupted runs in another process, at any number of ranks.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from loader import open_dataset
from tests.compat.ledger import save
from tests.compat.runs import accelerate_runs, lightning_runs, trainer_runs


def named(rows: torch.Tensor) -> dict[str, Any]:
    """A sample in the form that Trainer expects."""
    return {"rows": rows, "labels": rows[0]}


def main(rows: str, folder: Path, phase: str) -> None:
    torch.set_num_threads(1)
    data, named_data = open_dataset(rows), open_dataset(rows, transform=named)
    seen: dict[str, Any] = {}
    for runs, of in ((lightning_runs, data), (accelerate_runs, data), (trainer_runs, named_data)):
        seen |= (runs.first if phase == "first" else runs.again)(of, folder)
    if phase == "first":
        thousand = open_dataset(f"{rows}.1000.npy", transform=named)
        seen["evaluate"] = trainer_runs.evaluated(thousand, folder)
    save(folder / f"{phase}-{os.environ['RANK']}.json", seen)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
