"""The catalog: the immutable sample index of one dataset version, mapped from one file without a copy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from cachesvc.catalog.address_space import aligned
from cachesvc.catalog.column_file import mapped_columns
from cachesvc.catalog.columns import Array, Ints, MappedColumns, MappedTexts, check_ascending
from cachesvc.catalog.layout import (
    Columns,
    Field,
    Fixed,
    Indirect,
    Layout,
    Prepared,
    PreparedField,
    Rows,
    check_count,
)
from cachesvc.catalog.row_syntax import CsvHeader
from cachesvc.core.errors import CorruptData
from cachesvc.core.model import PAGE_BYTES, DatasetId, Extent, ExtentId, ObjectVersion, Piece
from cachesvc.core.safe_text import redacted
from cachesvc.sources.columnar.column import Column

if TYPE_CHECKING:
    from cachesvc.catalog import search

PART_COLUMNS = ("piece.stored", "piece.tail")
"""Columns of catalogs whose pieces are decoded from parts of objects."""
HASHES = "piece.hash"
"""Column of catalogs whose index states the hashes of objects."""
BUILDER_VERSION = 15
"""Raise it when the same listing would compile to another catalog: catalogs of other versions are built again."""


def is_current(path: str) -> bool:
    """Tell whether a catalog that was built earlier is one of this version."""
    try:
        with mapped_columns(path) as columns:
            return bool(columns.head["version"] == BUILDER_VERSION)
    except (CorruptData, FileNotFoundError):
        return False


@dataclass(frozen=True, eq=False)
class Catalog:
    """Read-only, and safe to share between threads and across a fork. Arrays are views of the file, which stays mapped as
    long as one of them lives.

    `extent_starts` are page-aligned addresses, ascending. `extent_first[i]` is the first sample of extent i, and
    `extent_first[-1] == samples`. `labels` index `classes`, -1 for a sample without a label; numeric labels are float64,
    NaN for a sample without one; None where no sample has a label. Labels of several values are float64[samples, n], or
    uint8[samples, classes], 1 for each class that applies and 255 for a sample without a label. `documents` (Megatron) are
    token offsets in the concatenated files. `notes` name the data that was left out.
    """

    id: DatasetId
    uri: str
    format: str
    samples: int
    fields: tuple[Field, ...]
    labels: Array | None
    documents: Ints | None
    notes: tuple[str, ...]
    extent_sizes: Ints
    extent_starts: Ints
    extent_first: Ints
    space_bytes: int
    stored_bytes: int
    layout: Layout
    columns: MappedColumns

    @classmethod
    def open(cls, path: str) -> Catalog:
        """Map a catalog file; `/proc/self/fd/N` is allowed.

        Raises CorruptData for anything but one whole catalog of this release, FileNotFoundError for no file.
        """
        with mapped_columns(path) as columns:
            return _catalog(columns)

    def __len__(self) -> int:
        return self.samples

    @property
    def extent_bytes(self) -> int:
        """The extent size that the data was cut by: the option, else the daemon's setting."""
        return int(self.columns.head["extent_bytes"])

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """Class names, decoded at the first use: there may be millions."""
        return tuple(MappedTexts(self.columns, "class"))

    def extents(self) -> list[ExtentId]:
        """Return every extent's id, in address order."""
        raw = self.columns["extent.id"].tobytes()
        return [ExtentId(raw[at : at + 16]) for at in range(0, len(raw), 16)]

    def extent(self, index: int) -> Extent:
        """Return one extent with its pieces."""
        columns, first = self.columns, self.columns["extent.piece"]
        pieces = tuple(self.piece(at) for at in range(int(first[index]), int(first[index + 1])))
        return Extent(
            ExtentId(columns["extent.id"][16 * index : 16 * index + 16].tobytes()),
            pieces,
            int(self.extent_sizes[index]),
            int(columns["extent.stored"][index]),
        )

    def piece(self, at: int) -> Piece:
        """Return one piece of all extents', in address order."""
        columns = self.columns
        stored, tail = (int(columns[name][at]) if name in columns else 0 for name in PART_COLUMNS)
        return Piece(
            self.object(int(columns["piece.object"][at])),
            int(columns["piece.offset"][at]),
            int(columns["piece.length"][at]),
            str(columns.head["codecs"][int(columns["piece.codec"][at])]),
            stored,
            tail,
            MappedTexts(columns, HASHES)[at] if f"{HASHES}.end" in columns else "",
        )

    def object(self, index: int) -> ObjectVersion:
        """Return one object of the listing that was compiled."""
        columns = self.columns
        uri = columns.head["uri_prefix"] + MappedTexts(columns, "object.uri")[index]
        return ObjectVersion(
            uri, int(columns["object.size"][index]), MappedTexts(columns, "object.etag")[index]
        )

    @property
    def uri_prefix(self) -> str:
        """The common prefix of the URIs of all objects."""
        return str(self.columns.head["uri_prefix"])

    @property
    def objects(self) -> int:
        """The number of objects in the listing."""
        return len(self.columns["object.size"])

    def locate(self, samples: Ints) -> tuple[Ints, Ints]:
        """Return addresses and lengths of samples, int64[n, F]; length -1 where a field is absent.

        For `Fixed`, F = 1. For `Indirect` they are those of the sample's entry in its extent's table, F = 1, which
        `settle` resolves. Not for `Columns`, whose values lie in several buffers.
        """
        assert not isinstance(self.layout, Columns), "a value of a column has no address of its own"
        return self.layout.locate(np.asarray(samples, np.int64))

    def settle(self, samples: Ints, pairs: np.ndarray) -> tuple[Ints, Ints]:
        """Return addresses and lengths by the table entries read at `locate`'s addresses.

        `pairs` is uint32[n, 2], and the result one of rows, int64[n, 1]. Indirect only. Raises CorruptData naming a
        shard with offsets outside it.
        """
        assert isinstance(self.layout, Indirect), "other layouts need no second step"
        return self.layout.settle(
            np.asarray(samples, np.int64), pairs, lambda extent: self.object(self._extent_object(extent)).uri
        )

    def check_shard(self, index: int, head: bytes) -> None:
        """Raise CorruptData where the sample count in a shard, its first 4 bytes, is not its index's. Indirect only."""
        indexed = int(self.extent_first[index + 1] - self.extent_first[index])
        check_count(self.object(self._extent_object(index)).uri, int.from_bytes(head, "little"), indexed)

    def split(self, row: bytes) -> tuple[bytes | None, ...]:
        """Split a row into its columns, in the order of `fields`. Indirect only. Raises CorruptData."""
        assert isinstance(self.layout, Indirect), "only an indirect layout has rows to split"
        return self.layout.split(row)

    def key(self, sample: int) -> str:
        """Return a sample's name: path, `__key__`, or "shard:ordinal". Raises IndexError."""
        if not 0 <= sample < self.samples:
            raise IndexError(f"sample {sample} of {self.samples}")
        if "key.end" in self.columns:
            return MappedTexts(self.columns, "key")[sample]
        if isinstance(self.layout, Fixed):
            run = int(np.searchsorted(self.layout.runs_first, sample, "right")) - 1
            ordinal = sample - int(self.layout.runs_first[run])
            return f"{self.shard(int(self.columns['run.object'][run]))}:{ordinal}"
        extent = int(np.searchsorted(self.extent_first, sample, "right")) - 1
        number = self._extent_object(extent)
        if not isinstance(self.layout, Indirect):  # extents are of one object each, in the order of objects
            extent = int(np.searchsorted(self.extent_objects, number))
        return f"{self.shard(number)}:{sample - int(self.extent_first[extent])}"

    def line_of(self, sample: int) -> tuple[str, int]:
        """Return the URI of a row of text and the number of its first line, from 1 on."""
        extent = int(np.searchsorted(self.extent_first, sample, "right")) - 1
        first = self.columns["line.first"]
        run = int(np.searchsorted(first, sample, "right")) - 1
        line = int(self.columns["line.from"][run]) + sample - int(first[run])
        return self.object(self._extent_object(extent)).uri, line

    def headers_of(self, samples: Ints) -> Ints:
        """Return the index of each row's CSV header, int64[n]."""
        extents = np.searchsorted(self.extent_first, samples, "right") - 1
        return np.asarray(self.columns["extent.header"][extents])

    @property
    def csv_headers(self) -> tuple[CsvHeader, ...]:
        """The headers of the files of a CSV dataset, each once."""
        return tuple(
            CsvHeader(str(sep), tuple(map(int, cells)))
            for sep, cells in self.columns.head["layout"]["headers"]
        )

    @property
    def compressed(self) -> bool:
        """Whether extents are decoded from whole objects."""
        return bool(self.columns["piece.codec"].any())

    @cached_property
    def in_object_order(self) -> bool:
        """Whether extents hold ranges of objects as they are, in the order of the objects and of their offsets."""
        objects, offsets = self.columns["piece.object"], self.columns["piece.offset"]
        step = np.diff(objects)
        return not self.compressed and bool(((step > 0) | ((step == 0) & (np.diff(offsets) > 0))).all())

    @cached_property
    def extent_objects(self) -> Ints:
        """The object of each extent's first piece."""
        objects: Ints = self.columns["piece.object"][self.columns["extent.piece"][:-1]]
        return objects

    def _extent_object(self, extent: int) -> int:
        return int(self.columns["piece.object"][int(self.columns["extent.piece"][extent])])

    def shard(self, index: int) -> str:
        """Return an object's name, or its path where several have that name."""
        if "object.name.end" in self.columns:
            return MappedTexts(self.columns, "object.name")[index]
        return self.object(index).uri.rpartition("/")[2]

    def find(self, expression: str) -> Ints:
        """Return the samples that an expression like `label == 'cat' and width > 100` selects, int64, ascending.

        Names in it are key, label, shard and the tags. Raises InvalidInput naming the bad part and the names that exist.
        """
        from cachesvc.catalog import search  # with all that reads labels

        return np.flatnonzero(search.select(expression, self.samples, self._search_column, self.names()))

    def names(self) -> tuple[str, ...]:
        """Return the names that `find` accepts. A label of several values is none."""
        label = ("label",) if self.labels is not None and self.labels.ndim == 1 else ()
        shard = ("shard",) if self.format != "files" else ()
        return ("key", *label, *shard, *(name for name, _ in self.columns.head["tags"]))

    def tag(self, name: str) -> Array | tuple[Array, MappedTexts] | None:
        """Return the values of a tag, float64[samples], NaN for none; or codes, -1 for none, and the texts that they index.
        None for no such tag."""
        for index, (tag, kind) in enumerate(self.columns.head["tags"]):
            if tag == name and kind == "number":
                return self.columns[f"tag.{index}.number"]
            if tag == name:
                return self.columns[f"tag.{index}.code"], MappedTexts(self.columns, f"tag.{index}.values")
        return None

    def _search_column(self, name: str) -> search.Column:
        from cachesvc.catalog import search

        tag = self.tag(name)
        if isinstance(tag, tuple):
            return search.TextValues(tag[0], list(tag[1]))
        if tag is not None:
            return search.NumberValues(tag)
        if name == "label" and self.labels is not None and self.labels.dtype.kind == "f":
            return search.NumberValues(self.labels)
        if name == "label" and self.labels is not None:
            return search.TextValues(self.labels, list(self.classes), codes_are_numbers=True)
        if name == "shard":
            objects = np.asarray([self._extent_object(extent) for extent in range(len(self.extent_sizes))])
            used, codes = np.unique(objects, return_inverse=True)
            per_sample = np.repeat(codes, np.diff(self.extent_first))
            return search.TextValues(per_sample, [self.shard(int(index)) for index in used])
        return search.TextValues(
            np.arange(self.samples), [self.key(sample) for sample in range(self.samples)]
        )


