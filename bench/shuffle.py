"""`python -m bench shuffle`: shuffle quality of each window, against numpy's permutation of the whole dataset.

The dataset is synthetic and has no bytes: 256 extents of 2,000 samples, global batches of 256. Measures of one epoch:

    position    Where do samples go? Counts the samples of each 256th of the dataset in each 256th of the epoch.
                Chi-square over its degrees of freedom (Pearson's statistic; 1.0 is a random permutation).
    neighbours  How far apart are neighbours of the source? The median distance in the epoch, as a share of the
                (1 - 1/sqrt(2)) N of a random permutation.
    classes     How mixed is a batch when the source is sorted by class? The mean number of distinct classes among 256
                samples, with 256 classes in all, as a share of the 162 of a random batch.

The seed is fixed, so the table is the same everywhere. A test compares it with the table in docs/training.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bench.grid import Grid
from cachesvc.core.order.epoch_order import EpochOrder, OrderSpec

EXTENTS = 256
EXTENT_SAMPLES = 2000
BATCH = 256
CELLS = 256
CLASSES = 256
WINDOWS = (1, 2, 4, 8, 16, 64, 0)
SEED, EPOCHS = 7, 3
EXTENT_MIB = 64
HEAD = (
    "window, extents",
    f"at {EXTENT_MIB} MiB an extent",
    "position: chi-square / freedom",
    "neighbours apart",
    "classes in a batch",
)

Order = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Quality:
    """Measures of one order; a random permutation has 1.0 in each."""

    position: float
    neighbours: float
    classes: float


def quality(order: Order) -> Quality:
    """Measure `order[position] = sample`, a permutation of [0, N)."""
    return Quality(_position(order), _neighbours(order), _classes(order))


def epoch(window_extents: int, epoch: int = 0, seed: int = SEED) -> Order:
    """The order of one whole epoch of the synthetic dataset."""
    first = np.arange(EXTENTS + 1) * EXTENT_SAMPLES
    order = EpochOrder(OrderSpec(seed, BATCH, window_extents), first, epoch)
    return order.slots(0, order.full_steps, 0, BATCH).reshape(-1)


def grid() -> Grid:
    """A row per window, each the mean of three epochs, and a row for numpy's permutation."""
    rows = [_row(window, [quality(epoch(window, one)) for one in range(EPOCHS)]) for window in WINDOWS]
    draw = np.random.default_rng(SEED)
    numpy = [quality(draw.permutation(EXTENTS * EXTENT_SAMPLES)) for _ in range(EPOCHS)]
    rows.append(("numpy's permutation", "", *_cells(numpy)))
    title = f"Shuffle quality, {EXTENTS} extents of {EXTENT_SAMPLES:,} samples, batches of {BATCH}; 1.00 is random"
    return Grid(title, HEAD, rows)


def _row(window: int, found: list[Quality]) -> tuple[str, ...]:
    if not window:
        return "all", '`window="all"`', *_cells(found)
    size = window * EXTENT_MIB
    named = f"{size >> 10} GiB" if size >= 1024 else f"{size} MiB"
    return str(window), named + (" (`auto`)" if size == 256 else ""), *_cells(found)


def _cells(found: list[Quality]) -> tuple[str, ...]:
    columns = zip(*((one.position, one.neighbours, one.classes) for one in found))
    return tuple(f"{float(np.mean(column)):.2f}" for column in columns)


def _position(order: Order) -> float:
    count = len(order)
    at = np.arange(count) * CELLS // count * CELLS + order * CELLS // count
    table = np.bincount(at, minlength=CELLS * CELLS)
    expected = count / CELLS**2
    return float(((table - expected) ** 2 / expected).sum() / (CELLS - 1) ** 2)


def _neighbours(order: Order) -> float:
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    apart = np.abs(np.diff(place))
    return float(np.median(apart) / ((1 - 0.5**0.5) * len(order)))


def _classes(order: Order) -> float:
    count = len(order) // BATCH * BATCH
    batches = np.sort((order[:count] * CLASSES // len(order)).reshape(-1, BATCH), axis=1)
    distinct = 1 + (np.diff(batches, axis=1) != 0).sum(axis=1)
    random = CLASSES * (1 - (1 - 1 / CLASSES) ** BATCH)
    return float(distinct.mean() / random)
