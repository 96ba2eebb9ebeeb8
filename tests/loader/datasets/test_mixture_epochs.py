"""Mixtures over several epochs: changing weights, epochs without batches, and their states."""

from __future__ import annotations

import functools
import hashlib
import json
import pickle
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cachesvc.core.errors import InvalidInput, StateMismatch
from loader import DataLoader, Mixture, mix, pack
from tests.support.training.mixtures import (
    SIZES,
    draws,
    notes,
    numbers,
    text,
    three_packed,
)


def test_the_order_of_mixtures_and_packs_is_one_fixed_function_forever(root: Path) -> None:
    """Saved states name positions in it. The digests are of the program that wrote states of version 3."""
    given: dict[str, Any] = {"batch_size": 7, "shuffle": True, "seed": 3, "window": 8192}
    mixed = DataLoader(mix(dict(zip(numbers(root), (0.5, 0.2, 0.3), strict=True))), epochs=3, **given)
    packed = DataLoader(three_packed(root), epochs=2, **given)
    columns = [mixed.indices for _ in mixed], [batch["tokens"].numpy() for batch in packed]
    found = [
        hashlib.blake2b(np.concatenate(each).astype("<i8").tobytes(), digest_size=8).hexdigest()
        for each in columns
    ]
    assert found == ["b76b03456a647876", "a190792d1b4f13a9"]


def test_weights_change_at_the_beginning_of_an_epoch(root: Path) -> None:
    parts = numbers(root)
    mixture = mix(dict(zip(parts, (1, 1, 0), strict=True)), size=20)
    later = mixture.reweighed(dict(zip(parts, (0, 0, 1), strict=True)), epoch=1)
    first = DataLoader(mixture, batch_size=5, shuffle=True)
    before = draws(first, 1)
    state = first.state_dict()
    second = DataLoader(later, batch_size=5, shuffle=True)
    second.load_state_dict(state)
    after = draws(second, 1)
    assert {c for c, _, _ in after} == {2}
    assert before + after == draws(DataLoader(later, batch_size=5, shuffle=True), 2)
    for _ in zip(second, range(2), strict=False):
        pass
    inside = second.state_dict()
    assert inside["dataset"].endswith("@0:1,1,0;1:0,0,1")
    with pytest.raises(StateMismatch, match="weights"):
        DataLoader(mixture, batch_size=5, shuffle=True).load_state_dict(inside)
    with pytest.raises(InvalidInput, match="epoch"):
        later.reweighed(dict(zip(parts, (1, 1, 1), strict=True)), epoch=1)


def with_empty_epochs(root: Path) -> Mixture:
    """A mixture with four batches of 5 in epoch 0, less than one batch from epoch 1 on, and two batches from epoch
    10**12 on."""
    parts = numbers(root)
    mixture = mix(dict(zip(parts, (10, 10, 0), strict=True)), by="choose")
    for epoch, each in ((1, 1), (10**12, 5)):
        mixture = mixture.reweighed(dict(zip(parts, (each, each, 0), strict=True)), epoch)
    return mixture


def take_batches(loader: DataLoader, batches: int) -> list[tuple[int, list[int]]]:
    return [(loader.epoch, loader.indices.tolist()) for _ in islice(loader, batches)]


def test_an_endless_loader_passes_epochs_of_less_than_one_batch(root: Path) -> None:
    loader = DataLoader(with_empty_epochs(root), batch_size=5, shuffle=True, drop_last=True, epochs=None)
    straight = take_batches(loader, 9)
    later = 10**12
    assert [epoch for epoch, _ in straight] == [0] * 4 + [later] * 2 + [later + 1] * 2 + [later + 2]
    for consumed in range(9):
        first = DataLoader(with_empty_epochs(root), batch_size=5, shuffle=True, drop_last=True, epochs=None)
        take_batches(first, consumed)
        second = DataLoader(with_empty_epochs(root), batch_size=5, shuffle=True, drop_last=True, epochs=None)
        second.load_state_dict(first.state_dict())
        assert take_batches(second, 9 - consumed) == straight[consumed:]


def test_epochs_of_less_than_one_batch_are_epochs_without_batches(root: Path) -> None:
    loader = DataLoader(with_empty_epochs(root), batch_size=5, drop_last=True)
    assert [len(list(loader)) for _ in range(3)] == [4, 0, 0]
    assert loader.epoch == 3


def test_an_endless_loader_without_further_batches_raises_an_error(
    root: Path,
) -> None:
    parts = numbers(root)[:2]
    mixture = mix(dict.fromkeys(parts, 10), by="choose").reweighed(dict.fromkeys(parts, 1), 1)
    loader = DataLoader(mixture, batch_size=5, drop_last=True, epochs=None)
    batches = iter(loader)
    assert len(list(islice(batches, 4))) == 4
    with pytest.raises(InvalidInput, match="less than one batch"):
        next(batches)
    loader.skip(7)
    assert loader.epoch == 1


@pytest.mark.slow
@pytest.mark.parametrize("skipped", range(1, 9))
@pytest.mark.parametrize("consumed", [0, 3])
def test_a_skip_counts_no_batches_of_epochs_that_have_none(root: Path, consumed: int, skipped: int) -> None:
    def loader() -> DataLoader:
        return DataLoader(with_empty_epochs(root), batch_size=5, shuffle=True, drop_last=True, epochs=None)

    wanted = take_batches(loader(), 12)[consumed + skipped :]
    first = loader()
    batches = iter(first)
    assert len(list(islice(batches, consumed))) == consumed
    first.skip(skipped)
    state = first.state_dict()
    assert [(first.epoch, first.indices.tolist()) for _ in islice(batches, len(wanted))] == wanted
    second = loader()
    second.load_state_dict(state)
    assert take_batches(second, len(wanted)) == wanted


