"""Compiles TFRecord files: each record is a sample, a `tf.train.Example` or bytes.

A record is its length (u64), the masked CRC-32C of that, its bytes, and their masked CRC-32C
(https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details). Files carry no index, so all are read
once, through the cache, and every checksum is compared then. Indices of other tools (`.idx` of NVIDIA DALI, `.index` and
`.tfindex` of the `tfrecord` package) are left out, so a stale one does no harm.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from cachesvc.catalog.compiler import Draft, Inputs, ListedObject
from cachesvc.catalog.containers import compression_of, masked_crc
from cachesvc.catalog.formats.text_rows import TextRows
from cachesvc.catalog.kinds import IGNORED, kind_of
from cachesvc.catalog.labels.row_tags import MAX_TAG_BYTES
from cachesvc.catalog.layout import Field
from cachesvc.catalog.parsing.tf_example import BYTES, Features, features_of
from cachesvc.catalog.row_syntax import EXAMPLE, RECORD
from cachesvc.core.errors import CorruptData, InvalidInput, install

MAX_RECORD_BYTES = 256 << 20
"""Limit of a record, which is held in memory while it is compared with its checksum."""
_MAX_FIELDS = 1024
_INDICES = ("index", "tfindex")
_HEAD = struct.Struct("<QI")
_TAIL = struct.Struct("<I")
_Crc = Callable[[bytes], int]


def select(entries: Sequence[ListedObject]) -> list[ListedObject]:
    """Choose the TFRecord files by their names; without one, all that may be data (`train-00000-of-01024`)."""
    found = [entry for entry in entries if kind_of(entry.name) == "tfrecord"]
    return found or [
        entry for entry in entries if kind_of(entry.name) != IGNORED and entry.extension not in _INDICES
    ]


def compile_tfrecord(inputs: Inputs) -> Draft:
    """Find every record. The first one that is not empty decides whether samples are Examples or bytes.

    Raises CorruptData, naming file and record, for a wrong checksum and a truncated file, InvalidInput where google-crc32c
    is not installed or a feature has several types, and as `TextRows` does.
    """
    crc, rows, fields = _crc32c(inputs.uri), TextRows(inputs), _Fields()
    is_example, why_not = True, ""
    for at, entry in enumerate(inputs.entries):
        uri = entry.object.uri
        for number, (offset, record) in enumerate(_records(uri, rows.windows(at), crc), 1):
            sample = rows.add(offset, len(record), number)
            if not is_example or not record:
                continue
            try:
                features = features_of(record)
            except ValueError as error:
                is_example, why_not = bool(fields), str(error)
                if is_example:
                    rows.add_malformed(at, number, f"{error}, unlike the records before it")
                continue
            is_example = bool(features or fields)
            fields.add(f"{uri} record {number}", features)
            rows.tags.add_all(sample, _tags(features))
        rows.end_object(at)
    if fields:
        return rows.draft(EXAMPLE, fields.encoded())
    draft = rows.draft(RECORD, [Field("record", "")])
    if "Sequence" in why_not:
        draft.notes.append("a tf.train.SequenceExample is not decoded: samples are its bytes")
    return draft


def _crc32c(uri: str) -> _Crc:
    try:
        import google_crc32c
    except ImportError:
        raise InvalidInput(
            f"{uri} is TFRecord and google-crc32c is not installed: {install('tfrecord')}, where the daemon "
            "runs too"
        ) from None
    value: _Crc = google_crc32c.value
    return value


def _records(uri: str, windows: Iterator[bytes], crc: _Crc) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and the bytes of each record. Raises CorruptData."""
    read, at, number = _Forward(uri, windows), 0, 1
    while not read.ended():
        head = read.take(_HEAD.size, number)
        length, stated = _HEAD.unpack(head)
        if masked_crc(crc(bytes(head[:8]))) != stated:
            packed = compression_of(bytes(head)) if number == 1 else ""
            if packed:
                raise InvalidInput(
                    f"{uri} is compressed by {packed}: give it a name that says so, like .tfrecord.gz"
                )
            raise CorruptData(
                f"{uri} record {number} at byte {at:,}: its length does not match its checksum; write the file anew"
            )
        if length > MAX_RECORD_BYTES:
            raise CorruptData(
                f"{uri} record {number} at byte {at:,} has {length:,} bytes; {MAX_RECORD_BYTES >> 20} MiB at most are read"
            )
        body = bytes(read.take(length, number))
        (stated,) = _TAIL.unpack(read.take(_TAIL.size, number))
        if masked_crc(crc(body)) != stated:
            raise CorruptData(
                f"{uri} record {number} at byte {at:,}: its bytes do not match their checksum; write the file anew"
            )
        yield at + _HEAD.size, body
        at, number = at + _HEAD.size + length + _TAIL.size, number + 1


class _Forward:
    """Takes bytes from windows in order, without copies where a window holds them."""

    def __init__(self, uri: str, windows: Iterator[bytes]) -> None:
        self._uri, self._windows = uri, windows
        self._window = memoryview(b"")

    def ended(self) -> bool:
        """Tell whether no byte is left."""
        if not self._window:
            self._window = memoryview(next(self._windows, b""))
        return not self._window

    def take(self, length: int, number: int) -> memoryview:
        """Return the next bytes. Raises CorruptData, naming the record, where there are fewer."""
        if len(self._window) < length:
            parts, held = [self._window], len(self._window)
            while held < length and (more := next(self._windows, b"")):
                parts.append(memoryview(more))
                held += len(more)
            self._window = memoryview(b"".join(parts))
        if len(self._window) < length:
            raise CorruptData(f"{self._uri} is truncated in record {number}: write it anew, or leave it out")
        taken, self._window = self._window[:length], self._window[length:]
        return taken


class _Fields:
    """The features of the Examples so far: their kinds, and whether each always has exactly one value."""

    def __init__(self) -> None:
        self._kinds: dict[str, str] = {}
        self._lists: set[str] = set()

    def __len__(self) -> int:
        return len(self._kinds)

    def add(self, where: str, features: Features) -> None:
        """Add the features of an Example. Raises InvalidInput for one of another type than before."""
        for name, (kind, values) in features.items():
            known = self._kinds.setdefault(name, kind)
            if len(values) != 1:
                self._lists.add(name)
            if known != kind and kind and known:
                raise InvalidInput(
                    f"{where}: feature {name!r} is {kind}, and {known} in the records before it"
                )
            self._kinds[name] = known or kind
        if len(self._kinds) > _MAX_FIELDS:
            raise InvalidInput(f"{where} has more features than the {_MAX_FIELDS:,} that are read")

    def encoded(self) -> list[Field]:
        """Return the fields. Several values, or a varying number of them, are marked by `[]`."""
        return [
            Field(name, f"{self._kinds[name] or BYTES}{'[]' if name in self._lists else ''}")
            for name in sorted(self._kinds)
        ]


def _tags(features: Mapping[str, tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield the features of one value; bytes only where they are a short text."""
    for name, (kind, values) in features.items():
        if len(values) != 1:
            continue
        value = values[0]
        if kind != BYTES:
            yield name, value
        elif len(value) <= MAX_TAG_BYTES:
            try:
                yield name, value.decode()
            except UnicodeDecodeError:
                continue
