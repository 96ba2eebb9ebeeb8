"""A folder of pictures, functions that prepare them, and a job that reads them in a process of its own."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from loader import DataLoader, open_dataset

CLASSES, EACH = ("cat", "dog"), 45
COUNT = len(CLASSES) * EACH
BAD = 17
"""The picture that `fails` cannot prepare."""


def write_pictures(folder: Path, seed: int = 0) -> str:
    """Write pictures of 24 x 24 whose first pixel tells their number; return the folder."""
    draw = np.random.default_rng(seed)
    for number in range(COUNT):
        pixels = draw.integers(0, 255, (24, 24, 3), np.uint8)
        pixels[0, 0, 0] = number
        path = folder / CLASSES[number // EACH] / f"{number:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        path.write_bytes(file.getvalue())
    return str(folder)


def noted(number: int) -> None:
    """Note a call of a function in the file that $CALLS names, where it names one. $LOUD: print it, too."""
    if "LOUD" in os.environ:
        print("prepares", number)
    if path := os.environ.get("CALLS"):
        with open(path, "a") as file:
            file.write(f"{number}\n")


def calls(path: Path) -> Counter[int]:
    """Count the calls for each picture."""
    return Counter(map(int, path.read_text().split()))


def half(sample: tuple[Any, int]) -> tuple[torch.Tensor, int]:
    """Return every second pixel, and the label."""
    pixels = np.array(sample[0])
    noted(int(pixels[0, 0, 0]))
    return torch.from_numpy(pixels[::2, ::2].copy()), sample[1]


def doubled(sample: tuple[Any, int]) -> np.ndarray[Any, Any]:
    """Return more than the tiers of a small node hold."""
    pixels = np.asarray(sample[0])
    noted(int(pixels[0, 0, 0]))
    return np.repeat(np.repeat(pixels, 2, 0), 2, 1)


def fails(sample: tuple[Any, int]) -> tuple[torch.Tensor, int]:
    """Prepare all pictures but one."""
    found = half(sample)
    if int(found[0][0, 0, 0]) == BAD:
        raise ValueError("an odd picture")
    return found


SPELLED_BYTES = 3_200
"""The most that `spelled` returns."""


def spelled(sample: tuple[Any, int]) -> dict[str, Any]:
    """Return values whose sizes differ from picture to picture."""
    pixels = np.array(sample[0])
    number = int(pixels[0, 0, 0])
    noted(number)
    return {
        "ids": pixels.reshape(-1)[: 7 * number].astype(np.int32),
        "rows": torch.from_numpy(pixels[: 1 + number % 5].copy()),
        "text": "\u00e4" * number,
        "raw": pixels[0, : number % 24, 0].tobytes(),
        "label": sample[1],
    }


def same(one: Any, other: Any) -> bool:
    """Return whether two samples are the same, types and dtypes included."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, (tuple, list)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(type(one) is type(other) and one == other)


def run_job(uri: str, socket: str, job: str, workers: int, calls_at: Path) -> subprocess.Popen[str]:
    """Start a job that reads an epoch of `half`, and prints the numbers of the pictures and its statistics."""
    command = [sys.executable, "-m", "tests.loader.prepare.pictures", uri, str(workers)]
    environment: Mapping[str, str] = os.environ | {
        "CACHESVC_SOCKET": socket,
        "CACHESVC": "require",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": job,
        "CALLS": str(calls_at),
    }
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def main() -> None:
    """Read an epoch as a training job does."""
    from tests.loader.prepare.pictures import half  # not of __main__, so that jobs agree about its name

    uri, workers = sys.argv[1], int(sys.argv[2])
    batches = DataLoader(
        open_dataset(uri, prepare=half), 8, shuffle=True, num_workers=workers, rank=0, world_size=1
    )
    numbers = [number for images, _ in batches for number in images[:, 0, 0, 0].tolist()]
    print(json.dumps({"numbers": numbers, "origins": batches.stats().bytes_by_origin}))


if __name__ == "__main__":
    main()
