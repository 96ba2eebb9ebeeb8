"""Datasets of a user's own, which are none of `open_dataset`."""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import Dataset, IterableDataset, get_worker_info


class Numbers(Dataset[int]):
    """A map-style dataset: sample n is n, and that of `bad` fails."""

    def __init__(self, count: int, bad: int = -1) -> None:
        self.count, self.bad = count, bad

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        if index == self.bad:
            raise KeyError(f"sample {index} is spoilt")
        return index


class Stream(IterableDataset[int]):
    """An iterable dataset of numbers without a state, divided among workers."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(first, self.count, step))
