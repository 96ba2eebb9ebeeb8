"""Mixtures under the DataLoader: the samples that an epoch takes from each dataset, and errors before the first
batch."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cachesvc.core.errors import CacheError, InvalidInput
from loader import DataLoader, Packed, mix, open_dataset, pack
from tests.support.training.loader_fakes import PlannedLink, compiled, in_memory
from tests.support.training.mixtures import (
    SEQ,
    SIZES,
    dataset_in,
    draws,
    notes,
    numbers,
    text,
    three_packed,
)


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_component_is_read_exactly_once_per_epoch_of_its_own(root: Path, shuffle: bool) -> None:
    mixture = mix(dict(zip(numbers(root), (0.5, 0.2, 0.3), strict=True)))
    loaders = [
        DataLoader(mixture, batch_size=5, shuffle=shuffle, rank=r, world_size=2, last="drop", window=8192)
        for r in range(2)
    ]
    found = draws(loaders[0], 1) + draws(loaders[1], 1)
    assert len(found) == len(set(found)) == sum(SIZES) // 10 * 10
    alone = draws(DataLoader(mixture, batch_size=10, shuffle=shuffle, window=8192), 4)
    assert len(alone) == len(set(alone)) == 4 * sum(SIZES)
    for component, size in enumerate(SIZES):
        passes = [own for c, own, _ in alone if c == component]
        for own in range(max(passes)):
            assert passes.count(own) == size
        assert abs(len(passes) - len(alone) * (0.5, 0.2, 0.3)[component]) <= 4
    if shuffle:
        first, second = ([i for c, own, i in alone if (c, own) == (2, n)] for n in (0, 1))
        assert first != second


@pytest.mark.parametrize(
    ("by", "weights", "size", "counts"),
    [
        ("repeat", (1, 1, 1), "total", (40, 25, 10)),
        ("repeat", (0.5, 1, 3), "total", (20, 25, 30)),
        ("choose", (7, 50, 1), "total", (7, 50, 1)),
        ("proportion", (2, 1, 1), 40, (20, 10, 10)),
        ("proportion", (2, 1, 1), "first", (21, 10, 10)),
        ("proportion", (2, 1, 1), "last", (49, 25, 24)),
        ("proportion", (0, 1, 1), 20, (0, 10, 10)),
    ],
)
def test_an_epoch_takes_the_requested_numbers_of_samples(
    root: Path, by: Any, weights: tuple[float, ...], size: Any, counts: tuple[int, ...]
) -> None:
    mixture = mix(dict(zip(numbers(root), weights, strict=True)), by=by, size=size)
    found = draws(DataLoader(mixture, batch_size=4, shuffle=True), 1)
    taken = tuple(sum(c == component for c, _, _ in found) for component in range(3))
    assert len(found) == len(mixture)
    assert all(
        abs(a - b) <= (by == "proportion" and isinstance(size, str))
        for a, b in zip(taken, counts, strict=True)
    )


def test_gathered_batches_equal_collated_ones(root: Path) -> None:
    mixture = mix(dict(zip(numbers(root), (1, 2, 3), strict=True)))
    fast = [batch.tolist() for batch in DataLoader(mixture, batch_size=7, shuffle=True)]
    slow = [
        torch.stack(batch).tolist()
        for batch in DataLoader(mixture, batch_size=7, shuffle=True, collate_fn=list)
    ]
    assert fast == slow
    shipped = pickle.loads(pickle.dumps(mixture))
    assert [batch.tolist() for batch in DataLoader(shipped, batch_size=7, shuffle=True)] == fast
    plain = torch.utils.data.DataLoader(mixture, batch_size=len(mixture))
    assert sorted(int(n) // 1000 for n in next(iter(plain))[:, 0]).count(2) == sum(
        c == 2 for c, _, _ in draws(DataLoader(mixture, batch_size=7), 1)
    )


def augmented(sample: torch.Tensor, rng: np.random.Generator) -> tuple[int, float]:
    return int(sample[0]), float(rng.random())


def test_a_repeated_sample_is_augmented_anew_and_equally_at_any_scale(root: Path) -> None:
    def seen(**more: Any) -> list[tuple[int, float]]:
        mixture = mix({numbers(root, transform=augmented)[2]: 3.0}, by="repeat")
        return [
            pair for batch in DataLoader(mixture, collate_fn=list, shuffle=True, **more) for pair in batch
        ]

    found = seen(batch_size=6)
    assert len(found) == 30
    assert len(set(found)) == 30
    assert seen(batch_size=3, num_workers=2, multiprocessing_context="fork") == found


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda root: mix({}), "at least one dataset"),
        (lambda root: mix({numbers(root)[0]: 0.0}), "weights"),
        (lambda root: mix({numbers(root)[0]: 1, numbers(root)[1].take(0): 1}), "empty"),
        (
            lambda root: mix({numbers(root)[0]: 1, dataset_in(root, "rows.npy", format="records"): 1}),
            "differ",
        ),
        (lambda root: mix({numbers(root)[0]: 1, notes(root): 1}), "differ"),
        (lambda root: mix({pack(text(root), 8): 1, pack(text(root), 9): 1}), "differ"),
        (lambda root: mix({numbers(root)[0]: 1}, by="taste"), "taste"),  # type: ignore[arg-type]
        (lambda root: mix({numbers(root)[0]: 1}, size=0), "size"),
        (lambda root: mix({numbers(root)[0]: 1}, by="repeat", size="first"), "size"),
        (lambda root: mix({numbers(root)[0]: 1.5}, by="choose"), "whole samples.* 1.5"),
        (
            lambda root: mix(one := {numbers(root)[0]: 2.0}, by="choose").reweighed(  # type: ignore[arg-type]
                dict.fromkeys(one, 0.5), 1
            ),
            "0.5",
        ),
        (lambda root: mix({mix({numbers(root)[0]: 1}): 1}), "Mixture"),  # type: ignore[dict-item]
        (lambda root: pack(text(root).take(5), 8), "subset"),
        (lambda root: pack(notes(root), 8), "dtype"),
        (lambda root: pack(notes(root), 8, dtype="uint32"), "uint32"),
        (lambda root: pack(text(root, transform=len), 8), "transform"),
        (lambda root: notes(root).where("label == 'bird'"), "bird.* cat, dog"),
        (lambda root: notes(root).where("label == 'cat' and label == 'dog'"), "none"),
        (lambda root: mix({numbers(root)[0]: 1}).take(3), "datasets first, then mix"),
        (lambda root: mix({numbers(root)[0]: 1}).split({"train": 1.0}), "datasets first, then mix"),
        (lambda root: pack(text(root), 8).where("key == 'x'"), "datasets first, then pack"),
        (lambda root: pack(text(root), 8).select([1]), "datasets first, then pack"),
    ],
)
def test_invalid_mixtures_and_packs_are_refused_before_the_first_batch(
    root: Path, wrong: Callable[[Path], object], message: str
) -> None:
    with pytest.raises(CacheError, match=message) as caught:
        wrong(root)
    assert isinstance(caught.value, InvalidInput)
    assert "\n" not in str(caught.value)


def test_labels_of_different_classes_cannot_be_mixed(tmp_path: Path) -> None:
    def folders(name: str, *classes: str) -> Any:
        for one in classes:
            (tmp_path / name / one).mkdir(parents=True)
            (tmp_path / name / one / "0.txt").write_text(one)
        return open_dataset(tmp_path / name)

    pets, birds, more = folders("a", "cat", "dog"), folders("b", "bird", "cat"), folders("c", "cat", "dog")
    with pytest.raises(InvalidInput, match=r"2 classes \('cat', 'dog'; .* and .*\('bird', 'cat'; "):
        mix({pets: 1, birds: 1})
    pairs = next(iter(DataLoader(mix({pets: 1, more: 1}), batch_size=4, shuffle=True)))
    assert {pets.classes[label] for label in pairs[1].tolist()} == {"cat", "dog"}


def test_each_connection_gets_one_plan_in_steps_of_the_mixture(root: Path) -> None:
    made = [compiled(root / f"n{n}.npy", root, extent_bytes=4096, format="records") for n in (0, 1)]
    links = [PlannedLink(link.id, link.path) for link in made]
    left, right = map(in_memory, links)
    parts = left.split({"a": 0.5, "b": 0.5})
    mixture = mix({parts["a"]: 1, parts["b"]: 1, right: 2}, size="last")
    loader = DataLoader(mixture, batch_size=4, shuffle=True, window=8192)
    taken: list[tuple[int, int, int]] = []
    for step, _ in enumerate(loader):
        component, _, inner = mixture.locate(loader.indices[: loader.valid])
        views = [mixture.components[c] for c in component.tolist()]
        for view, index in zip(views, inner.tolist(), strict=True):
            sample = int(view.ids_of(np.asarray([index]))[0])
            extent = int(np.searchsorted(view.catalog.extent_first, sample, "right")) - 1
            taken.append((step, 0 if view.version == left.version else 1, extent))
    assert [len(link.plans) for link in links] == [1, 1]
    assert all(link.grants[0].steps[-1] >= step - 1 for link in links)
    for step, which, extent in taken:
        plan = links[which].plans[0]
        assert (np.diff(plan.first_step) >= 0).all()
        assert extent in plan.extent[(plan.first_step <= step) & (step <= plan.last_step)]


def test_a_plan_names_the_extents_of_the_next_epoch_of_a_mixture_and_of_packs(root: Path) -> None:
    made = [
        compiled(root / "n0.npy", root, extent_bytes=4096, format="records"),
        compiled(root / "text", root, extent_bytes=4096, format="tokens", seq_len=1),
    ]
    links = [PlannedLink(link.id, link.path) for link in made]
    records, packs = in_memory(links[0]), pack(in_memory(links[1]), SEQ)
    for dataset, planned in ((mix({records: 1, in_memory(made[0]): 1}), links[0]), (packs, links[1])):
        loader = DataLoader(dataset, batch_size=4, shuffle=True, window=8192)
        for _ in range(3):
            assert sum(1 for _ in loader)
        assert all(
            plan.following is not None and plan.following.tolist() == after.extent.tolist()
            for plan, after in pairwise(planned.plans)
        )
        assert len(planned.plans) == 3


def test_repr_and_index_errors_of_packs_and_mixtures(root: Path) -> None:
    mixture = three_packed(root)
    assert "3 datasets" in repr(mixture)
    assert isinstance(mixture.components[0], Packed)
    assert "packs of 24" in repr(mixture.components[0])
    with pytest.raises(IndexError):
        mixture[len(mixture)]
