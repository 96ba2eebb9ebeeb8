"""Compiles Parquet files from their footers, which describe the row groups; rows are not read.

An extent is as many row groups of one file as fit `extent_bytes`, at least one, decoded to columns while they are filled
(`sources/parquet`). A sample is a row. Columns of the files are matched by name.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cachesvc.catalog.address_space import AddressSpace
from cachesvc.catalog.compiler import Draft, Inputs
from cachesvc.catalog.described_data import check_one_table, tables_about
from cachesvc.catalog.formats.column_draft import ColumnDraft, readable
from cachesvc.catalog.labels.hive_partitions import Partitions
from cachesvc.core.errors import CorruptData, InvalidInput
from cachesvc.core.model import ObjectVersion
from cachesvc.sources.columnar.arrow_types import fields_of, united
from cachesvc.sources.columnar.extent import MAX_BYTES
from cachesvc.sources.parquet.parquet import (
    END_BYTES,
    FOOTER_BYTES,
    MAGIC,
    MAX_RUN,
    Footer,
    GroupRun,
    RowGroup,
    footer_bytes,
    run_of,
    sizes_of,
)
from cachesvc.sources.parquet.recipe import Recipe, pyarrow_for

_TAIL_BYTES = 64 << 10
"""First read of each file: most footers are smaller."""
_THREADS = 32
_KEPT_BYTES = 64 << 20
"""Footers kept for a second pass, which files with different columns need."""


def compile_parquet(inputs: Inputs) -> Draft:
    """Compile by the footers. Raises CorruptData naming the file, InvalidInput for features that are not read and for
    files that are not one table."""
    arrow = pyarrow_for(inputs.entries[0].object.uri)
    footers, partitions = _Footers(inputs), Partitions(inputs.entries)
    about, notes = tables_about(inputs, footers.columns)
    footers.leave_out(about)
    wanted, columns = inputs.options.field_names, dict[int, list[str]]()
    names = [name for name in wanted if name not in partitions]

    def stored(schema: Any) -> Any:
        return fields_of(arrow, schema, names) if wanted else schema

    schema = arrow.schema([])
    for _, footer in footers.read(_THREADS):
        schema = united(arrow, schema, footer.uri, stored(footer.schema))
    while True:
        compiling, known = _Compiling(arrow, inputs, schema, partitions), schema
        for at, footer in footers.read():
            columns[at] = footer.names
            schema = united(arrow, schema, footer.uri, stored(footer.schema))
            if schema.equals(known):
                compiling.add(at, footer)
                inputs.progress(at + 1, len(inputs.entries))
        if schema.equals(known):
            break
    check_one_table(inputs, columns)
    missing = [name for name in names if name not in schema.names and name != "key"]
    if missing:
        known = ", ".join([*footer.schema.names, *partitions.names][:50])
        raise InvalidInput(f"fields {missing} are not in {inputs.uri}, which has {known}")
    draft = compiling.draft()
    draft.notes += notes
    return draft


class _Compiling:
    """Compiles files to a dataset of one schema."""

    def __init__(self, arrow: Any, inputs: Inputs, schema: Any, partitions: Partitions) -> None:
        self._inputs = inputs
        self._read, self._notes = readable(arrow, schema, inputs.uri)
        self._recipe = Recipe.of(arrow, self._read)
        self._space, self._firsts = AddressSpace([entry.object for entry in inputs.entries]), array("q")
        self._rows = ColumnDraft(partitions)

    def add(self, at: int, footer: Footer) -> None:
        """Add the row groups of a file."""
        version = self._inputs.entries[at].object
        columns, tail = self._recipe.columns, footer.size_bytes
        groups = footer.groups(
            self._recipe, lambda begin, end: self._inputs.fetch(version, begin, end - begin)
        )
        if any(chunk.end > version.size_bytes - tail for each in groups for chunk in each.chunks.values()):
            raise CorruptData(f"{version.uri}: row groups reach into the footer")
        for run in _runs(groups, min(self._inputs.options.extent_bytes, MAX_BYTES)):
            if run.size_bytes > MAX_BYTES:
                raise InvalidInput(
                    f"{version.uri}: row group {run.groups[0].number} takes {run.size_bytes:,} bytes decoded; write "
                    "groups below 4 GiB"
                )
            stored = sum(end - begin for begin, end in run.ranges)
            piece = at, run.groups[0].begin, run.size_bytes
            start = self._space.add_encoded(piece, self._recipe.codec, stored, tail)
            self._firsts.append(self._rows.samples)
            places = [place + start if place >= 0 else place for place in run.addresses(columns)]
            self._rows.add(run.rows, columns, places, at)

    def draft(self) -> Draft:
        """Return the draft of all files."""
        draft = self._rows.draft(self._space, self._firsts, self._read, self._inputs)
        draft.notes += self._notes
        return draft


def _runs(groups: Sequence[RowGroup], extent_bytes: int) -> Iterator[GroupRun]:
    begin = 0
    while begin < len(groups):
        sizes = sizes_of(groups[begin : begin + MAX_RUN])
        count = max(1, int(sizes.searchsorted(extent_bytes, "right")))
        yield run_of(groups[begin : begin + count])
        begin += count


class _Footers:
    """The footers of all files. They are fetched in batches and parsed one at a time: a parsed one takes ten times its
    size until its row groups are known."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        self._chosen: Sequence[int] = range(len(inputs.entries))
        self._kept: dict[int, bytes] = {}
        self._kept_bytes = 0

    def read(self, count: int | None = None) -> Iterator[tuple[int, Footer]]:
        """Yield the index and the footer of the first `count` files, or of all."""
        return self._read(self._chosen[:count])

    def leave_out(self, entries: Collection[int]) -> None:
        """Leave out files from what `read` yields."""
        self._chosen = [at for at in self._chosen if at not in entries]

    def columns(self, wanted: Sequence[int]) -> dict[int, list[str]]:
        """Return the names of the columns of files."""
        return {at: footer.names for at, footer in self._read(wanted)}

    def _read(self, wanted: Sequence[int]) -> Iterator[tuple[int, Footer]]:
        with ThreadPoolExecutor(_THREADS, "footers") as pool:
            for begin in range(0, len(wanted), _THREADS):
                numbers = wanted[begin : begin + _THREADS]
                for at, footer in zip(numbers, pool.map(self._fetch, numbers), strict=True):
                    if at not in self._kept and self._kept_bytes + len(footer) <= _KEPT_BYTES:
                        self._kept[at] = footer
                        self._kept_bytes += len(footer)
                    yield at, Footer(self._inputs.entries[at].object.uri, footer)

    def _fetch(self, at: int) -> bytes:
        return self._kept.get(at) or _footer(self._inputs, self._inputs.entries[at].object)


def _footer(inputs: Inputs, version: ObjectVersion) -> bytes:
    """Return the end of a file, from its footer on."""
    uri, size = version.uri, version.size_bytes
    begin = max(0, size - _TAIL_BYTES)
    tail = inputs.fetch(version, begin, size - begin)
    if tail.endswith(b"PARE"):
        raise InvalidInput(f"{uri} has an encrypted footer, which is not read")
    length = footer_bytes(tail) + END_BYTES
    if size < END_BYTES + len(MAGIC) or not tail.endswith(MAGIC) or length > size - len(MAGIC):
        raise CorruptData(f"{uri} is no Parquet file: it does not end with a footer")
    if len(tail) < length <= FOOTER_BYTES + END_BYTES:
        tail = inputs.fetch(version, size - length, begin - (size - length)) + tail
    return tail[-length:]
