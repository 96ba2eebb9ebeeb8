"""Mixtures whose weights change by step: the same samples at any scale, after resumes, and with changes on the way."""

from __future__ import annotations

import json
import pickle
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cachesvc.core.errors import InvalidInput, StateMismatch
from loader import DataLoader, Mixture, mix, pack
from tests.support.training.loader_fakes import in_step
from tests.support.training.mixtures import SIZES, numbers, text

GLOBAL = 8
Drawn = list[tuple[int, int, int]]


def weights(parts: Any, *shares: float) -> dict[Any, float]:
    return dict(zip(parts, shares, strict=True))


def ramped(root: Path, **more: Any) -> Mixture:
    """Return a mixture that goes from the first component to the third over 20 steps, in about 2 epochs."""
    parts = numbers(root)
    given: dict[str, Any] = {"schedule": [(20, weights(parts, 1, 1, 8))], "ramp": "linear"} | more
    return mix(weights(parts, 8, 1, 1), **given)


def taken(
    make: Any, world: int = 1, workers: int = 0, state: object = None, stop: int = 10**9, **more: Any
) -> tuple[list[Drawn], Any]:
    """Return the samples of each global batch as (component, own epoch, index), checked against what was read, and the
    state after them."""
    forked: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    given: dict[str, Any] = {"shuffle": True, "window": 8192, "seed": 3, "last": "drop", "epochs": 4}
    mixtures = [make() for _ in range(world)]
    loaders = [
        DataLoader(mixture, GLOBAL // world, rank=rank, world_size=world, **(given | forked | more))
        for rank, mixture in enumerate(mixtures)
    ]
    for loader in loaders if state is not None else ():
        loader.load_state_dict(json.loads(json.dumps(state)))
    found: list[Drawn] = []
    for batches in islice(zip(*loaders, strict=True), stop):
        step: Drawn = []
        for batch, loader, mixture in zip(batches, loaders, mixtures, strict=True):
            where = [column.tolist() for column in mixture.locate(loader.indices)]
            drawn = [*zip(*where, strict=True)]
            assert batch[:, 0].tolist() == [1000 * component + index for component, _, index in drawn]
            step += drawn
        found.append(step)
    states = [loader.state_dict() for loader in loaders]
    assert all(each == states[0] for each in states)
    return found, states[0]


def shares_of(steps: list[Drawn]) -> np.ndarray:
    components = [component for step in steps for component, _, _ in step]
    return np.bincount(components, minlength=3) / len(components)


@pytest.mark.parametrize("size", ["total", "once"])
def test_a_ledger_in_a_ramp_is_the_same_at_any_scale_and_after_resumes(root: Path, size: Any) -> None:
    def make() -> Mixture:
        return ramped(root, size=size)

    whole, end = taken(make)
    assert len(whole) == 4 * (sum(SIZES) // GLOBAL)
    flat = [drawn for step in whole for drawn in step]
    assert len({*flat}) == len(flat)
    for world, workers in ((2, 2), (4, 0)):
        head, state = taken(make, 1, workers, stop=7)  # within the ramp
        middle, state = taken(make, world, workers, state, 6)
        rest, state = taken(make, 4 // world, 2 - workers, state)
        assert head + middle + rest == whole
        # Ranks without a process group cannot sum their digests.
        assert state | {"digest": ""} == end | {"digest": ""}
    if size == "total":
        early, late = shares_of(whole[:5]), shares_of(whole[20:])
        assert early[0] > 0.6 > 0.2 > early[2]
        assert late[2] > 0.75
    else:
        each = [drawn for step in whole[: len(whole) // 4] for drawn in step]
        assert {own for _, own, _ in each} == {0}, "no component repeats"


@pytest.mark.parametrize("made", [{}, {"schedule": []}])
def test_a_run_that_goes_on_is_reweighed_on_all_ranks_at_one_step(root: Path, made: dict[str, Any]) -> None:
    def before() -> Mixture:
        return mix(weights(numbers(root), 1, 1, 0), size=40, **made)

    def after() -> Mixture:
        mixture = before()
        return mixture.reweighed(weights(mixture.components, 0, 1, 1), step=8)

    plain, _ = taken(before, stop=20)
    head, state = taken(before, 2, stop=6)
    assert "s8" not in state["dataset"]
    middle, state = taken(after, 4, 0, state, 5)
    assert "s8:0,1,1" in state["dataset"]
    rest, _ = taken(after, 1, 2, state, 9)
    found = head + middle + rest
    assert found[:8] == plain[:8]
    assert shares_of(found[:8]).tolist() == [0.5, 0.5, 0.0]
    assert shares_of(found[8:]).tolist() == [0.0, 0.5, 0.5]
    assert taken(after, stop=20)[0] == found
    flat = [drawn for step in found for drawn in step]
    assert len({*flat}) == len(flat)


def test_a_change_that_is_past_or_was_taken_back_is_refused(root: Path) -> None:
    parts = numbers(root)
    start = mix(weights(parts, 1, 1, 0), schedule=[])
    _, state = taken(lambda: start, stop=6)
    for step in (5, 3):
        with pytest.raises(StateMismatch, match="weights"):
            taken(lambda step=step: start.reweighed(weights(parts, 0, 1, 1), step=step), 1, 0, state, 1)
    later = start.reweighed(weights(parts, 0, 1, 1), step=6)
    found, state = taken(lambda: later, 1, 0, state, 2)
    assert shares_of(found).tolist() == [0.0, 0.5, 0.5]
    with pytest.raises(StateMismatch, match="weights"):
        taken(lambda: start, 1, 0, state, 1)
    ramp = later.reweighed(weights(parts, 1, 0, 0), step=40, ramp="linear")  # it would have begun at step 6
    with pytest.raises(StateMismatch, match="weights"):
        taken(lambda: ramp, 1, 0, state, 1)
    from_here = later.reweighed(weights(parts, 0, 1, 1), step=8)
    ramp = from_here.reweighed(weights(parts, 1, 0, 0), step=40, ramp="linear")
    assert len(taken(lambda: ramp, 1, 0, state, 3)[0]) == 3


def test_several_nodes_read_one_sequence(root: Path) -> None:
    """The plain mixture gives each node a part of the epoch; it is reweighed between epochs, or made with schedule=[]."""
    parts = numbers(root)
    plain = mix(weights(parts, 1, 1, 0), size=40)
    started = mix(weights(parts, 1, 1, 0), size=40, schedule=[])

    def loaders(mixture: Mixture, nodes: int = 2) -> list[DataLoader]:
        return [
            DataLoader(
                mixture, GLOBAL // nodes, shuffle=True, rank=rank, world_size=nodes, epochs=2, last="drop"
            )
            for rank in range(nodes)
        ]

    def seen(ranks: list[DataLoader], state: Any = None, stop: int = 10**9) -> tuple[list[list[int]], Any]:
        steps, after = in_step(ranks, state, stop)
        return [[int(row[0]) for batch, _ in step for row in batch] for step in steps], after

    begun = {  # as two nodes begin
        mixture: loaders(mixture)[0].state_dict() | {"canonical_nodes": 2} for mixture in (plain, started)
    }
    whole, _ = seen(loaders(started), begun[started])
    assert whole == seen(loaders(started, 1))[0]
    assert seen(loaders(plain), begun[plain])[0] != seen(loaders(plain, 1))[0]
    head, state = seen(loaders(started), begun[started], 3)
    assert state["canonical_nodes"] == 2
    changed = started.reweighed(weights(parts, 0, 1, 1), step=4)
    rest, _ = seen(loaders(changed), state)
    assert (head + rest)[:4] == whole[:4]
    assert len({*(n for step in (head + rest)[:5] for n in step)}) == 40
    _, state = seen(loaders(plain), begun[plain], 3)
    with pytest.raises(StateMismatch, match=r"mixture on 2 nodes, .* with schedule=\[\]"):
        seen(loaders(plain.reweighed(weights(parts, 0, 1, 1), step=7)), state)
    _, state = seen(loaders(plain), begun[plain], 5)  # an epoch is complete
    assert len(seen(loaders(plain.reweighed(weights(parts, 0, 1, 1), step=7)), state)[0]) == 5


def test_steps_of_another_size_are_refused_and_tokens_are_not(root: Path) -> None:
    packs = [pack(text(root), 24), pack(text(root), 24, edges=None)]
    schedule = [(24 * 40, weights(packs, 0, 1))]

    def loader(mixture: Mixture, **more: Any) -> DataLoader:
        return DataLoader(mixture, 8, shuffle=True, last="drop", **more)

    def components(mixture: Mixture, batches: DataLoader) -> list[int]:
        return [component for _ in batches for component in mixture.locate(batches.indices)[0].tolist()]

    by_tokens = mix(weights(packs, 1, 1), size=64, schedule=schedule, unit="tokens")
    run = loader(by_tokens)
    found = components(by_tokens, run)
    assert (found[:40].count(0), found[40:].count(0)) == (20, 0)
    wider = loader(by_tokens, global_batch_size=16)
    wider.load_state_dict(run.state_dict())
    assert set(components(by_tokens, wider)) == {1}
    assert "x40:0,1" in run.state_dict()["dataset"]
    by_step = mix(weights(packs, 1, 1), size=64, schedule=[(5, weights(packs, 0, 1))])
    run = loader(by_step)
    assert components(by_step, run) == found
    with pytest.raises(StateMismatch, match="epochs of other steps: global_batch_size=8, last='drop'"):
        loader(by_step, global_batch_size=16).load_state_dict(run.state_dict())
    with pytest.raises(InvalidInput, match="unit='tokens' is for packs and token files"):
        ramped(root, unit="tokens")


def test_scheduled_mixtures_are_sent_to_workers_and_indexed(root: Path) -> None:
    mixture = ramped(root)
    shipped = pickle.loads(pickle.dumps(mixture))
    assert shipped.identity == mixture.identity
    assert mixture.identity.endswith("@s0:8,1,1;l20:1,1,8")
    assert [int(shipped[n][0]) for n in (0, 7, -1)] == [int(mixture[n][0]) for n in (0, 7, -1)]
    assert len(mix(weights(numbers(root), 1, 1, 0), size="once")) == SIZES[0] + SIZES[1]
    first = DataLoader(ramped(root, size="first"), 5, shuffle=True, last="drop")
    assert 0 < len(first) * 5 < sum(SIZES)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"schedule": [(5,)]}, "schedule= takes pairs of a place in the run and weights"),
        ({"schedule": 5}, "schedule= takes pairs"),
        ({"schedule": [(0, (1, 1, 1))]}, "the place of new weights=0: give a whole number from 1"),
        (
            {"schedule": [(5, (1, 1, 1)), (5, (1, 0, 1))]},
            "weights change at 5 after 5: give ascending places",
        ),
        ({"schedule": [(5, (0, 0, 0))]}, "one of them above 0"),
        ({"schedule": [(5, (1, 1, -1))]}, "give a number of at least 0"),
        ({"schedule": [], "unit": "epochs"}, "unit='epochs': give one of 'steps', 'tokens'"),
        ({"schedule": [(5, (1, 1, 1))], "ramp": "cosine"}, "ramp='cosine': give one of 'step', 'linear'"),
        ({"schedule": [], "by": "repeat"}, "by='repeat' goes with neither schedule="),
        ({"size": "once", "by": "choose"}, "by='choose' goes with neither"),
        ({"schedule": [], "size": "last"}, "size='last' does not go with"),
    ],
)
def test_wrong_schedules_are_refused(root: Path, given: dict[str, Any], says: str) -> None:
    parts = numbers(root)
    if isinstance(given.get("schedule"), list):
        pairs = [(pair[0], weights(parts, *pair[1])) if len(pair) > 1 else pair for pair in given["schedule"]]
        given = given | {"schedule": pairs}
    with pytest.raises(InvalidInput, match=says):
        mix(weights(parts, 1, 1, 1), **given)


def test_wrong_places_for_new_weights_are_refused(root: Path) -> None:
    parts, other = numbers(root), numbers(root)
    plain, equal = mix(weights(parts, 1, 1, 1)), weights(parts, 1, 1, 1)
    stepped = plain.reweighed(equal, step=5)
    cases: list[tuple[Mixture, dict[str, Any], str]] = [
        (plain, {}, "0 places for new weights: give epoch=, step= or tokens="),
        (plain, {"epoch": 1, "step": 2}, "2 places for new weights"),
        (stepped, {"epoch": 3}, "change by step or token: give step= or tokens="),
        (stepped, {"step": 5}, "weights change at 5 after 5"),
        (plain.reweighed(equal, epoch=2), {"step": 50}, "not with weights that changed by epoch"),
        (mix(equal, size="first"), {"step": 5}, "a size that does not depend on weights"),
        (mix(equal, by="repeat"), {"step": 5}, "go with by='proportion'"),
        (plain, {"tokens": 5}, "unit='tokens' is for packs and token files"),
    ]
    for mixture, more, says in cases:
        with pytest.raises(InvalidInput, match=says):
            mixture.reweighed(equal, **more)
    with pytest.raises(InvalidInput, match="is not among the 3 mixed datasets"):
        plain.reweighed(weights(other, 1, 1, 1), step=5)
    once = mix(weights(parts, 1, 1, 0), size="once")
    with pytest.raises(InvalidInput, match="a dataset that had no weight so far would make the epoch longer"):
        once.reweighed(equal, step=5)
    with pytest.raises(InvalidInput, match="selects none of the 40 samples"):
        mix({parts[0].where("key == 'none'"): 1, parts[1]: 1})
    with pytest.raises(InvalidInput, match=r"component 0 of the mixture, .* is empty"):
        mix({parts[0].take(0): 0, parts[1]: 1})


def test_a_component_of_one_sample_repeats_it(root: Path) -> None:
    one, many = numbers(root)[0].select([7]), numbers(root)[1]
    mixture = mix({one: 1, many: 1}, size=4000)
    loader = DataLoader(mixture, 2000, shuffle=True)
    values = [value for batch in loader for value in batch[:, 0].tolist()]
    assert values.count(7) == 2000
    component, own_epoch, inner = mixture.locate(loader.indices)
    assert not inner[component == 0].any()
    assert own_epoch[component == 0].tolist() == [*range(1000, 2000)]


def test_steps_of_a_schedule_are_data_steps_where_some_are_skipped(root: Path) -> None:
    def make() -> Mixture:
        return ramped(root)

    whole, _ = taken(make, stop=25)
    found, _ = taken(make, 2, stop=20, skip_steps=[range(4, 9)])
    assert found == whole[:4] + whole[9:]
    head, state = taken(make, stop=6, skip_steps=[range(4, 9)])
    rest, _ = taken(make, 4, 0, state, 14)
    assert head + rest == found
