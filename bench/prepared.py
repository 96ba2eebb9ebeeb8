"""`python -m bench prepared [IMAGES]`: JPEGs of 500 x 375, resized to 256 once, beside Pillow that decodes them each time.

Pillow alone decodes and resizes the same files in as many processes as the loader has workers, in the same run. The first
job prepares; the second is another process, and reads what is prepared from RAM.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from bench.grid import Grid
from bench.peers.pictures import jpegs
from cachesvc.torch import DataLoader, open_dataset
from testbed.node import Daemon

IMAGES, SIDE, BATCH, WORKERS, EPOCHS = 2_000, 256, 64, 2, 3
FIRST_EPOCH, FROM_RAM, CPU_PART = 1.1, 10.0, 0.05
"""Asked: the time of the first epoch to Pillow's, the rate from RAM to Pillow's, and the CPU of a sample to Pillow's."""


def resized(image: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return a picture of 256 x 256, uint8[256, 256, 3]."""
    picture = image if isinstance(image, Image.Image) else Image.fromarray(np.asarray(image))
    return np.asarray(picture.resize((SIDE, SIDE), Image.Resampling.BILINEAR))


def resized_file(path: str) -> int:
    """Decode and resize a file, as a job without preparing does; return the bytes of the result."""
    with Image.open(path) as image:
        return resized(image.convert("RGB")).nbytes


def grid(images: int = IMAGES) -> tuple[Grid, bool]:
    """Measure both jobs and Pillow on this machine's cores. The second value: all ratios are as asked."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        paths = _written(root / "data", images)
        begun = time.process_time()
        for path in paths[:200]:
            resized_file(path)
        pillow_cpu_s = (time.process_time() - begun) / min(200, images)
        with ProcessPoolExecutor(WORKERS) as pool:
            list(pool.map(resized_file, paths[:64]))  # untimed: the processes start
            begun = time.perf_counter()
            list(pool.map(resized_file, paths, chunksize=BATCH))
            alone_s = time.perf_counter() - begun
        with Daemon(root / "node", ["--ram", "2GiB", "--allow", str(root / "data")]) as daemon:
            first = _job(root / "data", WORKERS, 1, daemon.env)
            second = _job(root / "data", WORKERS, EPOCHS, daemon.env)
            in_process = _job(root / "data", 0, EPOCHS, daemon.env)
    pillow = images / alone_s
    cpu_s = in_process["cpu_s"] / images / EPOCHS
    rows = [
        ("Pillow alone, two processes", f"{pillow:,.0f}", "", "", f"{pillow_cpu_s * 1e6:,.0f}"),
        _row("first job, which prepares", images / first["seconds"], pillow, f">= {1 / FIRST_EPOCH:.2f}"),
        _row(
            "second job from RAM, two workers",
            images * EPOCHS / second["seconds"],
            pillow,
            f">= {FROM_RAM:.0f}",
        ),
        (
            *_row("second job from RAM, in the trainer", images * EPOCHS / in_process["seconds"], pillow, ""),
            f"{cpu_s * 1e6:,.0f} ({cpu_s / pillow_cpu_s:.1%}, asked {CPU_PART:.0%})",
        ),
    ]
    met = first["seconds"] <= FIRST_EPOCH * alone_s and cpu_s <= CPU_PART * pillow_cpu_s
    met = met and images * EPOCHS / second["seconds"] >= FROM_RAM * pillow
    head = ("", "samples/s", "to Pillow", "asked", "CPU of a sample, us")
    return Grid(
        f"{images:,} JPEGs of 500 x 375 resized to {SIDE}, shuffled, batches of {BATCH}", head, rows
    ), met


def _row(name: str, rate: float, pillow: float, asked: str) -> tuple[str, ...]:
    return name, f"{rate:,.0f}", f"{rate / pillow:.2f}", asked


def _written(folder: Path, images: int) -> list[str]:
    folder.mkdir()
    paths = [str(folder / f"{number:05d}.jpg") for number in range(images)]
    for path, raw in zip(paths, jpegs(np.random.default_rng(0), images), strict=True):
        Path(path).write_bytes(raw)
    return paths


def _job(folder: Path, workers: int, epochs: int, environment: dict[str, str]) -> dict[str, float]:
    """Run a job in a process of its own; return the seconds and the CPU of its epochs."""
    command = [sys.executable, "-m", "bench.prepared", str(folder), str(workers), str(epochs)]
    done = subprocess.run(command, env=os.environ | environment, stdout=subprocess.PIPE, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _train(folder: str, workers: int, epochs: int) -> None:
    """Read whole epochs as a training job does."""
    batches = DataLoader(open_dataset(folder, prepare=resized), BATCH, shuffle=True, num_workers=workers)
    begun, cpu = time.perf_counter(), time.process_time()
    count = sum(len(batch) for _ in range(epochs) for batch in batches)
    row = {"seconds": time.perf_counter() - begun, "cpu_s": time.process_time() - cpu, "samples": count}
    sys.stdout.write(json.dumps(row))


if __name__ == "__main__":
    _train(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
