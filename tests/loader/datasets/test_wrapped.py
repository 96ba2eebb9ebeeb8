"""Datasets of `open_dataset` inside others: all parts count in the generators and in the identity of a state.
Arguments that would be ignored, and samples that would be seen twice, are refused."""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, IterableDataset, StackDataset, Subset, TensorDataset, random_split
from torch.utils.data import Dataset as TorchDataset

from cachesvc.core.errors import InvalidInput, StateMismatch
from loader import DataLoader, Dataset, mix, pack
from loader.datasets.wrapped import extent_layout
from testbed import WAIT_S
from tests.support import datasets
from tests.support.training.loader_fakes import Holding, MemoryLink, PlannedLink, compiled, drawing, in_memory

COUNT = 40


@pytest.fixture(scope="module")
def links(tmp_path_factory: pytest.TempPathFactory) -> list[MemoryLink]:
    """Record n of dataset i holds 1000 i + n."""
    root = tmp_path_factory.mktemp("inside")
    for number in range(3):
        rows = np.arange(COUNT, dtype="<i8").reshape(COUNT, 1) + 1000 * number
        datasets.array_file(root / f"{number}.bin", rows)
    return [compiled(root / f"{n}.bin", root, format="records", dtype="(1,)i8") for n in range(3)]


class Rows(IterableDataset[int]):
    """A user's iterable dataset."""

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(range(5))


@pytest.mark.parametrize("workers", [0, 1])
def test_transforms_of_every_part_are_keyed_by_epoch_and_seed(links: list[MemoryLink], workers: int) -> None:
    def draws(seed: int) -> list[dict[int, int]]:
        parts = [in_memory(link, transform=drawing) for link in links]
        both: ConcatDataset[Any] = ConcatDataset(
            [parts[0], Holding(Subset(parts[1], range(COUNT))), parts[2].take(COUNT)]
        )
        loader = DataLoader(both, batch_size=30, shuffle=True, seed=seed, epochs=2, num_workers=workers)
        pairs = torch.cat(list(loader)).reshape(2, 3 * COUNT, 2).tolist()
        return [dict(epoch) for epoch in pairs]

    first, second = draws(0)
    other = draws(1)[0]
    assert draws(0) == [first, second]
    assert len(first) == 3 * COUNT
    assert not [n for n in first if first[n] in (second[n], other[n])]


class ReadInTurns(Holding):
    """A dataset that two threads read in turns."""

    def __init__(self, dataset: Any, meeting: threading.Barrier) -> None:
        super().__init__(dataset)
        self.meeting = meeting

    def __getitem__(self, index: int) -> Any:
        self.meeting.wait(WAIT_S)
        return self.dataset[index]


def test_loaders_that_share_a_dataset_use_their_own_seeds(links: list[MemoryLink]) -> None:
    def first(dataset: TorchDataset[Any], seed: int) -> list[list[int]]:
        loader = DataLoader(dataset, batch_size=COUNT, seed=seed, num_workers=1, worker_type="thread")
        return next(iter(loader)).tolist()

    data = in_memory(links[0], transform=drawing)
    shared = ReadInTurns(data, threading.Barrier(2))
    with ThreadPoolExecutor(2) as both:
        found = list(both.map(first, (shared, shared), (1, 2)))
    assert found == [first(data, 1), first(data, 2)]


