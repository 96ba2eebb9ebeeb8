"""What a training run has consumed and where it stands: one line a batch, both in one write.

A line is a checksum and its JSON, between two line ends. A writer that was killed in mid-write leaves a line that
does not match its checksum; the next writer begins with a line end, so nothing has to be cleaned up.
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
"""The last whole line lies in it: a line of 16 samples has 2 KB."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One consumed batch: its samples, the SHA-256 of what each held, and the loader's state after it."""

    epoch: int
    indices: list[int]
    digests: list[str]
    state: dict[str, Any]


def digest(record: bytes) -> str:
    """What stands for a sample's bytes."""
    return sha256(record).hexdigest()


class Writer:
    """The run's end of its ledger. One process at a time."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def latest(self) -> Entry | None:
        """The last batch that was committed; None for a run that has consumed nothing."""
        size = os.fstat(self._fd).st_size
        tail = os.pread(self._fd, TAIL_BYTES, max(0, size - TAIL_BYTES))
        entries = [entry for entry in map(_parsed, tail.split(b"\n")) if entry is not None]
        return entries[-1] if entries else None

    def commit(self, entry: Entry) -> None:
        """The batch is consumed, once this returns or is killed in the very act: all of it or nothing."""
        body = json.dumps(asdict(entry)).encode()
        line = b"\n%s %s\n" % (xxhash.xxh3_64_hexdigest(body).encode(), body)
        written = os.write(self._fd, line)
        assert written == len(line), "the ledger's disk is full"


class Reader:
    """Whoever audits the run: what was committed since the last look."""

    def __init__(self, path: Path) -> None:
        path.touch()
        self._file = open(path, "rb")  # noqa: SIM115  (open as long as the audit)
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
    """None for a line that its writer did not end."""
    checksum, _, body = line.partition(b" ")
    if xxhash.xxh3_64_hexdigest(body).encode() != checksum:
        return None
    return Entry(**json.loads(body))
