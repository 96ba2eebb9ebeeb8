"""From URIs to a catalog file: survey (list, recognise, name the version), then build (compile, write)."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace

import numpy as np

from cachesvc.catalog.catalog import BUILDER_VERSION, Catalog
from cachesvc.catalog.choice import choose
from cachesvc.catalog.columns import TextColumn, ints, verify_digest, write_columns
from cachesvc.catalog.contents import look, warning
from cachesvc.catalog.detect import check_all_chosen, listing, name_of
from cachesvc.catalog.formats import files, fixed, mds, parquet, tokens, webdataset
from cachesvc.catalog.hive import hive_notes
from cachesvc.catalog.inputs import Draft, Entry, ExtentBytes, Inputs, Options
from cachesvc.catalog.space import Space
from cachesvc.catalog.unused import UNUSED_BYTES
from cachesvc.core.errors import CacheError, CorruptData, InvalidInput, NotFound, OutOfSpace
from cachesvc.core.model import EXTENT_BYTES, MAX_EXTENTS, PAGE_BYTES, DatasetId, Extent, ObjectVersion
from cachesvc.core.safe_text import redacted
from cachesvc.sources.source import Source

__all__ = ["DirectBytes", "ExtentBytes", "Options", "Survey", "build", "provisional", "survey"]

_log = logging.getLogger(__name__)
_DIRECT_READ_BYTES = 8 << 20
_DIRECT_THREADS = 8
_BESIDE_BYTES = 64 << 20
"""A catalog left beside less data than this, of many small files, may be larger than the data."""
_MAX_NOTES = 100
"""Of a catalog; each may hold a path of 4 KB."""
_Sources = Callable[[str], Source]

_COMPILE: dict[str, Callable[[Inputs], Draft]] = {
    "files": files.compile_files,
    "webdataset": webdataset.compile_webdataset,
    "mds": mds.compile_mds,
    "parquet": parquet.compile_parquet,
    "records": fixed.compile_records,
    "tokens": tokens.compile_tokens,
}
_SHORTER = {
    "records": "; give a smaller record_bytes or dtype",
    "tokens": "; give a smaller seq_len or overlap",
}
_MEANT_FOR = {
    "dtype": ("records", "tokens"),
    "seq_len": ("tokens",),
    "overlap": ("tokens",),
    "record_bytes": ("records",),
    "header_bytes": ("records", "tokens"),
    "labels_from": ("files",),
    "label_kind": ("files", "webdataset"),
}


@dataclass(frozen=True, slots=True)
class Survey:
    """A dataset version before it is compiled. `options.format` is resolved, `found_out` where it was not given.
    `left_out` objects are listed and no part of it, `first_left_out` is the URI of one. `beside` is a catalog that was
    left with the data, not yet believed."""

    id: DatasetId
    uri: str
    options: Options
    entries: tuple[Entry, ...]
    beside: ObjectVersion | None
    found_out: bool = False
    left_out: int = 0
    first_left_out: str = ""

    @property
    def format(self) -> str:
        """The format's name."""
        return self.options.format


def survey(uris: Sequence[str], options: Options, sources: _Sources) -> Survey:
    """List, find the format, compute the version's digest; reads no data. Raises NotFound for an empty
    dataset or an empty part of it, InvalidInput for unknown, ambiguous or several formats, and what the source raises.
    """
    options = replace(options, extent_bytes=options.extent_bytes or EXTENT_BYTES)
    if not uris or options.extent_bytes < PAGE_BYTES or options.extent_bytes % PAGE_BYTES:
        raise InvalidInput(f"a dataset needs a URI, and extent_bytes in multiples of {PAGE_BYTES}")
    uri = name_of(uris)
    listed = listing(uris, sources)
    choice = choose(uri, listed.entries, listed.zarrs, options)
    resolved = replace(options, format=choice.format)
    entries = tuple(choice.entries)
    if not entries:
        raise NotFound(f"{uri} holds no {resolved.format} data among its {len(listed.entries)} objects")
    check_all_chosen(uris, listed, entries, resolved.format)
    _check_options(uri, resolved)
    left_out = len(listed.entries) - len(entries)
    taken = {entry.object.uri for entry in entries} if left_out else set()
    # Of files, what is read as a sample depends on whether the format was given.
    opened = options if choice.found_out and choice.format == "files" else resolved
    return Survey(
        id=_digest(opened, entries),
        uri=uri,
        options=resolved,
        entries=entries,
        beside=listed.beside,
        found_out=choice.found_out,
        left_out=left_out,
        first_left_out=next(uri for each in listed.entries if (uri := each.object.uri) not in taken)
        if left_out
        else "",
    )


