"""`python -m bench.rows write FORMAT FOLDER COUNT`, `read READER FORMAT FOLDER WORKERS`: a process of the bench.

`read` prints "ready" after one epoch. Then each line of its input is a number of seconds, and each line that it prints the
rows a second meanwhile.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from bench.rows.corpus import WRITERS
from bench.rows.readers import READERS, endless, rows_in


def _read(reader: str, format: str, folder: str, workers: str) -> None:
    batches = READERS[reader](format, Path(folder), int(workers))
    print("ready", sum(map(rows_in, batches)), flush=True)
    counts = endless(batches)
    for line in sys.stdin:
        next(counts)
        done, began = 0, time.perf_counter()
        end = began + float(line)
        while time.perf_counter() < end:
            done += next(counts)
        print(done / (time.perf_counter() - began), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "write":
        WRITERS[sys.argv[2]](Path(sys.argv[3]), int(sys.argv[4]))
    else:
        _read(*sys.argv[2:])