OTHERS: dict[str, Callable[[Dataset, Dataset, Dataset], Any]] = {
    "another second part": lambda a, b, c: ConcatDataset([a, c]),
    "another order": lambda a, b, c: ConcatDataset([b, a]),
    "other samples of a part": lambda a, b, c: ConcatDataset([a, Subset(b, [*range(1, COUNT), 0])]),
    "another cut": lambda a, b, c: ConcatDataset(
        [a.take(COUNT // 2), ConcatDataset([b, b.take(COUNT // 2)])]
    ),
    "a choice of it": lambda a, b, c: Subset(ConcatDataset([a, b]), range(2 * COUNT)),
    "both side by side": lambda a, b, c: StackDataset(a, b),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_state_belongs_to_all_parts_in_order(links: list[MemoryLink], other: str) -> None:
    a, b, c = map(in_memory, links)
    loader: DataLoader = DataLoader(ConcatDataset([a, b]), batch_size=8, shuffle=True)
    next(iter(loader))
    state = loader.state_dict()
    again: DataLoader = DataLoader(
        ConcatDataset([in_memory(links[0]), in_memory(links[1])]), batch_size=8, shuffle=True
    )
    again.load_state_dict(state)
    assert len(list(again)) == len(loader) - 1
    with pytest.raises(StateMismatch, match="belongs to"):
        DataLoader(OTHERS[other](a, b, c), batch_size=8, shuffle=True).load_state_dict(state)


def test_a_wrapped_plain_dataset_keeps_its_identity(links: list[MemoryLink]) -> None:
    dataset = in_memory(links[0])
    part = Subset(dataset, range(1, COUNT))
    for given, identity in [
        (dataset, dataset.version),
        (Holding(dataset), dataset.version),
        (part, dataset.select(range(1, COUNT)).identity),
    ]:
        assert DataLoader(given, batch_size=8).state_dict()["dataset"] == identity


class SubclassedSubset(Subset[Any]):
    """A subclass of torch's Subset."""


class UsersSubset(TorchDataset[Any]):
    """A user's own subset class."""

    def __init__(self, dataset: TorchDataset[Any], indices: Any) -> None:
        self.dataset, self.indices = dataset, indices

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Any:
        return self.dataset[self.indices[index]]


@pytest.mark.parametrize("kind", [SubclassedSubset, UsersSubset])
def test_users_subsets_have_different_identities(links: list[MemoryLink], kind: Any) -> None:
    dataset = in_memory(links[0])
    first, second = (DataLoader(kind(dataset, range(at, at + 9)), batch_size=4) for at in (0, 9))
    with pytest.raises(StateMismatch, match="belongs to"):
        second.load_state_dict(first.state_dict())


def test_subsets_of_a_concatenation_have_different_identities(links: list[MemoryLink]) -> None:
    whole: ConcatDataset[Any] = ConcatDataset([in_memory(links[0]), in_memory(links[1])])
    halves = random_split(whole, [COUNT, COUNT], torch.Generator().manual_seed(0))
    states = [DataLoader(half, batch_size=8).state_dict() for half in halves]
    with pytest.raises(StateMismatch):
        DataLoader(halves[1], batch_size=8).load_state_dict(states[0])


def test_stats_count_every_part(links: list[MemoryLink]) -> None:
    loader: DataLoader = DataLoader(ConcatDataset([in_memory(link) for link in links]), batch_size=30)
    list(loader)
    assert sum(loader.stats().bytes_by_origin.values()) == 3 * COUNT * 8


HELD: dict[str, Callable[[Any], Any]] = {
    "Subset": lambda made: Subset(made, [0, 1]),
    "random_split": lambda made: random_split(made, [0.5, 0.5])[0],
    "ConcatDataset": lambda made: ConcatDataset([TensorDataset(torch.arange(3)), made]),
    "StackDataset": lambda made: StackDataset(made, made),
    "Holds": Holding,
}


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("made", ["Mixture", "Packed"])
def test_mixtures_and_packs_inside_others_are_refused(links: list[MemoryLink], held: str, made: str) -> None:
    data = in_memory(links[0])
    given = HELD[held](mix({data: 1.0}) if made == "Mixture" else pack(data, 5))
    with pytest.raises(InvalidInput, match=rf"{made} inside .*(split|take)") as raised:
        DataLoader(given, batch_size=2)
    assert "\n" not in str(raised.value)
    DataLoader(given, batch_size=2, sampler=[0, 1])


@pytest.mark.parametrize(
    "given",
    [
        {"rank": 0, "world_size": 2},
        {"mesh": object()},
        {"global_batch_size": 8},
        {"epochs": 3},
        {"epochs": None},
        {"last": "drop"},
    ],
)
def test_arguments_that_torchs_loader_would_ignore_are_refused(
    links: list[MemoryLink], given: dict[str, Any]
) -> None:
    ours = in_memory(links[0])
    others: list[tuple[Any, int | None]] = [(TensorDataset(torch.arange(9)), 2), (Rows(), 2), (Rows(), None)]
    for dataset, batch_size in others:
        with pytest.raises(InvalidInput, match=f"^{next(iter(given))}=.* ignored") as raised:
            DataLoader(dataset, batch_size, **given)
        assert "\n" not in str(raised.value)
        assert len(list(DataLoader(dataset, batch_size))) > 0
    assert len(DataLoader(others[0][0], 2, sampler=[1, 2, 3], **given)) == 2
    assert len(DataLoader(ours, batch_sampler=[[1, 2], [3]], **given)) == 2


class HidesDataset(TorchDataset[Any]):
    """A user's dataset that holds another in an attribute not named `dataset`."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


class HidesAmongOthers(HidesDataset):
    """A user's dataset that holds others in a list or dict."""

    def __init__(self, parts: Any) -> None:
        self.parts = parts

    @property
    def data(self) -> Any:
        return self.parts["ours" if isinstance(self.parts, dict) else 0]


HIDDEN: list[Callable[[Dataset], Any]] = [
    HidesDataset,
    lambda data: Subset(HidesDataset(data), range(COUNT)),
    lambda data: ConcatDataset([HidesDataset(data)]),
    lambda data: HidesDataset(HidesDataset(Subset(data, range(COUNT)))),
    lambda data: HidesAmongOthers((data, 3)),
    lambda data: ConcatDataset([HidesAmongOthers({"other": 3, "ours": Subset(data, range(COUNT))})]),
]


@pytest.mark.parametrize("hide", HIDDEN)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_hidden_dataset_runs_as_in_torch_with_transforms_keyed_by_epoch(
    links: list[MemoryLink], hide: Callable[[Dataset], Any], workers: int
) -> None:
    loader = DataLoader(hide(in_memory(links[0], transform=drawing)), COUNT, num_workers=workers)
    [first], [second] = list(loader), list(loader)
    assert first[:, 0].tolist() == second[:, 0].tolist() == list(range(COUNT))
    assert not (first[:, 1] == second[:, 1]).any()


class Streams(IterableDataset[Any]):
    """A user's iterable dataset over one of `open_dataset`, in this attribute."""

    def __init__(self, data: Any, name: str) -> None:
        vars(self)[name] = data

    def __iter__(self) -> Any:
        (data,) = vars(self).values()
        return iter([data[index] for index in range(len(data))])


@pytest.mark.parametrize("name", ["dataset", "data"])
@pytest.mark.parametrize("workers", [0, 1])
def test_each_process_sees_all_of_an_iterable_dataset_over_ours_and_a_warning_says_so(
    links: list[MemoryLink], name: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = Streams(in_memory(links[0], transform=drawing), name)

    def read(**given: Any) -> torch.Tensor:
        (batch,) = DataLoader(streams, COUNT, num_workers=workers, **given)
        return torch.as_tensor(batch)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read()
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        read(shard=False)
    says = (
        "each of 2 processes sees all of Streams: it is an IterableDataset over .* map-style .* shard=False"
    )
    with pytest.warns(UserWarning, match=says):
        assert read()[:, 0].tolist() == list(range(COUNT))


@pytest.mark.parametrize("hide", HIDDEN)
def test_a_warning_says_that_each_process_sees_all_of_a_hidden_dataset(
    links: list[MemoryLink], hide: Callable[[Dataset], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = hide(in_memory(links[0]))

    def warnings_of(**given: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert len(list(DataLoader(hidden, **{"batch_size": 8} | given))) > 0
        return [str(each.message) for each in caught]

    assert warnings_of() == []
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for unshared in ({}, {"shuffle": True}, {"batch_size": None}):
        [line] = warnings_of(**unshared)
        name = type(hidden).__name__
        assert line.startswith(f"each of 2 processes sees all of {name}: ")
        assert "\n" not in line
    for shared in ({"shard": False}, {"sampler": [3, 1]}, {"batch_sampler": [[3], [1]], "batch_size": 1}):
        assert warnings_of(**shared) == []


STACKED: dict[str, Callable[[Dataset, Dataset], Any]] = {
    "tuple": lambda a, b: StackDataset(a, Subset(b, range(COUNT))),
    "dict": lambda a, b: StackDataset(one=Subset(a, range(COUNT)), two=b),
}


@pytest.mark.parametrize("stacked", STACKED)
def test_a_stack_is_sharded_and_resumed(links: list[MemoryLink], stacked: str) -> None:
    """Each pair comes once, at any number of ranks. One rank that resumes alone gives the remaining pairs of all
    ranks."""

    def pairs(rank: int, world: int, state: Any = None, most: int | None = None) -> tuple[list[Any], Any]:
        made = STACKED[stacked](in_memory(links[0], transform=drawing), in_memory(links[1]))
        loader = DataLoader(made, 8 // world, shuffle=True, drop_last=True, rank=rank, world_size=world)
        if state is not None:
            loader.load_state_dict(state)
        found = []
        for _, batch in zip(range(most or COUNT), loader, strict=False):
            one, two = batch.values() if isinstance(batch, dict) else batch
            found.append([*zip(one.tolist(), two[:, 0].tolist(), strict=True)])
        return found, json.loads(json.dumps(loader.state_dict()))

    whole, _ = pairs(0, 1)
    assert sorted(one[0] for batch in whole for one, _ in batch) == list(range(COUNT))
    assert all(two == 1000 + one[0] for batch in whole for one, two in batch)
    (first, state), (second, same) = pairs(0, 2, most=2), pairs(1, 2, most=2)
    assert state == same
    assert [[*a, *b] for a, b in zip(first, second, strict=True)] == whole[:2]
    assert pairs(0, 1, state)[0] == whole[2:]


class OtherDataset(TorchDataset[Any]):
    """A dataset without any of `open_dataset`."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Any:
        return ()


PARTED: dict[str, Callable[[Dataset, Dataset], Any]] = {
    "behind": lambda a, b: ConcatDataset([a, Subset(b, range(COUNT - 1, 3, -1))]),
    "behind others": lambda a, b: ConcatDataset([OtherDataset(), a, Holding(b)]),
    "some of both": lambda a, b: random_split(
        ConcatDataset([a, b]), [50, 30], torch.Generator().manual_seed(0)
    )[0],
    "beside": lambda a, b: StackDataset(a.take(31), b.select(range(5, 36))),
    "some beside": lambda a, b: StackDataset(Subset(a, range(30, 9, -1)), Subset(b, range(30, 9, -1))),
    "held": lambda a, b: Holding(Holding(ConcatDataset([a, b]))),
    "behind and beside": lambda a, b: StackDataset(
        ConcatDataset([a.take(4), b.take(6)]),
        ConcatDataset([a, b]).datasets[1].take(10),  # type: ignore[attr-defined]
    ),
}


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("parted", PARTED)
def test_extents_of_parts_are_planned_in_the_order_of_reads(
    tmp_path: Path, parted: str, shuffle: bool
) -> None:
    """Each extent that a step reads is planned for that step, and no window holds all extents."""
    links = []
    for number in range(2):
        path = tmp_path / f"{number}.bin"
        datasets.array_file(path, np.repeat(np.arange(COUNT, dtype="<i8") + 1000 * number, 128))
        link = compiled(path, tmp_path, format="records", dtype="(128,)i8", extent_bytes=4096 << number)
        links.append(PlannedLink(link.id, link.path))
    both = [in_memory(link) for link in links]
    loader = DataLoader(
        PARTED[parted](*both), batch_size=3, shuffle=shuffle, window=12288, drop_last=True, collate_fn=list
    )
    # other cases do not read in the order of extents
    planned = shuffle or parted not in ("behind", "some of both", "some beside")
    for step, batch in enumerate(loader):
        for record in (
            each for sample in batch for each in (sample if isinstance(sample, tuple) else [sample])
        ):
            number, index = divmod(int(record[0]), 1000)
            plans = links[number].plans
            if not plans:
                assert not planned
                continue
            extent = int(np.searchsorted(both[number].catalog.extent_first, index, "right")) - 1
            plan = plans[-1]
            now = (plan.first_step <= step) & (step <= plan.last_step)
            assert extent in plan.extent[now] or (not planned and number)
            assert now.sum() <= 6
    for plan in (link.plans[-1] for link in links if link.plans):
        rows = [*zip(plan.extent.tolist(), plan.first_step.tolist(), plan.last_step.tolist(), strict=True)]
        # "behind and beside" has one part twice
        assert len(set(rows)) == len(rows) or parted == "behind and beside"


class NamedSamples(OtherDataset):
    """A dataset of another kind, indexed by names."""

    def __getitem__(self, index: Any) -> Any:
        return torch.tensor([{"a": -1, "b": -2}[index]])


def test_other_datasets_in_a_stack_may_use_any_index(links: list[MemoryLink]) -> None:
    both: ConcatDataset[Any] = ConcatDataset([in_memory(links[0]), Subset(NamedSamples(), ["a", "b"])])  # type: ignore[list-item]
    found = torch.cat(list(DataLoader(both, batch_size=8, shuffle=True)))
    assert sorted(found[:, 0].tolist()) == [-2, -1, *range(COUNT)]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("parted", [*PARTED, *STACKED])
def test_samples_of_parts_equal_torchs(links: list[MemoryLink], parted: str, workers: int) -> None:
    """The samples are equal although parts are read in one pass."""
    one, other = (in_memory(link, transform=drawing) for link in links[:2])
    dataset = (PARTED | STACKED)[parted](one, other)
    loader = DataLoader(
        dataset, 7, shuffle=True, seed=3, collate_fn=list, num_workers=workers, worker_type="thread"
    )
    for batch in loader:
        assert repr(batch) == repr([dataset[index] for index in loader.indices.tolist()])


def test_a_stack_is_ordered_by_the_part_with_most_extents(tmp_path: Path, links: list[MemoryLink]) -> None:
    """Labels in one extent do not make one window of all images."""
    path = tmp_path / "images.bin"
    datasets.array_file(path, np.zeros((COUNT, 128), "<i8"))
    images = in_memory(compiled(path, tmp_path, format="records", dtype="(128,)i8", extent_bytes=4096))
    found = extent_layout(StackDataset(in_memory(links[0]), images), shuffle=True)
    assert found.extent_first.tolist() == [*range(0, COUNT + 1, 4)]
    assert [len(piece.first) for piece in found.parts] == [2, COUNT // 4 + 1]


def by_name(record: torch.Tensor, *, rng: np.random.Generator) -> torch.Tensor:
    return drawing(record, rng)


def in_third_place(record: torch.Tensor, factor: int, rng: np.random.Generator) -> torch.Tensor:
    return factor * drawing(record, rng)


def second(record: torch.Tensor, generator: np.random.Generator) -> torch.Tensor:
    return drawing(record, generator)


@wraps(drawing)
def wrapped(*given: Any) -> torch.Tensor:
    return drawing(*given)


def with_its_own(record: torch.Tensor, rng: int) -> torch.Tensor:
    return record * rng


def test_a_transform_may_take_its_generator_in_several_ways(links: list[MemoryLink]) -> None:
    link = links[0]

    def drawn(transform: Any) -> list[list[int]]:
        data = in_memory(link, transform=transform)
        data.set_epoch(0)
        return [each.tolist() for each in data]

    for transform in (by_name, partial(in_third_place, factor=1), second, wrapped):
        assert drawn(transform) == drawn(drawing)
    own = in_memory(link, transform=partial(with_its_own, rng=2))
    assert torch.equal(own[5], 2 * in_memory(link)[5])


def change_indices(dataset: Any, count: int) -> None:
    dataset.indices = range(count, 0, -1)


def change_in_place(dataset: Any, count: int) -> None:
    dataset.indices[:] = range(count, 0, -1)


def change_inner(dataset: Any, count: int) -> None:
    dataset.dataset = Subset(dataset.dataset.dataset, range(count, 0, -1))


def change_parts(dataset: Any, count: int) -> None:
    dataset.datasets[1] = Subset(dataset.datasets[1], range(count))
    dataset.cumulative_sizes = dataset.cumsum(dataset.datasets)


CHANGED: list[tuple[Callable[[list[Dataset]], Any], Callable[[Any, int], None]]] = [
    (lambda given: Subset(given[0], range(7)), change_indices),
    (lambda given: Subset(given[0], list(range(7))), change_in_place),
    (lambda given: Subset(Holding(given[0]), range(7)), change_indices),
    (lambda given: Holding(Subset(given[0], range(7))), change_inner),
    (ConcatDataset, change_parts),
]


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1, "persistent_workers": True}])
@pytest.mark.parametrize(("make", "change"), CHANGED)
@pytest.mark.parametrize("count", [3, 19])
def test_an_iteration_reads_the_dataset_as_it_is_when_it_begins(
    links: list[MemoryLink],
    make: Callable[[list[Dataset]], Any],
    change: Callable[[Any, int], None],
    count: int,
    workers: dict[str, Any],
) -> None:
    """A curriculum changes the indices of a Subset between epochs, as in torch, also after an epoch was abandoned."""
    dataset = make([in_memory(link) for link in links[:2]])
    loader = DataLoader(dataset, batch_size=2, **workers)
    theirs = torch.utils.data.DataLoader(dataset, batch_size=2)
    next(iter(loader)), list(iter(loader))
    begun = iter(loader)
    next(begun), next(begun)
    del begun
    before = json.dumps(loader.state_dict())
    change(dataset, count)
    assert len(loader) == len(theirs)
    assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in theirs]
    assert (loader.epoch, len(loader)) == (4, len(theirs))
    with pytest.raises(StateMismatch, match="belongs to"):
        loader.load_state_dict(json.loads(before))
    state = loader.state_dict()
    DataLoader(dataset, batch_size=2).load_state_dict(state)
    loader.load_state_dict(state)
    loader.skip(1)
    change(dataset, count - 1)
    with pytest.raises(StateMismatch, match="holds other samples"):
        iter(loader)
    loader.load_state_dict(DataLoader(dataset, batch_size=2).state_dict())
    assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in theirs]
