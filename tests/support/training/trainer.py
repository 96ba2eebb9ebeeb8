"""A training process for tests: it prints what it read, and takes only as many batches as it is told.

python -m tests.support.training.trainer URI OPEN LOADER       # keyword arguments of open_dataset and DataLoader,
as JSON

Each line on stdin is a number of batches to take. Each batch is answered with a line of JSON.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from cachesvc.core.errors import CacheError
from loader import DataLoader, open_dataset


def digest(record: bytes) -> str:
    """Return the digest that represents a record in the ledger."""
    return hashlib.blake2b(record, digest_size=8).hexdigest()


def say(**what: Any) -> None:
    """Print one line of JSON."""
    print(json.dumps(what), flush=True)


def permissions() -> Iterator[None]:
    """Yield once for each batch that may be taken, until stdin ends."""
    for line in iter(sys.stdin.readline, ""):
        yield from (None for _ in range(int(line)))


def main() -> int:
    """Run epochs until stdin ends; the exit code is the error's."""
    uri, opening, loading = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    started, turns = time.monotonic(), permissions()
    try:
        batches = DataLoader(open_dataset(uri, **opening), **loading)
        while True:
            for batch in batches:
                if next(turns, "ended") == "ended":
                    return 0
                started = time.monotonic()
                found = [digest(row.numpy().tobytes()) for row in batch]
                say(epoch=batches.epoch, indices=batches.indices.tolist(), digests=found)
            say(ended=batches.epoch - 1, by_origin=batches.stats().bytes_by_origin)
    except CacheError as error:
        say(error=type(error).__name__, message=str(error), after_s=time.monotonic() - started)
        return error.code


if __name__ == "__main__":
    sys.exit(main())