def _catalog(columns: MappedColumns) -> Catalog:
    head = columns.head
    if head["version"] != BUILDER_VERSION:
        raise CorruptData(f"catalog version {head['version']!r}; this program reads {BUILDER_VERSION}")
    sizes, starts, first = columns["extent.size"], columns["extent.start"], columns["extent.first"]
    samples = int(head["samples"])
    _check_space(columns, samples)
    return Catalog(
        id=DatasetId(head["id"]),
        uri=redacted(head["uri"]),  # for people; the objects' URIs are for reading
        format=head["format"],
        samples=samples,
        fields=tuple(Field(str(name), str(encoding)) for name, encoding in head["fields"]),
        labels=_labels(columns, samples),
        documents=columns["documents"] if "documents" in columns else None,  # noqa: SIM401
        notes=tuple(redacted(note) for note in head["notes"]),
        extent_sizes=sizes,
        extent_starts=starts,
        extent_first=first,
        space_bytes=aligned(int(starts[-1] + sizes[-1]), PAGE_BYTES) if len(starts) else 0,
        stored_bytes=int(columns["extent.stored"].sum()),
        layout=_layout(columns, samples),
        columns=columns,
    )


def _labels(columns: MappedColumns, samples: int) -> Array | None:
    name = next((name for name in ("label", "label.number", "label.set") if name in columns), None)
    if name is None:
        return None
    width = int(columns.head["label_width"])
    if width < 0 or (width and len(columns[name]) != samples * width):
        raise CorruptData(f"catalog has {len(columns[name])} labels for {samples} samples of {width} each")
    return columns[name].reshape(samples, width) if width else columns[name]


