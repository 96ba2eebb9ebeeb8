"""URIs as users type them: their canonical form, an allowlist of prefixes, brace ranges and globs.

A canonical URI is a fixed point of `canonical`. Keys of objects, as listings return them, are not canonicalised: a key may
contain anything.
"""

from __future__ import annotations

import fnmatch
import itertools
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from cachesvc.core.errors import InvalidInput, NotAllowed, NotFound
from cachesvc.core.model import ObjectVersion
from cachesvc.sources import links
from cachesvc.sources.files import under
from cachesvc.sources.ignored import is_ignored
from cachesvc.sources.source import Source

MAX_URI_BYTES = 4096
MAX_EXPANDED = 100_000
MAX_EXPANDED_CHARACTERS = 32 << 20
WEB = ("http://", "https://")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,31})://")
_ONE_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{1,31}):/(?!/)")
_FORBIDDEN = re.compile(r"[\x00-\x1f\x7f\\]|%(2e|2f|5c|00)", re.I)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,254}")
_BRACES = re.compile(r"(\{[^{}]*\})")
_RANGE = re.compile(r"(\d{1,18})\.\.(\d{1,18})")
_SPECIAL = "[]{}*?"
_ESCAPE = re.compile(r"\[([][{}*?])\]")
"""Stands for the character in the brackets, as `glob.escape` writes it."""
_LITERAL = {ord(mark): chr(0xFDD0 + at) for at, mark in enumerate(_SPECIAL)}
"""Code points that no text holds stand for marks which are characters of a name."""
_UNMARKED = {ord(literal): chr(mark) for mark, literal in _LITERAL.items()}
_ESCAPED = {ord(literal): f"[{chr(mark)}]" for mark, literal in _LITERAL.items()}
_EMPTY = "(?!)"
"""How `fnmatch` translates a class that nothing is in."""
_Segment = re.Pattern[str]


def canonical(uri: str) -> str:
    """Return the canonical form of a dataset URI: lower-case scheme, `file://` for paths, no empty or dot segment.

    Relative paths start at the working directory. `a//b` equals `a/b` in a path; in a bucket it is another key and refused.
    Raises InvalidInput, also for percent-encoded dots and slashes, control characters and backslashes.
    """
    try:
        size_bytes = len(uri.encode())
    except UnicodeEncodeError:
        raise InvalidInput(f"{uri!a} is not UTF-8; rename what it names") from None
    if not uri.strip() or size_bytes > MAX_URI_BYTES:
        raise InvalidInput(f"a URI must have 1 to {MAX_URI_BYTES} bytes")
    if one_slash := _ONE_SLASH.match(uri):  # pathlib.Path turns s3://bucket into s3:/bucket
        raise InvalidInput(
            f"{uri!r} has one slash after {one_slash[1]}:, a URI has two; give it as text, not as a Path"
        )
    found = _SCHEME.match(uri)
    scheme = found[1].lower() if found else "file"
    rest = uri[found.end() :] if found else os.path.abspath(uri) + "/" * uri.endswith("/")
    if _FORBIDDEN.search(rest):
        raise InvalidInput(f"{uri!r} holds a control character, backslash or percent-encoded dot or slash")
    if scheme == "file":
        rest = "/" + re.sub(r"/+", "/", rest.removeprefix("localhost/")).lstrip("/") if rest else ""
    elif not _BUCKET.fullmatch(rest.split("/", 1)[0]):
        raise InvalidInput(f"{uri!r} names no bucket or host; write {scheme}://bucket/prefix/")
    segments = (rest.partition("?")[0] if scheme in ("http", "https") else rest).rstrip("/").split("/")[1:]
    if not rest or {".", ".."} & set(segments) or "" in segments or rest.endswith("//"):
        raise InvalidInput(f"{uri!r} holds an empty, '.' or '..' segment; write the plain path")
    return f"{scheme}://{rest}"


