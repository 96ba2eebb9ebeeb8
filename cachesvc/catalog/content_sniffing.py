"""Recognises objects by content where their names do not: reads the beginning of one object per extension."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from cachesvc.catalog.compiler import Inputs
from cachesvc.catalog.containers import HEAD_BYTES, Container, by_content, json_list, one_a_line, refusal
from cachesvc.catalog.kinds import KNOWN, PLAIN, TABLES, extension_of, kind_of
from cachesvc.catalog.labels.file_tables import begins_as_json_lines

_MAX_LOOKS = 16
"""The number of extensions whose first object is read: those with the most objects."""
_SAMPLE_BYTES = 1 << 20
"""A larger file of an unknown kind probably holds many samples."""
_LINES_BYTES = 64 << 10
_TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|[][{}:,]', re.DOTALL)
"""Texts, which may be cut at the end, and the marks of JSON."""
_PICKLES = frozenset({"pkl", "pickle", "pt", "pth", "joblib", "ckpt"})
"""Extensions that are not read here: the loader refuses them by name."""


def look(inputs: Inputs) -> tuple[Inputs, list[int]]:
    """Return inputs whose `unrelated` are the containers found by content, and the large entries of an unknown kind.

    Raises InvalidInput where half of the files or more are containers of one kind.
    """
    groups: dict[str, list[int]] = {}
    for at, entry in enumerate(inputs.entries):
        groups.setdefault(extension_of(entry.name), []).append(at)
    unknown = [
        group
        for name, group in groups.items()
        if name not in KNOWN and kind_of(inputs.entries[group[0]].name) == PLAIN
    ]
    unknown.sort(key=len, reverse=True)
    unrelated: dict[Container, list[int]] = {}
    opaque: list[int] = []
    for number, group in enumerate(unknown):
        container, binary = _content(inputs, group) if number < _MAX_LOOKS else (None, True)
        if container is not None:
            unrelated.setdefault(container, []).extend(group)
        elif binary:
            opaque += [at for at in group if inputs.entries[at].object.size_bytes > _SAMPLE_BYTES]
    _check(inputs, unrelated, len(inputs.entries) - sum(len(groups.get(name, ())) for name in TABLES))
    every = frozenset(at for container in unrelated.values() for at in container)
    return replace(inputs, unrelated=every, found_out=True), opaque


def _check(inputs: Inputs, unrelated: Mapping[Container, Sequence[int]], files: int) -> None:
    for container, places in unrelated.items():
        if 2 * len(places) >= files:
            raise refusal(inputs.entries[min(places)].object.uri, container, len(places))


def _content(inputs: Inputs, group: Sequence[int]) -> tuple[Container | None, bool]:
    """Return the container of a group's first non-empty object, and whether that object is binary."""
    if inputs.entries[group[0]].extension in _PICKLES:
        return None, True
    for at in group:
        version = inputs.entries[at].object
        if version.size_bytes:
            head = inputs.fetch(version, 0, min(version.size_bytes, HEAD_BYTES))
            return (None, False) if is_text(head) else (by_content(head, version.size_bytes), True)
    return None, False


def is_text(head: bytes) -> bool:
    """Tell whether the first `HEAD_BYTES` of an object are UTF-8 without control characters."""
    if any(byte < 32 and byte not in b"\t\n\v\f\r\x1b" for byte in head):
        return False
    try:
        head.decode()
    except UnicodeDecodeError as error:
        return len(head) == HEAD_BYTES and error.start > HEAD_BYTES - 4  # the head ends inside a character
    return True


def json_rows(inputs: Inputs) -> tuple[bool, list[str]]:
    """Tell whether all files are called `.json` and the first is JSON lines; and return the note on files that are a
    sample each, and yet hold rows.

    Raises InvalidInput for a long list of rows, and for rows in the only file.
    """
    if any(entry.extension != "json" for entry in inputs.entries):
        return False, []
    version, files = inputs.entries[0].object, len(inputs.entries)
    head = inputs.fetch(version, 0, min(version.size_bytes, _LINES_BYTES))
    if begins_as_json_lines(head):
        return True, []
    path = _rows_in(head)
    if path is None:
        return False, []
    rows = json_list(path)
    if files == 1 or (version.size_bytes > _SAMPLE_BYTES and not path):
        raise refusal(version.uri, rows, files)
    return False, [
        f"each of {files:,} .json files is one sample, and {version.uri} is {rows.name}: if its items are the samples, "
        f"{one_a_line(path)}"
    ]


def _rows_in(head: bytes) -> str | None:
    """Return the key of the first list of objects in a JSON object, "" for a list of objects; None for other JSON.

    `head`: the beginning of a file.
    """
    depth, key, before = 0, "", b""
    for token in map(re.Match.group, _TOKENS.finditer(head)):
        if token == b"{" and before == b"[" and depth in (1, 2):
            return key
        if token in b"[{":
            if depth == 1 and before != b":":
                return None  # a list of lists
            depth += 1
        elif token in b"]}":
            depth -= 1
        elif token == b":" and depth == 1:
            key = before.decode(errors="replace").strip('"')
        before = token
    return None


def warning(inputs: Inputs, opaque: Collection[int]) -> list[str]:
    """Return the note on samples that are large objects of an unknown kind."""
    if not opaque:
        return []
    return [
        f"{len(opaque):,} objects of unknown kind are read as opaque bytes, one sample each, the first is "
        f"{inputs.entries[min(opaque)].object.uri}: give format=, or format='files' if that is intended"
    ]
