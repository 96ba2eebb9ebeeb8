"""One rank of torchrun's: `python -m tests.compat.runs.ledger_job RUNS NAME PHASE ROWS FOLDER`.

Runs the trainer NAME of the module RUNS, and writes to FOLDER/PHASE-RANK.json the samples that this rank saw. Phase
"whole": an uninterrupted run. "cut": until an interruption. "rest", "other": resumes that, at any number of ranks.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import torch

from tests.compat.ledger import STOP, save


def main(runs: str, name: str, phase: str, rows: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    module = importlib.import_module(f"tests.compat.runs.{runs}")
    seen = module.run(name, rows, folder, phase in ("rest", "other"), STOP if phase == "cut" else 0)
    save(folder / f"{phase}-{os.environ['RANK']}.json", seen)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    runs, name, phase, rows, folder = sys.argv[1:]
    main(runs, name, phase, Path(rows), Path(folder))