def _layout(columns: MappedColumns, samples: int) -> Layout:
    head = columns.head["layout"]
    if head["kind"] == "fixed":
        return Fixed(
            int(head["record_bytes"]),
            int(head["stride_bytes"]),
            str(head["dtype"]),
            tuple(int(side) for side in head["shape"]),
            columns["run.first"],
            columns["run.slot"],
        )
    if head["kind"] == "rows":
        syntax = str(head.get("syntax", ""))
        shape = (samples, 1 if syntax else len(columns.head["fields"]))
        return Rows(columns["row.address"].reshape(shape), columns["row.length"].reshape(shape), syntax)
    if head["kind"] == "indirect":
        first, sizes = columns["extent.first"], tuple(int(size) for size in head["sizes"])
        return Indirect(
            columns["extent.start"], first, columns["extent.size"], sizes, bool(head.get("packed_rows"))
        )
    if head["kind"] == "columns":
        return _columns(columns, samples)
    if head["kind"] == "prepared":
        fields = (
            PreparedField(str(name), str(kind), str(dtype), tuple(map(int, shape)), int(offset))
            for name, kind, dtype, shape, offset in head["fields"]
        )
        starts, first = columns["extent.start"], columns["extent.first"]
        sizes = int(head["stride_bytes"]), int(head.get("most_bytes", 0))
        return Prepared(str(head["container"]), sizes[0], tuple(fields), starts, first, sizes[1])
    raise CorruptData(f"unknown layout {head['kind']!r}")


