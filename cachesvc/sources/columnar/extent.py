"""Writes arrays of Arrow as an extent of buffers, each at a place that follows from the room it was given.

Whoever knows the rooms knows the places, so that a catalog can state addresses before a row is decoded. A text's offsets
count from their own beginning, and its bytes lie behind them. Offsets and codes are u32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cachesvc.core.errors import CorruptData
from cachesvc.sources.columnar.arrow_types import U32
from cachesvc.sources.columnar.column import ALL_NULL, BUFFERS, NO_BUFFER, VALIDITY, Column, firsts

MAX_BYTES = 0xFFFFFFFF
"""The largest extent: offsets are u32."""
ALIGNED_BYTES = 8
Values = npt.NDArray[Any]
Part = list[Values]


def decoded(column: Column) -> Column:
    """Return the column as `ExtentWriter` writes it: u32 offsets, and codes for each text, whose values may lie once."""

    def change(node: Column) -> Column:
        if node.kind == "list":
            return Column(node.name, node.kind, node.means, U32, children=node.children)
        if node.kind == "text":
            values = Column("", node.kind, node.means, U32)
            return Column(node.name, "coded", dtype=U32, children=(values,))
        return node

    return column.mapped(change)


def places(rooms: Sequence[int]) -> tuple[list[int], int]:
    """Return where each buffer lies in its extent, given the room in bytes for each, and the size of all. `NO_BUFFER`
    and `ALL_NULL` stay what they are."""
    found, at = [], 0
    for room in rooms:
        found.append(at if room >= 0 else room)
        at += -(-max(0, room) // ALIGNED_BYTES) * ALIGNED_BYTES
    return found, at


def addresses(columns: Sequence[Column], found: Sequence[int]) -> list[int]:
    """Return the places as a catalog states them: a text's bytes are addressed from where its offsets begin."""
    out, at = list(found), 0
    for column in columns:
        for node in column.nodes():
            if node.kind == "text":
                out[at + 2] = out[at + 1]
            at += len(BUFFERS[node.kind])
    return out


