"""Datasets for tests of mixtures and packs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from loader import DataLoader, Dataset, Mixture, mix, pack
from tests.support.datasets import array_file, megatron, write_files
from tests.support.training.loader_fakes import compiled, in_memory

SEQ = 24
SIZES = (40, 25, 10)
"""Samples of the datasets of `numbers`."""


def mixture_data(root: Path) -> Path:
    """Write the data that mixtures are made of, and return its folder.

    `text`: Megatron documents in two files. `notes`: raw tokens in two classes. `rows`: records of one size.
    `n0`, ...: records that hold their own number.
    """
    draw = np.random.default_rng(5)
    for number in range(2):
        lengths = draw.integers(1, 60, 150)
        megatron(root / "text" / f"part{number}", [draw.integers(0, 9999, n).tolist() for n in lengths])
    notes = {
        f"{name}/{number:03d}.tok": draw.integers(0, 9999, 5 + 3 * number, np.uint16).tobytes()
        for name in ("cat", "dog")
        for number in range(40)
    }
    write_files(root / "notes", notes)
    array_file(root / "rows.npy", draw.integers(0, 9999, (300, 10)).astype(np.uint16))
    for index, size in enumerate(SIZES):
        numbers = np.arange(size, dtype=np.int64)[:, None] + 1000 * index
        array_file(root / f"n{index}.npy", np.tile(numbers, (1, 512)))  # one record a page
    return root


def dataset_in(root: Path, name: str, form: dict[str, Any] | None = None, **options: Any) -> Dataset:
    return in_memory(compiled(root / name, root, extent_bytes=4096, **options), **(form or {}))


def text(root: Path, **form: Any) -> Dataset:
    return dataset_in(root, "text", form, format="tokens", seq_len=1)


def notes(root: Path, **form: Any) -> Dataset:
    return dataset_in(root, "notes", {"fields": ("tok",), "decode": None} | form, format="files")


def three_packed(root: Path) -> Mixture:
    """Three packed datasets, one of them filtered."""
    parts = (
        pack(text(root), SEQ),
        pack(notes(root).where("label == 'cat'"), SEQ, dtype="uint16"),
        pack(dataset_in(root, "rows.npy", format="records"), SEQ),
    )
    return mix(dict(zip(parts, (0.5, 0.3, 0.2), strict=True)))


def numbers(root: Path, **form: Any) -> list[Dataset]:
    """Three datasets whose samples hold 1000 * dataset + index."""
    return [dataset_in(root, f"n{index}.npy", form, format="records") for index in range(3)]


def draws(loader: DataLoader, epochs: int) -> list[tuple[int, int, int]]:
    """(component, own epoch, index) of every sample, checked against the sample itself."""
    mixture, found = loader.dataset, list[tuple[int, int, int]]()
    assert isinstance(mixture, Mixture)
    for _ in range(epochs):
        for batch in loader:
            where = [column.tolist() for column in mixture.locate(loader.indices[: loader.valid])]
            values = batch[: loader.valid, 0].tolist()
            assert values == [1000 * c + i for c, i in zip(where[0], where[2], strict=True)]
            found += list(zip(*where, strict=True))
    return found
