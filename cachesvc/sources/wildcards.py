"""Wildcards over object URIs: `*` and `?` within a segment, `[a-z]`, `[!a]`, `**` across segments.

Matching does not try every way to divide a name: what lies between two stars (`fnmatch`), or between two `**`, takes its
leftmost place, which leaves the most for the rest.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence

from cachesvc.core.errors import InvalidInput

_EMPTY = "(?!)"
"""How `fnmatch` translates a class that nothing is in."""
_Segment = re.Pattern[str]


class Wildcards:
    """A compiled pattern. Raises InvalidInput for a class of a range that ends before its start."""

    def __init__(self, pattern: str) -> None:
        parts = pattern.split("/")
        if parts[-1] == "**":  # everything below the folder, but not the folder itself
            parts.append("*")
        self._blocks: list[list[_Segment]] = [[]]
        for part in parts:
            if part == "**":
                self._blocks.append([])
            else:
                self._blocks[-1].append(_segment(part))

    def matches(self, name: str) -> bool:
        """Tell whether the whole name matches; `**` stands for any number of segments, including none."""
        segments = name.split("/")
        first, *middle = self._blocks
        if not middle:
            return len(segments) == len(first) and _meet(first, segments, 0)
        last = middle.pop()
        at, end = len(first), len(segments) - len(last)
        if at > end or not _meet(first, segments, 0) or not _meet(last, segments, end):
            return False
        for block in middle:
            places = range(at, end - len(block) + 1)
            found = next((place for place in places if _meet(block, segments, place)), None)
            if found is None:
                return False
            at = found + len(block)
        return True


def _meet(block: Sequence[_Segment], segments: Sequence[str], at: int) -> bool:
    return all(each.match(segments[at + index]) for index, each in enumerate(block))


def _segment(part: str) -> _Segment:
    expression = fnmatch.translate(part)
    if _EMPTY in expression:
        raise InvalidInput(f"{part}: a range ends before it starts")
    return re.compile(expression)
