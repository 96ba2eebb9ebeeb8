"""Maps sample numbers to addresses: five layouts, which are all that a loader knows of formats.

A draft names one of the first four (`Draft.kind`: fixed, rows, indirect, columns), and has the values of `head` and the
columns that its class lists here. `prepared.py` derives catalogs of the fifth.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cachesvc.catalog.columns import Ints, MappedTexts
from cachesvc.core.errors import CorruptData
from cachesvc.sources.columnar.column import Column
from cachesvc.sources.framed_zstd import unframed

LITDATA = "litdata:"
"""Begins the encoding of a field of litData, whose name of the type follows."""
MAX_ROW_BYTES = 1 << 30
"""Limit of a row that is decompressed alone."""


@dataclass(frozen=True, slots=True)
class Field:
    """One named part of a sample. `encoding`: a file extension without dot (with `.gz` behind it for a member of a tar in
    gzip), an MDS encoding, a type of litData, for records and tokens a numpy dtype string, for columns Arrow's type."""

    name: str
    encoding: str


@dataclass(frozen=True, slots=True)
class Fixed:
    """Records of one size: address = slot * stride_bytes, without an entry per record.

    Head: `record_bytes`, `stride_bytes`, `dtype`, `shape`. Columns: `run.first`, `run.slot`, `run.object`.

    `stride_bytes` is less than `record_bytes` where sequences overlap. Run r holds samples from `runs_first[r]` on, in
    slots from `runs_slot[r]` on. A record is an array of `dtype` and `shape`.
    """

    record_bytes: int
    stride_bytes: int
    dtype: str
    shape: tuple[int, ...]
    runs_first: Ints
    runs_slot: Ints

    def slots(self, samples: Ints) -> Ints:
        """Return the slots of samples, int64[n]."""
        if len(self.runs_first) == 1:
            return np.asarray(samples + self.runs_slot[0])
        run = np.searchsorted(self.runs_first, samples, "right") - 1
        return np.asarray(samples + (self.runs_slot - self.runs_first)[run])

    def locate(self, samples: Ints) -> tuple[Ints, Ints]:
        """Return addresses and lengths, int64[n, 1]."""
        addresses = (self.slots(samples) * self.stride_bytes)[:, None]
        return addresses, np.full_like(addresses, self.record_bytes)


@dataclass(frozen=True, slots=True)
class Rows:
    """An address and a length for each sample and field, int64[samples, F]; length -1 where a field is absent.

    Columns: `row.address`, `row.length`, a row of F values after another.

    With a `syntax` (`row_syntax.py`) a sample is one row of text that holds all fields, and F is 1. The head then has
    `syntax` and `headers`: of CSV, the separator and the index of each cell's field. Further columns: `extent.header`, the
    header of each extent; `line.first` and `line.from`: from sample `line.first[r]` on, samples lie in consecutive lines of
    their file, the first in line `line.from[r]`.
    """

    addresses: Ints
    lengths: Ints
    syntax: str = ""

    def locate(self, samples: Ints) -> tuple[Ints, Ints]:
        """Return addresses and lengths, int64[n, F]."""
        return self.addresses[samples], self.lengths[samples]


@dataclass(frozen=True, slots=True)
class Indirect:
    """Shards of MDS and litData: an extent starts with u32 count and u32 offsets[count + 1].

    `sizes[c]` is the length of column c of a row, -1 where each row states it. `packed_rows`: each row is a zstd frame.
    Head: `sizes`, and `packed_rows` where it is true.
    """

    starts: Ints
    first: Ints
    extent_sizes: Ints
    sizes: tuple[int, ...]
    packed_rows: bool = False

    def locate(self, samples: Ints) -> tuple[Ints, Ints]:
        """Return the addresses of each sample's two u32 offsets, and length 8, int64[n, 1]."""
        extent = np.searchsorted(self.first, samples, "right") - 1
        addresses = (self.starts[extent] + 4 + 4 * (samples - self.first[extent]))[:, None]
        return addresses, np.full_like(addresses, 8)

    def settle(self, samples: Ints, pairs: np.ndarray, shard: Callable[[int], str]) -> tuple[Ints, Ints]:
        """Return addresses and lengths of the rows, int64[n, 1], by their offsets, uint32[n, 2].

        Raises CorruptData for offsets outside the shard; `shard(extent)` is its URI.
        """
        extent = np.searchsorted(self.first, samples, "right") - 1
        begin, end = pairs[:, 0].astype(np.int64), pairs[:, 1].astype(np.int64)
        table = 4 * (self.first[extent + 1] - self.first[extent] + 2)
        wrong = (begin < table) | (end < begin) | (end > self.extent_sizes[extent])
        if wrong.any():
            first = int(np.argmax(wrong))
            raise CorruptData(
                f"{shard(int(extent[first]))} has an offset table that points outside it, at sample "
                f"{int(samples[first])} of the dataset: write the shard or its index.json anew"
            )
        return (self.starts[extent] + begin)[:, None], (end - begin)[:, None]

    def split(self, row: bytes) -> tuple[bytes | None, ...]:
        """Split a row into its columns. Raises CorruptData where the sizes in the row do not add up."""
        if self.packed_rows:
            row = b"".join(unframed("a row", row, MAX_ROW_BYTES))
        stated = sum(size < 0 for size in self.sizes)
        if len(row) < 4 * stated:
            raise CorruptData(f"a row of {len(row)} bytes is shorter than its own sizes")
        variable = iter(struct.unpack_from(f"<{stated}I", row))
        at, columns = 4 * stated, []
        for size in self.sizes:
            length = next(variable) if size < 0 else size
            columns.append(row[at : at + length])
            at += length
        if at != len(row):
            raise CorruptData(f"a row of {len(row)} bytes states columns of {at}")
        return tuple(columns)


