"""Loaders over datasets and samplers of a user's own, which torchdata gives a state. Cut in the second epoch of three,
saved and continued by a new loader, they hand over what an uninterrupted loader does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from cachesvc.core.errors import InvalidInput, StateMismatch
from loader import DataLoader, open_dataset
from tests.compat.launch import numbered
from tests.support.training.users_datasets import Numbers, Stream

pytest.importorskip("torchdata", reason="no torchdata here: `make compat` installs it")
from torchdata.stateful_dataloader import StatefulDataLoader

COUNT, EPOCHS = 37, 3
CUT = 3
"""Batches of the second epoch before the interruption."""


class StatefulStream(Stream):
    """An iterable dataset with a state. It counts the samples that it makes."""

    def __init__(self) -> None:
        super().__init__(COUNT)
        self.given = self.begin = 0

    def __iter__(self) -> Iterator[int]:
        rest = list(super().__iter__())[self.begin :]
        self.given, self.begin = self.begin, 0
        return self._counted(rest)

    def _counted(self, rest: list[int]) -> Iterator[int]:
        for number in rest:
            self.given += 1
            yield number

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["given"]


class Backwards(Sampler[int]):
    """A sampler of a user, without a state."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(COUNT - 1, -1, -1))

    def __len__(self) -> int:
        return COUNT


def weighted(**given: Any) -> WeightedRandomSampler:
    return WeightedRandomSampler([1.0 + n for n in range(COUNT)], COUNT, **given)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def single() -> RandomSampler:
    return RandomSampler(Numbers(COUNT), generator=seeded())


LOADERS: dict[str, Callable[[], dict[str, Any]]] = {
    "shuffled": lambda: {"dataset": Numbers(COUNT), "shuffle": True},
    "shuffled, with a generator": lambda: {"dataset": Numbers(COUNT), "shuffle": True, "generator": seeded()},
    "in sequence": lambda: {"dataset": Numbers(COUNT)},
    "single samples": lambda: {"dataset": Numbers(COUNT), "batch_size": None, "sampler": single()},
    "own sampler": lambda: {"dataset": Numbers(COUNT), "sampler": Backwards()},
    "weights": lambda: {"dataset": Numbers(COUNT), "sampler": weighted(generator=seeded())},
    "subset": lambda: {"dataset": Numbers(COUNT), "sampler": SubsetRandomSampler(range(9, 30), generator=seeded())},
    "own batches": lambda: {"dataset": Numbers(COUNT), "batch_sampler": [[4, 2], [1], [9, 9, 9], [0, 3], [8]]},
    "stream": lambda: {"dataset": Stream(COUNT)},
    "stream with a state": lambda: {"dataset": StatefulStream()},
    "stream, every third step": lambda: {"dataset": StatefulStream(), "snapshot_every_n_steps": 3},
}  # fmt: skip


def loader_of(name: str, workers: int, kind: Any = DataLoader, **given: Any) -> Any:
    made = {"batch_size": 5, "num_workers": workers, **LOADERS[name](), **given}
    if "batch_sampler" in made:
        del made["batch_size"]
    return kind(**made)


