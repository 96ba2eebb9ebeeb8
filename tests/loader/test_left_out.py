"""Skipped steps and excluded samples: exactly once for everything else, at any scale and after any resume; and the
samples of each step, by name."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import ConcatDataset

from cachesvc.core.errors import InvalidInput, StateMismatch
from loader import DataLoader, mix, pack
from tests.support.training.loader_fakes import (
    MemoryLink,
    in_memory,
    in_step,
    loaders_of_ranks,
    numbers_in,
    wide_records,
)
from tests.support.training.mixtures import mixture_data, numbers, text

COUNT, BATCH = 203, 24
STEPS = -(-COUNT // BATCH)


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> MemoryLink:
    return wide_records(tmp_path_factory.mktemp("records"), COUNT)


def ranks(link: MemoryLink, world: int, workers: int = 0, **more: Any) -> list[DataLoader]:
    return loaders_of_ranks(link, BATCH, world, workers, **{"window": 16384, "epochs": 3} | more)


def real(steps: list[Any]) -> list[list[int]]:
    """The real samples of each step, of all ranks in turn."""
    return [[n for batch, valid in step for n in numbers_in(batch)[:valid]] for step in steps]


def key(number: int) -> str:
    return f"r.bin:{number}"


@pytest.mark.parametrize(("world", "workers"), [(1, 2), (4, 0)])
def test_all_steps_but_the_skipped_ones_come_as_without_skipping_at_any_scale(
    link: MemoryLink, world: int, workers: int
) -> None:
    whole = real(in_step(ranks(link, 1))[0])
    assert len(whole) == 3 * STEPS
    skip = [
        range(3, 5),
        (STEPS - 1, STEPS + 2),
    ]  # the second over the end of an epoch, its short step included
    left_out = {step for first, end in ((3, 5), (STEPS - 1, STEPS + 2)) for step in range(first, end)}
    expected = [row for step, row in enumerate(whole) if step not in left_out]
    loaders = ranks(link, world, workers, skip_steps=skip)
    assert len(loaders[0]) == len(expected)
    head, state = in_step(loaders, stop=4)
    assert (state["step"], state["data_step"], state["skipped"]) == (6, 6, f"3:5,{STEPS - 1}:{STEPS + 2}")
    # without the argument, since the state holds it, and on another number of ranks
    middle, state = in_step(ranks(link, 4 // world, workers), state, stop=6)
    end, state = in_step(ranks(link, world, workers, skip_steps=skip), state)
    assert real(head + middle + end) == expected
    assert (state["epoch"], state["data_step"]) == (3, 3 * STEPS)


@pytest.mark.parametrize(("world", "workers"), [(1, 0), (2, 2), (4, 0)])
def test_excluded_samples_are_gone_from_where_they_were_excluded_and_all_others_stay(
    link: MemoryLink, world: int, workers: int
) -> None:
    whole = real(in_step(ranks(link, 1))[0])
    first, later = whole[2][0], whole[STEPS + 2][3]
    head, state = in_step(ranks(link, world, workers, exclude=[key(first)]), stop=4)
    assert state["excluded"] == f"0:{first}"
    loaders = ranks(link, 4 // world, workers, exclude=[key(later), key(first)])
    middle, state = in_step(loaders, state, stop=STEPS)
    assert state["excluded"] == f"0:{first};4:{later}"
    end, _ = in_step(ranks(link, world, workers), state)
    found = real(head + middle + end)
    expected = [[n for n in row if n != first and (n != later or step < 4)] for step, row in enumerate(whole)]
    assert [sorted(row) for row in found] == [sorted(row) for row in expected]
    assert {len(numbers_in(batch)) for step in head for batch, _ in step} == {BATCH // world}, "equal shapes"
    assert not any(first in numbers_in(batch) for step in head + middle + end for batch, _ in step)


def test_a_batch_of_excluded_samples_alone_repeats_another_sample(link: MemoryLink) -> None:
    (probe,) = ranks(link, 1)
    second = real(in_step([probe], stop=2)[0])[1]
    (loader,) = ranks(link, 1, exclude=map(key, second))
    batches, valid = [], []
    for batch in loader:
        batches.append(numbers_in(batch))
        valid.append(loader.valid)
        assert loader.indices.tolist() == batches[-1]
    assert valid[1] == 0
    assert len(batches[1]) == BATCH
    assert not set(second) & {n for batch in batches for n in batch}
    assert loader.samples_of(1) == []


def test_steps_that_were_trained_cannot_be_skipped_afterwards(link: MemoryLink) -> None:
    _, state = in_step(ranks(link, 1, skip_steps=[range(1, 2)]), stop=5)
    assert state["data_step"] == 6
    with pytest.raises(StateMismatch, match=r"skip_steps has step 4, .* stands at step 6"):
        ranks(link, 1, skip_steps=[range(4, 9)])[0].load_state_dict(state)
    (again,) = ranks(link, 1, skip_steps=[range(1, 2), range(6, 7)])
    again.load_state_dict(state)
    assert again.state_dict()["skipped"] == "1:2,6:7"
    assert again.state_dict()["data_step"] == 7


def test_each_step_names_its_samples_and_where_they_lie(link: MemoryLink) -> None:
    (loader,) = ranks(link, 1, skip_steps=[range(2, 3)], exclude=[key(0)])
    found, _ = in_step(ranks(link, 1))
    for step, row in enumerate(real(found)):
        named = loader.samples_of(step)
        assert [each.index for each in named] == ([] if step == 2 else [n for n in row if n])
        for each in named:
            ((file, begin, end, _),) = each.places
            assert (each.key, begin, end) == (key(each.index), each.index * 2048, each.index * 2048 + 2048)
            assert file.endswith("/r.bin")
            assert row[each.slot] == each.index
    assert loader.state_dict()["data_step"] == 0


@pytest.mark.parametrize("world", [1, 2])
def test_mixtures_and_packs_skip_steps_exclude_samples_and_name_them(tmp_path: Path, world: int) -> None:
    parts = numbers(mixture_data(tmp_path))
    given = {"shuffle": True, "seed": 4, "global_batch_size": 8}

    def loaders(**more: Any) -> list[DataLoader]:
        mixed = mix({parts[0]: 2, parts[1]: 1})
        return [
            DataLoader(mixed, 8 // world, rank=rank, world_size=world, **given | more)
            for rank in range(world)
        ]

    def rows(steps: list[Any]) -> list[list[int]]:
        return [sorted(int(n) for batch, valid in step for n in batch[:valid, 0]) for step in steps]

    whole = rows(in_step(loaders())[0])
    excluded = whole[3][0]
    without = loaders(skip_steps=[(1, 3)], exclude=[without_key(parts, excluded)])
    steps = [step for step in range(len(whole)) if step not in (1, 2)]
    expected = [[n for n in whole[step] if n != excluded] for step in steps]
    assert rows(in_step(without)[0]) == expected
    named = [without[0].samples_of(step) for step in steps]
    assert [len(each) for each in named] == [len(row) for row in expected]
    assert all(each.places and each.key for row in named for each in row)

    packs = [
        DataLoader(pack(text(tmp_path), 24), 4, shuffle=True, skip_steps=skip) for skip in ([], [(1, 2)])
    ]
    tokens = [[batch["tokens"].tolist() for batch in loader] for loader in packs]
    assert tokens[1] == [*tokens[0][:1], *tokens[0][2:]]
    sizes = [sum(place.end - place.begin for place in each.places) for each in packs[1].samples_of(0)]
    assert sizes == [2 * 24] * 4


def without_key(parts: list[Any], number: int) -> str:
    part = parts[number // 1000]
    return str(part.catalog.key(number % 1000))


def test_what_cannot_be_left_out_is_refused(link: MemoryLink) -> None:
    for wrong in (
        {"skip_steps": "1:2"},
        {"skip_steps": [(2, 1)]},
        {"exclude": "r.bin:1"},
        {"exclude": ["r.bin:999"]},
    ):
        with pytest.raises(InvalidInput):
            ranks(link, 1, **wrong)
    with pytest.raises(InvalidInput, match="exclude= names samples"):
        DataLoader(ConcatDataset([in_memory(link)]), exclude=["r.bin:1"])
    with pytest.raises(InvalidInput, match="skip_steps= would be ignored"):
        DataLoader([1, 2], skip_steps=[range(1)])  # type: ignore[arg-type]


def test_a_step_from_before_a_change_of_the_batch_is_refused(link: MemoryLink) -> None:
    """A state names one order, from the change on."""
    first = DataLoader(in_memory(link), BATCH, shuffle=True)
    list(first)
    state = first.state_dict()
    other = DataLoader(in_memory(link), BATCH * 2, global_batch_size=BATCH * 2, shuffle=True)
    other.load_state_dict(state)
    found = [numbers_in(batch) for batch in islice(other, 2)]
    state = other.state_dict()
    assert (state["since_epoch"], state["since_step"], state["data_step"]) == (1, STEPS, STEPS + 2)
    assert [each.index for each in other.samples_of(STEPS + 1)] == found[1]
    with pytest.raises(StateMismatch, match=f"before step {STEPS}"):
        other.samples_of(STEPS - 1)
    assert Counter(each.index for step in range(STEPS, 2 * STEPS) for each in other.samples_of(step))
