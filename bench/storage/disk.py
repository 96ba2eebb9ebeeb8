"""Small samples out of the NVMe tier beside a RAM tier of a quarter of the data, and out of local files without a daemon.

The page cache warm: against the RAM tier that holds all of it, and a memmap of the same local file, collated by numpy. The
page cache cold: against fio over the tier's files.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.storage import fio
from bench.warm import RECORD_BYTES, SEQ_LEN, VARIED_BYTES, write_tars
from loader import DataLoader, Dataset, open_dataset
from testbed.memory import drop_page_cache

SIZE_BYTES = 1 << 30
EXTENT, WINDOW = "16MiB", 64 << 20
BATCH = 64
RUNS = 3
OF_RAM, OF_MEMMAP, OF_FIO = 0.8, 1.5, 0.8
DEPTHS = (BATCH, 256)
WORKERS: dict[str, dict[str, Any]] = {
    "in process": {},
    "2 processes": {"num_workers": 2, "persistent_workers": True},
    "2 threads": {"num_workers": 2, "worker_type": "thread"},
}
RECORDS: dict[str, Any] = {"format": "records", "record_bytes": RECORD_BYTES}


@dataclass(frozen=True)
class Warm:
    """Rates in samples/s of alternating epochs: of `ours`, of the RAM tier, and of a memmap, [] where none is compared."""

    name: str
    where: str
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
            self.where,
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


@dataclass(frozen=True)
class Cold:
    """Rates in samples/s of alternating epochs; `against` names the limit."""

    name: str
    where: str
    against: str
    ours: list[float]
    limit: list[float]

    def cells(self) -> tuple[str, ...]:
        """Cells of the table row."""
        medians = (f"{statistics.median(rates):,.0f}/s" for rates in (self.ours, self.limit))
        ratio = f"{_ratio(self.ours, self.limit):.2f}"
        return self.name, self.where, *medians, self.against, ratio, "yes" if self.met else "NO"

    @property
    def met(self) -> bool:
        """Whether the limit is met."""
        return _ratio(self.ours, self.limit) >= OF_FIO


def _ratio(ours: Sequence[float], limit: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, limit))


def write_data(root: Path) -> None:
    """Write records, tokens and tars of records of 1.5 to 4.5 KB, `SIZE_BYTES` of each."""
    rng = np.random.default_rng(7)
    for name in ("records", "tokens", "varied"):
        (root / name).mkdir(parents=True)
    rng.integers(0, 256, SIZE_BYTES // RECORD_BYTES * RECORD_BYTES, np.uint8).tofile(
        root / "records" / "r.bin"
    )
    rng.integers(0, 50_000, SIZE_BYTES // 2, np.uint16).tofile(root / "tokens" / "t.bin")
    sizes = rng.integers(VARIED_BYTES // 2, VARIED_BYTES * 3 // 2, SIZE_BYTES // VARIED_BYTES)
    write_tars(root / "varied", rng, sizes)


@dataclass(frozen=True)
class Nodes:
    """Each call makes clients use that daemon, `alone` none."""

    all_in_ram: Callable[[], None]
    quarter: Callable[[], None]
    alone: Callable[[], None]


class Epochs:
    """Epochs of one dataset through one daemon. The first opens it there."""

    def __init__(self, enter: Callable[[], None], opened: Callable[[], Dataset], **arguments: Any) -> None:
        enter()
        self.batches = DataLoader(
            opened(), BATCH, shuffle=True, drop_last=True, **({"window": WINDOW} | arguments)
        )
        for _ in range(2):  # fill the tiers, then begin with what a running job has
            self.rate()

    def rate(self) -> float:
        """Samples per second of one epoch."""
        return _rate(self.batches, len(self.batches) * BATCH)

    def from_ram(self) -> float:
        """The part of the latest epoch's bytes that came from RAM."""
        origins = self.batches.stats().bytes_by_origin
        return origins["ram"] / max(1, sum(origins.values()))


def warm(root: Path, nodes: Nodes) -> list[Warm]:
    """Two rows for each kind of sample and way of working."""
    forms: dict[str, tuple[dict[str, Any], dict[str, Any], np.ndarray[Any, Any] | None]] = {
        "3 KB records": (
            RECORDS,
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
        for how, workers in WORKERS.items():
            enters = (nodes.all_in_ram, nodes.quarter, nodes.alone)
            ways = [Epochs(enter, opened, **arguments, **workers) for enter in enters]
            rates: list[list[float]] = [[], [], []]
            memmap: list[float] = []
            for _ in range(RUNS):
                for way, seen in zip(ways, rates, strict=True):
                    seen.append(way.rate())
                if rows is not None and not workers:
                    memmap.append(_memmap(rows))
            ram, ours, local = rates
            found.append(Warm(f"{name}, {how}", "NVMe tier", ours, ram, memmap, ways[1].from_ram()))
            found.append(Warm(f"{name}, {how}", "local files", local, ram, memmap))
            del ways
    return found


def cold(root: Path, tier: Path, nodes: Nodes) -> list[Cold]:
    """3 KB records, the page cache dropped before each epoch. `tier` holds nothing else. [] where fio is not installed."""
    opened = lambda: open_dataset(root / "records", **RECORDS)  # noqa: E731
    ram = Epochs(nodes.all_in_ram, opened)
    windowed = {"NVMe tier": Epochs(nodes.quarter, opened), "local files": Epochs(nodes.alone, opened)}
    extents = [path for path in tier.glob("**/extents/**/*") if path.is_file()]
    source = root / "records" / "r.bin"
    random = [fio.limits(extents, RECORD_BYTES, depth).get(fio.BATCHED) for depth in DEPTHS]
    sequential = fio.sequential(extents)
    if sequential is None:
        return []
    rows = [
        Cold("3 KB records", where, "the lower of fio, sequential, and the RAM tier", [], [])
        for where in windowed
    ]
    for _ in range(RUNS):
        drop_page_cache(extents)
        limit = min(sequential() / RECORD_BYTES, ram.rate())
        for row in rows:
            drop_page_cache([*extents, source])
            row.ours.append(windowed[row.where].rate())
            row.limit.append(limit)
    everywhere = Epochs(nodes.quarter, opened, window="all")
    row = Cold('3 KB records, window="all"', "NVMe tier", "fio, random, the best depth", [], [])
    for _ in range(RUNS):
        drop_page_cache(extents)
        row.ours.append(everywhere.rate())
        best = 0.0
        for rate in filter(None, random):
            drop_page_cache(extents)
            best = max(best, rate() / RECORD_BYTES)
        row.limit.append(best)
    return [*rows, *([row] if all(row.limit) else [])]


def _memmap(rows: np.ndarray[Any, Any]) -> float:
    """The rate of a loop as it is written by hand: a batch's rows of a shuffled memmap, collated by numpy."""
    order = np.random.default_rng(0).permutation(len(rows))[: len(rows) // BATCH * BATCH].reshape(-1, BATCH)
    return _rate((torch.from_numpy(np.stack([rows[i] for i in ids])) for ids in order), order.size)


def _rate(batches: Iterable[object], samples: int) -> float:
    started = time.perf_counter()
    for _ in batches:
        pass
    return samples / (time.perf_counter() - started)
