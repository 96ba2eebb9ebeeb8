"""Compiles Parquet files from their footers, which describe the row groups; rows are not read.

An extent is as many row groups of one file as fit `extent_bytes`, at least one, decoded while they are filled
(`sources/parquet`). A sample is a row.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from cachesvc.catalog.address_space import AddressSpace
from cachesvc.catalog.columns import ints
from cachesvc.catalog.compiler import Draft, Inputs, ListedObject
from cachesvc.catalog.kinds import PARQUET
from cachesvc.catalog.layout import Field
from cachesvc.core.errors import CorruptData, InvalidInput
from cachesvc.core.model import ObjectVersion
from cachesvc.sources.parquet.arrow import Leaf
from cachesvc.sources.parquet.parquet import (
    ABSENT,
    END_BYTES,
    FOOTER_BYTES,
    MAGIC,
    Footer,
    RowGroup,
    footer_bytes,
)

_TAIL_BYTES = 64 << 10
"""First read of each file: most footers are smaller."""
_THREADS = 32


def select(entries: Sequence[ListedObject]) -> list[ListedObject]:
    """Choose the Parquet files by their names."""
    return [entry for entry in entries if entry.extension in PARQUET]


def compile_parquet(inputs: Inputs) -> Draft:
    """Compile by the footers. Raises CorruptData naming the file, InvalidInput for features that are not read."""
    space, firsts, samples = AddressSpace([entry.object for entry in inputs.entries]), array("q"), 0
    fields: tuple[Field, ...] | None = None
    notes: list[str] = []
    for at, (entry, footer, tail) in enumerate(_footers(inputs)):
        uri = entry.object.uri
        if fields is None:
            fields = _fields(uri, footer.leaves)
            notes = [
                f"column {name} has a type that is not read and is left out" for name in footer.unread.names
            ]
        elif fields != _fields(uri, footer.leaves):
            raise InvalidInput(
                f"{uri} has other columns than the files before it: {_named(_fields(uri, footer.leaves))}, "
                f"not {_named(fields)}"
            )
        groups = footer.row_groups()
        if groups and groups[-1].end > entry.object.size_bytes - tail:
            raise CorruptData(f"{uri}: row groups reach into the footer")
        for run in _runs(groups, min(inputs.options.extent_bytes, ABSENT)):
            begin, size = run[0].begin, sum(group.decoded_bytes for group in run)
            if size > ABSENT:
                raise InvalidInput(
                    f"{uri}: row group {run[0].number} takes {size:,} bytes decoded; write groups below 4 GiB"
                )
            space.add_encoded((at, begin, size), "parquet", run[-1].end - begin, tail)
            firsts.append(samples)
            samples += sum(group.rows for group in run)
        inputs.progress(at + 1, len(inputs.entries))
    return Draft(
        kind="table", space=space, fields=fields or (), extent_first=ints([*firsts, samples]), notes=notes
    )


def _runs(groups: Sequence[RowGroup], extent_bytes: int) -> Iterator[list[RowGroup]]:
    run: list[RowGroup] = []
    size = 0
    for group in groups:
        if run and size + group.decoded_bytes > extent_bytes:
            yield run
            run, size = [], 0
        run.append(group)
        size += group.decoded_bytes
    if run:
        yield run


def _fields(uri: str, leaves: Sequence[Leaf]) -> tuple[Field, ...]:
    if not leaves:
        raise InvalidInput(f"{uri} has no column of bytes, text, numbers or lists of numbers")
    return tuple(Field(leaf.name, leaf.encoding) for leaf in leaves)


def _named(fields: Sequence[Field]) -> str:
    return ", ".join(f"{field.name} {field.encoding}" for field in fields)


def _footers(inputs: Inputs) -> Iterator[tuple[ListedObject, Footer, int]]:
    """Yield every file with its footer and the footer's size. Footers are fetched in batches and parsed one at a time.

    A parsed footer takes ten times its size until its row groups are known.
    """
    with ThreadPoolExecutor(_THREADS, "footers") as pool:
        for begin in range(0, len(inputs.entries), _THREADS):
            batch = inputs.entries[begin : begin + _THREADS]
            found = pool.map(lambda entry: _footer(inputs, entry.object), batch)
            for entry, footer in zip(batch, found, strict=True):
                yield entry, Footer(entry.object.uri, footer), len(footer)


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
