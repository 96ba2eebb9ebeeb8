"""Derives the catalog of a prepared dataset from its source's: what a user's function makes of each sample.

Sample n of the one is sample n of the other. An extent of prepared samples holds a run of samples of one source extent, of
about the source's extent size. Extents are numbered in the order of the samples, and their ids follow from the dataset's:
a sample's label may come from the catalog, so equal bytes of the source may be prepared to other ones.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cachesvc.catalog.address_space import CODECS, aligned
from cachesvc.catalog.catalog import BUILDER_VERSION, Catalog
from cachesvc.catalog.column_file import write_columns
from cachesvc.catalog.columns import Array, Ints, TextColumn
from cachesvc.catalog.layout import PreparedField, table_bytes
from cachesvc.core.errors import InvalidInput
from cachesvc.core.model import EXTENT_BYTES, HUGE_BYTES, MAX_EXTENTS, PREPARED_MARK, DatasetId, ExtentId

FORMAT = "prepared"
RECORDS = 3
"""Counts up with the form of records, so that records of another form are not read."""
MAX_TEXT = 4096
"""Characters of a recipe's texts."""
MAX_FIELDS = 1000
CONTAINERS = ("value", "tuple", "list", "dict")
KINDS = ("tensor", "array", "number", "scalar")
UNEVEN_KINDS = (*KINDS, "bytes", "text")


@dataclass(frozen=True, slots=True)
class Recipe:
    """The function that prepares samples.

    `name` is its qualified name, `digest` that of its code and data, `spec` names the choices that decide what it gets: the
    fields and their decoding. A dataset belongs to the digest, or to the `given_name` in its place. `versions` are those of
    the libraries that it may use, by name.
    """

    name: str
    digest: str
    spec: str
    given_name: str = ""
    versions: Mapping[str, str] | None = None

    def check(self) -> None:
        """Raise InvalidInput for texts beyond the limits."""
        texts = (self.name, self.digest, self.spec, self.given_name, json.dumps(dict(self.versions or {})))
        if any(len(text) > MAX_TEXT for text in texts) or not self.digest:
            raise InvalidInput(f"the names of a prepare= function take more than {MAX_TEXT:,} characters")

    def dataset(self, source: DatasetId, user: int) -> DatasetId:
        """Return the id of what it makes of a dataset for a user."""
        identity = ["name", self.given_name] if self.given_name else ["digest", self.digest]
        text = json.dumps([FORMAT, RECORDS, source, self.name, identity, self.spec, user])
        return DatasetId(hashlib.blake2b(text.encode(), digest_size=16).hexdigest())


@dataclass(frozen=True, slots=True)
class PreparedForm:
    """The records of prepared samples. Raises InvalidInput for fields that overlap or lie outside their record.

    `most_bytes`: the most that the values of an uneven sample may take. Its fields have no shapes and offsets, and
    `stride_bytes` is the most that its record takes. 0 where all samples have the shapes of the fields.
    """

    container: str
    stride_bytes: int
    fields: tuple[PreparedField, ...]
    most_bytes: int = 0

    def __post_init__(self) -> None:
        end, kinds = self.most_bytes, UNEVEN_KINDS if self.most_bytes else KINDS
        for each in () if self.most_bytes else self.fields:
            if each.offset < end or min(each.shape, default=0) < 0 or len(each.name) > MAX_TEXT:
                raise InvalidInput(f"field {each.name!r} of a prepared sample does not lie in its record")
            end = each.offset + int(np.dtype(each.dtype).itemsize * np.prod(each.shape, dtype=object))
        if any(np.dtype(each.dtype).kind not in "biufc" for each in self.fields):
            raise InvalidInput("prepared samples hold numbers alone")
        if self.container not in CONTAINERS or any(each.kind not in kinds for each in self.fields):
            raise InvalidInput(f"prepared samples are no {self.container!r}")
        if not 0 < len(self.fields) <= MAX_FIELDS or not 0 <= end < self.stride_bytes <= 1 << 40:
            raise InvalidInput(f"prepared samples of {self.stride_bytes:,} bytes do not hold their fields")

    def to_json(self) -> str:
        """Return the form as text."""
        fields = [(each.name, each.kind, each.dtype, each.shape, each.offset) for each in self.fields]
        head = {"container": self.container, "stride_bytes": self.stride_bytes, "fields": fields}
        return json.dumps(head | ({"most_bytes": self.most_bytes} if self.most_bytes else {}))

    @classmethod
    def from_json(cls, text: str) -> PreparedForm:
        """Read a form. Raises InvalidInput."""
        try:
            head = json.loads(text)
            fields = (
                PreparedField(
                    str(name), str(kind), np.dtype(str(dtype)).str, tuple(map(int, shape)), int(offset)
                )
                for name, kind, dtype, shape, offset in head["fields"]
            )
            most_bytes = int(head.get("most_bytes", 0))
            return cls(str(head["container"]), int(head["stride_bytes"]), tuple(fields), most_bytes)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            if isinstance(error, InvalidInput):
                raise
            raise InvalidInput(f"no form of prepared samples: {error!r}") from None


