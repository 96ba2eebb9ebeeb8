"""Separates tables about files from the other files, and reads labels and tags from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cachesvc.catalog.compiler import Inputs
from cachesvc.catalog.labels.file_tables import FILE_COLUMNS, FileTable, begins_as_table, parse_table
from cachesvc.catalog.labels.tags import Tags
from cachesvc.core.errors import CorruptData, InvalidInput

_TABLE_STEMS = ("labels", "metadata")
"""Stems of names that only a table has, where other data is beside it."""
_MAX_TABLES = 16
_TABLE_BYTES = 256 << 20
_FIRST_LINE_BYTES = 64 << 10
"""Bytes read of JSONL of any other name: a file whose first line is longer is data."""


@dataclass(slots=True)
class _Read:
    """The counts of a table that was read. `unmatched` rows name no file of the data."""

    rows: int = 0
    unmatched: int = 0
    first_unmatched: str = ""


@dataclass(frozen=True, slots=True)
class TableSplit:
    """`tables`: indices of entries that are tables about the others; `rest`: the others; `notes`: for people."""

    tables: list[int]
    rest: list[int]
    notes: list[str]


def separate_tables(inputs: Inputs) -> TableSplit:
    """Find the tables: the one that `options.labels` names, else those directly below the URI that name files.

    Raises InvalidInput where the named one is absent or lacks a column, CorruptData where it does not parse.
    """
    named_table = inputs.options.table
    named = [at for at, entry in enumerate(inputs.entries) if named_table and entry.path == named_table]
    if named_table and not named:
        raise InvalidInput(
            f"{inputs.uri} has no label file {named_table!r} (labels: folder, none, or a .csv, .tsv or .jsonl)"
        )
    for at in named:
        _parsed(inputs, at).check_labels()
    found = [at for at, entry in enumerate(inputs.entries) if at not in named and _may_be_table(entry.path)]
    json_tables = _json_tables(inputs, {*named, *found})
    few = len(found) + len(json_tables) <= _MAX_TABLES
    kept = [*json_tables, *(at for at in found if _names_files(inputs, at))] if few else []
    if len(kept) + len(named) == len(inputs.entries):
        kept = []
    taken = {*named, *kept}
    rest = [at for at in range(len(inputs.entries)) if at not in taken]
    samples = [inputs.entries[at] for at in found if at not in taken]
    notes = [
        f"{entry.object.uri} is no table of labels: its first line would name a column for the file "
        f"({', '.join(FILE_COLUMNS)})"
        for entry in samples
        if entry.path.lower().partition(".")[0] in _TABLE_STEMS and len(samples) < len(rest)
    ]
    return TableSplit(sorted(taken), rest, notes)


def _may_be_table(path: str) -> bool:
    stem, _, extension = path.lower().rpartition(".")
    known = extension in ("csv", "tsv") or (extension == "jsonl" and stem in _TABLE_STEMS)
    return known and "/" not in path


def _json_tables(inputs: Inputs, known: set[int]) -> list[int]:
    """Return JSONL files of other names, directly below the URI, that begin as a table.

    More than `_MAX_TABLES` such files are data, and none is read.
    """
    rows = [
        at
        for at, entry in enumerate(inputs.entries)
        if entry.extension == "jsonl" and "/" not in entry.path and at not in known
    ]
    return [at for at in rows if _begins_as_table(inputs, at)] if len(rows) <= _MAX_TABLES else []


def _begins_as_table(inputs: Inputs, at: int) -> bool:
    version = inputs.entries[at].object
    if version.size_bytes > _TABLE_BYTES:
        return False
    beginning = inputs.fetch(version, 0, min(version.size_bytes, _FIRST_LINE_BYTES))
    return begins_as_table(beginning if version.size_bytes > _FIRST_LINE_BYTES else beginning + b"\n")


def _names_files(inputs: Inputs, at: int) -> bool:
    """Tell whether a file that the options do not name is a table. A CSV file that does not parse is data."""
    entry = inputs.entries[at]
    if entry.object.size_bytes > _TABLE_BYTES:
        return False
    try:
        return _parsed(inputs, at).file is not None
    except CorruptData:
        if entry.extension == "jsonl":
            raise
        return False


def _parsed(inputs: Inputs, at: int) -> FileTable:
    version = inputs.entries[at].object
    if version.size_bytes > _TABLE_BYTES:
        raise InvalidInput(
            f"{version.uri} has {version.size_bytes:,} bytes: tables of {_TABLE_BYTES:,} are read"
        )
    return parse_table(version.uri, inputs.fetch(version, 0, version.size_bytes))


def read_tables(
    inputs: Inputs, table_entries: Sequence[int], sample_of: Mapping[str, int | None], tags: Tags
) -> list[str]:
    """Add the values of the tables to `tags`, and return notes for people.

    `sample_of` has samples by path below the URI and by URI, with and without extension. A row names its file in one of
    these ways, or by its path from the table's folder. Raises InvalidInput where the table that `options.labels` names
    labels nothing, CorruptData where one does not parse.
    """
    notes = []
    for at in table_entries:
        is_named = inputs.entries[at].path == inputs.options.table
        read = _read_table(inputs, at, sample_of, tags, labels=is_named or not inputs.options.table)
        if is_named:
            _check_read(inputs, at, read, tags.labelled, next(iter(sample_of)))
        if read.unmatched:
            uri = inputs.entries[at].object.uri
            notes.append(
                f"{uri}: {read.unmatched:,} of {read.rows:,} rows name no file here, {read.first_unmatched!r} is the first"
            )
    return notes


def _read_table(
    inputs: Inputs, at: int, sample_of: Mapping[str, int | None], tags: Tags, labels: bool
) -> _Read:
    entry, read = inputs.entries[at], _Read()
    root = entry.object.uri.removesuffix(entry.path)
    for file, values in _parsed(inputs, at).rows():
        read.rows += 1
        name = file.removeprefix("./").removeprefix(root).removeprefix(_path(root))
        sample = sample_of.get(root + name, sample_of.get(name))
        if sample is None:
            read.unmatched += 1
            read.first_unmatched = read.first_unmatched or file
            continue
        for name, value in values.items():
            if name != "label" or labels:
                tags.add(sample, name, value)
    return read


def _path(uri: str) -> str:
    """Return the path of a local file's URI; any other URI unchanged."""
    return uri.removeprefix("file://")


def _check_read(inputs: Inputs, at: int, read: _Read, labelled: bool, example: str) -> None:
    """Raise InvalidInput for a table that should label the files and labels none."""
    uri = inputs.entries[at].object.uri
    if not read.rows:
        raise InvalidInput(f"{uri} has no rows: it labels none of the files")
    if read.unmatched == read.rows:
        raise InvalidInput(
            f"{uri} labels none of the files: it names {read.first_unmatched!r} where the data has {example!r}; name files "
            "by their path below the URI"
        )
    if not labelled:
        raise InvalidInput(
            f"{uri} labels none of the files: no row of a file has a label that is text or a number"
        )
