"""`python -m bench.gateway`: a cached file read through fsspec, beside a local file and s3fs, if that is installed."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import fsspec
import numpy as np

from testbed.node import Daemon
from testbed.servers import SeaweedFS

SIZE_BYTES = 256 << 20
BLOCK_BYTES, RANGE_BYTES = 1 << 20, 64 << 10
RANGES, REMOTE_RANGES = 2000, 200
RUNS = 5


def sequential(open_file: Callable[[], object]) -> float:
    """Read a whole file in blocks of 1 MiB; MB/s."""
    began, done = time.perf_counter(), 0
    with open_file() as file:  # type: ignore[attr-defined]
        while block := file.read(BLOCK_BYTES):
            done += len(block)
    assert done == SIZE_BYTES
    return done / (time.perf_counter() - began) / 1e6


def ranges(read: Callable[[int], bytes], count: int) -> float:
    """Read ranges of 64 KiB at random places; MB/s."""
    places = np.random.default_rng(0).integers(0, SIZE_BYTES - RANGE_BYTES, count).tolist()
    began = time.perf_counter()
    assert all(len(read(at)) == RANGE_BYTES for at in places)
    return count * RANGE_BYTES / (time.perf_counter() - began) / 1e6


def seeking(file: object) -> Callable[[int], bytes]:
    """Return a function that reads the range at a place of an open file."""

    def read(at: int) -> bytes:
        file.seek(at)  # type: ignore[attr-defined]
        return bytes(file.read(RANGE_BYTES))  # type: ignore[attr-defined]

    return read


def measured(local: str, cached: str, remote: str) -> dict[str, float]:
    """Measure each way once, one after another."""
    fs = fsspec.filesystem("cachesvc")
    rates = {
        "sequential, open()": sequential(partial(open, local, "rb")),
        "sequential, cachesvc://": sequential(lambda: fs.open(cached)),
    }
    with open(local, "rb") as file, fs.open(cached) as ours:
        rates["ranges, open()"] = ranges(seeking(file), RANGES)
        rates["ranges, cachesvc:// seek and read"] = ranges(seeking(ours), RANGES)
    rates["ranges, cachesvc:// cat_file"] = ranges(
        lambda at: fs.cat_file(cached, at, at + RANGE_BYTES), RANGES
    )
    if "s3" in fsspec.available_protocols() and _installed():
        s3 = fsspec.filesystem("s3")
        rates["sequential, s3fs"] = sequential(lambda: s3.open(remote))
        rates["ranges, s3fs cat_file"] = ranges(
            lambda at: bytes(s3.cat_file(remote, start=at, end=at + RANGE_BYTES)), REMOTE_RANGES
        )
    return rates


def _installed() -> bool:
    try:
        fsspec.get_filesystem_class("s3")
    except ImportError:
        return False
    return True


def main() -> None:
    """Print the median of each way in MB/s."""
    with tempfile.TemporaryDirectory() as folder, SeaweedFS(Path(folder) / "s3") as s3:
        root, bucket = Path(folder), s3.create_bucket("bench")
        os.environ.update(s3.env(), CACHESVC="require")
        (root / "x.bin").write_bytes(np.random.default_rng(0).bytes(SIZE_BYTES))
        s3.client().upload_file(str(root / "x.bin"), bucket, "x.bin")
        with Daemon(root / "node", ["--ram", "512MiB", "--allow", f"s3://{bucket}/"], s3.env()) as daemon:
            os.environ.update(daemon.env)
            names = (str(root / "x.bin"), f"s3/{bucket}/x.bin", f"{bucket}/x.bin")
            measured(*names)  # warm
            runs = [measured(*names) for _ in range(RUNS)]
    for name in runs[0]:
        figures = [run[name] for run in runs]
        print(
            f"{name:36} {statistics.median(figures):8,.0f} MB/s   {min(figures):,.0f} to {max(figures):,.0f}"
        )


if __name__ == "__main__":
    main()
