"""Records of prepared samples: every value comes back as the function returned it, and errors keep their code."""

from __future__ import annotations

import json
import re
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from cachesvc.catalog.prepared import PreparedForm
from cachesvc.core.errors import CorruptData, InvalidInput, SourceChanged
from loader.prepare.records import END, contained, encode, encode_error, error_in, form_of, value_of

KINDS = arrays.boolean_dtypes() | arrays.integer_dtypes() | arrays.floating_dtypes(sizes=(32, 64))
numbers = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)
values = numbers | arrays.arrays(KINDS, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
samples = values | st.lists(values, min_size=1, max_size=3) | st.tuples(values, values)
samples |= st.dictionaries(st.text(max_size=4), values, min_size=1, max_size=3)


def decoded(form: PreparedForm, record: bytearray) -> Any:
    arrays_of = (np.ndarray(each.shape, each.dtype, record, each.offset) for each in form.fields)
    return contained(
        form, [value_of(field, array) for field, array in zip(form.fields, arrays_of, strict=True)]
    )


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return [*one] == [*other] and all(same(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, (np.ndarray, np.generic)):
        return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
    return bool(one == other)


@given(samples)
def test_a_sample_comes_back_as_it_was(sample: Any) -> None:
    form = form_of(sample)
    assert PreparedForm.from_json(form.to_json()) == form
    assert same(decoded(form, encode(form, sample)), sample)


@given(arrays.arrays(np.float32, (3, 2), elements=st.floats(0, 1, width=32)))
def test_a_tensor_comes_back_as_a_tensor(array: np.ndarray[Any, Any]) -> None:
    tensor = torch.from_numpy(array).t()  # whose memory is in another order
    form = form_of((tensor, 3))
    found, label = decoded(form, encode(form, (tensor, 3)))
    assert torch.equal(found, tensor)
    assert (label, type(label)) == (3, int)


Pair = namedtuple("Pair", "a b")
UNKEPT = ["text", b"bytes", None, object(), 1 << 64, [[1], [2]], {1: 2}, np.array(["a"]), Pair(1, 2)]


@pytest.mark.parametrize("sample", [*UNKEPT, torch.zeros(1, dtype=torch.bfloat16), torch.eye(2).to_sparse()])
def test_values_that_records_do_not_hold_are_refused_with_advice(sample: Any) -> None:
    with pytest.raises(InvalidInput, match="prepare= returned"):
        form_of(sample)


@pytest.mark.parametrize(
    "other",
    [np.zeros(3, np.uint8), np.zeros(4, np.int8), [np.zeros(4, np.uint8)], torch.zeros(4, dtype=torch.uint8)],
)
def test_a_sample_of_another_form_is_an_error_of_that_sample(other: Any) -> None:
    form = form_of(np.zeros(4, np.uint8))
    with pytest.raises(InvalidInput, match="the first sample") as caught:
        encode(form, other)
    assert caught.value.of_object


@pytest.mark.parametrize(
    ("first", "other", "says"),
    [
        (1, np.int64(1), "scalar int64 [] for value, and number int64 [] for"),
        ({"a": 1, "b": 2}, {"a": 1}, "a dict of a, and a dict of a, b for"),
        ([1, 2], [1], "a list of 1, and a list of 2 for the first sample: .* np.asarray"),
        (np.zeros(2), np.zeros(3), "prepare_max_bytes="),
    ],
)
def test_a_sample_of_another_form_is_told_with_what_to_do(first: Any, other: Any, says: str) -> None:
    with pytest.raises(InvalidInput, match=re.sub(r"[][]", r"\\\g<0>", says)):
        encode(form_of(first), other)


@pytest.mark.parametrize(
    ("sample", "says"),
    [([], "an empty list"), ({}, "an empty dict"), ([1] * 2000, "np.asarray"), ({"ids": [1]}, "--max-bytes")],
)
def test_lists_and_empty_samples_are_refused_with_what_to_return(sample: Any, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        form_of(sample)


def test_fields_may_come_in_another_order() -> None:
    form = form_of({"a": 1, "b": 2.5})
    assert encode(form, {"b": 2.5, "a": 1}) == encode(form, {"a": 1, "b": 2.5})


@pytest.mark.parametrize("size", [0, 3, 500])
def test_an_error_keeps_its_code_and_as_much_of_its_message_as_there_is_room(size: int) -> None:
    form = form_of(np.zeros(size, np.uint8))
    found = error_in(encode_error(form, SourceChanged("it has changed")), "7.jpg")
    assert type(found) is SourceChanged
    assert str(found).startswith("7.jpg: " + "it has changed"[: form.stride_bytes - END.size])
    of_user = error_in(encode_error(form, ValueError("odd\nsize")), "7.jpg")
    assert type(of_user) is CorruptData
    assert str(of_user).startswith("7.jpg: " + "ValueError: odd size"[: form.stride_bytes - END.size])


def test_a_record_that_was_never_written_is_no_sample() -> None:
    form = form_of(1)
    assert "never written" in str(error_in(bytes(form.stride_bytes), "7.jpg"))


FIELD = ["v", "array", "|u1", [1], 0]


def form_text(*fields: object, container: str = "tuple", stride_bytes: object = 99) -> str:
    return json.dumps({"container": container, "stride_bytes": stride_bytes, "fields": fields})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        form_text(),
        form_text(FIELD, container="odd"),
        form_text(FIELD, stride_bytes="many"),
        form_text(["v", "array", "|u1", [9], 0], stride_bytes=8),
        form_text(["v", "array", "|u1", [9], 0], ["w", "array", "|u1", [1], 4]),
        form_text(["v", "array", "|O", [1], 0]),
        form_text(["v", "odd", "|u1", [1], 0]),
        form_text(["v", "array", "|u1", [-1], 0]),
    ],
)
def test_a_form_that_no_loader_sent_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        PreparedForm.from_json(text)
