"""The ledger of a training run: each line holds one consumed batch and the loader's state after it, in one write.

A line is a checksum and JSON, between two line ends. A writer killed in mid-write leaves a line that does not match its
checksum. The next writer begins with a line end, so no clean-up is needed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import xxhash

TAIL_BYTES = 1 << 16
"""Bytes at the end of the file that surely hold a whole line: a line of 16 samples has 2 KB."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One consumed batch: its samples, the SHA-256 of each sample's bytes, and the loader's state after it."""

    epoch: int
    indices: list[int]
    digests: list[str]
    state: dict[str, Any]


def digest(record: bytes) -> str:
    """SHA-256 of a sample's bytes."""
    return sha256(record).hexdigest()


class Writer:
    """Appends to a ledger; one process at a time."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def latest(self) -> Entry | None:
        """The last committed batch; None when the run has consumed nothing."""
        size = os.fstat(self._fd).st_size
        tail = os.pread(self._fd, TAIL_BYTES, max(0, size - TAIL_BYTES))
        entries = [entry for entry in map(_parsed, tail.split(b"\n")) if entry is not None]
        return entries[-1] if entries else None

    def commit(self, entry: Entry) -> None:
        """Append one consumed batch. A kill during the write leaves either the whole entry or none."""
        body = json.dumps(asdict(entry)).encode()
        line = b"\n%s %s\n" % (xxhash.xxh3_64_hexdigest(body).encode(), body)
        written = os.write(self._fd, line)
        assert written == len(line), "the ledger's disk is full"


class Reader:
    """Reads a ledger while it grows: each iteration yields the entries committed since the last one."""

    def __init__(self, path: Path) -> None:
        path.touch()
        self._file = open(path, "rb")  # noqa: SIM115  (open during the whole audit)
        self._rest = b""
        self.torn = 0

    def __iter__(self) -> Iterator[Entry]:
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        for line in filter(None, lines):
            entry = _parsed(line)
            if entry is None:
                self.torn += 1
            else:
                yield entry

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _parsed(line: bytes) -> Entry | None:
    """The entry of a line; None for a line whose write was cut short."""
    checksum, _, body = line.partition(b" ")
    if xxhash.xxh3_64_hexdigest(body).encode() != checksum:
        return None
    return Entry(**json.loads(body))