def local_path(uri: str) -> str | None:
    """Return the path of a local URI, None for any other."""
    if uri.startswith("file://"):
        return uri.removeprefix("file://")
    return None if "://" in uri else uri


@dataclass(frozen=True, slots=True)
class Allowlist:
    """The prefixes that may be served, made by `allowlist`; None for all that the daemon's user may read."""

    prefixes: tuple[str, ...] | None
    typed: tuple[str, ...] = ()
    """The prefixes as they were given, in the same order."""
    follow: links.Follow = links.follow

    def check(self, uri: str) -> str:
        """Return the canonical URI with links resolved. Raises NotAllowed, InvalidInput, and what `follow` raises."""
        found = resolved(canonical(uri), self.follow)
        if not self._below(found):
            raise NotAllowed(
                f"{uri} is not below an allowed prefix ({', '.join(self.prefixes or ()) or 'none'})"
            )
        return found

    def allows(self, uri: str) -> bool:
        """Tell whether an object of a listing lies below a prefix. Its key may contain characters that `check` would
        refuse. Raises what `follow` raises."""
        return self._below(resolved(uri, self.follow))

    def _below(self, found: str) -> bool:
        return self.prefixes is None or under(found.rstrip("/"), self.prefixes)

    def canonical_prefix(self, typed: str) -> str:
        """Return the canonical form of a prefix of `typed`."""
        assert self.prefixes is not None
        return self.prefixes[self.typed.index(typed)]

    @property
    def roots(self) -> tuple[str, ...]:
        """The allowed real paths, for `FilesSource`."""
        return tuple(p.removeprefix("file://") or "/" for p in self.prefixes or () if p.startswith("file://"))


def allowlist(
    prefixes: Sequence[str], follow: links.Follow = links.follow, place: Callable[[str], str] | None = None
) -> Allowlist:
    """Make an allowlist. `place` canonicalises a prefix and resolves its links; None does both here. No prefixes allow
    everything. Raises InvalidInput."""
    if not prefixes:
        return Allowlist(None, (), follow)
    found = [place(each) if place else resolved(canonical(each), follow) for each in prefixes]
    return Allowlist(tuple(each.rstrip("/") for each in found), tuple(prefixes), follow)


def resolved(uri: str, follow: links.Follow) -> str:
    """Resolve the links in a canonical URI, up to its first segment with a glob or a brace range."""
    if not uri.startswith("file://"):
        return uri
    path = uri.removeprefix("file://")
    end = min((path.find(c) for c in "*?[{" if c in path), default=len(path))
    cut = path.rfind("/", 0, end) + 1 if end < len(path) else end
    real = links.real(path[:cut], follow)
    if not path[:cut].endswith("/") or real == "/":
        return f"file://{real}{path[cut:]}"
    return f"file://{real}/{path[cut:]}"


def expand(uris: Sequence[str]) -> list[str]:
    """Expand `{000..012}` and `{a,b}`, left to right, and keep zero padding. Globs stay as they are, and so do other
    braces, as in a shell.

    Raises InvalidInput before expanding more than `MAX_EXPANDED` URIs or `MAX_EXPANDED_CHARACTERS` of all `uris` together.
    """
    parts = [[_choices(part) for part in _BRACES.split(uri)] for uri in uris]
    counts = [math.prod(len(each) for each in one) for one in parts]
    size = sum(count * len(uri) for count, uri in zip(counts, uris))
    if sum(counts) > MAX_EXPANDED or size > MAX_EXPANDED_CHARACTERS:
        typed = uris[counts.index(max(counts))]
        raise InvalidInput(
            f"{typed} stands for {max(counts):,} objects; give a prefix instead: {MAX_EXPANDED:,} objects and"
            f" {MAX_EXPANDED_CHARACTERS:,} characters may be spelled out by all URIs together"
        )
    return ["".join(chosen) for one in parts for chosen in itertools.product(*one)]


