"""Checks on a real device: the same batches as on the processor, lifetimes, errors, captures, recalls."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from bench.gpu.data import Data, jpeg
from cachesvc.core.errors import CorruptData
from loader import DataLoader, jagged, open_dataset
from loader.gpu.cuda_driver import register_host, unregister_host
from loader.gpu.registered_extents import registered_extents

EVERYTHING = 64 << 30
BATCH = 512
WAYS: dict[str, dict[str, Any]] = {
    "in process": {},
    "two processes": {"num_workers": 2},
    "two threads": {"num_workers": 2, "worker_type": "thread"},
    "gathered by the device": {"pinned_bytes": EVERYTHING},
    "gathered by the device, two threads": {
        "pinned_bytes": EVERYTHING,
        "num_workers": 2,
        "worker_type": "thread",
    },
}


def same_batches(data: Data) -> None:
    """Every way of making batches gives the batches of the processor, in order, over two epochs."""
    few = 40 * BATCH
    datasets = {
        "records": data.records().take(few),
        "odd records": data.records("odd").take(few),
        "tokens": data.tokens().take(few // 4),
        "plain tokens": data.tokens(overlap=0, targets=None).take(few // 4),
    }
    for name, dataset in datasets.items():
        for way, arguments in WAYS.items():
            common: dict[str, Any] = {"batch_size": BATCH, "shuffle": True, "epochs": 2}
            expected = DataLoader(dataset, **common)
            on_device = DataLoader(dataset, device="cuda", **common, **arguments)
            _poison()
            for number, (ours, theirs) in enumerate(zip(on_device, expected, strict=True)):
                for a, b in zip(_tensors(ours), _tensors(theirs), strict=True):
                    assert a.is_cuda, (name, way)
                    assert a.dtype == b.dtype, (name, way)
                    assert torch.equal(a.cpu(), b), f"{name}, {way}: batch {number} differs"


def same_bytes_of_uneven_samples(data: Data) -> None:
    """Jagged batches and dictionaries arrive unchanged."""
    for arguments in ({}, {"num_workers": 2}, {"num_workers": 2, "worker_type": "thread"}):
        pictures = data.pictures(decode=None, fields=("jpg",))
        ours = DataLoader(pictures, 16, True, collate_fn=jagged, device="cuda", **arguments)
        theirs = DataLoader(pictures, 16, True, collate_fn=jagged)
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a.values.cpu(), b.values)
            assert torch.equal(a.offsets.cpu(), b.offsets)


def nothing_is_overwritten(data: Data) -> None:
    """A batch that a slow kernel still reads keeps its values while later batches are made."""
    for arguments in WAYS.values():
        dataset = data.records().take(30 * BATCH)
        loader = DataLoader(dataset, BATCH, shuffle=True, device="cuda", **arguments)
        sums = []
        for batch in loader:
            torch.cuda._sleep(3_000_000)  # about 2 ms, in which the loader makes the next batches
            sums.append(batch.sum(dtype=torch.int64))
            del batch
        expected = [int(each.sum(dtype=torch.int64)) for each in DataLoader(dataset, BATCH, shuffle=True)]
        assert [int(each) for each in sums] == expected


def errors_arrive(data: Data) -> None:
    """An error on the side is raised in the training loop, and a damaged picture is named."""

    def fails(sample: Any) -> Any:
        raise ValueError("a transform that fails")

    for arguments in ({}, {"num_workers": 2}, {"num_workers": 2, "worker_type": "thread"}):
        small = open_dataset(
            data.path("records").parent, format="records", record_bytes=3072, transform=fails
        )
        loader = DataLoader(small, 8, device="cuda", **arguments)
        _raises(ValueError, partial(list, loader))
    folder = data.root / "damaged"
    folder.mkdir()
    with tarfile.open(folder / "0.tar", "w") as tar:
        for name, raw in (
            ("good", jpeg(0)),
            ("cmyk", jpeg(1, "CMYK")),
            ("damaged", jpeg(2)[:200] + b"x" * 500),
        ):
            entry = tarfile.TarInfo(f"{name}.jpg")
            entry.size = len(raw)
            tar.addfile(entry, io.BytesIO(raw))
    images = open_dataset(folder, decode="cuda")
    first = next(iter(DataLoader(images.take(2), 2, device="cuda")))
    assert [tuple(image.shape) for image in first] == [(3, 375, 500)] * 2
    error = _raises(CorruptData, lambda: [*DataLoader(images, 3, device="cuda")])
    assert "damaged" in str(error), error


def captures_are_undisturbed(data: Data) -> str:
    """CUDA graphs are captured while batches are made. Returns what happens beside torch's own pinning."""
    for arguments in WAYS.values():
        loader = DataLoader(data.records(), 2048, device="cuda", **arguments)
        assert not failed_captures(loader)
    # In a process of its own: a capture that failed leaves torch's allocator without memory to use again.
    program = (
        "import torch; from bench.gpu.checks import failed_captures;"
        " rows = torch.utils.data.TensorDataset(torch.zeros(1 << 16, 3072, dtype=torch.uint8));"
        " print(failed_captures(torch.utils.data.DataLoader(rows, 256, num_workers=2, pin_memory=True)))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    if ended.stdout.strip():
        return f"torch's loader with pin_memory: {ended.stdout.strip()} of 20 captures failed"
    errors = [line for line in ended.stderr.splitlines() if re.match(r"[\w.]*Error\b", line)]
    return f"torch's loader with pin_memory: {'; '.join(dict.fromkeys(errors))}"


def failed_captures(batches: Any) -> int:
    """Capture 20 graphs, each while batches are being made; return how many captures fail."""
    x = torch.zeros(1024, device="cuda")
    iterator, failed = iter(batches), 0
    for _ in range(20):
        next(iterator)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                y = x * 2 + 1
                time.sleep(0.005)
            graph.replay()
            assert y.sum().item() == 1024
        except RuntimeError:
            failed += 1
    return failed


def recalled_extents_are_given_back(data: Data) -> None:
    """A job whose registered extents fill the RAM tier gives them back to another dataset, and both read rightly."""
    first = data.records()
    loader = DataLoader(first, 4096, device="cuda", pinned_bytes=EVERYTHING, epochs=None)
    batches = iter(loader)
    for _ in range(2 * len(first) // 4096):
        next(batches)
    registered = registered_extents(first.opened.reader(), EVERYTHING, register_host, unregister_host)
    full = registered.registered_bytes
    assert full > 0.9 * data.gib * (1 << 30), f"{full} bytes are registered"
    second = data.tokens(overlap=0, targets=None)
    tokens = np.memmap(data.path("tokens"), np.uint16, "r")
    rows = tokens[: len(tokens) // 2048 * 2048].reshape(-1, 2048)
    other = DataLoader(second, 4096)
    given_back = full
    for number, batch in enumerate(other):
        assert np.array_equal(batch.numpy(), rows[number * 4096 : (number + 1) * 4096])
        given_back = min(given_back, registered.registered_bytes)
    assert given_back < full, "no registered extent was given back"
    flat = np.memmap(data.path("records"), np.uint8, "r")
    for _ in range(8):
        found = next(batches).cpu().numpy()
        assert np.array_equal(
            found, flat.reshape(-1)[: len(flat) // 3072 * 3072].reshape(-1, 3072)[loader.indices]
        )


CHECKS: list[Callable[[Data], Any]] = [
    same_batches,
    same_bytes_of_uneven_samples,
    nothing_is_overwritten,
    errors_arrive,
    captures_are_undisturbed,
    recalled_extents_are_given_back,
]


def _poison() -> None:
    """Fill freed device memory, so that a batch that was never written is not right by chance."""
    held = [torch.full((16 << 20,), 173, dtype=torch.uint8, device="cuda") for _ in range(8)]
    del held


def _tensors(batch: Any) -> list[torch.Tensor]:
    return [batch] if isinstance(batch, torch.Tensor) else list(batch)


def _raises(kind: type[Exception], call: Callable[[], object]) -> Exception:
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__} was raised")
