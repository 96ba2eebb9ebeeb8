"""One rank of a job with `shuffle_scope="node"`: `python -m tests.support.training.scoped_rank JOB`, JOB being JSON.

After each epoch it prints a line of JSON, and waits for a line. It leaves the last epoch early if the job says so.
"""

from __future__ import annotations

import json
import sys
from itertools import islice

import numpy as np
import torch.distributed as dist
from xxhash import xxh3_64_intdigest

from loader import DataLoader, open_dataset

RECORD = 4096


def main(
    uri: str, epochs: list[int], batch_size: int, state: dict[str, object] | None, leave: int | None
) -> None:
    """Run these epochs; with `leave`, only so many batches of the last one."""
    dist.init_process_group("gloo")
    data = open_dataset(uri, format="records", record_bytes=RECORD)
    loader = DataLoader(data, batch_size, shuffle=True, seed=3, window=1 << 18, shuffle_scope="node")
    if state is not None:
        loader.load_state_dict(state)
    for epoch in epochs:
        loader.set_epoch(epoch)
        digests: list[int] = []
        rows: list[int] = []
        for batch in islice(loader, leave if epoch == epochs[-1] else None):
            rows += loader.indices[: loader.valid].tolist()
            digests += [xxh3_64_intdigest(each.tobytes()) for each in np.asarray(batch)[: loader.valid]]
        dist.barrier()
        print(json.dumps([epoch, rows, digests, loader.state_dict()]), flush=True)
        sys.stdin.readline()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
