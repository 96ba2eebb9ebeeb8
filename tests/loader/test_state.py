"""A run's state: small, plain, exact with batches prefetched, and at home in torch's own checkpoints."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from cachesvc.core.errors import InvalidInput, StateMismatch
from loader import DataLoader, mix
from tests.support.training.loader_fakes import MemoryLink, in_memory, numbers_in, wide_records

COUNT = 500
MAX_STATE_BYTES = 64 << 10


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> MemoryLink:
    return wide_records(tmp_path_factory.mktemp("records"), COUNT)


def loader(link: MemoryLink, **settings: object) -> DataLoader:
    return DataLoader(in_memory(link), batch_size=8, shuffle=True, **{"window": 16384} | settings)  # type: ignore[arg-type]


def rows(batches: Iterable[Any]) -> list[list[int]]:
    return [numbers_in(batch) for batch in batches]


def test_the_state_is_small_and_plain(link: MemoryLink) -> None:
    state = loader(link).state_dict()
    assert json.loads(json.dumps(state)) == state
    assert len(json.dumps(state)) < MAX_STATE_BYTES
    assert all(isinstance(value, (int, str, bool)) for value in state.values())


def test_torch_checkpoints_hold_the_state(link: MemoryLink, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp  # slow to import, and only one process of the suite runs this test

    whole = rows(loader(link))
    first = loader(link)
    head = rows(islice(first, 9))
    model = torch.nn.Linear(2, 2)
    dcp.save({"model": model.state_dict(), "batches": first}, checkpoint_id=tmp_path / "step-9")
    second = loader(link)
    dcp.load({"model": model.state_dict(), "batches": second}, checkpoint_id=tmp_path / "step-9")
    assert head + rows(second) == whole


def small(link: MemoryLink, **more: Any) -> DataLoader:
    return DataLoader(in_memory(link).take(100), shuffle=True, seed=5, **more)


def rest(run: DataLoader) -> list[list[int]]:
    return [run.indices.tolist() for _ in run]


def test_another_cut_of_a_step_is_refused_with_its_number(link: MemoryLink) -> None:
    """The state is after two of four micro-batches: another cut of the step would lose or repeat samples."""
    first = small(link, batch_size=4, global_batch_size=16)
    list(islice(first, 2))
    for other in ({"batch_size": 2}, {"batch_size": 8}, {"batch_size": 4, "rank": 0, "world_size": 2}):
        with pytest.raises(StateMismatch, match="inside step 0"):
            small(link, **{"global_batch_size": 16} | other).load_state_dict(first.state_dict())


def test_an_earlier_epoch_in_smaller_batches_than_before_has_a_state(link: MemoryLink) -> None:
    first = small(link, global_batch_size=16)
    list(first)
    then = small(link, global_batch_size=8)
    then.load_state_dict(first.state_dict())
    then.set_epoch(0)
    again = small(link, global_batch_size=8)
    again.load_state_dict(then.state_dict())
    assert [batch.tolist() for batch in again] == [batch.tolist() for batch in then]


@pytest.mark.parametrize("given", [{"window": "all"}, {"last": "drop"}, {"drop_last": True}])
def test_arguments_apply_from_the_next_epoch_and_contradict_a_state_within_one(
    link: MemoryLink, given: dict[str, Any]
) -> None:
    saved: dict[str, Any] = {"window": 16384, "last": "pad"}
    first = loader(link, **saved)
    list(islice(first, 3))
    within = first.state_dict()
    first.set_epoch(0)
    list(first)
    over = first.state_dict()
    assert (within["step"], over["step"], over["epoch"]) == (3, 0, 1)
    for told in ({"window": None}, saved):
        same = loader(link, **told)
        same.load_state_dict(within)
        assert same.state_dict() == within
    then = loader(link, **{"window": None} | given)
    with pytest.raises(
        StateMismatch, match=r"with last='pad', .*'drop'|with a window of 2 .* of 0 .*leave it out"
    ):
        then.load_state_dict(within)
    then.load_state_dict(over)
    changed = {"window_extents": 0} if "window" in given else {"last": "drop", "steps": over["steps"] - 1}
    since = {"since_epoch": 1, "since_step": over["data_step"]}
    assert then.state_dict() == over | changed | since


@pytest.mark.parametrize(
    "wrong", [{"epoch": -3}, {"micro": -1}, {"step": -(10**9)}, {"global_batch": 10**30}, {"epoch": 2**63}]
)
def test_a_state_that_no_loader_saved_is_refused(link: MemoryLink, wrong: dict[str, int]) -> None:
    run = small(link, batch_size=10)
    with pytest.raises(StateMismatch, match="out of range"):
        run.load_state_dict(run.state_dict() | wrong)


def in_halves(link: MemoryLink) -> DataLoader:
    """Ten steps of two micro-batches."""
    return small(link, batch_size=5, global_batch_size=10, last="pad")


@pytest.mark.parametrize("taken", [0, 4, 5])
@pytest.mark.parametrize(
    "wrong",
    [
        *({"steps": steps} for steps in (0, 2, 9, 11)),
        {"step": 11},
        {"step": 10, "micro": 1, "batch_size": 5, "world_size": 1},
        {"micro": 2, "batch_size": 5, "world_size": 1},
        {"micro": 1, "batch_size": 3, "world_size": 1},
        {"micro": 1, "batch_size": 0, "world_size": 1},
        {"micro": 0, "batch_size": 5, "world_size": 1},
        {"micro": 0, "batch_size": 0, "world_size": 2},
        {"canonical_nodes": 0},
        {"canonical_nodes": 11},
        {"global_batch": 0},
        {"last": "rest"},
        {"last": "a\nb"},
    ],
)
def test_a_state_with_contradicting_numbers_is_refused(
    link: MemoryLink, taken: int, wrong: dict[str, Any]
) -> None:
    first = in_halves(link)
    list(islice(first, taken))
    run, state = in_halves(link), first.state_dict()
    with pytest.raises(StateMismatch, match="no loader saved this state") as refused:
        run.load_state_dict(state | wrong)
    assert str(refused.value).isprintable()
    run.load_state_dict(state)
    assert rest(run) == rest(in_halves(link))[taken:]


def test_the_weights_of_a_mixture_may_change_between_epochs(link: MemoryLink) -> None:
    """A changed weight changes the length of an epoch, which a state in mid-epoch must match."""
    one, other = in_memory(link).take(50), in_memory(link).take(30)
    mixture = mix({one: 10, other: 10}, by="choose")
    then = DataLoader(mixture.reweighed({one: 30, other: 10}, epoch=1), batch_size=10)
    first = DataLoader(mixture, batch_size=10, epochs=2)
    batches = iter(first)
    next(batches)
    with pytest.raises(StateMismatch, match="no loader saved this state"):
        then.load_state_dict(first.state_dict() | {"steps": 4})
    then.load_state_dict(first.state_dict())
    next(batches)
    then.load_state_dict(first.state_dict())
    assert (then.epoch, len(rest(then))) == (1, 4)


@pytest.mark.parametrize("given", [None, [], "state.pt"])
def test_a_value_that_is_no_state_is_refused_by_its_type(link: MemoryLink, given: Any) -> None:
    with pytest.raises(StateMismatch, match=f"{type(given).__name__} is not a state of this loader"):
        small(link, batch_size=10).load_state_dict(given)


@pytest.mark.parametrize(
    "wrong",
    [
        {3: 0},
        {None: 0},
        {"a\nb": 0},
        {"version": torch.zeros(2, 2)},
        {"dataset": "a\nb"},
        {"dataset": "a@b:1,1"},
        {"step": True},
        {"step": 1.0},
    ],
)
def test_a_wrong_value_in_a_state_is_shown_in_one_line(link: MemoryLink, wrong: dict[Any, Any]) -> None:
    run = small(link, batch_size=10)
    with pytest.raises(StateMismatch) as refused:
        run.load_state_dict(run.state_dict() | wrong)
    assert str(refused.value).isprintable()


def test_data_that_never_fills_a_batch_does_not_spin(link: MemoryLink) -> None:
    run = DataLoader(in_memory(link), batch_size=10**6, drop_last=True, epochs=None)
    with pytest.raises(InvalidInput, match="epochs=None would never give one"):
        next(iter(run))
    assert list(DataLoader(in_memory(link), batch_size=10**6, drop_last=True)) == []


def test_the_largest_number_of_epochs_has_a_length(link: MemoryLink) -> None:
    run = small(link, batch_size=10, epochs=2**63 - 1)
    assert len(run) == len(iter(run)) == 2**63 - 1  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [-1, 1.5, "1"])
def test_epochs_and_skips_are_whole_numbers(link: MemoryLink, wrong: Any) -> None:
    run = small(link, batch_size=10)
    for method in (run.set_epoch, run.skip):
        with pytest.raises(InvalidInput):
            method(wrong)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda given: pickle.loads(pickle.dumps(given))]
)
def test_the_samplers_of_a_copy_move_the_copy_alone(
    link: MemoryLink, copied: Callable[[DataLoader], DataLoader]
) -> None:
    first = loader(link)
    second = copied(first)
    second.sampler.set_epoch(7)  # type: ignore[attr-defined]
    assert (first.epoch, second.epoch) == (0, 7)
    first.batch_sampler.sampler.set_epoch(4)  # type: ignore[union-attr]
    assert (first.epoch, second.epoch) == (4, 7)


def test_a_state_from_before_the_release_before_names_the_release_that_reads_it(link: MemoryLink) -> None:
    run = small(link, batch_size=16)
    with pytest.raises(StateMismatch, match=r"of version 3, which 0\.2\.0 reads"):
        run.load_state_dict({"version": 3, "dataset": "abc"})


def test_a_state_of_this_version_names_its_order(link: MemoryLink) -> None:
    run = small(link, batch_size=16)
    state = run.state_dict()
    del state["rotated_from"]
    with pytest.raises(StateMismatch, match="its keys differ in rotated_from"):
        run.load_state_dict(state)


@pytest.mark.parametrize(("rank", "world", "batch"), [(0, 1, 3), (0, 2, 2), (1, 2, 2)])
def test_over_many_epochs_a_rank_sees_all_samples_of_one_extent(
    link: MemoryLink, rank: int, world: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank drops a sample of four in each epoch, and each of two nodes reads two."""
    for name, value in {"RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": 1}.items():
        monkeypatch.setenv(name, str(value))
    run = DataLoader(in_memory(link).take(4), batch // world, shuffle=True, drop_last=True, epochs=30)
    seen = rest(run)
    assert {n for each in seen for n in each} == set(range(4))
    if world == 1:
        assert {*range(4)} == {6 - sum(each) for each in seen}


def test_a_new_global_batch_may_be_smaller_than_the_number_of_nodes(
    link: MemoryLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as four_nodes:
        for name, value in {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 1}.items():
            four_nodes.setenv(name, str(value))
        state = small(link, batch_size=2).state_dict()
    assert state["canonical_nodes"] == 4
    run = small(link, batch_size=2, global_batch_size=2)
    run.load_state_dict(state)
    assert run.state_dict()["canonical_nodes"] == 2
    assert sorted(n for batch in rest(run) for n in batch) == list(range(100))


def test_a_skip_over_any_number_of_epochs_finds_its_place_at_once(link: MemoryLink) -> None:
    run = small(link, batch_size=10)
    run.skip(10 * 2**58 + 3)
    assert (run.epoch, run.state_dict()["step"]) == (2**58, 3)
    with pytest.raises(InvalidInput, match="no run is that long"):
        run.skip(2**63 - 1)
    assert (run.epoch, run.state_dict()["step"]) == (2**58, 3)
    nothing = DataLoader(in_memory(link), batch_size=10**6, drop_last=True)
    nothing.skip(2**63 - 1)
    with pytest.raises(InvalidInput, match="no run is that long"):
        nothing.skip(2**63 - 1)
    nothing.load_state_dict(nothing.state_dict())
    half, other = in_memory(link).take(50), in_memory(link).take(30)
    mixture = mix({half: 10, other: 10}, by="choose").reweighed({half: 10, other: 20}, epoch=3)
    mixed = DataLoader(mixture.reweighed({half: 30, other: 10}, epoch=5), batch_size=10)
    mixed.skip(3 * 2 + 2 * 3 + 4 * 10**15 + 1)
    assert (mixed.epoch, mixed.state_dict()["step"]) == (5 + 10**15, 1)
