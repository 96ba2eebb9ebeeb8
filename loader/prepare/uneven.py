"""The records of prepared samples of unlike shapes, such as lists of tokens, sounds or texts.

A record states the shape of each value and is as long as its values need. Names, kinds and dtypes are the same for all
samples, and are in the form of the records. An extent begins with the offsets of its records. Nothing is unpickled.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np

from cachesvc.catalog.layout import PreparedField
from cachesvc.catalog.prepared import PreparedForm
from cachesvc.core.errors import CorruptData, InvalidInput
from cachesvc.core.wire import NO_DATASET as UNKNOWN
from loader.prepare.records import (
    ALIGNMENT,
    END,
    FAILED,
    MADE,
    array_of,
    check_count,
    encode,
    encode_error,
    error_fields,
    kept_error,
    other_form,
    parts_of,
    value_of,
    values_of,
)

MAX_SIDES = 8
"""Dimensions of a value."""
_SIDE = struct.Struct("<q")
_TEXT = ("bytes", "text")


def uneven_form_of(sample: Any, most_bytes: int) -> PreparedForm:
    """Return the form of records of samples like this one, whose values take `most_bytes` at most. Raises InvalidInput for
    values that records do not hold."""
    container, names, values = parts_of(sample)
    check_count(container, names)
    found = (_array(name, value) for name, value in zip(names, values, strict=True))
    fields = tuple(
        PreparedField(name, kind, array.dtype.str, (), 0)
        for name, (kind, array) in zip(names, found, strict=True)
    )
    room = END.size + len(fields) * (ALIGNMENT + _SIDE.size * (1 + MAX_SIDES))
    return PreparedForm(container, _aligned(most_bytes + room), fields, most_bytes)


def encode_uneven(form: PreparedForm, sample: Any, content: bytes = UNKNOWN) -> bytearray:
    """Return the record of a sample: its head, the shape of each value, and the values. See `records.encode`. Raises
    InvalidInput for a sample of another form, or with too many bytes."""
    values = values_of(form, sample)
    shapes, arrays, size_bytes = bytearray(), [], 0
    for field, value in zip(form.fields, values, strict=True):
        kind, array = _array(field.name, value)
        if (kind, array.dtype.str) != (field.kind, field.dtype):
            raise other_form(
                f"{kind} of {array.dtype}", f"{field.kind} of {np.dtype(field.dtype)}", field.name
            )
        if array.ndim > MAX_SIDES:
            raise _beyond(f"{array.ndim} dimensions for {field.name}, and records hold {MAX_SIDES}")
        size_bytes += array.nbytes
        shapes += b"".join(map(_SIDE.pack, (array.ndim, *array.shape)))
        arrays.append(array)
    if size_bytes > form.most_bytes:
        raise _beyond(
            f"{size_bytes:,} bytes, and prepare_max_bytes={form.most_bytes} is declared: declare what the largest sample"
            " takes"
        )
    record = bytearray(END.pack(MADE, 0, 0, content)) + shapes
    for array in arrays:
        record += array.tobytes()
        record += bytes(_aligned(len(record)) - len(record))
    return record


def encode_uneven_error(form: PreparedForm, error: Exception, content: bytes = UNKNOWN) -> bytearray:
    """Return the record of a sample that could not be made; see `records.encode_error`."""
    code, message = error_fields(error, form.stride_bytes - END.size)
    record = bytearray(END.pack(FAILED, code, len(message), content)) + message
    return record + bytes(_aligned(len(record)) - len(record))


def record_of(form: PreparedForm, sample: Any, content: bytes = UNKNOWN) -> bytearray:
    """Return the record of a sample of either form. Raises as `records.encode` and `encode_uneven`."""
    return (encode_uneven if form.most_bytes else encode)(form, sample, content)


def record_of_error(form: PreparedForm, error: Exception, content: bytes = UNKNOWN) -> bytearray:
    """Return the record that keeps an error in place of a sample of either form."""
    return (encode_uneven_error if form.most_bytes else encode_error)(form, error, content)


def uneven_error(form: PreparedForm, record: bytes | bytearray, key: str) -> Exception | None:
    """Return the error that a record keeps in place of the sample `key`; None where it was made."""
    state, code, length, _ = END.unpack_from(record)
    message, room = record[END.size : END.size + length], form.stride_bytes - END.size
    return None if state == MADE else kept_error(state, code, message, room, key)


def decode_uneven(form: PreparedForm, record: bytes | bytearray) -> list[Any]:
    """Return the values of a sample that was made. Raises CorruptData for a record that is none."""
    values, at = [], END.size
    shapes = []
    try:
        for _ in form.fields:
            (count,) = _SIDE.unpack_from(record, at)
            if not 0 <= count <= MAX_SIDES:
                raise ValueError(f"{count} dimensions")
            shapes.append(struct.unpack_from(f"<{count}q", record, at + _SIDE.size))
            if min(shapes[-1], default=0) < 0:
                raise ValueError(f"a shape of {shapes[-1]}")
            at += _SIDE.size * (1 + count)
        for field, shape in zip(form.fields, shapes, strict=True):
            dtype = np.dtype(field.dtype)
            array = np.frombuffer(record, dtype, math.prod(shape), at).reshape(shape)
            at = _aligned(at + array.nbytes)
            values.append(_value_of(field, array))
    except (ValueError, struct.error) as error:
        raise CorruptData(f"a prepared record is damaged ({error}); cachesvc evict drops it") from None
    return values


def _array(name: str, value: Any) -> tuple[str, np.ndarray[Any, Any]]:
    """Return a value's kind, and the value as an array."""
    if type(value) is bytes:
        return "bytes", np.frombuffer(value, np.uint8)
    if type(value) is str:
        return "text", np.frombuffer(value.encode("utf-8", "surrogatepass"), np.uint8)
    return array_of(name, value)


def _value_of(field: PreparedField, array: np.ndarray[Any, Any]) -> Any:
    """Return a value from its array, which is of the record's memory."""
    if field.kind in _TEXT:
        raw = array.tobytes()
        return raw if field.kind == "bytes" else raw.decode("utf-8", "surrogatepass")
    return value_of(field, array.copy())


def _beyond(what: str) -> InvalidInput:
    error = InvalidInput(f"prepare= returned {what}")
    error.of_object = True
    return error


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT
