"""Epochs of a loader: each `iter()` that yields a batch is one, as in torch. Also `peek`, `epochs=` and resumed counts."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader

from cachesvc.core.errors import InvalidInput
from loader import DataLoader, mix, pack
from tests.support.training.loader_fakes import MemoryLink, drawing, in_memory

COUNT = 200
WORKERS: list[dict[str, Any]] = [
    {},
    {"num_workers": 1},
    {"num_workers": 1, "persistent_workers": True},
    {"num_workers": 2, "worker_type": "thread"},
]


def loader(link: MemoryLink, batch_size: int = 10, **given: Any) -> DataLoader[Any]:
    return DataLoader(in_memory(link), batch_size, **{"shuffle": True} | given)


def rows(batches: Any) -> list[list[int]]:
    return [batch[:, 0].tolist() for batch in batches]


def whole(link: MemoryLink, iterations: int, **given: Any) -> list[list[list[int]]]:
    """The batches of each whole iteration."""
    run = loader(link, **given)
    return [rows(run) for _ in range(iterations)]


@pytest.mark.parametrize("given", WORKERS)
def test_an_epoch_that_is_left_early_is_followed_by_the_next(link: MemoryLink, given: dict[str, Any]) -> None:
    """torch does the same. Other loaders begin at the same data again (webdataset issues 310 and 388)."""
    epochs, run = whole(link, 5), loader(link, **given)
    assert [rows(islice(run, 3)) for _ in range(3)] == [each[:3] for each in epochs[:3]]
    assert rows([next(iter(run))]) == epochs[3][:1]
    assert rows(run) == epochs[4]


def test_a_validation_that_is_left_early_keeps_its_order_and_draws_anew(link: MemoryLink) -> None:
    run = DataLoader(in_memory(link, transform=drawing), 10)
    seen = [torch.cat([*islice(run, 2)]) for _ in range(2)]
    assert seen[0][:, 0].tolist() == seen[1][:, 0].tolist() == list(range(20))
    assert not (seen[0][:, 1] == seen[1][:, 1]).any()


# ---- peek


@pytest.mark.parametrize("given", [*WORKERS, {"shuffle": False}, {"epochs": None}, {"pin_memory": True}])
def test_a_peek_gives_the_next_batch_and_moves_nothing(link: MemoryLink, given: dict[str, Any]) -> None:
    run = loader(link, **given)
    for _ in range(2):
        before = run.state_dict(), run.stats().steps
        looks = rows([run.peek(), run.peek()])
        assert (run.state_dict(), run.stats().steps) == before
        assert looks == rows([run.peek()]) * 2
        assert rows(islice(run, 4))[0] == looks[0]


def test_a_peek_in_a_running_loop_disturbs_nothing(link: MemoryLink) -> None:
    epochs, run, seen = whole(link, 2), loader(link, num_workers=1), []
    for batch in run:
        seen += rows([batch])
        if len(seen) in (1, 7):
            assert rows([run.peek()]) == epochs[1][:1]
            assert run.indices.tolist() == seen[-1]
    assert seen == epochs[0]
    saved = loader(link)
    list(islice(saved, 6))
    run.load_state_dict(saved.state_dict())
    assert rows([run.peek()]) == epochs[0][6:7]
    run.skip(1)
    assert rows([run.peek()]) == epochs[0][7:8] == rows(run)[:1]


def test_a_peek_looks_at_mixtures_packs_and_single_samples(link: MemoryLink) -> None:
    data = in_memory(link)
    for run in (
        DataLoader(mix({data: 1.0}), 4, shuffle=True),
        DataLoader(data, None, shuffle=True),
        DataLoader(data, 4, collate_fn=len),
        DataLoader(data, 4, on_error="skip"),
    ):
        first = run.peek()
        assert np.array_equal(first, next(iter(run)))
    packs = DataLoader(pack(data, 5), 2, shuffle=True)
    assert torch.equal(packs.peek()["tokens"], next(iter(packs))["tokens"])


def test_a_peek_of_nothing_and_of_torchs_order_is_refused(link: MemoryLink) -> None:
    data = in_memory(link)
    with pytest.raises(InvalidInput, match="epoch 0 has no batch"):
        DataLoader(data, COUNT + 1, drop_last=True).peek()
    with pytest.raises(InvalidInput, match="torch alone runs"):
        DataLoader(data, 4, sampler=range(9)).peek()


# ---- callers of a sampler's set_epoch


def resumed(link: MemoryLink, epoch: int, taken: int) -> Any:
    """A loader that has loaded a state of this place."""
    saved, run = loader(link), loader(link)
    saved.set_epoch(epoch)
    list(islice(saved, taken))
    run.load_state_dict(saved.state_dict())
    return run


@pytest.mark.parametrize("taken", [0, 7, 20])
def test_a_caller_that_counts_the_epochs_of_this_process_goes_on(link: MemoryLink, taken: int) -> None:
    """Fabric counts them from 0, whatever was loaded."""
    epochs, run = whole(link, 5), resumed(link, 2, taken)
    expected = [epochs[2][taken:], epochs[3], epochs[4]] if taken < 20 else epochs[3:]
    for count, batches in enumerate(expected):
        run.sampler.set_epoch(count)
        assert rows(run) == batches


def test_a_caller_that_has_yet_to_end_an_epoch_takes_nothing_and_begins_the_next(link: MemoryLink) -> None:
    """Lightning, resumed from a checkpoint of its last validation in an epoch, which falls on the last batch."""
    epochs, run = whole(link, 5), resumed(link, 2, 20)
    iter(run)
    run.sampler.set_epoch(2)
    assert run.state_dict()["epoch"] == 3
    for epoch in (3, 4):
        run.sampler.set_epoch(epoch)
        assert rows(run) == epochs[epoch]


def test_a_caller_that_leaves_epochs_early_begins_the_next(link: MemoryLink) -> None:
    """Lightning with `limit_train_batches`, resumed from a checkpoint within an epoch, at its last batch, after it."""
    epochs = whole(link, 4)
    for taken, counts in ((4, (2, 3)), (8, (2, 3)), (8, (3,))):
        run = resumed(link, 2, taken)
        for count in counts:
            run.sampler.set_epoch(count)
            if count == 3:
                assert rows(islice(run, 8)) == epochs[3][:8]
            elif taken < 8:
                assert rows(islice(run, 8 - taken)) == epochs[2][taken:8]


def test_a_caller_of_a_fresh_loader_names_epochs(link: MemoryLink) -> None:
    """`set_epoch` works as in DistributedSampler: in the README's loop, after a look, and for a repeated epoch."""
    epochs, run = whole(link, 3), loader(link)
    next(iter(run))
    for epoch in (0, 1, 2, 2, 0):
        run.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        assert rows(run) == epochs[epoch]


def test_torchs_loader_over_the_samplers_has_the_epochs_that_are_left(link: MemoryLink) -> None:
    cut, rest = loader(link, epochs=3), loader(link, epochs=3)
    list(islice(cut, 30))
    rest.load_state_dict(cut.state_dict())
    other = TorchLoader(rest.dataset, batch_sampler=rest.batch_sampler)
    assert len(other) == 40
    assert rows(other)[10:] == rows(rest)
