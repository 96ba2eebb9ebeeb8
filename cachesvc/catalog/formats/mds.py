"""Compiles MosaicML MDS, version 2, from `index.json`, which describes the shards; their rows are not read.

A shard is one extent. A compressed one is decoded while it is filled, and its stored bytes are compared with a hash if the
index states one. A shard begins with u32 samples and u32 offsets[samples + 1], and a sample with the u32 sizes of its
variable columns.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from cachesvc.catalog.address_space import AddressSpace
from cachesvc.catalog.columns import ints
from cachesvc.catalog.compiler import Draft, Inputs, ListedObject
from cachesvc.catalog.layout import Field
from cachesvc.catalog.parsing.json_stream import JsonStream
from cachesvc.core.errors import CorruptData, InvalidInput
from cachesvc.core.model import ObjectVersion
from cachesvc.sources.stated_hashes import is_known

_INDEX_BYTES = 512 << 20
"""Limit of an index, about a million shards. It is parsed in windows (`parsing/json_stream.py`)."""
_MAX_HEADS = 1024
"""Number of shards whose first bytes are compared with the index: 64 GiB of data, and about a second."""
_THREADS = 32
_CODECS = {"": "", "br": "brotli", "bz2": "bz2", "gz": "gzip", "snappy": "snappy", "zstd": "zstd"}
"""Our names of the codecs, by those of MosaicML's writer."""


@dataclass(frozen=True, slots=True)
class _Shard:
    """One entry of `shards`: `file` is the stored object, `stored` its size, `raw` its decoded size. `hash`: see `Piece`.
    `unknown`: an algorithm of which it has a hash, where none of them is known."""

    file: str
    stored: int
    raw: int
    samples: int
    codec: str
    hash: str
    unknown: str
    columns: tuple[tuple[str, str, int], ...]


def select(entries: Sequence[ListedObject]) -> list[ListedObject]:
    """Choose indices and shards."""
    return [entry for entry in entries if entry.name == "index.json" or ".mds" in entry.name.lower()]


def compile_mds(inputs: Inputs) -> Draft:
    """Compile by the index. Raises CorruptData naming file and field, InvalidInput for features that are not read."""
    places = {entry.object.uri: at for at, entry in enumerate(inputs.entries)}
    space, firsts, samples = AddressSpace([entry.object for entry in inputs.entries]), array("q"), 0
    columns: tuple[tuple[str, str, int], ...] | None = None
    heads: list[_Head] = []
    named: set[int] = set()
    unknown: dict[str, str] = {}
    for index in _indices(inputs):
        root = index.object.uri.rpartition("/")[0]
        for number, shard in enumerate(_shards(inputs, index)):
            where = f"{index.object.uri}: shards[{number}]"
            at = places.get(f"{root}/{shard.file}")
            if at is None:
                raise CorruptData(f"{where} names {shard.file!r}, which does not exist")
            if at in named:
                raise CorruptData(
                    f"{where} names {shard.file!r} again: its samples would be read twice an epoch"
                )
            named.add(at)
            if inputs.entries[at].object.size_bytes != shard.stored:
                raise CorruptData(f"{where}: {shard.file!r} should have {shard.stored} bytes")
            if columns is not None and shard.columns != columns:
                raise InvalidInput(f"{where} has other columns than the shards before it")
            columns = shard.columns
            space.add([(at, 0, shard.raw)], shard.codec, shard.hash)
            if shard.unknown:
                unknown.setdefault(shard.unknown, shard.file)
            firsts.append(samples)
            samples += shard.samples
            if not shard.codec and len(heads) < _MAX_HEADS:
                heads.append(_Head(inputs.entries[at].object, shard.samples, where))
            inputs.progress(len(firsts), len(inputs.entries))
    _check_heads(inputs, heads)
    columns = columns or ()
    return Draft(
        kind="indirect",
        space=space,
        fields=tuple(Field(name, encoding) for name, encoding, _ in columns),
        extent_first=ints([*firsts, samples]),
        head={"sizes": [size for _, _, size in columns]},
        notes=[
            f"{name!r} is no known hash, so {file} and others that have no other hash are not checked"
            for name, file in unknown.items()
        ],
    )


def _check_heads(inputs: Inputs, heads: Sequence[_Head]) -> None:
    """Raise CorruptData naming a shard whose sample count differs from its index's.

    Found later, it would fail in an epoch, or leave samples out.
    """

    def stated(head: _Head) -> int:
        return int.from_bytes(inputs.fetch(head.object, 0, 4), "little")

    with ThreadPoolExecutor(_THREADS, "heads") as pool:
        for head, samples in zip(heads, pool.map(stated, heads), strict=True):
            if samples != head.samples:
                raise CorruptData(
                    f"{head.object.uri} says that it holds {samples:,} samples, {head.where} says {head.samples:,}: "
                    "write the index or the shard anew"
                )