def _check_options(uri: str, options: Options) -> None:
    """Raises InvalidInput for an option that says nothing of data of this format: what was meant did not happen, and it
    would be another dataset version."""
    for name, formats in _MEANT_FOR.items():
        given = getattr(options, name)
        if given and given != "none" and options.format not in formats:
            said = f"labels={options.labels!r}" if name.startswith("label") else f"{name}={given!r}"
            raise InvalidInput(
                f"{said} is for {' and '.join(formats)}, and {uri} is read as {options.format}"
            )


def _digest(options: Options, entries: Sequence[Entry]) -> DatasetId:
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps([BUILDER_VERSION, asdict(options)], sort_keys=True).encode())
    for entry in entries:
        found = entry.object
        row = json.dumps([found.uri, found.size_bytes, found.etag, entry.path])
        digest.update(row.encode() + b"\n")
    return DatasetId(digest.hexdigest())


def build(
    survey: Survey, into: str, sources: _Sources, data: ExtentBytes, progress: Callable[[int, int], None]
) -> tuple[str, ...]:
    """Write the catalog at `into` (temporary name, fsync, rename); `progress(done, total)` counts what the
    format counts (bytes of tar, else files). The catalog's notes, for somebody to read. Raises what the format's
    compiler and the source raise."""
    if survey.beside is not None and _adopt(survey, survey.beside, into, sources):
        return ()

    def fetch(version: ObjectVersion, offset: int, length: int) -> bytes:
        buffer = bytearray(length)
        if length:
            sources(version.uri).read_into(version, offset, memoryview(buffer))
        return bytes(buffer)

    inputs = Inputs(survey.uri, survey.entries, survey.options, fetch, data, progress)
    inputs, opaque = look(inputs) if survey.found_out and survey.format == "files" else (inputs, [])
    draft = _COMPILE[survey.format](inputs)
    draft.notes[:0] = [
        *_left_out(survey, draft),
        *warning(inputs, set(opaque).difference(draft.strays)),
        *hive_notes(survey.entries, draft),
    ]
    if not draft.extent_first[-1]:
        found = sum(entry.object.size_bytes for entry in survey.entries)
        raise NotFound(
            f"{survey.uri} holds no whole sample in {found:,} bytes{_SHORTER.get(survey.format, '')}"
        )
    if len(draft.notes) > _MAX_NOTES:
        draft.notes[_MAX_NOTES - 1 :] = [f"and {len(draft.notes) - _MAX_NOTES + 1:,} notes more like these"]
    _write(survey, draft, into)
    return tuple(redacted(note) for note in draft.notes)


def _left_out(survey: Survey, draft: Draft) -> list[str]:
    """The note on objects that are no part of the dataset."""
    count, listed = survey.left_out + len(draft.strays), survey.left_out + len(survey.entries)
    if not count:
        return []
    first = survey.first_left_out or survey.entries[min(draft.strays)].object.uri
    return [f"{count:,} of {listed:,} objects are no {survey.format} and were left out, the first is {first}"]


def provisional(survey: Survey, extents: Sequence[Extent], directory: str) -> DatasetId:
    """A catalog of extents without samples, in `directory` by its id: what a format without an index reads
    while it is indexed. Its id is derived from the survey's."""
    versions = list(dict.fromkeys(piece.object for extent in extents for piece in extent.pieces))
    index = {version: number for number, version in enumerate(versions)}
    space = Space(versions)
    for extent in extents:
        space.add((index[piece.object], piece.offset, piece.length) for piece in extent.pieces)
    name = provisional_id(survey.id)
    entries = tuple(Entry(version, version.uri) for version in versions)
    none = np.zeros(0, np.int64)
    rows = {"row.address": none, "row.length": none}
    draft = Draft("rows", space, (), np.zeros(len(extents) + 1, np.int64), columns=rows)
    _write(replace(survey, id=name, entries=entries), draft, f"{directory}/{name}.lmdb")
    return name


