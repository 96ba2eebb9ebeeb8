"""Separates tables about files from the other files, and reads labels and tags from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from cachesvc.catalog.compiler import Inputs, ListedObject
from cachesvc.catalog.kinds import TABLES
from cachesvc.catalog.labels.file_tables import (
    UNSURE_COLUMNS,
    USUAL_NAMES,
    FileTable,
    begins_as_table,
    parse_table,
)
from cachesvc.catalog.labels.sample_names import SampleKeys, SampleNames
from cachesvc.catalog.labels.tags import Tags
from cachesvc.core.errors import CorruptData, InvalidInput

_TABLE_STEMS = ("labels", "metadata")
"""Stems of names that only a table has, where other data is beside it."""
_MAX_TABLES = 16
_TABLE_BYTES = 256 << 20
_ROWS_COMPARED = 20
"""Rows whose values are compared with the names of files, where the header is unknown."""
_FIRST_LINE_BYTES = 64 << 10
"""Bytes read of JSONL of any other name: a file whose first line is longer is data."""


@dataclass(slots=True)
class _Read:
    """The counts of a table that was read. `unmatched` rows name no file of the data. `advice`: how to name its label."""

    rows: int = 0
    unmatched: int = 0
    first_unmatched: str = ""
    advice: str = ""


@dataclass(frozen=True, slots=True)
class TableSplit:
    """`tables`: indices of entries that are tables about the others; `rest`: the others; `notes`: for people."""

    tables: list[int]
    rest: list[int]
    notes: list[str]


def separate_tables(inputs: Inputs, names: Callable[[], SampleNames] | None = None) -> TableSplit:
    """Find the tables: the one that `options.labels` names, else those directly below the URI that name files.

    `names` knows the files, for tables with an unknown header; None looks at headers alone. Raises InvalidInput where the
    named one is absent or lacks a column, or a table names files in a column of another name; CorruptData where one does
    not parse.
    """
    source = inputs.options.label_source
    named = [at for at, entry in enumerate(inputs.entries) if source.table and entry.path == source.table]
    if source.table and not named:
        raise InvalidInput(
            f"{inputs.uri} has no label file {source.table!r} (labels: folder, none, or a .csv, .tsv or .jsonl)"
        )
    for at in named:
        _parsed(inputs, at).check_labels()
    tables = [at for at, entry in enumerate(inputs.entries) if at not in named and _may_be_table(entry.path)]
    json_tables = _json_tables(inputs, {*named, *tables})
    few = len(tables) + len(json_tables) <= _MAX_TABLES
    kept = [*json_tables, *(at for at in tables if _names_files(inputs, at, names))] if few else []
    if len(kept) + len(named) == len(inputs.entries):
        kept = []
    if source.needs_table and not named:
        _check_columns(inputs, kept, tables)
    taken = {*named, *kept}
    rest = [at for at in range(len(inputs.entries)) if at not in taken]
    samples = [inputs.entries[at] for at in tables if at not in taken]
    notes = [
        f"{entry.object.uri} is no table of labels: its first line would name columns ({USUAL_NAMES})"
        for entry in samples
        if entry.path.lower().partition(".")[0] in _TABLE_STEMS and len(samples) < len(rest)
    ]
    return TableSplit(sorted(taken), rest, notes)


def _check_columns(inputs: Inputs, kept: Sequence[int], found: Sequence[int]) -> None:
    """Raise InvalidInput unless a table has the columns that `options.labels` names."""
    tables = [_parsed(inputs, at) for at in kept]
    if any(table.file is not None and table.labels for table in tables):
        return
    if not tables and not found:
        raise InvalidInput(
            f"{inputs.uri} has no table for labels={inputs.options.labels}: it lies directly below"
        )
    others = tables or [_parsed(inputs, at) for at in found]
    raise InvalidInput(f"{others[0].described()}, which labels={inputs.options.labels} does not name")


def _may_be_table(path: str) -> bool:
    stem, _, extension = path.lower().rpartition(".")
    known = extension in ("csv", "tsv") or (extension == "jsonl" and stem in _TABLE_STEMS)
    return known and "/" not in path


def may_be_beside(entry: ListedObject) -> bool:
    """Tell whether a file may be a table about the shards that it lies beside."""
    return entry.extension in TABLES and "/" not in entry.path


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


def _names_files(inputs: Inputs, at: int, names: Callable[[], SampleNames] | None) -> bool:
    """Tell whether a file that the options do not name is a table. A CSV file that does not parse is data.

    Raises InvalidInput where a column of another name has the names of files, unless the options say where labels are.
    """
    entry = inputs.entries[at]
    if entry.object.size_bytes > _TABLE_BYTES:
        return False
    try:
        table = _parsed(inputs, at)
        if table.file is not None and table.file.lower() not in UNSURE_COLUMNS:
            return True
        column = _column_of_files(table, names()) if names is not None else table.file
    except CorruptData:
        if entry.extension == "jsonl":
            raise
        return False
    if column is None or column == table.file or inputs.options.labels_from:
        return column is not None and column == table.file
    raise InvalidInput(
        f"{table.described()}, and {column!r} names the files: write {table.advice(column)}, or labels='none'"
    )


def _column_of_files(table: FileTable, names: SampleNames) -> str | None:
    """Return the column whose values differ and are the names of files in most of the first rows, None for none."""
    rows = list(islice(table.raw_rows(), _ROWS_COMPARED))
    for column in table.columns:
        values = [str(row.get(column, "")).removeprefix("./") for row in rows]
        hits = sum(names.find(value, "") is not None for value in values)
        if len(set(values)) == len(rows) < 2 * hits:
            return column
    return None


def _parsed(inputs: Inputs, at: int) -> FileTable:
    version = inputs.entries[at].object
    if version.size_bytes > _TABLE_BYTES:
        raise InvalidInput(
            f"{version.uri} has {version.size_bytes:,} bytes: tables of {_TABLE_BYTES:,} are read"
        )
    return parse_table(version.uri, inputs.fetch(version, 0, version.size_bytes), inputs.options.label_source)


def read_tables(
    inputs: Inputs, table_entries: Sequence[int], names: SampleNames | SampleKeys, tags: Tags
) -> list[str]:
    """Add the values of the tables to `tags`, and return notes for people.

    A row names its file as `names` knows it, or by its path from the table's folder. Raises InvalidInput where the table
    that `options.labels` names labels nothing, CorruptData where one does not parse.
    """
    notes = []
    for at in table_entries:
        is_named = inputs.entries[at].path == inputs.options.table
        read = _read_table(inputs, at, names, tags, labels=is_named or not inputs.options.table)
        last = (
            at == table_entries[-1] and inputs.options.label_source.needs_table and not inputs.options.table
        )
        if is_named or (last and not tags.labelled):
            _check_read(inputs, at, read, tags.labelled, names.example)
        elif read.advice and not tags.labelled:
            notes.append(read.advice)
        if read.unmatched:
            uri = inputs.entries[at].object.uri
            notes.append(
                f"{uri}: {read.unmatched:,} of {read.rows:,} rows name no file here, {read.first_unmatched!r} is the first"
            )
    return notes


def _read_table(inputs: Inputs, at: int, names: SampleNames | SampleKeys, tags: Tags, labels: bool) -> _Read:
    entry, table, read = inputs.entries[at], _parsed(inputs, at), _Read()
    if len(table.columns) > 1 and not table.labels and table.separator:
        read.advice = f"{table.described()}, none of which is known as the label: {table.advice()} makes one"
    root = entry.object.uri.removesuffix(entry.path)
    for file, values in table.rows():
        read.rows += 1
        name = file.removeprefix("./").removeprefix(root).removeprefix(root.removeprefix("file://"))
        sample = names.find(name, root)
        if sample is None:
            read.unmatched += 1
            read.first_unmatched = read.first_unmatched or file
            continue
        for name, value in values.items():
            if name != "label":
                tags.add(sample, name, value)
            elif labels:
                tags.add_label(sample, value, table.labels)
    return read


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