def _indices(inputs: Inputs) -> list[ListedObject]:
    """Return the index of each URI: the one directly below it, which may list its subfolders' shards, else its only one."""
    below: dict[str, list[ListedObject]] = {}
    for entry in inputs.entries:
        if entry.name == "index.json":
            below.setdefault(entry.object.uri.removesuffix(entry.path), []).append(entry)
    if not below:
        raise InvalidInput(f"{inputs.uri} has MDS shards but no index.json")
    chosen = []
    for root, found in below.items():
        top = [entry for entry in found if entry.path == "index.json"]
        if not top and len(found) > 1:
            paths = ", ".join(entry.path for entry in found[:4])
            raise InvalidInput(f"{root} holds {len(found)} MDS datasets ({paths}): open one of them")
        chosen += top or found
    return chosen


def _shards(inputs: Inputs, index: ListedObject) -> Iterator[_Shard]:
    """Yield the shards of an index while it is parsed."""
    uri, size = index.object.uri, index.object.size_bytes
    if size > _INDEX_BYTES:
        raise CorruptData(f"{uri} has {size} bytes; an index of more than {_INDEX_BYTES} is not read")
    stream = JsonStream(uri, lambda offset, length: inputs.fetch(index.object, offset, length), size)
    version, listed = None, False
    for name in stream.fields():
        if name != "shards":
            value = stream.value()
            version = value if name == "version" else version
            continue
        if listed:
            raise CorruptData(f"{uri} lists its shards twice")
        listed = True
        for number, value in enumerate(stream.items()):
            yield _shard(_Record(f"{uri}: shards[{number}]", value))
    if (
        _Record(uri, {"version": version}).take("version", int) != 2
    ):  # checked last: writers sort it behind the shards
        raise InvalidInput(f"{uri} is MDS version {version}; version 2 is read")
    if not listed:
        raise CorruptData(f"{uri}: field 'shards' is missing")


@dataclass(frozen=True, slots=True)
class _Head:
    """An uncompressed shard, and the sample count of its index."""

    object: ObjectVersion
    samples: int
    where: str


@dataclass(frozen=True, slots=True)
class _Record:
    """A JSON object with checked access to its fields."""

    where: str
    value: Any

    def take(self, name: str, kind: type) -> Any:
        """Return a field of a type; integers may not be negative. Raises CorruptData naming it."""
        found = self.value.get(name) if isinstance(self.value, dict) else None
        negative = isinstance(found, int) and found < 0
        if not isinstance(found, kind) or isinstance(found, bool) or negative:
            raise CorruptData(f"{self.where}: field {name!r} is missing or no {kind.__name__}")
        return found

    def record(self, name: str) -> _Record:
        """Return a nested object."""
        return _Record(f"{self.where}.{name}", self.take(name, dict))


def _shard(record: _Record) -> _Shard:
    if record.take("format", str) != "mds":
        raise InvalidInput(f"{record.where} has format {record.value['format']!r}; mds is read")
    raw = record.record("raw_data")
    raw_bytes, samples = raw.take("bytes", int), record.take("samples", int)
    compression = record.value.get("compression") or ""
    name = str(compression).partition(":")[0]
    if name not in _CODECS:
        read = ", ".join(filter(None, _CODECS))
        raise InvalidInput(f"{record.where} is compressed with {compression!r}; none, {read} are read")
    codec = _CODECS[name]
    stored = record.record("zip_data") if codec else raw
    if raw_bytes < 4 * (samples + 2):
        raise CorruptData(f"{record.where}.raw_data: field 'bytes' is too small for {samples} samples")
    if raw_bytes >> 32:
        raise CorruptData(
            f"{record.where}.raw_data: field 'bytes' is beyond 4 GiB, which no offset in a shard reaches"
        )
    hash, unknown = _hash(stored)
    return _Shard(
        stored.take("basename", str),
        stored.take("bytes", int),
        raw_bytes,
        samples,
        codec,
        hash,
        unknown,
        _columns(record),
    )


def _hash(stored: _Record) -> tuple[str, str]:
    """Return the first hash of a known algorithm, as `Piece` holds it, or "" and an algorithm that is not known."""
    hashes = stored.value.get("hashes") or {}
    if not isinstance(hashes, dict) or not all(isinstance(digits, str) for digits in hashes.values()):
        raise CorruptData(f"{stored.where}: field 'hashes' is no object of strings")
    for name, digits in hashes.items():
        if is_known(name):
            return f"{name}:{digits}", ""
    return "", next(iter(hashes), "")


def _columns(record: _Record) -> tuple[tuple[str, str, int], ...]:
    names, encodings = record.take("column_names", list), record.take("column_encodings", list)
    sizes = record.take("column_sizes", list)
    if not len(names) == len(encodings) == len(sizes) or not names:
        raise CorruptData(f"{record.where}: column_names, column_encodings and column_sizes differ in length")
    for size in sizes:
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 0):
            raise CorruptData(f"{record.where}: field 'column_sizes' holds {size!r}")
    return tuple(
        (str(name), str(encoding), -1 if size is None else size)
        for name, encoding, size in zip(names, encodings, sizes, strict=True)
    )