def derive(source: Catalog, recipe: Recipe, form: PreparedForm, user: int, into: str) -> DatasetId:
    """Write the catalog of what `recipe` makes of a source at `into`/ID.lmdb, and return its id. Raises InvalidInput for
    more extents than a dataset may have, OutOfSpace."""
    recipe.check()
    dataset = recipe.dataset(source.id, user)
    first, extent = _runs(source, max(1, (source.extent_bytes or EXTENT_BYTES) // form.stride_bytes))
    sizes = np.diff(first) * form.stride_bytes
    if form.most_bytes:
        sizes += table_bytes(np.diff(first))
    starts = np.cumsum(np.concatenate([[0], aligned_sizes(sizes)]))[:-1]
    none = np.zeros(0, np.int64)
    columns: dict[str, Array] = {
        **dict.fromkeys(("piece.object", "piece.offset", "piece.length", "object.size"), none),
        "piece.codec": np.zeros(0, np.uint8),
        "extent.piece": np.zeros(len(sizes) + 1, np.int64),
        "extent.size": sizes,
        "extent.start": starts,
        "extent.stored": np.zeros(len(sizes), np.int64),
        "extent.id": np.frombuffer(b"".join(_ids(dataset, len(sizes))), np.uint8),
        "extent.first": first,
        "extent.source": extent,
        **TextColumn().columns("object.uri"),
        **TextColumn().columns("object.etag"),
        **TextColumn().columns("class"),
    }
    layout = json.loads(form.to_json())
    head = {
        "version": BUILDER_VERSION,
        "id": dataset,
        "uri": f"{source.uri}#{recipe.name}@{recipe.given_name or recipe.digest[:8]}",
        "uri_prefix": source.uri_prefix,
        "format": FORMAT,
        "extent_bytes": source.extent_bytes,
        "samples": source.samples,
        "fields": [(each.name, each.dtype) for each in form.fields],
        "layout": {"kind": FORMAT, **layout},
        "codecs": list(CODECS),
        "tags": [],
        "label_width": 0,
        "notes": [],
        "prepared": {
            "source": source.id,
            "digest": recipe.digest,
            "user": user,
            "versions": dict(recipe.versions or {}),
        },
    }
    write_columns(f"{into}/{dataset}.lmdb", head, columns)
    return dataset


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a prepared dataset: its source, the user it belongs to, and the digest and libraries of the function
    that made it."""

    source: DatasetId
    user: int
    digest: str
    versions: Mapping[str, str]
    source_extents: Ints
    """The index of each extent's source extent."""


def origin_of(catalog: Catalog) -> Origin | None:
    """Return the origin of a prepared dataset; None for other datasets."""
    head: dict[str, Any] | None = catalog.columns.head.get("prepared")
    if head is None:
        return None
    versions = {str(name): str(version) for name, version in head["versions"].items()}
    extents = catalog.columns["extent.source"]
    return Origin(DatasetId(head["source"]), int(head["user"]), str(head["digest"]), versions, extents)


def aligned_sizes(sizes: Ints) -> Ints:
    """Return the address space that extents of these sizes take: they begin at huge pages, so that they are mapped as
    such, or small ones at pages."""
    unit = HUGE_BYTES if len(sizes) and int(sizes.max()) >= HUGE_BYTES else 4096
    return np.asarray([aligned(int(size), unit) for size in sizes.tolist()], np.int64)


def _runs(source: Catalog, samples: int) -> tuple[Ints, Ints]:
    """Cut the samples of each source extent into runs of at most `samples`. Return the first sample of each run, with the
    number of all, and the source extent of each."""
    counts = np.diff(source.extent_first)
    runs = -(-counts // samples)
    if runs.sum() > MAX_EXTENTS:
        raise InvalidInput(
            f"{source.uri}: prepared samples would take more than {MAX_EXTENTS:,} extents; open the source with larger"
            " ones (extent_bytes=)"
        )
    extent = np.repeat(np.arange(len(counts)), runs)
    nth = np.arange(len(extent)) - np.repeat(np.cumsum(runs) - runs, runs)
    first = source.extent_first[extent] + nth * samples
    return np.append(first, source.samples).astype(np.int64), extent.astype(np.int64)


def _ids(dataset: DatasetId, count: int) -> list[ExtentId]:
    prefix = bytes.fromhex(dataset)
    return [
        ExtentId(
            hashlib.blake2b(prefix + index.to_bytes(8, "little"), digest_size=12).digest() + PREPARED_MARK
        )
        for index in range(count)
    ]
