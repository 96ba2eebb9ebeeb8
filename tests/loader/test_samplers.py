"""The `sampler` and `batch_sampler` of a loader have its indices, and iterating them does not move it."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator, skip_first_batches
from torch.utils.data import ConcatDataset, RandomSampler, SequentialSampler, Subset
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data.distributed import DistributedSampler

from cachesvc.core.errors import InvalidInput
from loader import DataLoader, Dataset, mix, pack
from tests.support.training.loader_fakes import MemoryLink, drawing, in_memory

COUNT = 103
pytestmark = pytest.mark.filterwarnings("error:set_epoch")


def rows(batches: Any) -> list[list[int]]:
    return [torch.as_tensor(batch).flatten().tolist() for batch in batches]


class Loader(DataLoader[Any]):
    """A loader whose samplers have the attributes that torch's annotations leave out."""

    sampler: Any
    batch_sampler: Any


def ranks(link: MemoryLink, world: int, **given: Any) -> list[Loader]:
    given = {"shuffle": True, "batch_size": 5, **given}
    return [Loader(in_memory(link), rank=rank, world_size=world, **given) for rank in range(world)]


def jumbled(data: Dataset) -> Subset[Any]:
    return Subset(data, [*range(60, 20, -1), -1, *range(61, 100)])


def behind(data: Dataset) -> ConcatDataset[Any]:
    return ConcatDataset([data.take(40), Subset(data, range(40, COUNT)), data.select([7, 3, 7])])


ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"shuffle": False},
    {"drop_last": True},
    {"last": "drop", "shuffle": False},
    {"global_batch_size": 30},
    {"seed": 2**64 - 1, "window": 1},
    {"epochs": 3, "global_batch_size": 60},
    {"on_error": "substitute"},
    {"collate_fn": torch.stack, "num_workers": 1},
]


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("given", ARGUMENTS, ids=lambda given: ",".join(given) or "none")
def test_the_batch_sampler_has_the_batches_that_are_iterated(
    link: MemoryLink, world: int, given: dict[str, Any]
) -> None:
    for loader in ranks(link, world, **given):
        for _ in range(2):
            listed = list(loader.batch_sampler)
            assert [*itertools.chain(*listed)] == list(loader.sampler)
            assert (len(loader.batch_sampler), len(loader.sampler)) == (len(listed), sum(map(len, listed)))
            assert rows(TorchLoader(loader.dataset, batch_sampler=loader.batch_sampler)) == listed
            assert len(loader) == len(listed)
            assert rows(loader) == listed


@pytest.mark.parametrize("around", [jumbled, behind])
def test_indices_are_those_of_the_wrapping_dataset(
    link: MemoryLink, around: Callable[[Dataset], Any]
) -> None:
    loader = DataLoader(around(in_memory(link)), 4, shuffle=True, rank=1, world_size=2)
    again = TorchLoader(loader.dataset, batch_sampler=loader.batch_sampler)
    assert rows(again) == rows(loader)


def test_a_sampler_has_the_whole_epoch_whatever_was_consumed_skipped_or_loaded(link: MemoryLink) -> None:
    (_, loader), (_, other) = ranks(link, 2), ranks(link, 2)
    loader.set_epoch(2)
    whole = list(loader.batch_sampler)
    reading = iter(loader)
    begun = rows(itertools.islice(reading, 3))
    state = loader.state_dict()
    assert list(loader.batch_sampler) == whole
    assert loader.state_dict() == state
    assert begun + rows(reading) == whole
    assert list(loader.batch_sampler) != whole  # the next epoch's
    other.load_state_dict(state)
    other.skip(2)
    assert list(other.batch_sampler) == whole
    assert rows(other) == whole[5:]


def test_a_loaded_state_brings_its_global_batch_and_window(link: MemoryLink) -> None:
    (saved,) = ranks(link, 1, batch_size=20, window=1)
    next(iter(saved))
    loaded, _ = ranks(link, 2)
    loaded.load_state_dict(saved.state_dict())
    assert (loaded.accumulate, len(loaded.batch_sampler)) == (2, len(loaded))
    assert list(loaded.batch_sampler)[2:] == rows(loaded)


