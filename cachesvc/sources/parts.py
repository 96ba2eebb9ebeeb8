"""Reads that are a part of an upload. S3 states a checksum of a part that was uploaded with one, as SDKs do today, but none
of a range.

https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity-upload.html
"""

from __future__ import annotations

import threading

from cachesvc.core.model import ObjectVersion
from cachesvc.sources.digests import parts_of
from cachesvc.sources.http import Answer

UNTOLD = 3
"""A server that did not say of so many objects, one after the other, what was asked of their parts is asked no more."""
_MOST = 1 << 16
_THROTTLED = frozenset({429, 503})


def part_at(version: ObjectVersion, offset: int, size: int) -> int:
    """The number, from 1, of the part that a range is if all of them but the last have one size; 0: it is none."""
    count, last = parts_of(version), offset + size == version.size_bytes
    if count < 2:
        return 0
    part_bytes, odd = divmod(offset, count - 1) if last else (size, 0)
    alike = part_bytes >= size > 0 and not odd and -(-version.size_bytes // part_bytes) == count
    return offset // part_bytes + 1 if alike and offset % part_bytes == 0 else 0


def is_not_the_part(answer: Answer, offset: int, size: int) -> bool:
    """Whether a read is to be asked as a range instead: its server has other parts, or knows none, which servers say with
    all kinds of errors. What is wrong with the object it says then."""
    span = answer.headers.get("content-range", "").removeprefix("bytes ").partition("/")[0]
    found = answer.status == 206 and span == f"{offset}-{offset + size - 1}"
    return not found and answer.status not in _THROTTLED


class Parts:
    """Which reads are asked for as parts; of one server, for many threads."""

    def __init__(self) -> None:
        self._silent: set[str] = set()
        self._in_a_row = 0
        self._lock = threading.Lock()

    def worth_asking(self, version: ObjectVersion) -> bool:
        """Whether a server may state checksums of an object's parts."""
        return self._in_a_row < UNTOLD and version.uri not in self._silent

    def told(self, version: ObjectVersion, stated: bool) -> None:
        """What came of asking."""
        with self._lock:
            if stated:
                self._in_a_row = 0
            elif version.uri not in self._silent:
                self._in_a_row += 1
                if len(self._silent) >= _MOST:
                    self._silent.clear()
                self._silent.add(version.uri)
