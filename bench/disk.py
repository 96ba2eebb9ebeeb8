"""Small samples out of the NVMe tier beside a RAM tier of a quarter of the data, and out of local files without a daemon,
the page cache warm: against the RAM tier that holds all of it, and a memmap of the same local file, collated by numpy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.warm import RECORD_BYTES, SEQ_LEN, VARIED_BYTES, write_tars
from loader import DataLoader, Dataset, open_dataset

SIZE_BYTES = 1 << 30
EXTENT, WINDOW = "16MiB", 64 << 20
BATCH = 64
RUNS = 3
OF_RAM, OF_MEMMAP = 0.8, 1.5


@dataclass(frozen=True)
class Row:
    """Rates in samples/s of alternating epochs. `ours`: of what the title of the table says."""

    name: str
    ours: list[float]
    ram: list[float]
    memmap: list[float]
    from_ram: float | None = None
    """The part of a daemon's bytes that came from RAM."""

    def cells(self) -> tuple[str, ...]:
        """Cells of the table row."""
        against = [_ratio(self.ours, self.ram), _ratio(self.ours, self.memmap) if self.memmap else None]
        return (
            self.name,
            f"{statistics.median(self.ours):,.0f}/s",
            "" if self.from_ram is None else f"{self.from_ram:.0%}",
            *(f"{each:.2f}" if each is not None else "" for each in against),
            "yes" if self.met else "NO",
        )

    @property
    def met(self) -> bool:
        """Whether both limits are met."""
        enough = _ratio(self.ours, self.ram) >= OF_RAM
        return enough and (not self.memmap or _ratio(self.ours, self.memmap) >= OF_MEMMAP)


def _ratio(ours: Sequence[float], limit: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, limit))


def write_data(root: Path) -> None:
    """Write records, tokens and tars of records of 1.5 to 4.5 KB."""
    rng = np.random.default_rng(7)
    for name in ("records", "tokens", "varied"):
        (root / name).mkdir(parents=True)
    rng.integers(0, 256, SIZE_BYTES // RECORD_BYTES * RECORD_BYTES, np.uint8).tofile(
        root / "records" / "r.bin"
    )
    rng.integers(0, 50_000, SIZE_BYTES // 2, np.uint16).tofile(root / "tokens" / "t.bin")
    sizes = rng.integers(VARIED_BYTES // 2, VARIED_BYTES * 3 // 2, SIZE_BYTES // 8 // VARIED_BYTES)
    write_tars(root / "varied", rng, sizes)


class Epochs:
    """Epochs of one dataset through one daemon. The first opens it there."""

    def __init__(self, enter: Callable[[], None], opened: Callable[[], Dataset], **arguments: Any) -> None:
        enter()
        self.batches = DataLoader(opened(), BATCH, shuffle=True, drop_last=True, window=WINDOW, **arguments)
        for _ in range(2):  # fill the tiers, then begin with what a running job has
            self.rate()

    def rate(self) -> float:
        """Samples per second of one epoch."""
        return _rate(self.batches, len(self.batches) * BATCH)

    def from_ram(self) -> float:
        """The part of the latest epoch's bytes that came from RAM."""
        origins = self.batches.stats().bytes_by_origin
        return origins["ram"] / max(1, sum(origins.values()))


def measure(
    root: Path, all_in_ram: Callable[[], None], quarter: Callable[[], None], alone: Callable[[], None]
) -> list[Row]:
    """`all_in_ram` and `quarter` make clients use that daemon, `alone` none. Two rows for each kind of sample."""
    forms: dict[str, tuple[dict[str, Any], dict[str, Any], np.ndarray[Any, Any] | None]] = {
        "3 KB records": (
            {"format": "records", "record_bytes": RECORD_BYTES},
            {},
            np.memmap(root / "records" / "r.bin", np.uint8, "r").reshape(-1, RECORD_BYTES),
        ),
        "2,048 x uint16 tokens": (
            {"format": "tokens", "dtype": "uint16", "seq_len": SEQ_LEN},
            {},
            np.memmap(root / "tokens" / "t.bin", np.uint16, "r").reshape(-1, SEQ_LEN),
        ),
        "tar members of 1.5 to 4.5 KB": ({"decode": None}, {"collate_fn": list}, None),
    }
    found = []
    for (name, (form, arguments, rows)), folder in zip(forms.items(), ("records", "tokens", "varied")):
        opened = lambda form=form, folder=folder: open_dataset(root / folder, **form)  # noqa: E731
        ways = [Epochs(enter, opened, **arguments) for enter in (all_in_ram, quarter, alone)]
        rates: list[list[float]] = [[], [], []]
        memmap: list[float] = []
        for _ in range(RUNS):
            for way, seen in zip(ways, rates, strict=True):
                seen.append(way.rate())
            if rows is not None:
                memmap.append(_memmap(rows))
        ram, ours, local = rates
        found.append(Row(name, ours, ram, memmap, ways[1].from_ram()))
        found.append(Row(f"{name}, local files, no daemon", local, ram, memmap))
    return found


def _memmap(rows: np.ndarray[Any, Any]) -> float:
    """The rate of a loop as it is written by hand: a batch's rows of a shuffled memmap, collated by numpy."""
    order = np.random.default_rng(0).permutation(len(rows))[: len(rows) // BATCH * BATCH].reshape(-1, BATCH)
    return _rate((torch.from_numpy(np.stack([rows[i] for i in ids])) for ids in order), order.size)


def _rate(batches: Iterable[object], samples: int) -> float:
    started = time.perf_counter()
    for _ in batches:
        pass
    return samples / (time.perf_counter() - started)
