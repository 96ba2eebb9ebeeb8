"""Records of uneven prepared samples, and the extents that hold them."""

from __future__ import annotations

import os
import struct
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from cachesvc.catalog.prepared import PreparedForm
from cachesvc.core.errors import CacheError, CorruptData, InvalidInput, SourceChanged
from cachesvc.tiers.checksum import block_digest
from cachesvc.tiers.tier import CHECKSUM_BLOCK_BYTES
from loader.prepare.preparer import Target
from loader.prepare.records import END, contained
from loader.prepare.uneven import (
    decode_uneven,
    encode_uneven,
    record_of_error,
    uneven_error,
    uneven_form_of,
)
from tests.loader.prepare.pictures import same

KINDS = arrays.boolean_dtypes() | arrays.integer_dtypes() | arrays.floating_dtypes(sizes=(32, 64))
any_arrays = arrays.arrays(KINDS, arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
values = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.binary() | st.text() | any_arrays
values |= any_arrays.map(
    lambda array: torch.from_numpy(array.view("u1") if array.ndim else array.astype(bool))
)
samples = values | st.lists(values, min_size=1, max_size=3) | st.tuples(values, values)
samples |= st.dictionaries(st.text(max_size=4), values, min_size=1, max_size=3)


@given(samples)
def test_a_sample_comes_back_as_it_was(sample: Any) -> None:
    form = uneven_form_of(sample, 1 << 20)
    assert PreparedForm.from_json(form.to_json()) == form
    record = bytes(encode_uneven(form, sample))
    assert len(record) <= form.stride_bytes
    assert uneven_error(form, record, "7.jpg") is None
    found = contained(form, decode_uneven(form, record))
    assert same_bits(found, sample)


def same_bits(one: Any, other: Any) -> bool:
    """Compare NaN as bytes."""
    if isinstance(one, np.ndarray) and one.dtype == other.dtype:
        return one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, (list, tuple)) and type(one) is type(other):
        return all(map(same_bits, one, other))
    if isinstance(one, dict):
        return [*one] == [*other] and all(same_bits(one[name], other[name]) for name in one)
    return same(one, other)


def test_shapes_and_dimensions_may_differ_and_nothing_else() -> None:
    form = uneven_form_of((np.zeros(3, np.int32), "a"), 100)
    sample = np.ones((2, 3, 1), np.int32), "other"
    assert same(contained(form, decode_uneven(form, encode_uneven(form, sample))), sample)
    for other in ((np.zeros(3), "a"), (np.zeros(3, np.int32), b"a"), (np.zeros(3, np.int32),), {"a": 1}):
        with pytest.raises(InvalidInput, match="alike"):
            encode_uneven(form, other)
    with pytest.raises(InvalidInput, match="9 dimensions"):
        encode_uneven(form, (np.zeros([1] * 9, np.int32), "a"))


def test_a_sample_with_more_bytes_than_declared_says_both() -> None:
    form = uneven_form_of(np.zeros(3, np.uint8), 10)
    assert len(encode_uneven(form, np.zeros(10, np.uint8))) <= form.stride_bytes
    with pytest.raises(InvalidInput, match="11 bytes, and prepare_max_bytes=10 is declared") as caught:
        encode_uneven(form, np.zeros(11, np.uint8))
    assert caught.value.of_object


def test_an_error_keeps_its_code_within_the_room_of_a_record() -> None:
    form = uneven_form_of("", 1)
    record = record_of_error(form, SourceChanged("it has changed " * 99))
    assert len(record) <= form.stride_bytes
    found = uneven_error(form, bytes(record), "7.jpg")
    assert type(found) is SourceChanged
    assert str(found).startswith("7.jpg: it has changed")
    assert "never written" in str(uneven_error(form, bytes(form.stride_bytes), "7.jpg"))


@pytest.mark.parametrize("shape", [(9,), (-1, 5), (1, -5), (1, 1 << 40), (2, 1 << 40, 1 << 40)])
def test_a_damaged_record_is_a_typed_error(shape: tuple[int, ...]) -> None:
    form = uneven_form_of(np.zeros(3, np.uint8), 10)
    record = bytearray(encode_uneven(form, np.zeros(3, np.uint8)))
    struct.pack_into(f"<{len(shape)}q", record, END.size, *shape)
    with pytest.raises(CorruptData, match="damaged"):
        decode_uneven(form, record[: END.size + 16])


@pytest.mark.parametrize("count", [1, 50, 20_000])
def test_an_extent_begins_with_the_offsets_of_its_records_and_has_the_digests_of_its_bytes(
    count: int,
) -> None:
    records = [bytearray(bytes([number % 251]) * (8 * (1 + number % 9))) for number in range(count)]
    table = 8 * (count + 1)
    fd = os.memfd_create("extent")
    kept = os.dup(fd)
    with Target(fd, 8 << 20, table) as target:
        assert all(target.write(bytearray(record)) == b"" for record in records)
        digests = target.finish()
    body = os.pread(kept, 8 << 20, 0)
    os.close(kept)
    assert len(body) == target.size_bytes
    offsets = np.frombuffer(body[:table], "<u8").tolist()
    assert [body[begin:end] for begin, end in pairwise(offsets)] == records
    blocks = [body[at : at + CHECKSUM_BLOCK_BYTES] for at in range(0, len(body), CHECKSUM_BLOCK_BYTES)]
    assert digests == b"".join(block_digest(memoryview(block)) for block in blocks)


def test_an_extent_larger_than_its_target_is_not_written() -> None:
    with Target(os.memfd_create("extent"), 100, 16) as target:
        target.write(bytearray(80))
        with pytest.raises(CacheError, match="not deterministic"):
            target.write(bytearray(8))
