"""Checks every row of a catalog that comes from a place where others write."""

from __future__ import annotations

import math

import numpy as np

from cachesvc.catalog.catalog import PART_COLUMNS, Catalog
from cachesvc.catalog.columns import Ints, MappedColumns, MappedTexts, check_ascending
from cachesvc.catalog.layout import Columns, Fixed, Indirect, Rows
from cachesvc.catalog.row_syntax import CSV, SYNTAXES
from cachesvc.core.errors import CorruptData
from cachesvc.core.model import extent_of
from cachesvc.sources.columnar.column import ALL_NULL


def check_catalog(catalog: Catalog) -> None:
    """Read every row and raise CorruptData for one that points outside its object or the address space."""
    try:
        _check_pieces(catalog.columns)
        _check_samples(catalog)
        _check_tags(catalog)
        for index in range(len(catalog.extent_sizes)):
            extent = catalog.extent(index)
            if extent != extent_of(extent.pieces):
                raise CorruptData(f"the id of extent {index} is not that of its pieces")
    except (ValueError, IndexError, KeyError, OverflowError, TypeError, SyntaxError) as error:
        raise CorruptData(f"catalog rows are inconsistent: {error!r}") from error


def _check_samples(catalog: Catalog) -> None:
    columns, layout = catalog.columns, catalog.layout
    for name, (dtype, _) in columns.head["columns"].items():
        if dtype != _dtype_of(name):
            raise CorruptData(f"catalog column {name!r} is of type {dtype}")
        if name.endswith(".end"):
            check_ascending(columns[name], name)
    if isinstance(layout, Rows) and catalog.samples:
        lengths = np.maximum(layout.lengths, 0)
        if layout.addresses.min() < 0 or (lengths > catalog.space_bytes - layout.addresses).any():
            raise CorruptData("a sample lies outside the address space")
        begins = layout.addresses[lengths > 0]
        _check_held(catalog, begins, begins + lengths[lengths > 0])
        if layout.syntax:
            _check_text_rows(catalog, layout.syntax)
    if isinstance(layout, Fixed):
        _check_runs(catalog, layout)
    if isinstance(layout, Indirect) and (np.diff(catalog.extent_first) > catalog.extent_sizes // 4 - 2).any():
        raise CorruptData("a shard is too small for the offsets of its samples")
    if isinstance(layout, Columns):
        _check_chunks(catalog, layout)


def _check_text_rows(catalog: Catalog, syntax: str) -> None:
    columns, headers = catalog.columns, catalog.csv_headers
    fields = [field for header in headers for field in header.fields]
    if syntax not in SYNTAXES or not set(fields) <= set(range(len(catalog.fields))):
        raise CorruptData("rows of text are of no known syntax, or their headers name no field")
    chosen, first = columns["extent.header"], columns["line.first"]
    if len(chosen) != len(catalog.extent_sizes) or not (chosen >= 0).all():
        raise CorruptData("an extent of rows has no header")
    if syntax == CSV and chosen.max() >= len(headers):
        raise CorruptData("an extent of rows has no header")
    if not 0 < len(first) == len(columns["line.from"]) or first[0] or (np.diff(first) <= 0).any():
        raise CorruptData("the line numbers of rows are inconsistent")


def _check_runs(catalog: Catalog, layout: Fixed) -> None:
    first, slot, objects = layout.runs_first, layout.runs_slot, catalog.columns["run.object"]
    if not 0 < len(first) == len(slot) == len(objects) or first[0] or (np.diff(first) <= 0).any():
        raise CorruptData("runs of records are inconsistent")
    if first[-1] >= catalog.samples or not 0 <= objects.min() <= objects.max() < catalog.objects:
        raise CorruptData("a run of records has no object, or no sample")
    last = layout.slots(np.append(first[1:], catalog.samples) - 1)
    if layout.stride_bytes <= 0 or slot.min() < 0 or last.max() > catalog.space_bytes // layout.stride_bytes:
        raise CorruptData("a run of records lies outside the address space")
    _check_held(catalog, slot * layout.stride_bytes, last * layout.stride_bytes + layout.record_bytes)
    item = np.dtype(layout.dtype)
    if item.hasobject or math.prod((item.itemsize, *layout.shape)) != layout.record_bytes:
        raise CorruptData("the size of records is not that of their type and shape")


def _check_chunks(catalog: Catalog, layout: Columns) -> None:
    """Raise CorruptData for chunks that name no schema, buffer or constant. Where values lie, their reader checks."""
    schemas, address = layout.chunk_schema, layout.chunk_address
    if not 0 <= schemas.min() <= schemas.max() < len(layout.schemas):
        raise CorruptData("a chunk of rows has no schema")
    if address.size and (address.min() < ALL_NULL or address.max() > catalog.space_bytes):
        raise CorruptData("a buffer lies outside the address space")
    names = {field.name for field in catalog.fields}
    for number, columns in enumerate(layout.schemas):
        mine, at = address[schemas == number], 0
        if sum(column.buffers for column in columns) > address.shape[1]:
            raise CorruptData("a schema has more buffers than its chunks")
        if {column.name for column in columns} != names or len(columns) != len(names):
            raise CorruptData("a schema has other columns than the dataset")
        for column in columns:
            if column.kind == "constant" and mine[:, at].max(initial=-1) >= len(layout.constants):
                raise CorruptData("a chunk of rows names no value of a folder")
            at += column.buffers


def _check_held(catalog: Catalog, begins: Ints, ends: Ints) -> None:
    """Raise CorruptData for a range that reaches into a gap between extents: a read there kills the process."""
    starts, stops = catalog.extent_starts, catalog.extent_starts + catalog.extent_sizes
    gaps = np.flatnonzero(np.append(starts[1:] != stops[:-1], True))
    until = stops[gaps][np.searchsorted(gaps, np.arange(len(starts)))]
    first = np.searchsorted(starts, begins, "right") - 1
    if (first < 0).any() or (ends > until[first]).any():
        raise CorruptData("a sample lies between extents")


def _check_tags(catalog: Catalog) -> None:
    columns, classes = catalog.columns, len(MappedTexts(catalog.columns, "class"))
    coded = [
        (columns[f"tag.{at}.code"], len(MappedTexts(columns, f"tag.{at}.values")))
        for at in _tags(catalog, "text")
    ]
    if "label" in columns:
        coded.append((columns["label"], classes))
    if any(codes.min() < -1 or codes.max() >= names for codes, names in coded):
        raise CorruptData("a label or tag names no value")
    rows = [len(codes) for codes, _ in coded]
    rows += [len(columns[f"tag.{at}.number"]) for at in _tags(catalog, "number")]
    rows += [len(columns["key.end"])] if "key.end" in columns else []
    rows += [len(catalog.labels)] if catalog.labels is not None else []
    if set(rows) - {catalog.samples}:
        raise CorruptData("labels, tags or keys are not one per sample")
    if "object.name.end" in columns and len(columns["object.name.end"]) != catalog.objects:
        raise CorruptData("names are not one per object")


def _tags(catalog: Catalog, kind: str) -> list[int]:
    return [at for at, (_, found) in enumerate(catalog.columns.head["tags"]) if found == kind]


def _dtype_of(name: str) -> str:
    if name.endswith(".number"):
        return "<f8"
    if name == "label" or name.endswith(".code"):
        return "<i4"
    return "|u1" if name.endswith((".text", ".codec", ".id", "label.set")) else "<i8"


def _check_pieces(columns: MappedColumns) -> None:
    objects, offsets = columns["piece.object"], columns["piece.offset"]
    lengths, codecs = columns["piece.length"], columns["piece.codec"]
    if len(objects) and not 0 <= objects.min() <= objects.max() < len(columns["object.size"]):
        raise CorruptData("a piece names an object that is not listed")
    sizes = columns["object.size"][objects]
    stored, tails = (columns[name] if name in columns else np.zeros_like(sizes) for name in PART_COLUMNS)
    wrong = (
        (offsets < 0) | (lengths < 0) | (codecs >= len(columns.head["codecs"])) | (stored < 0) | (tails < 0)
    )
    wrong |= (stored > 0) & ((codecs == 0) | (stored > sizes - offsets) | (tails > sizes))
    if (wrong | ((codecs == 0) & (lengths > sizes - offsets))).any():
        raise CorruptData("a piece lies outside its object")
