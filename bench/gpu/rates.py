"""Rates of loaders and of the bus."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

SECONDS = 1.0


def synchronize() -> None:
    """Wait for the device, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(call: Callable[[], object], times: int = 20) -> float:
    """Return the seconds that the device takes for a call, on the mean over several after two to warm up."""
    for _ in range(2):
        call()
    synchronize()
    began = time.perf_counter()
    for _ in range(times):
        call()
    synchronize()
    return (time.perf_counter() - began) / times


def rate(
    batches: Callable[[], Iterable[Any]], count: Callable[[Any], int], seconds: float = SECONDS
) -> dict[str, float]:
    """Iterate over what `batches` returns, again and again, for about `seconds`, after a start of a quarter of that.

    Returns `per_s`, what `count` adds up to per second, and `cores`, the processor time of this process per second.
    Child processes are not counted in it.
    """
    began, total, started, cpu = time.perf_counter(), 0, 0.0, 0.0
    for batch in itertools.chain.from_iterable(iter(batches, None)):
        now = time.perf_counter()
        if not started:
            if now - began > seconds / 4:
                synchronize()
                started, cpu = time.perf_counter(), time.process_time()
            continue
        total += count(batch)
        if now - started > seconds:
            break
    synchronize()
    wall = time.perf_counter() - started
    return {"per_s": total / wall, "cores": (time.process_time() - cpu) / wall}


def bus_bytes_per_s(size_bytes: int = 256 << 20) -> float:
    """Return the rate of copies from pinned memory to the device, the limit of every loader."""
    source = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True).random_()
    target = torch.empty_like(source, device="cuda")
    return size_bytes / timed(lambda: target.copy_(source, non_blocking=True))
