"""Builds a catalog file from a survey: adopts the one beside the data, or compiles the objects by their format."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from cachesvc.catalog.address_space import AddressSpace
from cachesvc.catalog.catalog import BUILDER_VERSION, Catalog
from cachesvc.catalog.column_file import verify_digest, write_columns
from cachesvc.catalog.columns import TextColumn, ints
from cachesvc.catalog.compiler import Draft, ExtentBytes, Inputs, ListedObject, names_of
from cachesvc.catalog.content_sniffing import json_rows, look, warning
from cachesvc.catalog.expiry import UNUSED_BYTES
from cachesvc.catalog.formats.all_formats import FORMATS
from cachesvc.catalog.labels.hive_partitions import hive_notes
from cachesvc.catalog.survey import Survey, provisional_id
from cachesvc.catalog.validation import check_catalog
from cachesvc.core.errors import CacheError, CorruptData, NotFound, OutOfSpace
from cachesvc.core.model import MAX_EXTENTS, DatasetId, Extent, ObjectVersion
from cachesvc.core.safe_text import redacted
from cachesvc.sources.source import Source

__all__ = ["DirectBytes", "build", "provisional"]

_DIRECT_THREADS = 8
_MAX_NOTES = 100
"""Limit of a catalog's notes; each may hold a path of 4 KB."""
_SHOWN = 4
"""Number of names in a note."""
_READ_BYTES = 8 << 20
_BESIDE_BYTES = 64 << 20
"""A catalog left beside less data than this, of many small files, may be larger than the data."""
_Sources = Callable[[str], Source]
_log = logging.getLogger(__name__)


