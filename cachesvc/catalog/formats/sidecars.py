"""What files say about other files: class folders, CSV/JSONL tables, and small `.cls`/`.json`/`.txt`
sidecars.

Reading a sidecar costs one GET when the catalog is built, 16 at a time, and none afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from cachesvc.catalog.columns import Ints
from cachesvc.catalog.inputs import Draft, Inputs
from cachesvc.catalog.layout import Field
from cachesvc.catalog.tables import Table, parsed_table
from cachesvc.catalog.tags import SIDECAR_BYTES, SIDECARS, Tags
from cachesvc.core.errors import CorruptData, InvalidInput

__all__ = ["SIDECARS", "Files", "annotate", "tables"]

MAX_SIDECARS = 200_000
"""Sidecars read at most; with more, none is (a partial index would search wrongly) and a note says so."""
_MAX_TABLES = 16
_TABLE_BYTES = 256 << 20
_THREADS = 16
_BATCH = 1024


@dataclass(frozen=True, slots=True)
class Files:
    """Files of samples: `entry[i]` is field `field[i]` of sample `sample[i]`."""

    entry: Sequence[int]
    sample: Ints
    field: Ints
    fields: tuple[Field, ...]
    samples: int


@dataclass(slots=True)
class _Read:
    """What a table turned out to hold: `strangers` are rows that name no file, `labels` those that give one."""

    rows: int = 0
    strangers: int = 0
    stranger: str = ""
    labels: int = 0


def tables(inputs: Inputs) -> tuple[list[int], list[int]]:
    """Entries that are tables about the other files, and the other entries. The one that `options.labels` names
    always is; else those directly below the URI that name files. Raises InvalidInput where the named one is not
    there or lacks a column, CorruptData where it does not parse."""
    asked = inputs.options.table
    named = [at for at, entry in enumerate(inputs.entries) if asked and entry.path == asked]
    if asked and not named:
        raise InvalidInput(
            f"{inputs.uri} has no label file {asked!r} (labels: folder, none, or a .csv, .tsv or .jsonl)"
        )
    for at in named:
        _parsed(inputs, at).check_labels()
    found = [at for at, entry in enumerate(inputs.entries) if at not in named and _may_be_table(entry.path)]
    kept = [at for at in found if _names_files(inputs, at)] if len(found) <= _MAX_TABLES else []
    if len(kept) + len(named) == len(inputs.entries):
        kept = []
    taken = {*named, *kept}
    return sorted(taken), [at for at in range(len(inputs.entries)) if at not in taken]


def _may_be_table(path: str) -> bool:
    stem, _, extension = path.rpartition(".")
    known = extension in ("csv", "tsv") or (extension == "jsonl" and stem in ("labels", "metadata"))
    return known and "/" not in path


def _names_files(inputs: Inputs, at: int) -> bool:
    """Whether a file that nobody named is a table. One of separated values may as well be data of any kind."""
    entry = inputs.entries[at]
    if entry.object.size_bytes > _TABLE_BYTES:
        return False
    try:
        return _parsed(inputs, at).file is not None
    except CorruptData:
        if entry.name.endswith(".jsonl"):
            raise
        return False


def _parsed(inputs: Inputs, at: int) -> Table:
    version = inputs.entries[at].object
    if version.size_bytes > _TABLE_BYTES:
        raise InvalidInput(
            f"{version.uri} has {version.size_bytes:,} bytes: tables of {_TABLE_BYTES:,} are read"
        )
    return parsed_table(version.uri, inputs.fetch(version, 0, version.size_bytes))


def annotate(inputs: Inputs, draft: Draft, files: Files, table_entries: Sequence[int]) -> None:
    """Give a draft its labels and tags: tables first, then `.cls` sidecars, then class folders. The first of
    these that labels anything decides, unless `options.labels` does. Raises InvalidInput where that labels nothing."""
    tags, wanted = Tags(), inputs.options.labels
    draft.notes += _read_tables(inputs, files, table_entries, tags)
    _read_sidecars(inputs, draft, files, tags, skip_labels=wanted == "folder" or tags.labelled)
    labelled = tags.take_labels(files.samples)
    if wanted in ("", "folder") and (labelled is None or wanted == "folder"):
        labelled = _folders(inputs, files)
    if labelled is not None and wanted != "none":
        draft.label(*labelled)
    draft.tags = tags.columns(files.samples)
    if tags.dropped:
        draft.notes.append(f"{len(tags.dropped)} tags beyond the first ones are not searchable")


def _folders(
    inputs: Inputs, files: Files
) -> tuple[tuple[str, ...], np.ndarray[tuple[int], np.dtype[np.int32]]] | None:
    """Classes from the first folder below the URI, where every file lies in one, and in two or more unless folders
    are asked for."""
    asked = inputs.options.labels == "folder"
    paths = [inputs.entries[at].path for at in files.entry]
    outside = next((path for path in paths if "/" not in path), None)
    classes = sorted({path.partition("/")[0] for path in paths})
    if outside is not None and asked:
        raise InvalidInput(
            f"labels='folder': {outside!r} lies in no folder below {inputs.uri}; labels='' finds out"
        )
    if outside is not None or (len(classes) < 2 and not asked):
        return None
    numbers = {name: number for number, name in enumerate(classes)}
    labels = np.full(files.samples, -1, np.int32)
    labels[files.sample] = [numbers[path.partition("/")[0]] for path in paths]
    return tuple(classes), labels


def _read_tables(inputs: Inputs, files: Files, table_entries: Sequence[int], tags: Tags) -> list[str]:
    """What the tables say of the files into `tags`; notes for people. A row names a file by its path below the URI,
    with or without its extension, or by its whole URI or path."""
    if not table_entries:
        return []
    sample_of: dict[str, int] = {}
    for at, sample in zip(files.entry, files.sample.tolist(), strict=True):
        path = inputs.entries[at].path
        sample_of[path] = sample
        sample_of.setdefault(path.rpartition(".")[0], sample)
    notes = []
    for at in table_entries:
        asked = inputs.entries[at].path == inputs.options.table
        read = _read_table(inputs, at, sample_of, tags, labels=asked or not inputs.options.table)
        if asked:
            _check_read(inputs, at, read, inputs.entries[files.entry[0]].path)
        if read.strangers:
            uri = inputs.entries[at].object.uri
            notes.append(
                f"{uri}: {read.strangers:,} of {read.rows:,} rows name no file here, {read.stranger!r} is the first"
            )
    return notes


def _read_table(inputs: Inputs, at: int, sample_of: Mapping[str, int], tags: Tags, labels: bool) -> _Read:
    entry, read = inputs.entries[at], _Read()
    root = entry.object.uri.removesuffix(entry.path)
    for file, values in _parsed(inputs, at).rows():
        read.rows += 1
        sample = sample_of.get(file.removeprefix("./").removeprefix(root).removeprefix(_path(root)))
        if sample is None:
            read.strangers += 1
            read.stranger = read.stranger or file
            continue
        for name, value in values.items():
            if name != "label" or labels:
                tags.add(sample, name, value)
                read.labels += name == "label" and value not in ("", None)
    return read


def _path(uri: str) -> str:
    """How people write the URI of a local file."""
    return uri.removeprefix("file://")


def _check_read(inputs: Inputs, at: int, read: _Read, example: str) -> None:
    """Raises InvalidInput for a table that was to label the files and labels none."""
    uri = inputs.entries[at].object.uri
    if not read.rows:
        raise InvalidInput(f"{uri} has no rows: it labels none of the files")
    if read.strangers == read.rows:
        raise InvalidInput(
            f"{uri} labels none of the files: it names {read.stranger!r} where the data has {example!r}; name files "
            "by their path below the URI"
        )
    if not read.labels:
        raise InvalidInput(
            f"{uri} labels none of the files: no row of a file has a label that is text or a number"
        )


def _read_sidecars(inputs: Inputs, draft: Draft, files: Files, tags: Tags, skip_labels: bool) -> None:
    """Only where they exist beside data: a folder of nothing but texts is data."""
    encodings = [field.encoding for field in files.fields]
    if set(encodings) <= set(SIDECARS):
        return
    wanted = np.isin(files.field, [at for at, encoding in enumerate(encodings) if encoding in SIDECARS])
    chosen = [at for at in np.flatnonzero(wanted).tolist() if _size(inputs, files, at) <= SIDECAR_BYTES]
    if len(chosen) > MAX_SIDECARS:
        draft.notes.append(f"{len(chosen)} sidecars are more than {MAX_SIDECARS}: they are not searchable")
        return
    for at, body in _bodies(inputs, files, chosen):
        encoding = encodings[int(files.field[at])]
        if not (skip_labels and encoding == "cls"):
            tags.add_sidecar(int(files.sample[at]), encoding, body)


def _size(inputs: Inputs, files: Files, at: int) -> int:
    return inputs.entries[files.entry[at]].object.size_bytes


def _bodies(inputs: Inputs, files: Files, chosen: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    def body(at: int) -> bytes:
        return inputs.fetch(inputs.entries[files.entry[at]].object, 0, _size(inputs, files, at))

    with ThreadPoolExecutor(_THREADS, "sidecars") as pool:
        for begin in range(0, len(chosen), _BATCH):
            batch = chosen[begin : begin + _BATCH]
            yield from zip(batch, pool.map(body, batch), strict=True)
