"""The catalog: the immutable sample index of one dataset version, mapped from one file and never copied."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cachesvc.catalog import search
from cachesvc.catalog.columns import Array, Columns, Ints, Texts, read_columns
from cachesvc.catalog.layout import Field, Fixed, Indirect, Layout, Rows, Table
from cachesvc.catalog.space import CODECS, aligned
from cachesvc.core.errors import CorruptData
from cachesvc.core.model import PAGE_BYTES, DatasetId, Extent, ExtentId, ObjectVersion, Piece, extent_of
from cachesvc.core.safe_text import redacted

_PARTS = ("piece.stored", "piece.tail")
"""Columns of catalogs in which pieces are decoded from parts of objects."""
BUILDER_VERSION = 11
"""Part of every dataset's digest: raised when the same listing would compile to something else."""


@dataclass(frozen=True, eq=False)
class Catalog:
    """Read-only and safe to share between threads and across a fork. Arrays are views of the file, which
    stays mapped as long as one of them lives.

    `extent_starts` are page-aligned addresses, ascending; `extent_first[i]` is the first sample of extent i
    and `extent_first[-1] == samples`. `labels` index `classes`, -1 for a sample without one; numbers are float64,
    NaN for a sample without one; None where no sample has one. `documents` (Megatron) are token offsets in the
    files' concatenation. `notes` say what was left out.
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
    _columns: Columns

    @classmethod
    def open(cls, path: str) -> Catalog:
        """Map a catalog file (`/proc/self/fd/N` will do). Raises CorruptData for anything that is not one
        whole valid catalog, FileNotFoundError for no file."""
        return read_columns(path, _catalog)

    def __len__(self) -> int:
        return self.samples

    @property
    def extent_bytes(self) -> int:
        """The option that it was compiled with, the daemon's own where nobody gave one."""
        return int(self._columns.head["extent_bytes"])

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """The names of classes, made when they are asked for: there may be millions."""
        return tuple(Texts(self._columns, "class"))

    def extents(self) -> list[ExtentId]:
        """Every extent's id, in address order."""
        raw = self._columns["extent.id"].tobytes()
        return [ExtentId(raw[at : at + 16]) for at in range(0, len(raw), 16)]

    def extent(self, index: int) -> Extent:
        """One extent with its pieces."""
        columns, first = self._columns, self._columns["extent.piece"]
        pieces = tuple(self._piece(at) for at in range(int(first[index]), int(first[index + 1])))
        return Extent(
            ExtentId(columns["extent.id"][16 * index : 16 * index + 16].tobytes()),
            pieces,
            int(self.extent_sizes[index]),
            int(columns["extent.stored"][index]),
        )

    def _piece(self, at: int) -> Piece:
        columns = self._columns
        return Piece(
            self.object(int(columns["piece.object"][at])),
            int(columns["piece.offset"][at]),
            int(columns["piece.length"][at]),
            CODECS[int(columns["piece.codec"][at])],
            *(int(columns[name][at]) for name in _PARTS if name in columns),
        )

    def object(self, index: int) -> ObjectVersion:
        """One object of the listing that was compiled."""
        columns = self._columns
        uri = columns.head["uri_prefix"] + Texts(columns, "object.uri")[index]
        return ObjectVersion(uri, int(columns["object.size"][index]), Texts(columns, "object.etag")[index])

    @property
    def uri_prefix(self) -> str:
        """What the URIs of all its objects begin with."""
        return str(self._columns.head["uri_prefix"])

    @property
    def objects(self) -> int:
        """How many objects the listing holds."""
        return len(self._columns["object.size"])

    def locate(self, samples: Ints) -> tuple[Ints, Ints]:
        """Addresses and lengths of samples, int64[n, F]; length -1 where a field is absent. Fixed: F = 1.
        Indirect and Table: where the extent says where each sample lies, F = 1."""
        return self.layout.locate(np.asarray(samples, np.int64))

    def settle(self, samples: Ints, pairs: np.ndarray) -> tuple[Ints, Ints]:
        """Addresses and lengths from the uint32[n, 2] (Table: [n, F, 2]) that stood at `locate`'s addresses: of rows,
        int64[n, 1] (Indirect), or of fields, int64[n, F] (Table). Raises CorruptData naming a shard with offsets outside
        it."""
        assert isinstance(self.layout, Indirect | Table), "other layouts need no second step"
        return self.layout.settle(
            np.asarray(samples, np.int64), pairs, lambda extent: self.object(self._extent_object(extent)).uri
        )

    def check_shard(self, index: int, head: bytes) -> None:
        """Indirect only: raise CorruptData naming an extent that begins (4 bytes) with another number of samples than
        its index told."""
        told = int(self.extent_first[index + 1] - self.extent_first[index])
        stated = int.from_bytes(head, "little")
        if stated != told:
            uri = self.object(self._extent_object(index)).uri
            raise CorruptData(
                f"{uri} says that it holds {stated:,} samples, its index.json says {told:,}: write the index or the "
                "shard anew"
            )

    def split(self, row: bytes) -> tuple[bytes | None, ...]:
        """Indirect only: a row's columns in the order of `fields`. Raises CorruptData."""
        assert isinstance(self.layout, Indirect), "only an indirect layout has rows to split"
        return self.layout.split(row)

    def key(self, sample: int) -> str:
        """A sample's name: path, `__key__`, or "shard:ordinal". Raises IndexError."""
        if not 0 <= sample < self.samples:
            raise IndexError(f"sample {sample} of {self.samples}")
        if "key.end" in self._columns:
            return Texts(self._columns, "key")[sample]
        if isinstance(self.layout, Fixed):
            run = int(np.searchsorted(self.layout.runs_first, sample, "right")) - 1
            ordinal = sample - int(self.layout.runs_first[run])
            return f"{self._shard(int(self._columns['run.object'][run]))}:{ordinal}"
        extent = int(np.searchsorted(self.extent_first, sample, "right")) - 1
        number = self._extent_object(extent)
        if isinstance(self.layout, Table):  # a piece an extent, in the order of objects
            extent = int(np.searchsorted(self._columns["piece.object"], number))
        return f"{self._shard(number)}:{sample - int(self.extent_first[extent])}"

    def _extent_object(self, extent: int) -> int:
        return int(self._columns["piece.object"][int(self._columns["extent.piece"][extent])])

    def _shard(self, index: int) -> str:
        return self.object(index).uri.rpartition("/")[2]

    def find(self, expression: str) -> Ints:
        """Samples that an expression like `label == 'cat' and width > 100` selects, int64, ascending. Names:
        key, label, shard and the tags. Raises InvalidInput naming the bad part and the names that exist."""
        return np.flatnonzero(search.select(expression, self.samples, self._search_column, self.names()))

    def names(self) -> tuple[str, ...]:
        """The names that `find` knows."""
        label = ("label",) if self.labels is not None else ()
        shard = ("shard",) if self.format != "files" else ()
        return ("key", *label, *shard, *(name for name, _ in self._columns.head["tags"]))

    def _search_column(self, name: str) -> search.Column:
        for index, (tag, kind) in enumerate(self._columns.head["tags"]):
            if tag == name and kind == "number":
                return search.Numbers(self._columns[f"tag.{index}.number"])
            if tag == name:
                values = Texts(self._columns, f"tag.{index}.values")
                return search.Words(self._columns[f"tag.{index}.code"], list(values))
        if name == "label" and self.labels is not None and self.labels.dtype.kind == "f":
            return search.Numbers(self.labels)
        if name == "label" and self.labels is not None:
            return search.Words(self.labels, list(self.classes), codes_are_numbers=True)
        if name == "shard":
            objects = np.asarray([self._extent_object(extent) for extent in range(len(self.extent_sizes))])
            used, codes = np.unique(objects, return_inverse=True)
            per_sample = np.repeat(codes, np.diff(self.extent_first))
            return search.Words(per_sample, [self._shard(int(index)) for index in used])
        return search.Words(np.arange(self.samples), [self.key(sample) for sample in range(self.samples)])

    def check(self) -> None:
        """Read every row and raise CorruptData for one that points outside its object or the address space;
        for catalogs that come from where others write."""
        try:
            _check_pieces(self._columns)
            self._check_samples()
            self._check_tags()
            for index in range(len(self.extent_sizes)):
                extent = self.extent(index)
                if extent != extent_of(extent.pieces):
                    raise CorruptData(f"extent {index} is not named after its pieces")
        except (ValueError, IndexError, KeyError, OverflowError, TypeError, SyntaxError) as error:
            raise CorruptData(f"catalog rows make no sense: {error!r}") from error

    def _check_samples(self) -> None:
        columns, layout = self._columns, self.layout
        for name, (dtype, _) in columns.head["columns"].items():
            if dtype != _dtype_of(name):
                raise CorruptData(f"catalog column {name!r} is of type {dtype}")
            if name.endswith(".end"):
                _ascending(columns[name], name)
        if isinstance(layout, Rows) and self.samples:
            lengths = np.maximum(layout.lengths, 0)
            if layout.addresses.min() < 0 or (lengths > self.space_bytes - layout.addresses).any():
                raise CorruptData("a sample lies outside the address space")
            begins = layout.addresses[lengths > 0]
            self._check_held(begins, begins + lengths[lengths > 0])
        if isinstance(layout, Fixed):
            self._check_runs(layout)
        if isinstance(layout, Indirect) and (np.diff(self.extent_first) > self.extent_sizes // 4 - 2).any():
            raise CorruptData("a shard is too small for the offsets of its samples")
        if (
            isinstance(layout, Table)
            and (np.diff(self.extent_first) > self.extent_sizes // layout.row_bytes).any()
        ):
            raise CorruptData("an extent is too small for the table of its rows")

    def _check_runs(self, layout: Fixed) -> None:
        first, slot, objects = layout.runs_first, layout.runs_slot, self._columns["run.object"]
        if not 0 < len(first) == len(slot) == len(objects) or first[0] or (np.diff(first) <= 0).any():
            raise CorruptData("runs of records make no sense")
        if first[-1] >= self.samples or not 0 <= objects.min() <= objects.max() < self.objects:
            raise CorruptData("a run of records is of no object, or has no sample")
        last = layout.slots(np.append(first[1:], self.samples) - 1)
        if layout.stride_bytes <= 0 or slot.min() < 0 or last.max() > self.space_bytes // layout.stride_bytes:
            raise CorruptData("a run of records lies outside the address space")
        self._check_held(slot * layout.stride_bytes, last * layout.stride_bytes + layout.record_bytes)
        item = np.dtype(layout.dtype)
        if item.hasobject or math.prod((item.itemsize, *layout.shape)) != layout.record_bytes:
            raise CorruptData("records are no items of their type and shape")

    def _check_held(self, begins: Ints, ends: Ints) -> None:
        """Raises CorruptData for a range that reaches into a gap between extents: whoever reads there is killed."""
        starts, stops = self.extent_starts, self.extent_starts + self.extent_sizes
        gaps = np.flatnonzero(np.append(starts[1:] != stops[:-1], True))
        until = stops[gaps][np.searchsorted(gaps, np.arange(len(starts)))]
        first = np.searchsorted(starts, begins, "right") - 1
        if (first < 0).any() or (ends > until[first]).any():
            raise CorruptData("a sample lies between extents")

    def _check_tags(self) -> None:
        columns, classes = self._columns, len(Texts(self._columns, "class"))
        coded = [
            (columns[f"tag.{at}.code"], len(Texts(columns, f"tag.{at}.values"))) for at in self._tags("text")
        ]
        if "label" in columns:
            coded.append((columns["label"], classes))
        if any(codes.min() < -1 or codes.max() >= names for codes, names in coded):
            raise CorruptData("a label or tag names no value")
        rows = [len(codes) for codes, _ in coded]
        rows += [len(columns[f"tag.{at}.number"]) for at in self._tags("number")]
        rows += [len(columns[name]) for name in ("key.end", "label.number") if name in columns]
        if set(rows) - {self.samples}:
            raise CorruptData("labels, tags or keys are not one a sample")

    def _tags(self, kind: str) -> list[int]:
        return [at for at, (_, found) in enumerate(self._columns.head["tags"]) if found == kind]


def _dtype_of(name: str) -> str:
    if name.endswith(".number"):
        return "<f8"
    if name == "label" or name.endswith(".code"):
        return "<i4"
    return "|u1" if name.endswith((".text", ".codec", ".id")) else "<i8"


def _check_pieces(columns: Columns) -> None:
    objects, offsets = columns["piece.object"], columns["piece.offset"]
    lengths, codecs = columns["piece.length"], columns["piece.codec"]
    if len(objects) and not 0 <= objects.min() <= objects.max() < len(columns["object.size"]):
        raise CorruptData("a piece names an object that is not listed")
    sizes = columns["object.size"][objects]
    stored, tails = (columns[name] if name in columns else np.zeros_like(sizes) for name in _PARTS)
    wrong = (offsets < 0) | (lengths < 0) | (codecs >= len(CODECS)) | (stored < 0) | (tails < 0)
    wrong |= (stored > 0) & ((codecs == 0) | (stored > sizes - offsets) | (tails > sizes))
    if (wrong | ((codecs == 0) & (lengths > sizes - offsets))).any():
        raise CorruptData("a piece lies outside its object")


def _catalog(columns: Columns) -> Catalog:
    head = columns.head
    if head["version"] != BUILDER_VERSION:
        raise CorruptData(f"catalog version {head['version']!r}; this program reads {BUILDER_VERSION}")
    sizes, starts, first = columns["extent.size"], columns["extent.start"], columns["extent.first"]
    samples = int(head["samples"])
    _check_space(columns, samples)
    return Catalog(
        id=DatasetId(head["id"]),
        uri=redacted(head["uri"]),  # for people; objects keep theirs, to be read
        format=head["format"],
        samples=samples,
        fields=tuple(Field(str(name), str(encoding)) for name, encoding in head["fields"]),
        labels=_optional(columns, "label.number" if "label.number" in columns else "label"),
        documents=_optional(columns, "documents"),
        notes=tuple(redacted(note) for note in head["notes"]),
        extent_sizes=sizes,
        extent_starts=starts,
        extent_first=first,
        space_bytes=aligned(int(starts[-1] + sizes[-1]), PAGE_BYTES) if len(starts) else 0,
        stored_bytes=int(columns["extent.stored"].sum()),
        layout=_layout(columns, samples),
        _columns=columns,
    )


def _optional(columns: Columns, name: str) -> Array | None:
    return columns[name] if name in columns else None  # noqa: SIM401


def _layout(columns: Columns, samples: int) -> Layout:
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
        shape = (samples, len(columns.head["fields"]))
        return Rows(columns["row.address"].reshape(shape), columns["row.length"].reshape(shape))
    if head["kind"] == "indirect":
        first, sizes = columns["extent.first"], tuple(int(size) for size in head["sizes"])
        return Indirect(columns["extent.start"], first, columns["extent.size"], sizes)
    if head["kind"] == "table":
        fields = len(columns.head["fields"])
        if not fields:
            raise CorruptData("a table without fields")
        return Table(columns["extent.start"], columns["extent.first"], columns["extent.size"], fields)
    raise CorruptData(f"unknown layout {head['kind']!r}")


def _check_space(columns: Columns, samples: int) -> None:
    sizes, starts, first = columns["extent.size"], columns["extent.start"], columns["extent.first"]
    count = len(sizes)
    _ascending(starts, "extent.start")
    _ascending(first, "extent.first")
    _ascending(columns["extent.piece"], "extent.piece")
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
        raise CorruptData("catalog extents make no sense")
    if (starts[:-1] + sizes[:-1] > starts[1:]).any():
        raise CorruptData("catalog extents overlap")
    if columns["extent.piece"][-1] != len(columns["piece.object"]):
        raise CorruptData("catalog pieces and extents disagree")


def _ascending(values: Ints, name: str) -> None:
    if len(values) and (values[0] < 0 or (values[1:] < values[:-1]).any()):
        raise CorruptData(f"catalog column {name!r} must ascend")
