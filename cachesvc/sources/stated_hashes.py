"""Compares stored objects with the hashes that the index of their dataset states, as `algorithm:hex digits`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import xxhash

from cachesvc.core.errors import CorruptData, InvalidInput, SourceUnavailable
from cachesvc.sources.source import Checker

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
