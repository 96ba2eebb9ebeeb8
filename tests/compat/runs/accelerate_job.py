"""A training script under Accelerate, one rank of a torchrun job.

    python -m tests.compat.runs.accelerate_job DATA OUT CHECKPOINT STOP

Writes to OUT-RANK.json the samples that this rank saw. CHECKPOINT: the state to resume, "" for none. After STOP batches
of an epoch the script saves to OUT-saved and ends; with 0 it ends after the epoch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator

from loader import DataLoader, open_dataset


def main(data: str, out: str, checkpoint: str, stop: int) -> None:
    accelerator = Accelerator(cpu=True)
    layer = torch.nn.Linear(1, 1)
    layer, optimizer, batches = accelerator.prepare(
        layer, torch.optim.SGD(layer.parameters(), 0.01), DataLoader(open_dataset(data), 5, shuffle=True)
    )
    if checkpoint:
        accelerator.load_state(checkpoint)
    seen: list[int] = []
    for count, batch in enumerate(batches, 1):
        seen += batch[:, 0].tolist()
        accelerator.backward(layer(batch[:, :1].float()).mean())
        optimizer.step()
        if count == stop:
            accelerator.save_state(f"{out}-saved")
            break
    Path(f"{out}-{accelerator.process_index}.json").write_text(json.dumps(seen))
    accelerator.end_training()


if __name__ == "__main__":
    data, out, checkpoint, stop = sys.argv[1:]
    main(data, out, checkpoint, int(stop))