def provisional_id(dataset: str) -> DatasetId:
    """The id that a dataset's extents have while it is indexed."""
    return DatasetId(hashlib.blake2b(f"provisional {dataset}".encode(), digest_size=16).hexdigest())


def _write(survey: Survey, draft: Draft, into: str) -> None:
    columns = {**draft.space.columns(), **draft.columns, "extent.first": draft.extent_first}
    versions = [entry.object for entry in survey.entries]
    prefix = os.path.commonprefix([version.uri for version in versions])  # noqa: RUF071
    columns.update(TextColumn(version.uri[len(prefix) :] for version in versions).columns("object.uri"))
    columns.update(TextColumn(version.etag for version in versions).columns("object.etag"))
    columns.update(TextColumn(draft.classes).columns("class"))
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
        "tags": tags,
        "notes": draft.notes,
    }
    write_columns(into, head, columns)


def _adopt(survey: Survey, beside: ObjectVersion, into: str, sources: _Sources) -> bool:
    """Take the catalog left with the data if it is whole, of this version, and names these objects only.
    Anybody who may write there may have forged it."""
    temporary = f"{into}.{os.getpid()}.beside"
    try:
        _check_beside(survey, beside, os.path.dirname(into) or ".")
        _download(beside, temporary, sources(beside.uri))
        verify_digest(temporary)
        catalog = Catalog.open(temporary)
        if catalog.id != survey.id or catalog.format != survey.format:
            raise CorruptData(f"it is of version {catalog.id}, the data of {survey.id}")
        if catalog.objects != len(survey.entries) or any(
            catalog.object(index) != entry.object for index, entry in enumerate(survey.entries)
        ):
            raise CorruptData("it names other objects than are listed")
        if len(catalog.extent_sizes) > MAX_EXTENTS:
            raise CorruptData(f"it has more than {MAX_EXTENTS:,} extents")
        catalog.check()
        os.replace(temporary, into)
    except (CacheError, OSError) as error:  # OSError: no room for it, which may be room for one that is built
        _log.warning("%s is not used: %s", beside.uri, error)
        return False
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
    return True


def _check_beside(survey: Survey, beside: ObjectVersion, directory: str) -> None:
    """Raises CorruptData for a size that no catalog of this data has: one larger than the data costs more to fetch than
    to build. OutOfSpace, and OSError, where it would take more than half of what its disk has left."""
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
        for offset in range(0, version.size_bytes, _DIRECT_READ_BYTES):
            buffer = bytearray(min(_DIRECT_READ_BYTES, version.size_bytes - offset))
            source.read_into(version, offset, memoryview(buffer))
            file.write(buffer)
        file.flush()
        os.fsync(file.fileno())


class DirectBytes:
    """`ExtentBytes` straight from the source: for `cachesvc index` and without a daemon. Holds one extent."""

    def __init__(self, sources: _Sources) -> None:
        self._sources = sources
        self._extents: Sequence[Extent] = ()
        self._held, self._bytes = -1, memoryview(b"")

    def declare(self, extents: Sequence[Extent]) -> None:
        """Remember the extents."""
        self._extents = extents

    def read(self, extent: int, offset: int, length: int) -> bytes:
        """Bytes of an extent, which is fetched whole in parallel ranges when it is not the one held."""
        if extent != self._held:
            self._held, self._bytes = -1, memoryview(b"")
            self._bytes = self._fetch(self._extents[extent])
            self._held = extent
        return bytes(self._bytes[offset : offset + length])

    def _fetch(self, extent: Extent) -> memoryview:
        whole, begin, parts = memoryview(bytearray(extent.size_bytes)), 0, []
        for piece in extent.pieces:
            assert not piece.codec, "formats with compressed objects carry an index"
            for at in range(0, piece.length, _DIRECT_READ_BYTES):
                end = min(at + _DIRECT_READ_BYTES, piece.length)
                parts.append((piece.object, piece.offset + at, whole[begin + at : begin + end]))
            begin += piece.length
        with ThreadPoolExecutor(_DIRECT_THREADS, "direct") as pool:
            for _ in pool.map(lambda part: self._sources(part[0].uri).read_into(*part), parts):
                pass
        return whole
