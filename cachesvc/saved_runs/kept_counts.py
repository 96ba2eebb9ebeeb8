"""Whole numbers that were counted over a dataset, an extent at a time, and kept in a folder of the user's."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cachesvc.catalog.columns import Ints
from cachesvc.core.errors import OutOfSpace

_CHECKSUM_BYTES = 16


def key_of_ends(version: str, eos: int, dtype: np.dtype[Any], extent: int) -> str:
    """The key of the addresses after each token `eos` in an extent of a dataset version."""
    return f"{version} eos {eos} {dtype.str} {extent}"


def key_of_rows(identity: str, fields: Sequence[str] | None, low: int, high: int) -> str:
    """The key of the numbers of tokens of the rows [low, high) of a dataset."""
    return f"{identity} {fields} {low} {high}"


class KeptCounts:
    """Numbers by key, each in a file with a checksum. Without a folder nothing is kept."""

    def __init__(self, folder: str | None) -> None:
        self._folder = folder

    def get(self, key: str, make: Callable[[], Ints]) -> Ints:
        """Return the numbers of a key, int64, made where they are not kept undamaged. Raises OutOfSpace where they
        cannot be written, and the errors of `make`."""
        if self._folder is None:
            return make()
        path = os.path.join(
            self._folder, f"{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}.counts"
        )
        kept = _read(path)
        if kept is None:
            kept = make()
            self._write(path, kept)
        return kept

    def _write(self, path: str, counts: Ints) -> None:
        """Write counts and their checksum, as a file that is complete or absent."""
        content, folder = counts.astype("<i8").tobytes(), os.path.dirname(path)
        try:
            os.makedirs(folder, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".counts-", delete=False) as file:
                file.write(content + _checksum(content))
            os.replace(file.name, path)
        except OSError as error:
            raise OutOfSpace(f"counts={folder!r} cannot be written: {error.strerror or error}") from error


def _read(path: str) -> Ints | None:
    """Read counts; None for a file that is absent, damaged, or of a release before files had a checksum."""
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError:
        return None
    kept, checksum = content[:-_CHECKSUM_BYTES], content[-_CHECKSUM_BYTES:]
    return np.frombuffer(kept, "<i8") if checksum == _checksum(kept) else None


def _checksum(counts: bytes) -> bytes:
    return hashlib.blake2b(counts, digest_size=_CHECKSUM_BYTES).digest()
