"""Steps and samples that a run leaves out, and the inverse of the order: everything else stays as it was."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachesvc.core.errors import InvalidInput
from cachesvc.core.order.epoch_order import EpochOrder, Last, OrderSpec
from cachesvc.core.order.excluded import MAX_EXCLUDED, Excluded, parse_excluded, repaired
from cachesvc.core.order.permute import permute, unpermute
from cachesvc.core.order.skipped import NONE_SKIPPED, RunSteps, Skipped, parse_skipped, skipped_by

RANGES = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), max_size=5)
ENDS = [each for each in get_args(Last) if each != "error"]


def skipped(ranges: list[tuple[int, int]]) -> Skipped:
    return Skipped((begin, begin + size) for begin, size in ranges)


def order(draw: st.DrawFn, left_out: Skipped = NONE_SKIPPED) -> EpochOrder:
    sizes = draw(st.lists(st.integers(0, 40), min_size=1, max_size=9).filter(any))
    batch = draw(st.integers(1, 30))
    nodes = draw(st.integers(1, min(4, batch)))
    spec = OrderSpec(
        draw(st.integers(0, 99)),
        batch,
        draw(st.integers(0, 4)),
        nodes,
        draw(st.booleans()),
        draw(st.sampled_from(ENDS)),
        draw(st.sampled_from([0, 9])),
    )
    return EpochOrder(spec, np.concatenate(([0], np.cumsum(sizes))), draw(st.integers(0, 3)), left_out)


orders = st.composite(order)()


def batches(of: EpochOrder) -> dict[int, list[int]]:
    """The real samples of each step that is kept, by its number among all steps."""
    full = of.slots(0, of.full_steps, 0, of.spec.global_batch).tolist()
    found = {of.skipped.step(number): row for number, row in enumerate(full)}
    if of.has_tail:
        tail = of.tail(0, of.spec.global_batch)
        found[of.skipped.step(of.full_steps)] = tail.samples[0][: int(tail.valid[0])].tolist()
    return found


@given(RANGES)
def test_kept_steps_are_numbered_without_the_skipped_ones(ranges: list[tuple[int, int]]) -> None:
    left_out = skipped(ranges)
    named = {step for begin, size in ranges for step in range(begin, begin + size)}
    kept = [step for step in range(80) if step not in named]
    assert [step for step in range(80) if step not in left_out] == kept
    assert left_out.steps(np.arange(len(kept))).tolist() == kept
    assert left_out.numbers(np.array(kept)).tolist() == [*range(len(kept))]
    assert all(left_out.number(step) == sum(each < step for each in kept) for step in range(80))
    assert parse_skipped(left_out.text).ranges == left_out.ranges
    inside = left_out.within(20, 30)
    assert [step for step in range(30) if step in inside] == [
        step - 20 for step in sorted(named) if 20 <= step < 50
    ]


@given(orders, RANGES)
def test_skipped_steps_change_no_other_step(whole: EpochOrder, ranges: list[tuple[int, int]]) -> None:
    left_out = skipped(ranges).within(0, whole.data_steps)
    without = EpochOrder(whole.spec, whole.extent_first, whole.epoch, left_out)
    expected = {step: row for step, row in batches(whole).items() if step not in left_out}
    assert batches(without) == expected
    assert without.steps == len(expected)


@given(orders, RANGES, st.integers(1, 3))
def test_a_plan_with_skipped_steps_has_the_extents_of_every_kept_batch(
    whole: EpochOrder, ranges: list[tuple[int, int]], ranks: int
) -> None:
    without = EpochOrder(
        whole.spec, whole.extent_first, whole.epoch, skipped(ranges).within(0, whole.data_steps)
    )
    batch = whole.spec.global_batch
    low, high = 0, batch // ranks if batch % ranks == 0 else batch
    plan = without.plan(low, high)
    for step in range(without.full_steps):
        samples = without.slots(step, step + 1, low, high)[0]
        touched = set((np.searchsorted(whole.extent_first, samples, "right") - 1).tolist())
        planned = plan.extent[(plan.first_step <= step) & (step <= plan.last_step)]
        assert touched <= set(planned.tolist())
    assert (plan.last_step < max(1, without.steps)).all()


@given(orders)
def test_the_place_of_a_sample_is_where_the_order_has_it(of: EpochOrder) -> None:
    found = {sample: (step, slot) for step, row in batches(of).items() for slot, sample in enumerate(row)}
    assert {sample: of.place(sample) for sample in range(of.samples)} == {
        sample: found.get(sample) for sample in range(of.samples)
    }


@given(st.integers(1, 1 << 40), st.integers(0, (1 << 64) - 1), st.data())
def test_a_permutation_is_undone(size: int, key: int, data: st.DataObject) -> None:
    value = data.draw(st.integers(0, size - 1))
    assert unpermute(int(permute(np.array([value]), size, key)[0]), size, key) == value


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=4), st.integers(0, 3))
def test_data_steps_count_through_epochs_of_several_lengths(
    phases: list[tuple[int, int]], since: int
) -> None:
    lengths = [length for epochs, length in phases for _ in range(epochs)]
    changes = np.cumsum([0, *(epochs for epochs, _ in phases)]).tolist()[:-1]
    since = min(since, len(lengths) - 1)
    steps = RunSteps(since, 7, changes, lambda epoch: lengths[min(epoch, len(lengths) - 1)])
    number = 7
    for epoch in range(since, len(lengths)):
        assert steps.first(epoch) == number
        for at in range(lengths[epoch]):
            assert steps.place(number) == (epoch, at)
            number += 1


def test_epochs_before_the_order_count_back_to_step_0() -> None:
    steps = RunSteps(3, 14, [], lambda epoch: 6)
    assert [steps.first(epoch) for epoch in range(5)] == [0, 2, 8, 14, 20]


def test_texts_that_name_no_steps_are_refused() -> None:
    assert parse_skipped("").ranges == []
    assert skipped_by([range(5, 9), (7, 12), range(3, 3 + 1)]).text == "3:4,5:12"
    for text in ("5", "9:5", "1:2,2:3", "5:6,1:2", "a:b", "-1:3", "1:2,"):
        with pytest.raises(InvalidInput):
            parse_skipped(text)
    for wrong in ("5:9", 7, [5], [range(0, 9, 2)], [(3, 3)], [(-1, 2)], [range(9, 5)]):
        with pytest.raises(InvalidInput):
            skipped_by(wrong)


@given(st.dictionaries(st.integers(0, 50), st.integers(0, 9), max_size=12), st.integers(0, 12))
def test_samples_are_left_out_from_their_step_on(since: dict[int, int], step: int) -> None:
    left_out = Excluded(since)
    assert parse_excluded(left_out.text).since == left_out.since == since
    bad = left_out.until(step).among(np.arange(60))
    assert np.flatnonzero(bad).tolist() == sorted(each for each, at in since.items() if at <= step)
    more = left_out.with_more({3: 100, 51: 100}).since
    assert more == {3: 100, 51: 100} | since


@given(st.data())
def test_repeats_take_the_place_of_excluded_samples(data: st.DataObject) -> None:
    width, valid = data.draw(st.integers(1, 6)), []
    rows = np.arange(4 * width).reshape(4, width)
    valid = [data.draw(st.integers(0, width)) for _ in range(4)]
    out = data.draw(st.sets(st.integers(0, 4 * width - 1)))
    bad = np.isin(rows, [*out])
    found, real = repaired(rows, np.array(valid), bad)
    assert found.shape == rows.shape
    for before, after, old, now in zip(rows.tolist(), found.tolist(), valid, real.tolist(), strict=True):
        assert after[:now] == [each for each in before[:old] if each not in out]
        assert set(after) <= set(before)
        assert not set(after) & out or set(before) <= out


def test_more_samples_than_a_state_holds_are_refused() -> None:
    with pytest.raises(InvalidInput, match="where"):
        Excluded(dict.fromkeys(range(MAX_EXCLUDED + 1), 0))
    for text in ("5", "5:", "5:a", "-1:3", "1:2,-3"):
        with pytest.raises(InvalidInput):
            parse_excluded(text)