def plain(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def cut(begun: Any) -> tuple[Any, list[Any]]:
    """The state after some batches, and the rest of the epoch."""
    batches = iter(begun)
    for _ in range(CUT):
        next(batches)
    return begun.state_dict(), [plain(batch) for batch in batches]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", LOADERS)
def test_a_cut_epoch_and_all_later_ones_continue_as_if_uninterrupted(name: str, workers: int) -> None:
    torch.manual_seed(0)
    whole = loader_of(name, workers)
    seen = [[plain(batch) for batch in whole] for _ in range(EPOCHS)]
    torch.manual_seed(0)
    begun = loader_of(name, workers)
    assert [plain(batch) for batch in begun] == seen[0]
    batches = iter(begun)
    assert [plain(next(batches)) for _ in range(CUT)] == seen[1][:CUT]
    state = begun.state_dict()
    torch.manual_seed(1)
    resumed = loader_of(name, workers)
    resumed.load_state_dict(state)
    assert resumed.epoch == 1
    assert [plain(batch) for batch in resumed] == seen[1][CUT:]
    assert [plain(batch) for batch in resumed] == seen[2]


@pytest.mark.parametrize("name", ["shuffled", "weights", "stream with a state"])
def test_a_state_after_an_epochs_end_is_the_next_epoch(name: str) -> None:
    first = loader_of(name, 0)
    list(first)
    state = first.state_dict()
    after = [plain(batch) for batch in first]
    resumed = loader_of(name, 0)
    resumed.load_state_dict(state)
    assert resumed.epoch == 1
    assert [plain(batch) for batch in resumed] == after


def test_weights_without_a_generator_resume_within_the_epoch() -> None:
    begun = DataLoader(Numbers(COUNT), 5, sampler=weighted())
    state, rest = cut(begun)
    torch.manual_seed(7)
    resumed = DataLoader(Numbers(COUNT), 5, sampler=weighted())
    resumed.load_state_dict(state)
    assert [plain(batch) for batch in resumed] == rest
    found = torch.get_rng_state()
    torch.manual_seed(7)
    iter(DataLoader(Numbers(COUNT)))  # torch draws one number when an iteration begins
    assert torch.equal(found, torch.get_rng_state())


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", ["shuffled", "own sampler", "stream", "stream with a state"])
def test_states_pass_between_this_loader_and_torchdatas(name: str, workers: int) -> None:
    for kind, other in ((StatefulDataLoader, DataLoader), (DataLoader, StatefulDataLoader)):
        begun = loader_of(name, workers, kind)
        state, rest = cut(begun)
        resumed = loader_of(name, workers, other)
        resumed.load_state_dict(state)
        assert [plain(batch) for batch in resumed] == rest


def test_persistent_workers_continue_from_a_state() -> None:
    begun = loader_of("stream with a state", 2, persistent_workers=True)
    list(begun)
    state, rest = cut(begun)
    begun.load_state_dict(state)
    assert [plain(batch) for batch in begun] == rest


def test_attributes_may_change_between_epochs() -> None:
    loader = loader_of("in sequence", 0)
    list(loader)
    loader.collate_fn = sum
    assert next(iter(loader)) == 10


def test_the_ranks_of_a_distributed_sampler_continue() -> None:
    seen: list[int] = []
    for rank in range(2):

        def ranked(rank: int = rank) -> DataLoader:
            return DataLoader(
                Numbers(COUNT), 4, sampler=DistributedSampler(Numbers(COUNT), 2, rank, drop_last=True)
            )

        begun = ranked()
        begun.set_epoch(1)
        batches = iter(begun)
        first = [plain(next(batches)) for _ in range(2)]
        state = begun.state_dict()
        resumed = ranked()
        resumed.load_state_dict(state)
        resumed.set_epoch(resumed.epoch)
        seen += [number for batch in (*first, *map(plain, resumed)) for number in batch]
    assert len(seen) == len(set(seen)) == COUNT - 1


def test_transforms_draw_as_before_under_a_users_sampler(tmp_path: Path) -> None:
    rows = numbered(tmp_path / "rows.npy", COUNT)

    def drawn(row: torch.Tensor, rng: np.random.Generator) -> tuple[int, float]:
        return int(row[0]), rng.random()

    def batches_of(state: dict[str, Any] | None) -> tuple[list[list[Any]], dict[str, Any]]:
        data = open_dataset(rows, transform=drawn)
        loader = DataLoader(data, 5, sampler=weighted(generator=seeded()), collate_fn=list, seed=3)
        if state is not None:
            loader.load_state_dict(state)
            return [*loader, *loader], {}
        seen = list(loader)
        batches = iter(loader)
        seen += [next(batches) for _ in range(CUT)]
        saved = loader.state_dict()
        return [*seen, *batches, *loader], saved

    whole, state = batches_of(None)
    rest, _ = batches_of(state)
    assert rest == whole[-len(rest) :]
    assert len(rest) == 2 * len(whole) // EPOCHS - CUT


def test_a_state_of_another_loader_is_refused() -> None:
    state = loader_of("stream", 0).state_dict()
    with pytest.raises(StateMismatch, match="num_workers=0, the loader has 2"):
        loader_of("stream", 2).load_state_dict(state)
    for foreign in ({"version": 3, "dataset": "abc"}, {"_iterator_finished": False}, [1], None, "state"):
        with pytest.raises(StateMismatch, match="no state of a loader that runs as torch's own"):
            loader_of("stream", 0).load_state_dict(foreign)
    with pytest.raises(StateMismatch, match="runs as torch's own because Stream is not") as refused:
        loader_of("stream", 0).skip(1)
    assert "torchdata" not in str(refused.value)
    for wrong in (-1, 1.5, "often"):
        with pytest.raises(InvalidInput, match="snapshot_every_n_steps"):
            DataLoader(Numbers(COUNT), snapshot_every_n_steps=wrong)  # type: ignore[arg-type]
