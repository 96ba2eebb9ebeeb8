"""Compiles MosaicML MDS, version 2, from `index.json`, which describes the shards; their rows are not read.

A shard is one extent. A compressed one is decoded while it is filled, and its stored bytes are compared with a hash if the
index states one. A shard begins with u32 samples and u32 offsets[samples + 1], and a sample with the u32 sizes of its
variable columns.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cachesvc.catalog.address_space import AddressSpace
from cachesvc.catalog.columns import ints
from cachesvc.catalog.compiler import Draft, Inputs, ListedObject, in_threads
from cachesvc.catalog.layout import Field, check_count
from cachesvc.catalog.parsing.json_index import JsonRecord, Listed, indices, stream_of
from cachesvc.core.errors import CorruptData, InvalidInput
from cachesvc.core.model import ObjectVersion
from cachesvc.sources.stated_hashes import is_known

_MAX_HEADS = 1024
"""Number of shards whose first bytes are compared with the index: 64 GiB of data, and about a second."""
_CODECS = {"": "", "br": "brotli", "bz2": "bz2", "gz": "gzip", "snappy": "snappy", "zstd": "zstd"}
"""Our names of the codecs, by those of MosaicML's writer."""


@dataclass(frozen=True, slots=True)
class _Shard:
    """One entry of `shards`: `file` is the stored object, `stored` its size, `raw` its decoded size. `hash`: see `Piece`.
    `unknown`: the algorithm of one of its hashes, if none is known."""

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
    space, firsts, samples = AddressSpace([entry.object for entry in inputs.entries]), array("q"), 0
    columns: tuple[tuple[str, str, int], ...] | None = None
    heads: list[_Head] = []
    listed = Listed(inputs, "samples")
    unknown: dict[str, str] = {}
    for index in indices(inputs, "MDS", merges=True):
        for number, shard in enumerate(_shards(inputs, index)):
            where = f"{index.object.uri}: shards[{number}]"
            at = listed.place(index, shard.file, where)
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
    """Raise CorruptData naming a shard whose sample count differs from its index's."""

    def stated(head: _Head) -> int:
        return int.from_bytes(inputs.fetch(head.object, 0, 4), "little")

    for head, samples in zip(heads, in_threads(stated, heads), strict=True):
        check_count(head.object.uri, samples, head.samples, head.where)


def _shards(inputs: Inputs, index: ListedObject) -> Iterator[_Shard]:
    """Yield the shards of an index while it is parsed."""
    uri, stream = index.object.uri, stream_of(inputs, index)
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
            yield _shard(JsonRecord(f"{uri}: shards[{number}]", value))
    if (
        JsonRecord(uri, {"version": version}).take("version", int) != 2
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


def _shard(record: JsonRecord) -> _Shard:
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


def _hash(stored: JsonRecord) -> tuple[str, str]:
    """Return the first hash of a known algorithm, as `Piece` holds it, or "" and an algorithm that is not known."""
    hashes = stored.value.get("hashes") or {}
    if not isinstance(hashes, dict) or not all(isinstance(digits, str) for digits in hashes.values()):
        raise CorruptData(f"{stored.where}: field 'hashes' is no object of strings")
    for name, digits in hashes.items():
        if is_known(name):
            return f"{name}:{digits}", ""
    return "", next(iter(hashes), "")


def _columns(record: JsonRecord) -> tuple[tuple[str, str, int], ...]:
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
