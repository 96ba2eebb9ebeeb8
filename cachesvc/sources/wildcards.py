"""Wildcards over object URIs: `*` and `?` within a segment, `[a-z]`, `[!a]`, `**` across segments.

Matching costs at most the pattern's length times the name's. A regular expression would try every way to divide a name
among the stars. Here the text between two stars matches a fixed number of characters (between two `**`, of segments) and
takes its leftmost position, which leaves the most for the rest.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from cachesvc.core.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class _Piece:
    """A run of characters without a star, as an expression that matches exactly `length` characters."""

    expression: re.Pattern[str]
    length: int


@dataclass(frozen=True, slots=True)
class _Segment:
    """One segment of a pattern: pieces with a star between each two."""

    pieces: tuple[_Piece, ...]

    def matches(self, name: str) -> bool:
        """Tell whether the whole segment of a name matches."""
        first, *middle = self.pieces
        if not middle:
            return first.expression.fullmatch(name) is not None
        last = middle.pop()
        at, end = first.length, len(name) - last.length
        if at > end or not first.expression.match(name) or not last.expression.match(name, end):
            return False
        for piece in middle:
            found = piece.expression.search(name, at, end)
            if found is None:
                return False
            at = found.end()
        return True


class Wildcards:
    """A compiled pattern. Raises InvalidInput for a range that ends before its start."""

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
    return all(each.matches(segments[at + index]) for index, each in enumerate(block))


def _segment(part: str) -> _Segment:
    pieces: list[list[str]] = [[]]
    at = 0
    while at < len(part):
        end = _class_end(part, at)
        if end:
            pieces[-1].append(_class(part[at + 1 : end]))
        elif part[at] == "*":
            pieces.append([])
        else:
            pieces[-1].append("." if part[at] == "?" else re.escape(part[at]))
        at = max(end, at) + 1
    return _Segment(tuple(_Piece(re.compile("".join(each), re.S), len(each)) for each in pieces))


def _class_end(part: str, at: int) -> int:
    """Return the index of the `]` that ends a class which starts at `at`; 0 for no class. A leading `]` is a member."""
    if part[at] != "[":
        return 0
    return max(part.find("]", at + 2 + part.startswith("!", at + 1)), 0)


def _class(body: str) -> str:
    """Translate a class to a regular expression's. Raises InvalidInput for `[z-a]`."""
    negated = body.startswith("!")
    members, at = [], int(negated)
    while at < len(body):
        if body[at + 1 : at + 2] == "-" and at + 2 < len(body):
            if body[at] > body[at + 2]:
                raise InvalidInput(f"[{body}]: the range {body[at : at + 3]} ends before it starts")
            members.append(f"{re.escape(body[at])}-{re.escape(body[at + 2])}")
            at += 3
        else:
            members.append(re.escape(body[at]))
            at += 1
    return f"[{'^' * negated}{''.join(members)}]"