class ExtentWriter:
    """Collects the arrays of some columns, and writes them as one extent. Raises CorruptData for more than its rooms."""

    def __init__(self, arrow: Any, columns: Sequence[Column], rooms: Sequence[int], where: str) -> None:
        """`columns` are `decoded`. `where` names the data in errors."""
        self._arrow, self._columns, self._rooms, self._where = arrow, columns, rooms, where
        self._firsts = firsts(columns)
        self._parts: list[Part] = [[] for _ in rooms]
        self._used = [0] * len(rooms)
        self._counts: dict[int, int] = {}

    def add(self, number: int, array: Any, kind: Any) -> None:
        """Add an array to a column: values of `kind`, Arrow's plain type, or of one that is cast to it without loss."""
        self._add(self._columns[number], self._firsts[number], array, kind)

    def extent(self, rows: int, size_bytes: int) -> Values:
        """Return the extent as bytes, uint8[size_bytes]. Raises CorruptData where a column does not have `rows` values."""
        found, _ = places(self._rooms)
        out = np.zeros(size_bytes, np.uint8)
        for column, first in zip(self._columns, self._firsts, strict=False):
            absent = column.kind == "null" or self._rooms[first] == ALL_NULL
            if self._counts.get(first, 0) != rows and not absent:
                raise CorruptData(f"{self._where}: column {column.name!r} holds less than its footer says")
            at = first
            for node in column.nodes():
                for name in BUFFERS[node.kind]:
                    if found[at] >= 0 and self._parts[at] and name != "bytes":
                        raw = self._raw(name, node, at)
                        out[found[at] : found[at] + len(raw)] = raw
                    at += 1
        return out

    def _raw(self, name: str, node: Column, at: int) -> Values:
        """Return the bytes of a buffer; those of a text's offsets with the text behind them."""
        whole = np.concatenate(self._parts[at])
        if name in ("validity", "bits"):
            return np.packbits(whole, bitorder="little")
        if name != "offsets":
            return whole.view(np.uint8)
        bounds = np.zeros(len(whole) + 1, np.int64)
        np.cumsum(whole, out=bounds[1:])
        if node.kind != "text":
            return bounds.astype(U32).view(np.uint8)
        bounds += np.dtype(U32).itemsize * len(bounds)
        return np.concatenate([bounds.astype(U32).view(np.uint8), *self._parts[at + 1]])

    def _take(self, at: int, values: Values, bits: int) -> None:
        self._used[at] += bits
        if self._used[at] > 8 * self._rooms[at]:
            raise CorruptData(f"{self._where} holds more than its footer says")
        self._parts[at].append(values)

    def _add(self, column: Column, first: int, array: Any, kind: Any) -> None:
        types = self._arrow.types
        if isinstance(array, self._arrow.ExtensionArray):
            array = array.storage
        if isinstance(kind, self._arrow.BaseExtensionType):
            kind = kind.storage_type
        if types.is_null(array.type) and column.kind != "null":
            array = self._arrow.nulls(len(array), kind)
        if column.kind == "null" or self._rooms[first] == ALL_NULL:
            return
        count = len(array)
        self._counts[first] = self._counts.get(first, 0) + count
        self._add_validity(first, array)
        child = first + len(BUFFERS[column.kind])
        if column.kind == "fixed":
            self._add_fixed(column, first + 1, array, kind)
        elif column.kind == "bool":
            bits = array.cast(self._arrow.bool_()).fill_null(False).to_numpy(zero_copy_only=False)
            self._take(first + 1, bits, len(bits))
        elif column.kind == "coded":
            self._add_text(first, child, array)
        elif column.kind == "list" and types.is_map(array.type):
            self._add_map(column, first, child, array, kind)
        elif column.kind in ("list", "fixed list"):
            bounds = list_bounds(self._arrow, array)
            if column.kind == "list":
                self._take(first + 1, np.diff(bounds), 32 * count)
            items = array.values.slice(bounds[0], bounds[-1] - bounds[0])
            self._add(column.children[0], child, items, kind.value_type)
        else:
            self._add_struct(column, child, array, kind)

    def _add_validity(self, first: int, array: Any) -> None:
        room = self._rooms[first + VALIDITY]
        if room == NO_BUFFER:
            if array.null_count:
                raise CorruptData(f"{self._where} holds nulls, and its footer says that there are none")
            return
        valid = array.is_valid().to_numpy(zero_copy_only=False)
        self._take(first + VALIDITY, valid, len(valid))

    def _add_fixed(self, column: Column, at: int, array: Any, kind: Any) -> None:
        if self._arrow.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        if array.type != kind:
            array = array.cast(kind)
        width = np.dtype(column.dtype).itemsize
        held = array.buffers()[1]
        if held is None or not held.size:
            values = np.zeros(len(array) * width, np.uint8)
        else:
            values = np.frombuffer(held, np.uint8, len(array) * width, array.offset * width)
        self._take(at, values, 8 * len(values))

    def _add_text(self, first: int, child: int, array: Any) -> None:
        """Add texts or bytes: values, or codes and the distinct values."""
        before, coded = self._counts.get(child, 0), self._rooms[first + 1] >= 0
        if self._arrow.types.is_dictionary(array.type) and not coded:
            array = array.dictionary_decode()
        if self._arrow.types.is_dictionary(array.type):
            codes = array.indices.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
            array = array.dictionary
        else:
            codes = np.arange(len(array))
        if coded:
            self._take(first + 1, (codes + before).astype(U32), 32 * len(codes))
        offsets, data = text_parts(self._arrow, array)
        self._counts[child] = before + len(array)
        self._take(child + 1, np.diff(offsets), 32 * len(array) + 8 * len(data))
        self._parts[child + 2].append(data)

    def _add_map(self, column: Column, first: int, child: int, array: Any, kind: Any) -> None:
        bounds = np.asarray(array.offsets.to_numpy(zero_copy_only=False), np.int64)
        self._take(first + 1, np.diff(bounds), 32 * len(array))
        pair, at = column.children[0], child + len(BUFFERS["struct"])
        low, count = int(bounds[0]), int(bounds[-1] - bounds[0])
        self._counts[child] = self._counts.get(child, 0) + count
        if self._rooms[child] >= 0:
            self._take(child, np.ones(count, bool), count)
        parts = ((array.keys, kind.key_type), (array.items, kind.item_type))
        for node, (values, inner) in zip(pair.children, parts, strict=True):
            self._add(node, at, values.slice(low, count), inner)
            at += node.buffers

    def _add_struct(self, column: Column, child: int, array: Any, kind: Any) -> None:
        for node in column.children:
            inner = kind.field(kind.get_field_index(node.name)).type
            at = array.type.get_field_index(node.name)
            part = array.field(at) if at >= 0 else self._arrow.nulls(len(array), inner)
            self._add(node, child, part, inner)
            child += node.buffers


def text_parts(arrow: Any, texts: Any) -> tuple[npt.NDArray[np.int64], Values]:
    """Return the offsets of texts or bytes, int64 [n + 1], in the bytes that follow, uint8, and those bytes."""
    if not len(texts):
        return np.zeros(1, np.int64), np.zeros(0, np.uint8)
    large = texts.cast(arrow.large_binary())
    offsets = np.frombuffer(large.buffers()[1], np.int64, len(large) + 1, 8 * large.offset)
    held = large.buffers()[2]
    data = np.frombuffer(held, np.uint8) if held is not None and held.size else np.zeros(0, np.uint8)
    return offsets - offsets[0], data[offsets[0] : offsets[-1]]


def list_bounds(arrow: Any, lists: Any) -> npt.NDArray[np.int64]:
    """Return where each list begins in `values`, and where the last one ends."""
    if arrow.types.is_fixed_size_list(lists.type):
        size: int = lists.type.list_size
        return size * (int(lists.offset) + np.arange(len(lists) + 1, dtype=np.int64))
    return np.asarray(lists.offsets.to_numpy(zero_copy_only=False), np.int64)
