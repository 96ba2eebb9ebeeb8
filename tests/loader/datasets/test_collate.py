"""Default collation into given memory equals torch's default collation."""

from __future__ import annotations

import re
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from cachesvc.core.errors import InvalidInput
from loader.datasets.collate import default_collate_into
from loader.reading.address_range import Bytes

Pair = namedtuple("Pair", "image label")

SAMPLES: dict[str, list[Any]] = {
    "arrays": [np.full((2, 3), n, np.uint16) for n in range(4)],
    "arrays of no dimension": [np.array(n, np.float32) for n in range(4)],
    "arrays of two types": [np.zeros(2, np.float32), np.zeros(2, np.float64)],
    "empty arrays": [np.zeros((0, 3), np.int64)] * 2,
    "tensors": [torch.full((2, 3), n) for n in range(4)],
    "tensors of two types": [torch.zeros(2), torch.zeros(2, dtype=torch.float64)],
    "tensors with gradients": [torch.ones(2, requires_grad=True), torch.ones(2)],
    "tensors of no dimension": [torch.tensor(n) for n in range(4)],
    "transposed": [torch.arange(6).reshape(2, 3).T, torch.arange(6).reshape(2, 3).T],
    "one": [np.arange(3)],
    "large arrays": [np.full((100, 100, 3), n, np.uint8) for n in range(4)],
    "large tensors": [torch.full((100, 100), n) for n in range(4)],
    "large, of two types": [np.zeros(9_000, np.float32), np.ones(9_000, np.float64)],
    "large tensors of two types": [torch.zeros(9_000), torch.ones(9_000, dtype=torch.float64)],
    "large and one that is not": [torch.zeros(9_000), torch.zeros(9_000, requires_grad=True)],
    "large, cut out of larger": [
        np.arange(90_000).reshape(300, 300)[n:, n : n + 100][:200] for n in range(4)
    ],
    "large pairs with labels": [(np.full(40_000, n, np.int16), n, torch.ones(9_000) * n) for n in range(3)],
    "large, in lists and dicts": [
        {"x": [np.full(20_000, n, np.int8)], "y": np.ones(3) * n} for n in range(3)
    ],
    "large, the same one twice": [np.arange(9_000)] * 2,
    "tuples with labels": [(np.full(3, n, np.uint8), n, str(n)) for n in range(3)],
    "named": [Pair(torch.ones(2) * n, n) for n in range(3)],
    "dicts": [{"x": np.ones(2) * n, "y": {"z": torch.ones(1)}, "b": b"raw"} for n in range(3)],
    "numbers": [1.5, 2.5],
    "scalars": [np.float32(1), np.float32(2)],
    "bytes": [b"a", b"bc"],
}


def given(made: list[Bytes]) -> Callable[[int], Bytes]:
    def empty(size_bytes: int) -> Bytes:
        made.append(np.full(size_bytes, 0xEE, np.uint8))
        return made[-1]

    return empty


def flat(batch: Any) -> list[Any]:
    if isinstance(batch, dict):
        return [batch.keys(), *(each for value in batch.values() for each in flat(value))]
    if isinstance(batch, (list, tuple)):
        return [type(batch), *(each for value in batch for each in flat(value))]
    return [batch]


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("into", [True, False])
def test_batches_equal_torchs(name: str, into: bool) -> None:
    made: list[Bytes] = []
    expected = flat(default_collate(SAMPLES[name]))
    found = flat(default_collate_into(given(made) if into else None, SAMPLES[name], len(SAMPLES[name])))
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        if isinstance(other, torch.Tensor):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
        else:
            assert one == other


LARGE = ["large arrays", "large tensors", "large, cut out of larger", "large, in lists and dicts"]


@pytest.mark.parametrize("name", ["arrays", "tensors", "transposed", "one", "named", "dicts", *LARGE])
def test_numbers_are_stacked_in_the_given_memory(name: str) -> None:
    made: list[Bytes] = []
    batch = flat(default_collate_into(given(made), SAMPLES[name], len(SAMPLES[name])))
    places = {room.ctypes.data for room in made}
    assert {each.data_ptr() for each in batch if isinstance(each, torch.Tensor) and each.dim() > 1} <= places


@pytest.mark.parametrize(
    ("samples", "says"),
    [
        ([np.zeros(2), np.zeros(3)], "sample 0 has shape [2] and sample 1 has shape [3]"),
        ([np.zeros(20_000), np.zeros(30_000)], "sample 0 has shape [20000] and sample 1 has shape [30000]"),
        (
            [torch.zeros(9_000)] * 2 + [torch.zeros(9_001)],
            "sample 0 has shape [9000] and sample 2 has shape [9001]",
        ),
        ([(torch.zeros(2), 1), (torch.zeros(3), 2)], "sample 1 has shape [3] at [0]"),
        ([{"x": [1, 2]}, {"x": [1]}], "sample 0 has length 2 and sample 1 has length 1 at ['x']"),
    ],
)
def test_an_error_names_samples_of_different_shapes(samples: list[Any], says: str) -> None:
    with pytest.raises(RuntimeError):
        default_collate(samples)
    with pytest.raises(InvalidInput, match=re.escape(says)):
        default_collate_into(given([]), samples, len(samples))


@pytest.mark.parametrize("samples", [[np.array(["a"]), np.array(["b"])], [object(), object()]])
def test_torchs_errors_are_raised_unchanged(samples: list[Any]) -> None:
    with pytest.raises((RuntimeError, TypeError)) as theirs:
        default_collate(samples)
    with pytest.raises(theirs.type) as mine:
        default_collate_into(given([]), samples, len(samples))
    assert str(mine.value) == str(theirs.value)


def test_collate_functions_that_the_user_registered_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def listed(batch: Any, *, collate_fn_map: Any = None) -> Any:
        return list(batch)

    monkeypatch.setitem(default_collate_fn_map, np.ndarray, listed)
    assert type(default_collate_into(given([]), [np.zeros(2)], 1)) is list


def test_a_large_value_is_copied_before_the_next_sample_is_made() -> None:
    same = np.empty(20_000, np.int64)

    def overwritten() -> Iterator[tuple[np.ndarray[Any, Any], int]]:
        for number in range(4):
            same.fill(number)
            yield same, number

    images, numbers = default_collate_into(None, overwritten(), 4)
    assert images.shape == (4, 20_000)
    assert (images == numbers[:, None]).all()


@pytest.mark.parametrize(
    ("samples", "some"),
    [
        ([{"png": 1, "cls": 0}, {"png": 2}], "cls"),
        ([{"png": 2}, {"png": 1, "cls": 0}], "cls"),  # torch drops the field from the batch
        ([(1, 0), (2, None)], "a value 1"),
    ],
)
def test_an_error_names_fields_that_only_some_samples_have(samples: list[Any], some: str) -> None:
    with pytest.raises(InvalidInput, match=f"only some samples of a batch have {some}: choose fields="):
        default_collate_into(None, samples, len(samples))