def build(
    survey: Survey,
    into: str,
    sources: _Sources,
    data: ExtentBytes,
    progress: Callable[[int, int], None],
    most_beside: int = MAX_EXTENTS,
) -> tuple[str, ...]:
    """Write the catalog at `into` (temporary name, fsync, rename) and return its notes, for people.

    `progress(done, total)` is in bytes of the data: formats count what they index, objects or bytes, and the same share of
    the bytes counts as done. A catalog left beside the data is taken where it has at most `most_beside` extents. Raises
    NotFound for data without a whole sample, and the errors of the format's compiler and of the source.
    """
    if survey.beside is not None and _adopt(survey, survey.beside, into, sources, most_beside):
        return ()

    def fetch(version: ObjectVersion, offset: int, length: int) -> bytes:
        buffer = bytearray(length)
        if length:
            sources(version.uri).read_into(version, offset, memoryview(buffer))
        return bytes(buffer)

    size_bytes = sum(entry.object.size_bytes for entry in survey.entries)

    def indexed(done: int, total: int) -> None:
        progress(done * size_bytes // max(1, total), size_bytes)

    inputs = Inputs(survey.uri, survey.entries, survey.options, fetch, data, indexed)
    opaque, documents = list[int](), list[str]()
    if survey.found_out and survey.format == "files":
        inputs, opaque = look(inputs)
        is_lines, documents = json_rows(inputs)
        if is_lines:
            survey = replace(survey, options=replace(survey.options, format="jsonl"))
            inputs = replace(inputs, options=survey.options)
    draft = FORMATS[survey.format].compile(inputs)
    draft.notes[:0] = [
        *survey.notes,
        *_left_out(survey, draft),
        *_litter(survey.litter),
        *warning(inputs, set(opaque).difference(draft.unrelated)),
        *documents,
        *hive_notes(survey.entries, draft),
    ]
    if not draft.extent_first[-1]:
        raise NotFound(
            f"{survey.uri} holds no whole sample in {size_bytes:,} bytes{FORMATS[survey.format].if_empty}"
        )
    if len(draft.notes) > _MAX_NOTES:
        draft.notes[_MAX_NOTES - 1 :] = [f"and {len(draft.notes) - _MAX_NOTES + 1:,} notes more like these"]
    _write(survey, draft, into)
    return tuple(redacted(note) for note in draft.notes)


def _litter(names: Sequence[str]) -> list[str]:
    """Return the note on files and folders of operating systems and tools."""
    if not names:
        return []
    more = f" and {len(names) - _SHOWN} names more" if len(names) > _SHOWN else ""
    return [f"left out, as left by operating systems and tools: {', '.join(names[:_SHOWN])}{more}"]


def _left_out(survey: Survey, draft: Draft) -> list[str]:
    """Return the note on listed objects that are not part of the dataset."""
    count, listed = survey.left_out + len(draft.unrelated), survey.left_out + len(survey.entries)
    if not count:
        return []
    first = survey.first_left_out or survey.entries[min(draft.unrelated)].object.uri
    return [f"{count:,} of {listed:,} objects are no {survey.format} and were left out, the first is {first}"]


def provisional(survey: Survey, extents: Sequence[Extent], directory: str) -> DatasetId:
    """Write a catalog of extents without samples into `directory`, named by its id, and return the id.

    A format that carries no index reads its data through these extents while it is indexed. The id derives from the
    survey's.
    """
    versions = list(dict.fromkeys(piece.object for extent in extents for piece in extent.pieces))
    index = {version: number for number, version in enumerate(versions)}
    space = AddressSpace(versions)
    for extent in extents:
        space.add((index[piece.object], piece.offset, piece.length) for piece in extent.pieces)
    name = provisional_id(survey.id)
    entries = tuple(ListedObject(version, version.uri) for version in versions)
    none = np.zeros(0, np.int64)
    rows = {"row.address": none, "row.length": none}
    draft = Draft("rows", space, (), np.zeros(len(extents) + 1, np.int64), columns=rows)
    _write(replace(survey, id=name, entries=entries), draft, f"{directory}/{name}.lmdb")
    return name


def _write(survey: Survey, draft: Draft, into: str) -> None:
    columns = {**draft.space.columns(), **draft.columns, "extent.first": draft.extent_first}
    versions = [entry.object for entry in survey.entries]
    prefix = os.path.commonprefix([version.uri for version in versions])  # noqa: RUF071
    columns.update(TextColumn(version.uri[len(prefix) :] for version in versions).columns("object.uri"))
    columns.update(TextColumn(version.etag for version in versions).columns("object.etag"))
    columns.update(TextColumn(draft.classes).columns("class"))
    names = names_of(survey.entries)
    if any(name != entry.name for name, entry in zip(names, survey.entries, strict=True)):
        columns.update(TextColumn(names).columns("object.name"))
    columns["object.size"] = ints(version.size_bytes for version in versions)
    if draft.keys is not None:
        columns.update(draft.keys.columns("key"))
    tags = []
    for number, (name, column) in enumerate(draft.tags.items()):
        tags.append((name, "number" if isinstance(column, np.ndarray) else "text"))
        if isinstance(column, np.ndarray):
            columns[f"tag.{number}.number"] = column
        else:
            columns[f"tag.{number}.code"] = column[0]
            columns.update(column[1].columns(f"tag.{number}.values"))
    head = {
        "version": BUILDER_VERSION,
        "id": survey.id,
        "uri": survey.uri,
        "uri_prefix": prefix,
        "format": survey.format,
        "extent_bytes": survey.options.extent_bytes,
        "samples": int(draft.extent_first[-1]),
        "fields": [(field.name, field.encoding) for field in draft.fields],
        "layout": {"kind": draft.kind, **draft.head},
        "codecs": draft.space.codecs,
        "tags": tags,
        "label_width": draft.label_width,
        "notes": draft.notes,
    }
    write_columns(into, head, columns)


class DirectBytes:
    """Implements `ExtentBytes` from the source, for use without a daemon. Holds one extent in memory."""

    def __init__(self, sources: _Sources) -> None:
        self._sources = sources
        self._extents: Sequence[Extent] = ()
        self._held, self._bytes = -1, memoryview(b"")

    def declare(self, extents: Sequence[Extent]) -> None:
        """Remember the extents."""
        self._extents = extents

    def read(self, extent: int, offset: int, length: int) -> bytes:
        """Return bytes of an extent, which is fetched whole, in parallel ranges, unless it is held."""
        if extent != self._held:
            self._held, self._bytes = -1, memoryview(b"")
            self._bytes = self._fetch(self._extents[extent])
            self._held = extent
        return bytes(self._bytes[offset : offset + length])

    def _fetch(self, extent: Extent) -> memoryview:
        whole, begin, parts = memoryview(bytearray(extent.size_bytes)), 0, []
        for piece in extent.pieces:
            assert not piece.codec, "formats with compressed objects carry an index"
            for at in range(0, piece.length, _READ_BYTES):
                end = min(at + _READ_BYTES, piece.length)
                parts.append((piece.object, piece.offset + at, whole[begin + at : begin + end]))
            begin += piece.length
        with ThreadPoolExecutor(_DIRECT_THREADS, "direct") as pool:
            for _ in pool.map(lambda part: self._sources(part[0].uri).read_into(*part), parts):
                pass
        return whole


def _adopt(survey: Survey, beside: ObjectVersion, into: str, sources: _Sources, most_extents: int) -> bool:
    """Copy the catalog left beside the data to `into` if it is whole, of this version, and names these objects only:
    anyone who may write there may have forged it.

    Returns False, and logs why, where it is not used.
    """
    temporary = f"{into}.{os.getpid()}.beside"
    try:
        _check_beside(survey, beside, os.path.dirname(into) or ".")
        _download(beside, temporary, sources(beside.uri))
        verify_digest(temporary)
        catalog = Catalog.open(temporary)
        if catalog.id != survey.id or catalog.format not in survey.formats:
            raise CorruptData(f"its version is {catalog.id}, the data's is {survey.id}")
        if catalog.objects != len(survey.entries) or any(
            catalog.object(index) != entry.object for index, entry in enumerate(survey.entries)
        ):
            raise CorruptData("its objects are not those of the listing")
        if len(catalog.extent_sizes) > most_extents:
            raise CorruptData(f"it has more than {most_extents:,} extents")
        check_catalog(catalog)
        os.replace(temporary, into)
    except (CacheError, OSError) as error:  # OSError: no room for it, though perhaps for a built one
        _log.warning("%s is not used: %s", beside.uri, error)
        return False
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
    return True


def _check_beside(survey: Survey, beside: ObjectVersion, directory: str) -> None:
    """Raise CorruptData for a catalog larger than its data, which costs more to fetch than to build.

    Raises OutOfSpace, or OSError, where it would take more than half of the free space of its disk.
    """
    size, data = beside.size_bytes, sum(entry.object.size_bytes for entry in survey.entries)
    most = min(max(data, _BESIDE_BYTES), UNUSED_BYTES)
    if size > most:
        raise CorruptData(f"it has {size:,} bytes; one beside {data:,} bytes of data has {most:,} at most")
    disk = os.statvfs(directory)
    free_bytes = disk.f_bavail * disk.f_frsize
    if size > free_bytes // 2:
        raise OutOfSpace(f"it has {size:,} bytes, {directory} {free_bytes:,} left")


def _download(version: ObjectVersion, path: str, source: Source) -> None:
    with open(path, "wb") as file:
        for offset in range(0, version.size_bytes, _READ_BYTES):
            buffer = bytearray(min(_READ_BYTES, version.size_bytes - offset))
            source.read_into(version, offset, memoryview(buffer))
            file.write(buffer)
        file.flush()
        os.fsync(file.fileno())
