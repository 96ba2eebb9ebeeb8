"""The records of prepared samples: the values of a sample one after another, and whether it could be made.

All samples have one form: a tensor, an array or a number, or a tuple, list or dict of these, with one shape and dtype
each. So samples are gathered without Python for each. A sample whose function raised is kept as the code and the message
of its error.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from cachesvc.catalog.layout import PreparedField
from cachesvc.catalog.prepared import MAX_FIELDS, PreparedForm
from cachesvc.core.errors import CacheError, CorruptData, InvalidInput, from_code
from cachesvc.core.wire import NO_DATASET as UNKNOWN

END = struct.Struct("<HHI16s")
"""The end of a record: `MADE` or `FAILED` (0: never written), the code of the error, the length of its message, which lies
at the record's beginning, and the digest of the bytes of the source's extent."""
CONTENT_AT = END.size - len(UNKNOWN)
MADE, FAILED = 1, 2
ALIGNMENT = 8
_ADVICE = "return a tensor, an array or a number, or a tuple or dict of these"
_SIZED = (
    "; with prepare_max_bytes= (--max-bytes) text and bytes are kept, too, and arrays of unlike shapes, as np.asarray makes"
    " of a list"
)


def form_of(sample: Any) -> PreparedForm:
    """Return the form of records for samples like this one. Raises InvalidInput for values that records do not hold."""
    container, names, values = parts_of(sample)
    check_count(container, names)
    fields, end = list[PreparedField](), 0
    for name, value in zip(names, values, strict=True):
        kind, array = array_of(name, value)
        fields.append(PreparedField(name, kind, array.dtype.str, array.shape, end))
        end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    return PreparedForm(container, end + END.size, tuple(fields))


def encode(form: PreparedForm, sample: Any, content: bytes = UNKNOWN) -> bytearray:
    """Return the record of a sample. `content`: the digest of its extent in the source. Raises InvalidInput for a sample of
    another form."""
    values = values_of(form, sample)
    record = bytearray(form.stride_bytes)
    for field, value in zip(form.fields, values, strict=True):
        kind, array = array_of(field.name, value)
        if (kind, array.dtype.str, array.shape) != (field.kind, field.dtype, field.shape):
            found = f"{kind} {array.dtype} {list(array.shape)}"
            wanted = f"{field.kind} {np.dtype(field.dtype)} {list(field.shape)}"
            mend = ", or give prepare_max_bytes= (--max-bytes)" * (array.shape != field.shape)
            raise other_form(found, wanted, field.name, mend)
        np.ndarray(field.shape, field.dtype, record, field.offset)[...] = array
    END.pack_into(record, form.stride_bytes - END.size, MADE, 0, 0, content)
    return record


def encode_error(form: PreparedForm, error: Exception, content: bytes = UNKNOWN) -> bytearray:
    """Return the record of a sample that could not be made; see `encode`. Errors of the user's code become CorruptData."""
    record, room = bytearray(form.stride_bytes), form.stride_bytes - END.size
    code, message = error_fields(error, room)
    record[: len(message)] = message
    END.pack_into(record, room, FAILED, code, len(message), content)
    return record


def error_fields(error: Exception, room: int) -> tuple[int, bytes]:
    """Return the code of an error, and its message in at most `room` bytes."""
    code = error.code if isinstance(error, CacheError) else CorruptData.code
    text = str(error) if isinstance(error, CacheError) else f"{type(error).__name__}: {error}"
    return code, " ".join(text.split()).encode("utf-8", "replace")[:room]


def error_in(record: bytes | bytearray, key: str) -> CacheError:
    """Return the error that a record holds in place of the sample `key`."""
    room = len(record) - END.size
    state, code, length, _ = END.unpack_from(record, room)
    return kept_error(state, code, record[:length], room, key)


def kept_error(state: int, code: int, message: bytes | bytearray, room: int, key: str) -> CacheError:
    """Return the error that a record keeps in place of the sample `key`. `room`: the bytes of the longest message."""
    if state != FAILED:
        return CorruptData(f"{key}: its prepared record was never written; cachesvc evict drops it")
    text = message.decode("utf-8", "replace")
    if len(message) == room:
        text += "... (there is no room for the rest: give the function this sample)"
    error = from_code(code, f"{key}: {text}")
    error.of_object = True
    return error


