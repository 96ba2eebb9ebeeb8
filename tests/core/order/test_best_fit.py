"""Packs of whole documents: every token once, documents whole where they fit, few packs, seek to any pack."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachesvc.core.order.best_fit import WholePackRun, WholePacks, best_fit_decreasing, whole_packs
from cachesvc.core.order.epoch_order import NEVER_ROTATED, EpochOrder, OrderSpec

EXTENTS = st.lists(st.lists(st.integers(0, 30), max_size=8), min_size=1, max_size=6)


def fitted(extents: list[list[int]], length: int, overflow: Any = "split") -> tuple[WholePacks, np.ndarray]:
    lengths = np.asarray([n for extent in extents for n in extent], np.int64)
    first = np.cumsum([0, *(len(extent) for extent in extents)])
    return whole_packs(first, lengths, length, overflow), lengths


def run_of(packs: WholePacks, lengths: np.ndarray, epoch: int, shuffle: bool) -> WholePackRun:
    spec = OrderSpec(7, 1, 2, 1, shuffle, rotated_from=NEVER_ROTATED)
    order = EpochOrder(spec, packs.extent_first, epoch)
    return WholePackRun(packs, order, lambda documents: lengths[documents])


def placed_one_by_one(sizes: np.ndarray, room: int) -> int:
    """Best fit decreasing as its definition has it: the number of bins."""
    left: list[int] = []
    for size in sorted(sizes.tolist(), reverse=True):
        fits = [(rest, index) for index, rest in enumerate(left) if rest >= size]
        index = min(fits)[1] if fits else len(left)
        left += [] if fits else [room]
        left[index] -= size
    return len(left)


@settings(max_examples=200)
@given(st.integers(1, 25), st.lists(st.integers(1, 25), max_size=60))
def test_bins_are_as_many_as_one_by_one(room: int, wanted: list[int]) -> None:
    sizes = np.asarray([min(size, room) for size in wanted], np.int64)
    bins = best_fit_decreasing(sizes, room)
    loads = np.bincount(bins, sizes)
    assert loads.size == placed_one_by_one(sizes, room)
    assert ((loads > 0) & (loads <= room)).all()


@given(EXTENTS, st.integers(1, 12), st.integers(0, 2), st.booleans())
def test_every_token_is_in_one_pack_of_its_extent(
    extents: list[list[int]], length: int, epoch: int, shuffle: bool
) -> None:
    packs, lengths = fitted(extents, length)
    run = run_of(packs, lengths, epoch, shuffle)
    assert run.size == packs.size
    spots = run.at(np.arange(run.size))
    assert sorted(spots.tolist()) == list(range(run.size))
    pieces = run.pieces(spots)
    sizes = pieces.end - pieces.begin
    assert (sizes > 0).all()
    assert (np.bincount(pieces.row, sizes, minlength=run.size) <= length).all()
    tokens = [
        (document, token)
        for document, begin, end in zip(*(column.tolist() for column in pieces[1:]), strict=True)
        for token in range(begin, end)
    ]
    assert sorted(tokens) == [(d, token) for d, size in enumerate(lengths.tolist()) for token in range(size)]
    parts = np.bincount(pieces.document, minlength=lengths.size)
    assert np.array_equal(parts, -(-lengths // length)), "only long documents are cut, in whole packs"
    extent_of = np.repeat(np.arange(len(extents)), [len(extent) for extent in extents])
    assert all(len({*extent_of[pieces.document[pieces.row == row]]}) == 1 for row in range(run.size))
    if not shuffle:
        firsts = pieces.document[np.searchsorted(pieces.row, np.arange(run.size))]
        assert (np.diff(firsts) >= 0).all(), "packs follow their first documents"


@given(EXTENTS, st.integers(1, 12))
def test_truncated_documents_keep_their_beginnings(extents: list[list[int]], length: int) -> None:
    packs, lengths = fitted(extents, length, "truncate")
    pieces = run_of(packs, lengths, 0, False).pieces(np.arange(packs.size))
    assert (pieces.begin == 0).all()
    kept = np.bincount(pieces.document, pieces.end, minlength=lengths.size)
    assert np.array_equal(kept, np.minimum(lengths, length))


@given(EXTENTS, st.integers(1, 12), st.booleans(), st.data())
def test_a_seek_finds_the_same_pack_and_the_plan_has_its_extent(
    extents: list[list[int]], length: int, shuffle: bool, data: st.DataObject
) -> None:
    packs, lengths = fitted(extents, length)
    if not packs.size:
        return
    run, again = (run_of(packs, lengths, 1, shuffle) for _ in range(2))
    whole = run.pieces(run.at(np.arange(run.size)))
    position = data.draw(st.integers(0, run.size - 1))
    alone = again.pieces(again.at(np.asarray([position])))
    assert all(
        np.array_equal(column[whole.row == position], found)
        for column, found in zip(whole[1:], alone[1:], strict=True)
    )
    (touches,) = run.touches()
    extent = np.repeat(np.arange(len(extents)), [len(each) for each in extents])[alone.document[0]]
    assert extent in touches.extent[(touches.begin <= position) & (position < touches.end)]


@pytest.mark.parametrize("length", [512, 2048, 8192])
def test_packs_of_a_long_tailed_set_are_full(length: int) -> None:
    """Log-normal lengths: half are below 400 tokens, one in a thousand is above 16,000."""
    lengths = np.maximum(1, np.random.default_rng(0).lognormal(6, 1.2, 60_000)).astype(np.int64)
    packs = whole_packs(np.asarray([0, 30_000, 60_000]), lengths, length, "split")
    assert lengths.sum() / (packs.size * length) > 0.998


def test_no_document_makes_no_pack() -> None:
    packs, lengths = fitted([[], [0, 0]], 5)
    assert (packs.size, packs.extent_first.tolist()) == (0, [0, 0, 0])
    assert not any(column.size for column in run_of(packs, lengths, 0, True).pieces(np.empty(0, np.int64)))