def check_count(
    uri: str, stated: int, indexed: int, where: str = "its index.json", noun: str = "samples"
) -> None:
    """Raise CorruptData where the count at the begin of a shard is not its index's. Found later, it would fail in an epoch,
    or leave samples out."""
    if stated != indexed:
        raise CorruptData(
            f"{uri} says that it holds {stated:,} {noun}, {where} says {indexed:,}: write the index or the shard anew"
        )


@dataclass(frozen=True, slots=True)
class Columns:
    """Chunks of rows whose values lie in buffers, as Arrow lays them out (`sources/columnar`).

    `chunk_first`: the first sample of each chunk, and the number of all. `chunk_schema`: its schema among `schemas`.
    `chunk_address` [chunks, buffers]: the address of each buffer of the schema's columns, or `NO_BUFFER` or `ALL_NULL`;
    for a constant column, the number of its value among `constants`. Head: `schemas`. Columns: `chunk.first`,
    `chunk.schema`, `chunk.address`, `constant`.
    """

    chunk_first: Ints
    chunk_schema: Ints
    chunk_address: Ints
    schemas: tuple[tuple[Column, ...], ...]
    constants: MappedTexts

    def rows(self, samples: Ints) -> tuple[Ints, Ints]:
        """Return the chunks of samples and their rows in them, int64[n]."""
        chunks = np.searchsorted(self.chunk_first, samples, "right") - 1
        return chunks, samples - self.chunk_first[chunks]


@dataclass(frozen=True, slots=True)
class PreparedField:
    """A value of each prepared sample: an array of `dtype` and `shape` at `offset` in the sample's record. `kind`:
    "tensor", "array", "number" (Python's) or "scalar" (numpy's). Of uneven samples it may be "bytes" or "text" too, and
    each record states the shape."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """Samples as a user's function made them: records of `stride_bytes`, one after another in each extent.

    Head: `container` ("value", "tuple", "list" or "dict"), `stride_bytes`, and `fields`: the name, kind, dtype, shape and
    offset of each. The end of a record says whether its sample was made (`loader/prepare/records.py`).

    Samples of unlike shapes have `most_bytes` in the head, the most that the values of one may take. `stride_bytes` is
    then the most that a record takes. An extent starts with u64 offsets[count + 1] of its records, and its size in the
    catalog is the most that it may take (`loader/prepare/uneven.py`).
    """

    container: str
    stride_bytes: int
    fields: tuple[PreparedField, ...]
    starts: Ints
    first: Ints
    most_bytes: int = 0

    def locate(self, samples: Ints) -> tuple[Ints, Ints]:
        """Return addresses and lengths of records, of uneven ones those of their two offsets, int64[n, 1]."""
        extent = np.searchsorted(self.first, samples, "right") - 1
        step, length = (OFFSET_BYTES, 2 * OFFSET_BYTES) if self.most_bytes else (self.stride_bytes,) * 2
        addresses = (self.starts[extent] + step * (samples - self.first[extent]))[:, None]
        return addresses, np.full_like(addresses, length)

    def settle(self, samples: Ints, pairs: np.ndarray) -> tuple[Ints, Ints]:
        """Return addresses and lengths of uneven records, int64[n], by their offsets, uint64[n, 2]. Raises CorruptData for
        offsets that no extent has."""
        extent = np.searchsorted(self.first, samples, "right") - 1
        begin, end = pairs[:, 0].astype(np.int64), pairs[:, 1].astype(np.int64)
        table = table_bytes(self.first[extent + 1] - self.first[extent])
        wrong = (begin < table) | (end < begin) | (end - begin > self.stride_bytes)
        if wrong.any():
            sample = int(samples[np.argmax(wrong)])
            raise CorruptData(f"the prepared record of sample {sample} lies nowhere; cachesvc evict drops it")
        return self.starts[extent] + begin, end - begin


OFFSET_BYTES = 8


def table_bytes(samples: Ints) -> Ints:
    """Return the bytes of the offsets of extents with so many uneven records."""
    return OFFSET_BYTES * (samples + 1)


Layout = Fixed | Rows | Indirect | Columns | Prepared
