"""How fast records and tokens arrive on the device, against the bus and against torch's loader over a memmap."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from bench.gpu.checks import EVERYTHING
from bench.gpu.data import RECORD_BYTES, SEQ_LEN, Data
from bench.gpu.rates import bus_bytes_per_s, rate, synchronize, timed
from loader import DataLoader, Dataset
from loader.datasets.samples.kinds import gathered_records
from loader.gpu.record_gather import HostRecords

SIZES = (256, 1024, 4096, 16_384, 65_536)
"""Records in a batch."""


def measure(data: Data) -> Iterator[tuple[str, Any]]:
    """Yield a name and its figures: GB/s and cores by way and batch size."""
    yield "bus, GB/s", bus_bytes_per_s() / 1e9
    kinds = {
        "records": (data.records(), RECORD_BYTES),
        "tokens": (data.tokens(overlap=0, targets=None), 2 * SEQ_LEN),
        "odd records": (data.records("odd"), RECORD_BYTES + 1),
        "shifted tokens": (data.tokens(), 2 * SEQ_LEN),
    }
    for name, (dataset, size_bytes) in kinds.items():
        yield name, _rows(dataset, size_bytes, SIZES if name in ("records", "tokens") else (4096,))
        yield f"{name}, the kernel alone, GB/s", _kernel(dataset, size_bytes)
    for name in ("records", "tokens"):
        yield f"{name}, torch over a memmap, 4 workers, pin_memory", _torch(data, name)
    yield "bus again, GB/s", bus_bytes_per_s() / 1e9


def _rows(dataset: Dataset, size_bytes: int, sizes: tuple[int, ...]) -> dict[str, Any]:
    ways: dict[str, dict[str, Any]] = {
        "by the device": {"pinned_bytes": EVERYTHING},
        "by the processor": {},
        "by the processor, 4 threads": {"num_workers": 4, "worker_type": "thread"},
        "by the processor, 4 processes": {"num_workers": 4},
    }
    rows: dict[str, Any] = {}
    for way, arguments in ways.items():
        used = sizes if way == "by the device" else tuple(size for size in sizes if size == 4096)
        for size in used:
            loader = DataLoader(
                dataset, size, True, drop_last=True, window="all", epochs=None, device="cuda", **arguments
            )
            if way == "by the device":  # two epochs lease and register every extent
                batches = iter(loader)
                for _ in range(len(dataset) // size // 4):
                    next(batches)
                del batches
            one = rate(partial(iter, loader), _count)
            rows.setdefault(way, {})[size] = {
                "gb_per_s": one["per_s"] * size_bytes / 1e9,
                "cores": one["cores"],
                "cpu_ns_per_record": one["cores"] / one["per_s"] * 1e9,
            }
            del loader
            synchronize()
    return rows


def _kernel(dataset: Dataset, size_bytes: int) -> dict[int, float]:
    """Gathers of random records whose slots are on the device already, in GB/s by batch size."""
    samples, reader = gathered_records(dataset.sample_reader), dataset.opened.reader()
    assert samples is not None
    form = samples.record_form
    assert form is not None
    records = HostRecords(form, *reader.space, torch.device("cuda", 0))
    rates = {}
    for size in SIZES:
        slots = samples.locate(reader, np.random.default_rng(0).permutation(len(dataset))[:size])[0]
        on_device = torch.from_numpy(slots).cuda()
        rates[size] = size * size_bytes / timed(partial(records.gather, on_device)) / 1e9
    return rates


def _count(batch: Any) -> int:
    return len(batch) if isinstance(batch, torch.Tensor) else len(batch[0])


class _Mapped(torch.utils.data.Dataset[torch.Tensor]):
    """A memmap, as training scripts have it."""

    def __init__(self, path: str, dtype: Any, width: int) -> None:
        flat = np.memmap(path, dtype, "r")
        self._rows = flat[: len(flat) // width * width].reshape(-1, width)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self._rows[index].copy())


def _torch(data: Data, name: str, size: int = 4096) -> dict[str, Any]:
    width, dtype = (SEQ_LEN, np.uint16) if name == "tokens" else (RECORD_BYTES, np.uint8)
    mapped = _Mapped(str(data.path(name)), dtype, width)
    loader = torch.utils.data.DataLoader(mapped, size, True, num_workers=4, pin_memory=True, drop_last=True)

    def moved() -> Any:
        for batch in loader:
            yield batch.cuda(non_blocking=True)

    one = rate(moved, len, 2.0)
    size_bytes = width * np.dtype(dtype).itemsize
    return {f"{size}": {"gb_per_s": one["per_s"] * size_bytes / 1e9, "cores": one["cores"]}}
