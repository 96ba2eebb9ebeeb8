"""Images per second: decoded on the device, and by processors."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from bench.gpu.data import Data
from bench.gpu.rates import rate
from loader import DataLoader

BATCH = 64


def to_tensor(sample: dict[str, Any]) -> torch.Tensor:
    """Return the image of a sample as uint8 [3, height, width]."""
    return torch.from_numpy(np.array(sample["jpg"])).permute(2, 0, 1).contiguous()


def by_torchvision(sample: dict[str, Any]) -> torch.Tensor:
    """Decode the JPEG of a sample by torchvision on a processor."""
    from torchvision.io import decode_jpeg

    image: torch.Tensor = decode_jpeg(torch.frombuffer(bytearray(sample["jpg"]), dtype=torch.uint8))
    return image


def measure(data: Data) -> Iterator[tuple[str, Any]]:
    """Yield a way, and its images/s and the trainer's cores."""
    common: dict[str, Any] = {"batch_size": BATCH, "shuffle": True, "drop_last": True, "device": "cuda"}
    on_device = data.pictures(decode="cuda")
    ways = {
        "device, in process": DataLoader(on_device, **common),
        "device, 2 threads": DataLoader(on_device, num_workers=2, worker_type="thread", **common),
        "device, 2 processes": DataLoader(on_device, num_workers=2, **common),
        "Pillow, 1 process": DataLoader(data.pictures(transform=to_tensor), num_workers=1, **common),
        "Pillow, 8 processes": DataLoader(data.pictures(transform=to_tensor), num_workers=8, **common),
        "torchvision, 1 process": DataLoader(data.pictures(decode=by_torchvision), num_workers=1, **common),
        "torchvision, 8 processes": DataLoader(data.pictures(decode=by_torchvision), num_workers=8, **common),
    }
    for way, loader in ways.items():
        yield way, rate(partial(iter, loader), _count)


def _count(batch: Any) -> int:
    return len(batch["jpg"]) if isinstance(batch, dict) else len(batch)
