"""Behaviour of torch's DataLoader that ours keeps, and programs written for it."""

from __future__ import annotations

import re
import sys
import traceback
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    SequentialSampler,
    TensorDataset,
)

from cachesvc.core.errors import (
    InvalidInput,
    StateMismatch,
)
from loader import DataLoader, mix
from tests.support.training.loader_fakes import Holding, MemoryLink, in_memory

COUNT = 100


def test_other_datasets_behave_as_in_torch() -> None:
    pairs = TensorDataset(torch.arange(10), torch.arange(10) * 2)
    ours = list(DataLoader(pairs, batch_size=4))
    theirs = list(torch.utils.data.DataLoader(pairs, batch_size=4))
    assert all(
        torch.equal(a, b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)
    )
    loader = DataLoader(pairs)
    with pytest.warns(UserWarning, match="runs as torch's own"):
        state = loader.state_dict()
    with pytest.warns(UserWarning, match="begins anew"):
        loader.load_state_dict(state)
    with pytest.raises(StateMismatch):
        loader.load_state_dict({"version": 2})
    with pytest.raises(StateMismatch, match="TensorDataset is not a map-style dataset of open_dataset"):
        loader.skip(1)


def test_a_users_own_sampler_is_used(link: MemoryLink) -> None:
    dataset = in_memory(link)
    for loader in (
        DataLoader(dataset, batch_size=3, sampler=[5, 1, 9, 9]),
        DataLoader(dataset, batch_sampler=[[5, 1, 9], [9]]),
        torch.utils.data.DataLoader(dataset, batch_size=3, sampler=[5, 1, 9, 9]),
    ):
        assert [b[:, 0].tolist() for b in loader] == [[5, 1, 9], [9]]
    nested = BatchSampler(SequentialSampler(dataset), 50, False)
    assert len(list(DataLoader(dataset, batch_sampler=nested, num_workers=1))) == 2


def test_set_epoch_reaches_a_users_own_sampler(link: MemoryLink) -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(in_memory(link), 2, 0)
    batches = BatchSampler(SequentialSampler(sampler), 50, False)
    batches.set_epoch = sampler.set_epoch  # type: ignore[attr-defined]
    for epoch, given in ((3, {"sampler": sampler}), (4, {"batch_sampler": batches})):
        DataLoader(in_memory(link), **given).set_epoch(epoch)
        assert sampler.epoch == epoch
    DataLoader(in_memory(link), batch_sampler=BatchSampler(sampler, 50, False)).set_epoch(5)
    assert sampler.epoch == 5


def test_every_argument_is_an_attribute(link: MemoryLink) -> None:
    given: dict[str, Any] = {
        "seed": 3,
        "epochs": None,
        "last": "drop",
        "window": 4096,
        "rank": 0,
        "world_size": 1,
    }
    given |= {"shard": False, "on_error": "raise", "dp_dims": ("dp",), "mesh": None, "global_batch_size": 8}
    given |= {"batch_size": 4, "shuffle": True, "num_workers": 0, "drop_last": False, "pin_memory": False}
    loader = DataLoader(in_memory(link), **given)
    assert {name: getattr(loader, name) for name in given} == given
    assert isinstance(loader, torch.utils.data.DataLoader)


def spoilt(sample: Any) -> Any:
    if sample[0] == 7:
        raise KeyError("spoilt")
    return sample


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
@pytest.mark.parametrize("given", [{}, {"num_workers": 1}, {"num_workers": 1, "worker_type": "thread"}])
@pytest.mark.parametrize(
    "form", [{"transform": spoilt}, {"decode": lambda raw: spoilt(np.frombuffer(raw, "<i8"))}]
)
def test_an_error_of_a_users_callable_names_the_sample(
    link: MemoryLink, form: dict[str, Any], given: dict[str, Any]
) -> None:
    with pytest.raises(KeyError) as caught:
        list(DataLoader(in_memory(link, **form), batch_size=10, **given))
    text = "".join(traceback.format_exception(caught.value))
    assert "spoilt" in text
    assert re.search(r"in sample r\.bin:7 of file://.*/r\.bin", text)


def torchs_noise(sample: torch.Tensor) -> torch.Tensor:
    return torch.rand(1)  # torchvision's transforms draw so


def test_workers_of_different_ranks_draw_differently_from_torchs_generator(link: MemoryLink) -> None:
    def noise(rank: int) -> list[float]:
        dataset = in_memory(link, transform=torchs_noise)
        loader = DataLoader(dataset, batch_size=10, num_workers=1, rank=rank, world_size=2)
        return torch.cat(list(loader)).flatten().tolist()

    assert noise(0) == noise(0)
    assert not set(noise(0)) & set(noise(1))


def test_last_and_drop_last_must_agree(link: MemoryLink) -> None:
    with pytest.raises(InvalidInput, match="give one of them"):
        len(DataLoader(in_memory(link), 3, last="pad", drop_last=True))
    assert len(DataLoader(in_memory(link), 3, last="drop", drop_last=True)) == 33


def test_stats_report_waits_and_origins(link: MemoryLink) -> None:
    loader = DataLoader(in_memory(link), batch_size=10)
    list(loader)
    stats = loader.stats()
    assert (stats.steps, stats.samples) == (10, 100)
    assert stats.bytes_by_origin == {"ram": 8 * COUNT, "nvme": 0, "direct": 0, "local": 0, "prepared": 0}
    assert 0 < stats.wait_p50_s <= stats.wait_p99_s <= stats.wait_s <= stats.elapsed_s


class HalvedMesh:
    """A mesh whose one dimension is not called `dp`."""

    mesh_dim_names = ("dp_shard",)

    def get_coordinate(self) -> tuple[int]:
        return (1,)

    def size(self, mesh_dim: int | None = None) -> int:
        return 2


@pytest.mark.parametrize("dims", ["dp_shard", ["dp_shard"]])
def test_dp_dims_takes_a_name_or_a_list(link: MemoryLink, dims: Any) -> None:
    loader = DataLoader(in_memory(link), batch_size=25, mesh=HalvedMesh(), dp_dims=dims)
    assert [int(batch[0, 0]) for batch in loader] == [25, 75]


class OneByOne(Holding):
    """A user's dataset that does not support reads of several samples at once."""

    __getitems__ = None


def test_a_dataset_without_getitems_is_read_one_by_one(link: MemoryLink) -> None:
    found = torch.cat(list(DataLoader(OneByOne(in_memory(link)), batch_size=30)))
    assert torch.equal(found, torch.arange(COUNT).reshape(COUNT, 1))


def test_a_loader_that_torch_alone_runs_refuses_arguments_it_would_ignore(link: MemoryLink) -> None:
    data = in_memory(link)
    with pytest.raises(InvalidInput, match=r"on_error= would be ignored: torch alone runs this loader"):
        DataLoader(data, 10, sampler=[1, 2, 3], on_error="skip")
    for given in ({"sampler": [1, 2]}, {"batch_sampler": [[1, 2]]}):
        with pytest.raises(InvalidInput, match="a Mixture has its own order in each epoch"):
            DataLoader(mix({data: 1.0}), **given)
    drawn = DataLoader(data, 2, sampler=[1, 2])
    assert len(list(drawn)) == 1
    for read in (lambda: drawn.valid, lambda: drawn.indices):
        with pytest.raises(InvalidInput, match="its sampler knows"):
            read()
    assert len(list(DataLoader(data, batch_size=None, sampler=[3, 4]))) == 2
    assert len(list(DataLoader(data, batch_sampler=[[3, 4]]))) == 1