@pytest.mark.parametrize(("by", "one", "other"), [("choose", 10, 5), ("repeat", 1, 2)])
def test_a_state_includes_how_many_samples_an_epoch_takes(root: Path, by: Any, one: int, other: int) -> None:
    parts = numbers(root)[:2]
    first = mix(dict.fromkeys(parts, 3), by=by)
    loader = DataLoader(first.reweighed(dict.fromkeys(parts, one), epoch=1), batch_size=5, shuffle=True)
    loader.set_epoch(1)
    next(iter(loader))
    changed = first.reweighed(dict.fromkeys(parts, other), epoch=1)
    with pytest.raises(StateMismatch, match="weights"):
        DataLoader(changed, batch_size=5, shuffle=True).load_state_dict(loader.state_dict())


def test_a_state_of_another_filter_mixture_or_packing_is_refused(root: Path) -> None:
    dataset = notes(root)
    parts = numbers(root)
    pairs: list[tuple[Any, Any]] = [
        (dataset.where("label == 'cat'"), dataset.where("label == 'dog'")),
        (dataset.take(40), dataset.select(range(40, 80))),
        (mix({parts[0]: 1, parts[1]: 1}, size=40), mix({parts[0]: 1, parts[1]: 2}, size=40)),
        (mix({parts[0]: 1, parts[1]: 1}, size=40), mix({parts[1]: 1, parts[0]: 1}, size=40)),
        (mix({parts[0]: 1}, size=40), parts[0]),
        (pack(text(root), 7), pack(text(root), 8)),
    ]
    for one, other in pairs:
        loader = DataLoader(one, batch_size=4, shuffle=True, collate_fn=list)
        next(iter(loader))
        state = loader.state_dict()
        same = pickle.loads(pickle.dumps(one))
        DataLoader(same, batch_size=4, shuffle=True, collate_fn=list).load_state_dict(state)
        with pytest.raises(StateMismatch, match="filter"):
            DataLoader(other, batch_size=4, shuffle=True, collate_fn=list).load_state_dict(state)


def test_a_mismatch_of_long_mixtures_gives_a_short_error(root: Path) -> None:
    parts = numbers(root)
    one = mix({parts[0]: 1, parts[1]: 1}, size=40)
    for epoch in range(1, 60):
        one = one.reweighed({parts[0]: epoch, parts[1]: 1 / 3}, epoch=epoch)
    loader = DataLoader(one, batch_size=4, shuffle=True)
    loader.set_epoch(80)
    state = loader.state_dict()
    other = DataLoader(one.reweighed({parts[0]: 7, parts[1]: 1}, epoch=70), batch_size=4, shuffle=True)
    with pytest.raises(StateMismatch, match=r"\.\.\..*70:.*: give the same data") as caught:
        other.load_state_dict(state)
    assert len(str(caught.value)) < 800


@pytest.mark.slow
def test_a_state_of_many_datasets_and_weights_is_small_and_exact(root: Path) -> None:
    (first, *_) = numbers(root)
    parts = [first.take(count) for count in range(1, 41)]

    @functools.cache
    def reweighed(tenth: int, epochs: int = 40) -> Mixture:
        mixture = mix(dict.fromkeys(parts, 1), size=40)
        for epoch in range(1, epochs):
            weights = [10_000_019 + epoch * part for part in range(40)]
            weights[0] += tenth * (epoch == 10)
            mixture = mixture.reweighed(dict(zip(parts, weights, strict=True)), epoch)
        return mixture

    loader = DataLoader(reweighed(1), batch_size=5, shuffle=True)
    loader.set_epoch(38)
    batches = iter(loader)
    next(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    assert len(reweighed(1).identity) > 10_000
    assert len(json.dumps(state)) < 5_000
    following = [batch.tolist() for batch in batches]
    for same in (reweighed(1), reweighed(1, epochs=44)):
        resumed = DataLoader(same, batch_size=5, shuffle=True)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        assert [batch.tolist() for batch in resumed] == following
    for other in (reweighed(0), reweighed(1, epochs=38)):
        with pytest.raises(StateMismatch, match="weights") as caught:
            DataLoader(other, batch_size=5, shuffle=True).load_state_dict(state)
        assert len(str(caught.value)) < 800


def test_an_epoch_with_too_many_draws_before_it_is_refused(root: Path) -> None:
    """Draws still follow one another in the last epoch that is not refused."""
    parts = numbers(root)
    mixture = mix(dict(zip(parts, (0.5, 0.3, 0.2), strict=True)))

    def passes_of(epoch: int) -> list[list[int]]:
        loader = DataLoader(mixture, batch_size=5, shuffle=True)
        loader.set_epoch(epoch)
        passes: list[list[int]] = [[], [], []]
        for _ in loader:
            for index, own_epoch, at in np.transpose(mixture.locate(loader.indices)).tolist():
                assert 0 <= at < SIZES[index]
                passes[index].append(own_epoch)
        return passes

    counted, refused = 0, 2**63 - 1
    while refused - counted > 1:
        middle = (counted + refused) // 2
        try:
            found, counted = passes_of(middle), middle
        except InvalidInput:
            refused = middle
    with pytest.raises(InvalidInput, match="set a smaller epoch"):
        passes_of(refused)
    assert counted > 2**55
    assert all(passes == sorted(passes) and passes[0] > 2**55 for passes in found)
