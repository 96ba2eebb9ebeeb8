"""Indices work as in a list, one or many at a time: negative ones count from the end, others out of range are
errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Subset

from loader import DataLoader, Dataset, mix, pack
from tests.support.training.loader_fakes import in_memory, numbered_records

COUNT = 50
WAYS: dict[str, Callable[[Any, Sequence[int]], list[int]]] = {
    "many": lambda data, indices: [int(row[0]) for row in data.__getitems__(indices)],
    "subset": lambda data, indices: [int(Subset(data, indices)[n][0]) for n in range(len(indices))],
    "torch's loader": lambda data, indices: flat(TorchLoader(data, 2, sampler=indices)),
    "our loader": lambda data, indices: flat(DataLoader(data, 2, sampler=indices)),
    "our loader over a subset": lambda data, indices: flat(DataLoader(Subset(data, indices), 2)),
}


def flat(batches: Any) -> list[int]:
    return [int(row[0]) for batch in batches for row in batch]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """The last extent is padded."""
    return in_memory(numbered_records(tmp_path_factory.mktemp("indices"), COUNT))


@pytest.mark.parametrize("way", WAYS)
def test_negative_indices_count_from_the_end(rows: Dataset, way: str) -> None:
    assert WAYS[way](rows, [-1, 3, -COUNT]) == [COUNT - 1, 3, 0]
    assert WAYS[way](rows.select([9, 4, 7]), [-1, -3]) == [7, 9]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("outside", [COUNT, COUNT + 1, -COUNT - 1, 10**6])
def test_an_index_out_of_range_is_an_error(rows: Dataset, way: str, outside: int) -> None:
    with pytest.raises(IndexError, match=f"{outside} of {COUNT}"):
        WAYS[way](rows, [0, outside])
    with pytest.raises(IndexError):
        WAYS[way](rows.take(10), [0, 10])


def test_an_index_must_be_an_integer(rows: Dataset) -> None:
    for given in ([1.7], [True, False], ["1"]):
        with pytest.raises(TypeError, match="whole numbers"):
            rows.__getitems__(given)  # type: ignore[arg-type]
    assert rows.__getitems__([]) == []
    tensors: Any = [torch.tensor(2), np.int32(-1)]
    assert [int(row[0]) for row in rows.__getitems__(tensors)] == [2, COUNT - 1]


def test_mixtures_and_packs_are_indexed_alike(rows: Dataset) -> None:
    for made in (mix({rows: 1.0}), pack(rows, 5)):
        last = made[len(made) - 1]
        for found in (made[-1], Subset(made, [-1])[0], next(iter(TorchLoader(Subset(made, [-1]), None)))):
            assert repr(found) == repr(last)
        for outside in (len(made), -len(made) - 1):
            with pytest.raises(IndexError):
                list(TorchLoader(made, 1, sampler=[outside]))
