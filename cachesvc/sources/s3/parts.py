"""Reads that are a part of an upload. S3 states a checksum of a part that was uploaded with one, as SDKs do today, but none
of a range.

https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity-upload.html
"""

from __future__ import annotations

import threading

from cachesvc.core.model import ObjectVersion
from cachesvc.sources.s3.digests import parts_of
from cachesvc.sources.s3.http import Answer

UNTOLD = 3
"""A server that did not say of so many objects, one after the other, what was asked of their parts is asked no more."""
_MOST = 1 << 16
_THROTTLED = frozenset({429, 503})


def part_at(version: ObjectVersion, offset: int, size: int) -> int:
    """The number, from 1, of the part that a range is if all of them but the last have one size; 0: it is none."""
    count, last = parts_of(version), offset + size == version.size_bytes
    if count < 2:
        return 0
    part_bytes = offset // (count - 1) if last else size
    alike = part_bytes > 0 and -(-version.size_bytes // part_bytes) == count
    return offset // part_bytes + 1 if alike and offset % part_bytes == 0 else 0


def is_not_the_part(answer: Answer, offset: int, size: int) -> bool:
    """Whether a read is to be asked as a range instead: its server has other parts, or knows none, which servers say with
    all kinds of errors. What is wrong with the object it says then."""
    span = answer.headers.get("content-range", "").removeprefix("bytes ").partition("/")[0]
    found = answer.status == 206 and span == f"{offset}-{offset + size - 1}"
    return not found and answer.status not in _THROTTLED


def of_the_moment(status: int) -> bool:
    """Whether an error may be gone at the next try, and so says nothing of parts."""
    return status >= 500 and status != 501


class Parts:
    """Which reads are asked for as parts; of one server, for many threads. A server that fails is asked for the part again,
    for a range of the object has no checksum; one that fails over parts alone is found out by ranges that it then gives,
    with no part given between: a server that is in trouble for a moment does not do so often."""

    def __init__(self) -> None:
        self._silent: set[str] = set()
        self._in_a_row = 0
        self._failed: dict[str, int] = {}
        """Of parts of an object, one after the other, with such errors."""
        self._ranges = 0
        """Given where parts had failed so, one after the other."""
        self._lock = threading.Lock()

    def worth_asking(self, version: ObjectVersion) -> bool:
        """Whether a server may state checksums of an object's parts."""
        known = self._in_a_row < UNTOLD and self._ranges < UNTOLD**2
        return known and version.uri not in self._silent and self._failed.get(version.uri, 0) < UNTOLD

    def failed(self, version: ObjectVersion) -> None:
        """An error `of_the_moment` came of asking for a part."""
        with self._lock:
            if len(self._failed) >= _MOST:
                self._failed.clear()
            self._failed[version.uri] = self._failed.get(version.uri, 0) + 1

    def ranged(self, version: ObjectVersion, given: bool) -> None:
        """What came of asking for a range: where parts had failed, they are asked for again."""
        if self._failed:
            with self._lock:
                self._ranges += self._failed.pop(version.uri, 0) >= UNTOLD and given

    def told(self, version: ObjectVersion, stated: bool) -> None:
        """What came of asking for a part."""
        with self._lock:
            self._failed.pop(version.uri, None)
            if stated:
                self._in_a_row = self._ranges = 0
            elif version.uri not in self._silent:
                self._in_a_row += 1
                if len(self._silent) >= _MOST:
                    self._silent.clear()
                self._silent.add(version.uri)
