"""Compares stored objects with the hashes that the index of their dataset states, as `algorithm:hex digits`, or the hub."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import xxhash

from cachesvc.core.errors import CorruptData, InvalidInput, SourceUnavailable, TierFailed
from cachesvc.core.model import Extent, ObjectVersion
from cachesvc.sources.source import Checker

_SHA256 = re.compile(r"[0-9a-f]{64}")
_CHUNK_BYTES = 1 << 20
_XXHASHES = {
    "xxh32": xxhash.xxh32,
    "xxh64": xxhash.xxh64,
    "xxh128": xxhash.xxh128,
    "xxh3_64": xxhash.xxh3_64,
    "xxh3_128": xxhash.xxh3_128,
}
_VARIABLE = frozenset({"shake_128", "shake_256"})
"""Algorithms whose digest has no size of its own."""


def is_known(algorithm: str) -> bool:
    """Tell whether objects can be compared with hashes of this algorithm."""
    return algorithm in _XXHASHES or algorithm in hashlib.algorithms_available - _VARIABLE


def hub_sha256(version: ObjectVersion) -> str:
    """Return the SHA-256 of a large object of the hub in hex digits, which its version holds; "" for any other object."""
    oid = version.etag.partition("-")[2] if version.uri.startswith("hf://") else ""
    return oid if _SHA256.fullmatch(oid) else ""


def check_stated(extent: Extent, fd: int) -> None:
    """Compare the whole objects of a filled extent with the hashes that are stated of them. Nothing is asked of a source.
    Raises SourceUnavailable where one differs, TierFailed where the extent cannot be read."""
    at = 0
    for piece in extent.pieces:
        sha = hub_sha256(piece.object)
        stated = piece.hash or (f"sha256:{sha}" if sha else "")
        if stated and piece.length == piece.object.size_bytes and not piece.codec:
            hash_checker(piece.object.uri, stated)(_chunks(fd, at, piece.length))
        at += piece.length


def _chunks(fd: int, at: int, size_bytes: int) -> Iterator[memoryview]:
    buffer, end = memoryview(bytearray(min(_CHUNK_BYTES, size_bytes))), at + size_bytes
    while at < end:
        try:
            count = os.preadv(fd, [buffer[: end - at]], at)
        except OSError as error:
            raise TierFailed(f"cannot read the extent being filled: {error.strerror}") from error
        if not count:
            raise TierFailed("the extent being filled ends before what was written to it")
        yield buffer[:count]
        at += count


def hash_checker(uri: str, stated: str) -> Checker:
    """Return a function that compares all bytes of an object with `stated`. Raises InvalidInput for another algorithm than
    `is_known` tells."""
    algorithm, _, expected = stated.partition(":")
    new = _algorithm(uri, algorithm)
    before = ""

    def check(data: Iterable[memoryview]) -> None:
        nonlocal before
        digest = new()
        for part in data:
            digest.update(part)
        found = str(digest.hexdigest())
        if found == expected.lower():
            return
        wrong = f"{uri} has the {algorithm} {found}, its index says {expected}"
        if found != before:
            before = found
            raise SourceUnavailable(wrong)
        raise CorruptData(f"{wrong}, and two reads agree: write the object or its index anew")

    return check


def _algorithm(uri: str, name: str) -> Callable[[], Any]:
    if name in _XXHASHES:
        return _XXHASHES[name]
    try:
        hashlib.new(name, usedforsecurity=False)
    except ValueError:
        raise InvalidInput(f"{uri}: hashes of {name!r} are not known here: build the catalog again") from None
    return lambda: hashlib.new(name, usedforsecurity=False)
