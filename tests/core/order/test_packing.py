"""Packing: every token in at most one pack, whole documents where they fit, seek to any pack."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cachesvc.core.order.best_fit import whole_packs
from cachesvc.core.order.epoch_order import NEVER_ROTATED, EpochOrder, OrderSpec
from cachesvc.core.order.excluded import Excluded
from cachesvc.core.order.pack_order import Documents, PackOrder
from cachesvc.core.order.packing import PackRun

EXTENTS = st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=1, max_size=6)


def packed(extents: list[list[int]], length: int, window: int, epoch: int, shuffle: bool) -> PackRun:
    lengths = np.asarray([n for extent in extents for n in extent], np.int64)
    first = np.cumsum([0, *(len(extent) for extent in extents)])
    totals = np.asarray([sum(extent) for extent in extents], np.int64)
    order = EpochOrder(OrderSpec(7, 1, window, 1, shuffle, rotated_from=NEVER_ROTATED), first, epoch)
    return PackRun(order, lambda documents: lengths[documents], totals, length)


@settings(max_examples=100, deadline=None)
@given(EXTENTS, st.integers(1, 12), st.integers(0, 3), st.integers(0, 2), st.booleans())
def test_every_token_is_in_one_pack_until_the_last_whole_one(
    extents: list[list[int]], length: int, window: int, epoch: int, shuffle: bool
) -> None:
    lengths = [n for extent in extents for n in extent]
    run = packed(extents, length, window, epoch, shuffle)
    assert run.size == sum(lengths) // length
    pieces = run.pieces(np.arange(run.size))
    assert (pieces.begin < pieces.end).all()
    in_pack = np.bincount(pieces.row, pieces.end - pieces.begin, minlength=run.size)
    assert (in_pack == length).all()
    seen = [
        (document, token)
        for _, document, begin, end in zip(*(column.tolist() for column in pieces), strict=True)
        for token in range(begin, end)
    ]
    assert len(set(seen)) == len(seen) == run.size * length
    # a document is whole, in one pack or in consecutive ones, unless it is the one cut at the end
    cut = [d for d in dict(seen) if sum(1 for one, _ in seen if one == d) < lengths[d]]
    assert len(cut) <= 1


@settings(max_examples=60, deadline=None)
@given(EXTENTS, st.integers(1, 12), st.integers(0, 3), st.booleans(), st.data())
def test_a_seek_finds_the_same_packs(
    extents: list[list[int]], length: int, window: int, shuffle: bool, data: st.DataObject
) -> None:
    run, again = (packed(extents, length, window, 0, shuffle) for _ in range(2))
    if not run.size:
        return
    whole = run.pieces(np.arange(run.size))
    pack = data.draw(st.integers(0, run.size - 1))
    alone = again.pieces(np.asarray([pack]))
    for column, found in zip(whole[1:], alone[1:], strict=True):
        assert np.array_equal(column[whole.row == pack], found)


@settings(max_examples=60, deadline=None)
@given(EXTENTS, st.integers(1, 12), st.integers(0, 3), st.booleans())
def test_the_plan_names_the_extent_of_every_document_of_a_pack(
    extents: list[list[int]], length: int, window: int, shuffle: bool
) -> None:
    run = packed(extents, length, window, 1, shuffle)
    [touches] = run.touches()
    owner = [index for index, extent in enumerate(extents) for _ in extent]
    pieces = run.pieces(np.arange(run.size))
    for row, document in zip(pieces.row.tolist(), pieces.document.tolist(), strict=True):
        now = (touches.begin <= row) & (row < touches.end)
        assert owner[document] in touches.extent[now]


def test_unshuffled_packs_are_the_documents_in_their_order() -> None:
    pieces = packed([[3, 4], [5]], 5, 1, 0, False).pieces(np.arange(2))
    assert pieces.document.tolist() == [0, 1, 1, 2]
    assert pieces.begin.tolist() == [0, 0, 2, 0]
    assert pieces.end.tolist() == [3, 2, 4, 3]


@settings(max_examples=100, deadline=None)
@given(EXTENTS, st.integers(1, 12), st.integers(0, 3), st.booleans(), st.booleans(), st.data())
def test_excluded_documents_are_in_no_pack_and_others_stay(
    extents: list[list[int]], length: int, window: int, shuffle: bool, best: bool, data: st.DataObject
) -> None:
    lengths = np.asarray([n for extent in extents for n in extent], np.int64)
    first = np.cumsum([0, *(len(extent) for extent in extents)])
    totals = np.asarray([sum(extent) for extent in extents], np.int64)
    documents = Documents(np.dtype("u1"), first, totals, np.negative, lambda some: lengths[some])
    whole = whole_packs(first, lengths, length, "split") if best else None
    order = PackOrder(documents, None, length, whole)
    out = data.draw(st.sets(st.integers(0, max(0, lengths.size - 1))))
    plain = OrderSpec(7, 1, window, 1, shuffle)
    spec = replace(plain, excluded=Excluded(dict.fromkeys(out, 5)).text)
    assert spec.at_step(5) is spec
    assert spec.at_step(4) == plain
    packs = np.arange(order.size)
    before = [*zip(*(column.tolist() for column in order.pieces(packs, plain, 1)), strict=True)]
    after = [*zip(*(column.tolist() for column in order.pieces(packs, spec, 1)), strict=True)]
    assert after == [piece for piece in before if piece[1] not in out]
    gone = order.left_out(packs, spec, 1).tolist()
    assert gone == [pack not in {piece[0] for piece in after} for pack in packs.tolist()]