def test_either_sampler_sets_the_epoch_of_the_loader(link: MemoryLink) -> None:
    loader, anew = ranks(link, 2)[0], ranks(link, 2)[0]
    for told, epoch in ((loader.sampler, 4), (loader.batch_sampler, 1), (loader.batch_sampler.sampler, 3)):
        told.set_epoch(epoch)
        anew.set_epoch(epoch)
        assert loader.epoch == loader.sampler.epoch == epoch
        assert list(loader.batch_sampler) == rows(loader) == rows(anew)
    for wrong in (-1, 1.5, "1"):
        for told in (loader.sampler, loader.batch_sampler):
            with pytest.raises(InvalidInput, match="epoch"):
                told.set_epoch(wrong)


def test_types_show_that_a_loader_is_sharded_and_whether_it_shuffles(link: MemoryLink) -> None:
    for shuffle, kind, other in (
        (True, RandomSampler, SequentialSampler),
        (False, SequentialSampler, RandomSampler),
    ):
        loader = ranks(link, 3, shuffle=shuffle, drop_last=True)[2]
        sampler, batches = loader.sampler, loader.batch_sampler
        assert isinstance(sampler, kind)
        assert not isinstance(sampler, other)
        assert isinstance(sampler, DistributedSampler)
        assert (sampler.rank, sampler.num_replicas) == (2, 3)
        assert sampler.total_size == 3 * sampler.num_samples == 3 * len(sampler)
        assert sampler.data_source is sampler.dataset is loader.dataset  # type: ignore[comparison-overlap]
        assert (batches.batch_size, batches.drop_last, batches.sampler) == (5, True, sampler)


class Mesh:
    """Two data-parallel ranks of two tensor-parallel processes; this is the last of these."""

    mesh_dim_names = ("dp", "tp")

    def get_coordinate(self) -> tuple[int, int]:
        return 1, 1

    def size(self, mesh_dim: int | None = None) -> int:
        return 4 if mesh_dim is None else 2