@dataclass(frozen=True, slots=True)
class _Range:
    """A range like `{000..012}`, expanded lazily."""

    numbers: range
    width: int

    def __len__(self) -> int:
        return abs(self.numbers.stop - self.numbers.start)

    def __iter__(self) -> Iterator[str]:
        return (str(number).zfill(self.width) for number in self.numbers)


def _choices(part: str) -> Sequence[str] | _Range:
    """Return the texts that a part of a URI, with its braces, stands for."""
    if not _BRACES.fullmatch(part):
        return (part,)
    span = _RANGE.fullmatch(part[1:-1])
    if span is None:
        return part[1:-1].split(",") if "," in part else (part,)
    first, last = int(span[1]), int(span[2])
    width = max(len(span[1]), len(span[2])) if "0" in (span[1][:1], span[2][:1]) else 0
    step = 1 if last >= first else -1
    return _Range(range(first, last + step, step), width)


def expanded(uris: Sequence[str], source_of: Callable[[str], Source]) -> list[str]:
    """Expand brace ranges and globs, but not in the name of an object or folder that exists. `[[]` stands for `[`, and so
    on for the other marks.

    Raises InvalidInput before any lookup for braces that stand for a URI that is not canonical. So all results lie below
    the folder typed before the braces, which an allowlist has checked. Raises NotFound for a glob that matches nothing,
    and the errors of the sources.
    """
    marked = [_ESCAPE.sub(lambda found: found[1].translate(_LITERAL), uri) for uri in uris]
    for one in expand(marked):
        canonical(one)
    found: list[str] = []
    for uri, pattern in zip(uris, marked, strict=True):
        plain = expand([pattern]) == [pattern] and not has_glob(pattern)
        if plain or (("[" in uri or "{" in uri) and _exists(uri, source_of)):
            found.append(pattern.translate(_UNMARKED) if plain else uri)
            continue
        for one in expand([pattern]):
            found += _matches(canonical(one), source_of)
    return found


def _exists(uri: str, source_of: Callable[[str], Source]) -> bool:
    """Tell whether there is an object, or a folder of objects, of this very name."""
    try:
        return not uri.startswith(WEB) and next(iter(source_of(uri).list(uri)), None) is not None
    except (NotFound, NotAllowed):
        return False


def _matches(pattern: str, source_of: Callable[[str], Source]) -> list[str]:
    """Return the objects that match a pattern without braces. Raises NotFound where there are none."""
    if not has_glob(pattern) or pattern.startswith(WEB):  # a URL's `?` begins its query
        return [pattern.translate(_UNMARKED)]
    found = [version.uri for version in glob(source_of(pattern), pattern)]
    if not found:
        hint = "; [[] stands for the character [" if "[" in pattern else ""
        raise NotFound(f"{pattern.translate(_UNMARKED)} matches no object{hint}")
    return found


def has_glob(uri: str) -> bool:
    """Tell whether the URI is a pattern: `*` and `?` within a segment, `[abc]`, `**` across segments."""
    return any(mark in uri for mark in "*?[")


def glob(source: Source, pattern: str) -> Iterator[ObjectVersion]:
    """Yield the objects that match a pattern, in key order, without those that a listing of the folder ignores. Lists the
    last folder before the first wildcard."""
    start = min(pattern.find(mark) for mark in "*?[" if mark in pattern)
    end = pattern.rindex("/", 0, start) + 1
    root, wanted = pattern[:end].translate(_UNMARKED), Wildcards(pattern[end:].translate(_ESCAPED))
    for found in source.list(root):
        path = found.uri[len(root) :]
        if found.uri.startswith(root) and not is_ignored(path) and wanted.matches(path):
            yield found


class Wildcards:
    """A compiled pattern: `*` and `?` within a segment, `[a-z]`, `[!a]`, `**` across segments. Raises InvalidInput for a
    class of a range that ends before its start.

    Matching does not try every way to divide a name: what lies between two stars (`fnmatch`), or between two `**`, takes
    its leftmost place, which leaves the most for the rest.
    """

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