def value_of(field: PreparedField, row: np.ndarray[Any, Any]) -> Any:
    """Return the value of a field from its array, which the value keeps."""
    if field.kind == "number":
        return row.item()
    if field.kind == "scalar":
        return row[()]
    return torch.from_numpy(row) if field.kind == "tensor" else row


def contained(form: PreparedForm, values: Sequence[Any]) -> Any:
    """Return values of all fields as the function returned them."""
    if form.container == "value":
        return values[0]
    if form.container == "dict":
        return dict(zip((each.name for each in form.fields), values, strict=True))
    return tuple(values) if form.container == "tuple" else list(values)


def names_of(form: PreparedForm) -> tuple[str, ...]:
    """Return the names of the fields of a form."""
    return tuple(each.name for each in form.fields)


def parts_of(sample: Any) -> tuple[str, tuple[str, ...], Sequence[Any]]:
    """Return a sample's container, the names of its fields and their values."""
    if type(sample) is dict:
        if not all(type(name) is str for name in sample):
            raise InvalidInput(f"prepare= returned a dict with keys that are not text; {_ADVICE}")
        return "dict", tuple(sample), list(sample.values())
    if type(sample) in (tuple, list):
        return type(sample).__name__, tuple(map(str, range(len(sample)))), sample
    return "value", ("value",), [sample]


def check_count(container: str, names: Sequence[str]) -> None:
    """Raise InvalidInput for a sample of no values, or of more than records hold."""
    if not 0 < len(names) <= MAX_FIELDS:
        raise InvalidInput(
            f"prepare= returned {_fields(container, names)}, and records hold 1 to {MAX_FIELDS:,} values: return an"
            " array of many numbers, as np.asarray makes of a list"
        )


def values_of(form: PreparedForm, sample: Any) -> Sequence[Any]:
    """Return the values of a sample in the order of a form's fields. Raises InvalidInput for a sample of other fields."""
    container, names, values = parts_of(sample)
    wanted = names_of(form)
    if container != form.container or {*names} != {*wanted}:
        mend = ", or return an array, as np.asarray makes of a list" * (container in ("list", "tuple"))
        raise other_form(_fields(container, names), _fields(form.container, wanted), mend=mend)
    return [sample[name] for name in wanted] if container == "dict" else values


def _fields(container: str, names: Sequence[str]) -> str:
    if container == "value":
        return "one value"
    if not names:
        return f"an empty {container}"
    return f"a {container} of {', '.join(names) if container == 'dict' and len(names) < 20 else len(names)}"


def array_of(name: str, value: Any) -> tuple[str, np.ndarray[Any, Any]]:
    """Return a value's kind, and the value as an array."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        try:
            return "tensor", value.detach().cpu().resolve_conj().resolve_neg().numpy()
        except TypeError:  # numpy has no bfloat16
            raise InvalidInput(
                f"prepare= returned {value.dtype} for {name}, which records do not hold"
            ) from None
    if type(value) in (bool, int, float):
        try:
            return "number", np.asarray(
                value, {bool: np.bool_, int: np.int64, float: np.float64}[type(value)]
            )
        except OverflowError:
            raise InvalidInput(f"prepare= returned {value} for {name}, beyond 64 bits") from None
    if isinstance(value, (np.ndarray, np.generic)) and _is_kept(value):
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        return kind, np.asarray(value)
    raise InvalidInput(
        f"prepare= returned a {type(value).__module__}.{type(value).__qualname__} for {name}; {_ADVICE}"
        + _SIZED * isinstance(value, (str, bytes, list))
    )


def _is_kept(value: np.ndarray[Any, Any] | np.generic) -> bool:
    """Tell whether records hold such numbers: long doubles have bytes without a meaning, and masks would be lost."""
    dtype = value.dtype
    return dtype.kind in "biufc" and dtype.char not in "gG" and not isinstance(value, np.ma.MaskedArray)


def other_form(found: str, wanted: str, name: str = "", mend: str = "") -> InvalidInput:
    """Return the error of a sample that differs from the first. `mend`: what to do in place of making them alike."""
    of = f" for {name}" if name else ""
    error = InvalidInput(
        f"prepare= returned {found}{of}, and {wanted} for the first sample: make all samples alike{mend}"
    )
    error.of_object = True
    return error
