"""Maps Arrow columns to fields of samples: the types that are read, and the position of an array's values in its buffers.

pyarrow is optional, so each function gets it as the argument `arrow`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cachesvc.sources.parquet.nulls import marked


@dataclass(frozen=True, slots=True)
class Leaf:
    """One column of values, which is a field of samples.

    `column`: its index in the file. `width`: bytes of a number or of a fixed-size binary value; 0 for text and bytes of any
    length. `items`: numbers in each list of a fixed-size list type; else 0.
    """

    name: str
    encoding: str
    column: int
    width: int
    items: int


@dataclass(slots=True)
class UnreadColumns:
    """`names`: the columns of types that are not read, with their types. `columns`: the number of all columns."""

    names: list[str]
    columns: int


def leaves_of(arrow: Any, schema: Any) -> tuple[list[Leaf], UnreadColumns]:
    """Return the leaves of a schema in the order of the file's columns: nested types depth first."""
    found: list[Leaf] = []
    unread = UnreadColumns([], 0)

    def walk(name: str, kind: Any) -> None:
        if arrow.types.is_struct(kind):
            for field in kind:
                walk(f"{name}.{field.name}", field.type)
            return
        width, items, encoding = _kind(arrow, _storage(arrow, kind))
        if encoding:
            encoding += _shape(arrow, kind)
            found.append(Leaf(name, encoding, unread.columns, width, items))
        else:
            unread.names.append(f"{name} ({kind})")
        unread.columns += _columns(arrow, kind)

    for field in schema:
        walk(field.name, field.type)
    return found, unread


def _storage(arrow: Any, kind: Any) -> Any:
    return kind.storage_type if isinstance(kind, arrow.BaseExtensionType) else kind


def _shape(arrow: Any, kind: Any) -> str:
    """Return the suffix of a tensor's encoding: its shape as stored, and its permutation if there is one."""
    if not isinstance(kind, arrow.FixedShapeTensorType):
        return ""
    sides = [kind.shape, *([kind.permutation] if kind.permutation else [])]
    return "".join(":" + ",".join(map(str, each)) for each in sides)


def _columns(arrow: Any, kind: Any) -> int:
    kind = _storage(arrow, kind)
    nested = [kind.field(at).type for at in range(kind.num_fields)]
    return sum(_columns(arrow, each) for each in nested) if nested else 1


def _kind(arrow: Any, kind: Any) -> tuple[int, int, str]:
    """Return a leaf's width, items and encoding for a type; the encoding is "" for types that are not read."""
    types = arrow.types
    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_string(kind) or types.is_large_string(kind) or str(kind) == "string_view":
        return 0, 0, "str"
    if types.is_fixed_size_binary(kind):  # pyarrow always expands a dictionary of them
        return kind.byte_width, 0, "bytes"
    if types.is_binary(kind) or types.is_large_binary(kind) or str(kind) == "binary_view":
        return 0, 0, "bytes"
    if _number(arrow, kind):
        return _dtype(arrow, kind).itemsize, 0, "bool" if types.is_boolean(kind) else _dtype(arrow, kind).name
    listed = types.is_list(kind) or types.is_large_list(kind)
    listed |= types.is_fixed_size_list(kind) and kind.list_size > 0  # pyarrow reads none of 0
    if listed and _number(arrow, kind.value_type):
        dtype = _dtype(arrow, kind.value_type)
        items = kind.list_size if types.is_fixed_size_list(kind) else 0
        return dtype.itemsize, items, f"array:{'?' if types.is_boolean(kind.value_type) else dtype.str}"
    return 0, 0, ""


def _number(arrow: Any, kind: Any) -> bool:
    return bool(arrow.types.is_integer(kind) or arrow.types.is_floating(kind) or arrow.types.is_boolean(kind))


def _dtype(arrow: Any, kind: Any) -> np.dtype[Any]:
    return np.dtype(np.uint8 if arrow.types.is_boolean(kind) else kind.to_pandas_dtype())


def values_of(arrow: Any, chunk: Any, leaf: Leaf, coded: bool) -> tuple[Any, Any, Any]:
    """Return the begins, the lengths (-1 for null) and the bytes of an array's values. Values of a `coded` leaf, which
    has a dictionary, occur once in the bytes."""
    if isinstance(chunk.type, arrow.BaseExtensionType):
        chunk = chunk.storage
    absent = chunk.is_null().to_numpy(zero_copy_only=False)
    if not leaf.width:
        codes, values = np.arange(len(chunk)), chunk
        if coded:
            chunk = chunk if arrow.types.is_dictionary(chunk.type) else chunk.dictionary_encode()
            codes = chunk.indices.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
            values = chunk.dictionary
        values = values.cast(arrow.large_binary())
        offsets = _held(values, np.dtype("<i8"), len(values) + 1)
        held = values.buffers()[2]
        data = np.frombuffer(held, np.uint8) if held is not None and held.size else np.zeros(0, np.uint8)
        data = data[offsets[0] : offsets[-1]]
        ends = np.append(offsets, offsets[-1:])  # if all are null, code 0 has no value
        begins = offsets[codes] - offsets[0]
        lengths = ends[codes + 1] - offsets[codes]
    elif leaf.encoding.startswith("array:"):
        bounds = _bounds(arrow, chunk)
        items = chunk.values.slice(bounds[0], bounds[-1] - bounds[0])
        bounds = bounds - bounds[0]
        data = _plain(arrow, items, leaf.width)
        begins, lengths = bounds[:-1] * leaf.width, np.diff(bounds) * leaf.width
        if items.null_count:
            there = items.is_valid().to_numpy(zero_copy_only=False)
            nulls = np.diff(np.append(0, np.cumsum(~there))[bounds])
            holed = (nulls > 0) & ~absent
            numbers = np.where(there[:, None], data.reshape(-1, leaf.width), np.uint8(0))
            begins, lengths, data = marked(numbers, bounds, there, holed)
    else:
        if arrow.types.is_dictionary(chunk.type):
            chunk = chunk.dictionary_decode()
        data = _plain(arrow, chunk, leaf.width)
        begins = np.arange(len(chunk), dtype=np.int64) * leaf.width
        lengths = np.full(len(chunk), leaf.width, np.int64)
    return begins, np.where(absent, -1, lengths), data


def _bounds(arrow: Any, lists: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return where each list begins in `values`, and where the last one ends."""
    if arrow.types.is_fixed_size_list(lists.type):
        size: int = lists.type.list_size
        return size * (int(lists.offset) + np.arange(len(lists) + 1, dtype=np.int64))
    return np.asarray(lists.offsets.to_numpy(zero_copy_only=False), np.int64)


def _plain(arrow: Any, numbers: Any, width: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    if arrow.types.is_boolean(numbers.type):
        numbers = numbers.cast(arrow.uint8())
    return _held(numbers, np.dtype(f"V{width}"), len(numbers)).view(np.uint8)


def _held(array: Any, dtype: np.dtype[Any], count: int) -> np.ndarray[Any, Any]:
    """Return the items of an array's fixed-width buffer from its offset on; null items are undefined."""
    found = array.buffers()[1]
    if found is None or not found.size:
        return np.zeros(count, dtype)
    return np.frombuffer(found, dtype, count, array.offset * dtype.itemsize)
