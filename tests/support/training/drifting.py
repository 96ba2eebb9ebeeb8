"""One rank of a torchrun job whose ranks take different numbers of batches.

    python -m tests.support.training.drifting FOLDER DRIFT_S

Each line of stdin is a number of batches to take, or "save" to save a state.
"""

from __future__ import annotations

import logging
import sys

import torch
import torch.distributed as dist

from loader import DataLoader, open_dataset


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    batches = DataLoader(open_dataset(sys.argv[1], format="records"), batch_size=2)
    batches._drift_s = float(sys.argv[2])
    taken = iter(batches)
    for line in sys.stdin:
        if line == "save\n":
            batches.state_dict()
        else:
            for _ in range(int(line)):
                next(taken)
        print(batches.state_dict()["step"], flush=True)


if __name__ == "__main__":
    main()