def _columns(columns: MappedColumns, samples: int) -> Columns:
    schemas = tuple(
        tuple(Column.from_json(each) for each in found) for found in columns.head["layout"]["schemas"]
    )
    first, schema, address = columns["chunk.first"], columns["chunk.schema"], columns["chunk.address"]
    check_ascending(first, "chunk.first")
    if len(first) != len(schema) + 1 or first[0] or first[-1] != samples or not len(schema):
        raise CorruptData("the chunks of rows are inconsistent")
    return Columns(first, schema, address.reshape(len(schema), -1), schemas, MappedTexts(columns, "constant"))


def _check_space(columns: MappedColumns, samples: int) -> None:
    sizes, starts, first = columns["extent.size"], columns["extent.start"], columns["extent.first"]
    count = len(sizes)
    check_ascending(starts, "extent.start")
    check_ascending(first, "extent.first")
    check_ascending(columns["extent.piece"], "extent.piece")
    lengths = (len(starts), len(columns["extent.stored"]), len(first) - 1, len(columns["extent.piece"]) - 1)
    if set(lengths) != {count} or len(columns["extent.id"]) != 16 * count or count == 0:
        raise CorruptData(f"catalog columns disagree on {count} extents")
    if (
        first[-1] != samples
        or first[0] != 0
        or (sizes < 0).any()
        or starts[-1] + sizes[-1] < 0
        or (starts % PAGE_BYTES).any()
    ):
        raise CorruptData("catalog extents are inconsistent")
    if (starts[:-1] + sizes[:-1] > starts[1:]).any():
        raise CorruptData("catalog extents overlap")
    if columns["extent.piece"][-1] != len(columns["piece.object"]):
        raise CorruptData("catalog pieces and extents disagree")
