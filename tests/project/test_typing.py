"""The public API as type checkers and annotations see it; `make lint` checks this file."""

# An error that is ignored here is one that users must get: an ignore that is not needed is an error too.

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import TensorDataset
from typing_extensions import assert_type

from cachesvc.core.errors import InvalidInput
from loader import DataLoader, Dataset, Jagged, Mixture, Packed, Stats, jagged, mix, open_dataset, pack


class Words(TorchDataset[str]):
    """A user's dataset."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> str:
        return "abcd"[index]


def made(batches: DataLoader[int]) -> DataLoader[list[torch.Tensor]]:
    """Annotations of a user's script; never called."""
    raise NotImplementedError


class Own(DataLoader[str]):
    """A loader that a user derives from ours."""


@pytest.fixture
def rows(tmp_path: Path) -> str:
    np.save(tmp_path / "rows.npy", np.arange(40, dtype="<i4").reshape(10, 4))
    return str(tmp_path / "rows.npy")


def test_the_loader_is_generic_as_torchs_is() -> None:
    assert get_origin(DataLoader[int]) is DataLoader
    assert get_args(DataLoader[Any]) == (Any,)
    assert get_type_hints(made)["return"] == DataLoader[list[torch.Tensor]]
    assert isinstance(DataLoader[str](Words()), TorchLoader)
    assert [*DataLoader[str](Words(), 2)] == [*Own(Words(), 2)] == [["a", "b"], ["c", "d"]]


def test_what_is_inferred_is_what_comes(rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHESVC", "off")
    data = assert_type(open_dataset(rows, format="records"), Dataset)
    assert len([sample for sample in data]) == len(data) == 10
    batches = DataLoader(data, batch_size=2, shuffle=True, seed=1, epochs=None, last="drop", window="all")
    assert_type(batches, DataLoader[Any])
    assert_type(DataLoader(Words()), DataLoader[str])
    assert_type(DataLoader(TensorDataset(torch.ones(3)), 2), DataLoader[tuple[torch.Tensor, ...]])
    as_torch: TorchLoader[Any] = batches
    assert assert_type(iter(batches), Iterator[Any]) is not None
    assert assert_type(len(as_torch), int) == 5
    assert assert_type(batches.epoch, int) == assert_type(batches.valid, int) == 0
    assert assert_type(batches.accumulate, int) == 1
    assert_type(batches.state_dict(), dict[str, Any])
    assert_type(batches.stats(), Stats)
    assert_type(batches.indices, np.ndarray[Any, np.dtype[np.int64]])
    mixture = assert_type(mix({data: 0.5, data.take(4): 0.5}), Mixture)
    assert_type(pack(data, 3), Packed)
    assert_type(data.split({"train": 0.5}), dict[str, Dataset])
    assert_type(jagged([np.ones(2)]), Jagged)
    DataLoader(mixture, batch_size=None, collate_fn=jagged)


def test_a_wrong_type_is_an_error_for_checkers_and_at_run_time() -> None:
    with pytest.raises(ValueError):
        DataLoader(Words(), batch_size="2")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput):
        DataLoader(Words(), window="most")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput):
        open_dataset("/nowhere", fields=5)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput):
        DataLoader(Words()).set_epoch("1")  # type: ignore[arg-type]
