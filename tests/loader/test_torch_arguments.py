"""Every argument of torch's DataLoader means what it means there, for any dataset and for ours."""

from __future__ import annotations

import inspect
import os
import time
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import (
    Dataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from cachesvc.core.errors import InvalidInput
from loader import DataLoader
from tests.support.training.loader_fakes import MemoryLink, in_memory
from tests.support.training.users_datasets import Numbers, Stream

COUNT = 60


class Opening(Dataset[int]):
    """A user's dataset around one of ours, with something that each worker opens for itself."""

    def __init__(self, dataset: Any) -> None:
        self.dataset, self.opened = dataset, -1

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> int:
        return int(self.dataset[index]) * 0 + self.opened


def open_in_worker(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.opened = info.id


def flat(batches: Any) -> list[int]:
    return [int(n) for batch in batches for n in torch.as_tensor(batch).reshape(-1)]


def test_the_signature_is_torchs_and_more() -> None:
    ours = inspect.signature(DataLoader.__init__).parameters
    theirs = inspect.signature(TorchLoader.__init__).parameters
    for name, argument in theirs.items():
        assert name in ours
        if argument.default is not inspect.Parameter.empty:
            assert ours[name].default == argument.default, name
    positional = [n for n, p in theirs.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [n for n, p in ours.items() if p.kind is p.POSITIONAL_OR_KEYWORD] == positional


@pytest.mark.parametrize(
    "arguments",
    [
        {"shuffle": True, "sampler": [1, 2]},
        {"batch_sampler": [[1]], "batch_size": 2},
        {"batch_size": None, "drop_last": True},
        {"prefetch_factor": 2},
        {"persistent_workers": True},
        {"timeout": -1},
        {"num_workers": -1},
        {"multiprocessing_context": "fork", "num_workers": 1, "sampler": 5},
    ],
)
def test_arguments_that_torch_refuses_are_refused(link: MemoryLink, arguments: dict[str, Any]) -> None:
    def outcome(kind: type[Any], data: Any) -> tuple[str, str]:
        try:
            list(kind(data, **arguments))
        except (ValueError, TypeError) as error:
            return type(error).__name__, str(error)
        return "", ""

    theirs = outcome(TorchLoader, Numbers(COUNT))
    assert theirs != ("", "")
    assert outcome(DataLoader, Numbers(COUNT)) == theirs
    assert outcome(DataLoader, in_memory(link)) == theirs


@pytest.mark.parametrize("more", [{}, {"worker_type": "thread"}, {"pin_memory": True}])
def test_a_timeout_without_workers_is_refused_as_by_torch(link: MemoryLink, more: dict[str, Any]) -> None:
    with pytest.raises((AssertionError, ValueError)):
        iter(TorchLoader(Numbers(COUNT), timeout=5))
    loader = DataLoader(in_memory(link), timeout=5, **more)
    with pytest.raises(InvalidInput, match="num_workers is 0"):
        iter(loader)
    loader.timeout = 0
    next(iter(loader))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_generator_orders_other_datasets_as_in_torch(workers: int) -> None:
    def order(kind: type[Any]) -> list[int]:
        generator = torch.Generator().manual_seed(5)
        return flat(kind(Numbers(COUNT), 7, shuffle=True, num_workers=workers, generator=generator))

    assert order(DataLoader) == order(TorchLoader) != list(range(COUNT))


@pytest.mark.parametrize("own", [False, True], ids=["theirs", "ours"])
def test_samplers_with_generators_are_used(link: MemoryLink, own: bool) -> None:
    data = in_memory(link) if own else Numbers(COUNT)

    def samplers() -> list[Any]:
        seeds = [torch.Generator().manual_seed(n) for n in (1, 2)]
        weighted = WeightedRandomSampler([1.0] * COUNT, 20, generator=seeds[0])
        return [weighted, RandomSampler(Numbers(COUNT), generator=seeds[1])]

    for first, second in zip(samplers(), samplers(), strict=True):
        drawn = list(second)
        assert flat(DataLoader(data, 6, sampler=first, num_workers=1)) == drawn


@pytest.mark.parametrize("own", [False, True], ids=["theirs", "ours"])
def test_no_batch_size_hands_out_single_samples(link: MemoryLink, own: bool) -> None:
    found = list(DataLoader(in_memory(link) if own else Numbers(COUNT), batch_size=None))
    assert flat(found) == list(range(COUNT))
    assert len(found) == COUNT


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_iterable_datasets_share_themselves_between_workers(context: str) -> None:
    loader = DataLoader(
        Stream(COUNT), 8, num_workers=2, multiprocessing_context=context, persistent_workers=True
    )
    assert sorted(flat(loader)) == sorted(flat(loader)) == list(range(COUNT))


def test_an_exception_in_a_worker_arrives_with_its_type_and_message() -> None:
    for workers in (0, 2):
        with pytest.raises(KeyError, match="sample 33 is spoilt"):
            list(DataLoader(Numbers(COUNT, bad=33), 8, num_workers=workers))


def _exhausted(samples: list[Any]) -> Any:
    return next(iter(()))


@pytest.mark.parametrize("given", [{}, {"num_workers": 1}, {"num_workers": 1, "worker_type": "thread"}])
def test_a_stop_iteration_of_the_users_code_is_a_clear_error(link: MemoryLink, given: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        list(DataLoader(in_memory(link), 10, collate_fn=_exhausted, **given))


def _refuse(worker: int) -> None:
    raise RuntimeError(f"worker {worker} does not start")


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_worker_init_finds_the_users_dataset(link: MemoryLink, context: str) -> None:
    given: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": context}
    loader = DataLoader(Opening(in_memory(link)), 10, worker_init_fn=open_in_worker, **given)
    assert set(flat(loader)) == {0, 1}


def test_an_exception_in_worker_init_arrives_too(link: MemoryLink) -> None:
    with pytest.raises(RuntimeError, match=r"worker \d does not start"):
        list(DataLoader(in_memory(link), 8, num_workers=1, worker_init_fn=_refuse))


def _drowsy(batch: list[Any]) -> Any:
    time.sleep(20)
    return batch


def test_a_worker_that_takes_longer_than_timeout_is_an_error(link: MemoryLink) -> None:
    loader = DataLoader(in_memory(link), 8, num_workers=1, timeout=0.3, collate_fn=_drowsy)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="timed out"):
        next(iter(loader))
    assert time.monotonic() - began < 60, "it hung"


@pytest.mark.parametrize("own", [False, True], ids=["theirs", "ours"])
def test_out_of_order_delivery_loses_and_repeats_nothing(link: MemoryLink, own: bool) -> None:
    if "in_order" not in inspect.signature(TorchLoader.__init__).parameters:
        pytest.skip("this torch has no in_order")
    data = in_memory(link) if own else Numbers(COUNT)
    loader = DataLoader(data, 4, num_workers=2, in_order=False)
    assert loader.in_order is False
    assert sorted(flat(loader)) == list(range(COUNT))


@pytest.mark.parametrize("own", [False, True], ids=["theirs", "ours"])
def test_persistent_workers_live_on_and_prefetching_can_be_deep(link: MemoryLink, own: bool) -> None:
    data = in_memory(link) if own else Numbers(COUNT)
    loader = DataLoader(
        data, 5, num_workers=2, persistent_workers=True, prefetch_factor=7, collate_fn=_with_process
    )
    pids = [{pid for pid, _ in loader} for _ in range(2)]
    assert len(pids[0] | pids[1]) <= 2  # an idle worker makes the next batch, so one may make all
    fresh = DataLoader(data, 5, num_workers=2, collate_fn=_with_process)
    assert {pid for pid, _ in fresh}.isdisjoint({pid for pid, _ in fresh})


def _with_process(batch: list[Any]) -> tuple[int, Any]:
    return os.getpid(), batch


def test_pinning_without_an_accelerator_only_warns(link: MemoryLink) -> None:
    for data in (TensorDataset(torch.arange(COUNT)), in_memory(link)):
        loader = DataLoader(data, 10, pin_memory=True)
        found = [batch[0] if isinstance(batch, list) else batch for batch in loader]
        assert flat(found) == list(range(COUNT))
        assert all(batch.is_pinned() == torch.cuda.is_available() for batch in found)


@pytest.mark.parametrize("own", [False, True], ids=["theirs", "ours"])
@pytest.mark.parametrize("workers", [0, 1])
def test_attributes_set_between_iterations_apply_from_the_next_one(
    link: MemoryLink, own: bool, workers: int
) -> None:
    loader = DataLoader(in_memory(link) if own else Numbers(COUNT), 4, num_workers=workers)
    assert len(loader) == 15  # does not use the collate_fn, as in torch
    loader.collate_fn = _with_process
    first = [*loader]
    assert flat(batch for _, batch in first) == list(range(COUNT))
    loader.num_workers, loader.prefetch_factor = 1 - workers, None if workers else 2
    there = {pid == os.getpid() for pid, _ in loader}
    assert ({pid == os.getpid() for pid, _ in first}, there) == ({workers == 0}, {workers == 1})


@pytest.mark.parametrize("worker_type", ["process", "thread"])
def test_workers_that_make_no_batch_ahead_are_refused_as_torch_refuses_them(
    link: MemoryLink, worker_type: Any
) -> None:
    loader = DataLoader(in_memory(link), 4, num_workers=1, prefetch_factor=0, worker_type=worker_type)
    with pytest.raises((AssertionError, ValueError), match="prefetch_factor"):
        iter(torch.utils.data.DataLoader(Numbers(COUNT), 4, num_workers=1, prefetch_factor=0))
    with pytest.raises(InvalidInput, match="prefetch_factor=0"):
        iter(loader)
    loader.prefetch_factor = 1
    assert flat(loader) == list(range(COUNT))


def test_a_loader_may_not_be_given_another_batch_size_later(link: MemoryLink) -> None:
    loader = DataLoader(Numbers(COUNT), 4)
    with pytest.raises(ValueError, match="batch_size"):
        loader.batch_size = 5
    assert (
        len(loader),
        len(DataLoader(in_memory(link), 4)),
        len(DataLoader(Numbers(COUNT), 7, drop_last=True)),
    ) == (15, 15, 8)
