"""Writes TFRecord files and `tf.train.Example`, by code that shares nothing with the reader's."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence

import google_crc32c

Value = bytes | int | float
Values = Sequence[Value] | Value


def framed(records: Iterable[bytes]) -> bytes:
    """Return a TFRecord file."""
    parts = []
    for record in records:
        length = struct.pack("<Q", len(record))
        parts += [length, _masked_crc(length), record, _masked_crc(record)]
    return b"".join(parts)


def _masked_crc(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) % 2**32)


def example(features: Mapping[str, Values]) -> bytes:
    """Encode an Example. Numbers are packed, as TensorFlow writes them; a feature of no values has no kind."""
    entries = (_field(1, _field(1, name.encode()) + _field(2, _feature(v))) for name, v in features.items())
    return _field(1, b"".join(entries))


def _feature(values: Values) -> bytes:
    listed = [values] if isinstance(values, Value) else list(values)
    if not listed:
        return b""
    if isinstance(listed[0], bytes):
        return _field(1, b"".join(_field(1, value) for value in listed))  # type: ignore[arg-type]
    if isinstance(listed[0], float):
        return _field(2, _field(1, struct.pack(f"<{len(listed)}f", *listed)))
    return _field(3, _field(1, b"".join(_varint(int(value) % 2**64) for value in listed)))


def _field(number: int, body: bytes) -> bytes:
    """Encode a field of bytes: https://protobuf.dev/programming-guides/encoding"""
    return _varint(number << 3 | 2) + _varint(len(body)) + body


def _varint(value: int) -> bytes:
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])