def test_the_rank_of_a_sampler_is_the_loaders(link: MemoryLink, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = rows(ranks(link, 2)[1])
    meshed = Loader(in_memory(link), 5, shuffle=True, mesh=Mesh())
    assert list(meshed.batch_sampler) == wanted
    started = Loader(in_memory(link), 5, shuffle=True)
    alone = Loader(in_memory(link), 5, shuffle=True, shard=False)
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    assert list(started.batch_sampler) == wanted
    assert list(alone.batch_sampler) == rows(alone) == rows(ranks(link, 1)[0])


def test_a_loader_that_torch_alone_runs_keeps_torchs_samplers(link: MemoryLink) -> None:
    drawn = SequentialSampler(range(9))
    loader = DataLoader(in_memory(link), 2, sampler=drawn)
    assert loader.sampler is drawn
    assert type(loader.batch_sampler) is torch.utils.data.BatchSampler
    assert type(DataLoader(range(9), 2, shuffle=True).sampler) is RandomSampler  # type: ignore[arg-type]


@pytest.mark.parametrize("made", [lambda data: mix({data: 1.0}), lambda data: pack(data, 5)])
def test_no_index_names_a_sample_of_a_mixture_or_a_pack_to_another_loader(
    link: MemoryLink, made: Callable[[Dataset], Any]
) -> None:
    loader = Loader(made(in_memory(link)), 4, shuffle=True)
    assert len(loader.batch_sampler) == len(loader)
    for sampler in (loader.sampler, loader.batch_sampler):
        with pytest.raises(InvalidInput, match="iterate this one, after load_state_dict"):
            iter(sampler)


@pytest.mark.parametrize("workers", [0, 1])
def test_transforms_draw_the_same_in_a_loader_that_is_built_from_it(link: MemoryLink, workers: int) -> None:
    loader = DataLoader(in_memory(link, transform=drawing), 8, shuffle=True, seed=5, num_workers=workers)
    loader.set_epoch(2)
    rest = rows(skip_first_batches(loader, 3))
    assert rest == rows(loader)[3:]


def test_a_sampler_outlives_its_loader_and_keeps_none_alive(link: MemoryLink) -> None:
    gc.collect()
    gc.disable()
    try:
        loader = ranks(link, 2)[1]
        loader.set_epoch(1)
        batches, there = loader.batch_sampler, weakref.ref(loader)
        wanted = rows(loader)
        loader.set_epoch(1)
        del loader
        assert there() is None
    finally:
        gc.enable()
    for each in (batches, copy.copy(batches), pickle.loads(pickle.dumps(batches))):
        each.set_epoch(3)
        other = list(each)
        each.set_epoch(1)
        assert list(each) == wanted != other


def test_a_batch_sampler_rebuilt_to_predict_has_each_sample_once(link: MemoryLink) -> None:
    """Lightning does so, with `drop_last=False`, whatever the loader does with samples that fill no batch."""
    cases: list[dict[str, Any]] = [{"drop_last": True}, {}, {"global_batch_size": 70}]
    for world, given in itertools.product((1, 2, 7), cases):
        if given.get("global_batch_size", 70) % (5 * world):
            continue
        seen: list[int] = []
        for loader in ranks(link, world, **given):
            kind = type(loader.batch_sampler)
            again = kind(loader.sampler, batch_size=5, drop_last=False)
            seen += [index for batch in again for index in batch]
            assert len(again) == sum(1 for _ in again)
            plain = kind(range(11), batch_size=5, drop_last=False)
            assert ([len(batch) for batch in plain], len(plain)) == ([5, 5, 1], 3)
        assert sorted(seen) == list(range(COUNT))


def test_accelerate_leaves_our_loader_unchanged_and_shards_torchs(link: MemoryLink) -> None:
    accelerator = Accelerator(cpu=True)
    own = DataLoader(in_memory(link), 5, shuffle=True)
    assert accelerator.prepare(own) is own
    foreign = DataLoader(in_memory(link), 5, sampler=range(9))
    assert accelerator.prepare(foreign) is not foreign


def test_a_loader_without_batch_size_yields_single_samples_and_has_a_state(link: MemoryLink) -> None:
    loaders = ranks(link, 2, batch_size=None)
    seen = [[int(sample[0]) for sample in loader] for loader in loaders]
    assert [len(each) for each in seen] == [52, 52]
    assert sorted({*seen[0], *seen[1]}) == list(range(COUNT))
    (again, _), (broken, _) = ranks(link, 2, batch_size=None), ranks(link, 2, batch_size=None, num_workers=1)
    assert broken.batch_sampler is None
    assert list(broken.sampler) == seen[0]
    begun = [int(sample[0]) for sample in itertools.islice(broken, 20)]
    again.load_state_dict(broken.state_dict())
    assert begun + [int(sample[0]) for sample in again] == seen[0]
    whole = DataLoader(mix({in_memory(link): 1.0}), None)
    assert next(iter(whole)).shape == (1,)


def test_set_epoch_before_a_loaded_state_warns(link: MemoryLink) -> None:
    """A state saved inside the loop after an epoch's last batch is the next epoch's beginning."""
    loader, again = ranks(link, 1)[0], ranks(link, 1)[0]
    for _ in loader:
        state = loader.state_dict()
    again.load_state_dict(state)
    with pytest.warns(UserWarning, match=r"set_epoch\(0\) goes back behind .* epoch 1"):
        again.set_epoch(0)
    again.load_state_dict(state)
    for epoch in (again.epoch, 2):  # no warning, which an error would follow
        again.set_epoch(epoch)
        assert again.epoch == epoch


def test_a_loaded_epoch_that_another_loader_read_to_its_end_begins_again_with_a_warning(
    link: MemoryLink,
) -> None:
    """Scripts that call `skip_first_batches` and no `set_epoch` would read its rest twice."""
    (saved,), (loader,) = ranks(link, 1), ranks(link, 1)
    list(itertools.islice(saved, 4))
    loader.load_state_dict(saved.state_dict())
    rest = rows(skip_first_batches(loader, 4))
    with pytest.warns(UserWarning, match=r"set_epoch\(1\) begins the next"):
        assert rows(itertools.islice(loader, 2)) == rest[:2]
    loader.load_state_dict(saved.state_dict())
    list(skip_first_batches(loader, 4))
    loader.set_epoch(1)
    assert rows(loader) != rest


def test_an_empty_state_changes_nothing_and_warns(link: MemoryLink) -> None:
    loader = ranks(link, 1)[0]
    loader.skip(3)
    with pytest.warns(UserWarning, match="an empty state"):
        loader.load_state_dict({})
    assert loader.state_dict()["step"] == 3
