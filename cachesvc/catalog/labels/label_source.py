"""Parses the option `labels`: the origin of labels, the columns of a table that hold them, and their kind."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cachesvc.core.errors import InvalidInput

KINDS = ("class", "float")
"""The kinds of labels that `labels=` may name; "" infers the kind."""
ORIGINS = ("folder", "none")
"""Origins other than a table."""
_KEYS = ("file", "target", "table", "separator", "kind")
_EXAMPLE = 'labels={"file": "image_id", "target": "breed"}'


@dataclass(frozen=True, slots=True)
class LabelSource:
    """`origin`: one of `ORIGINS`; "" infers it. `table`: the path of a table beside the data; "" finds it. `file` and
    `targets`: names of its columns; "" and () take the usual ones. `separator`: what divides the classes in one cell; ""
    for one class a cell. `kind`: one of `KINDS`, "" infers it."""

    origin: str = ""
    table: str = ""
    file: str = ""
    targets: tuple[str, ...] = ()
    separator: str = ""
    kind: str = ""

    @property
    def needs_table(self) -> bool:
        """A table must label the data."""
        return bool(self.table or self.file or self.targets)


def parse_labels(labels: str) -> LabelSource:
    """Parse an origin, table or kind ("truth.csv:float"), or the JSON object that `labels_text` writes.

    Raises InvalidInput.
    """
    if labels.startswith("{"):
        return _parsed(labels)
    source, _, kind = labels.rpartition(":")
    if kind not in KINDS:
        source, kind = labels, ""
    return (
        LabelSource(source, kind=kind) if source in ("", *ORIGINS) else LabelSource(table=source, kind=kind)
    )


def labels_text(labels: Mapping[str, Any]) -> str:
    """Return the text of a mapping. Raises InvalidInput for what is no JSON."""
    try:
        return json.dumps(dict(labels))
    except (TypeError, ValueError):
        raise InvalidInput(f"labels={labels!r}: give names of columns as text, as in {_EXAMPLE}") from None


def checked_labels(labels: str) -> str:
    """Return the text of labels, with the keys of a JSON object sorted. Raises InvalidInput."""
    parse_labels(labels)
    return json.dumps(json.loads(labels), sort_keys=True) if labels.startswith("{") else labels


def columns_advice(columns: tuple[str, ...], file: str | None, target: str | None) -> str:
    """Return the words that name the columns of a table: those known, else the first others."""
    others = [name for name in columns if name not in (file, target)]
    words = {"file": file or next(iter(others), "...")}
    words["target"] = target or next((name for name in others if name != words["file"]), "...")
    return f"labels={json.dumps(words, ensure_ascii=False)}"


def _parsed(text: str) -> LabelSource:
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"labels={text[:200]!r} is no JSON ({error}): write {_EXAMPLE}") from None
    if not isinstance(given, dict):
        raise InvalidInput(f"labels={text[:200]!r}: write {_EXAMPLE}")
    unknown = [name for name in given if name not in _KEYS]
    if unknown:
        raise InvalidInput(f"labels= has no {unknown[0]!r}; it has {', '.join(_KEYS)}, as in {_EXAMPLE}")
    targets = given.pop("target", ())
    targets = (targets,) if isinstance(targets, str) else targets
    texts = [*given.values(), *targets] if isinstance(targets, (list, tuple)) else [None]
    if not all(isinstance(each, str) and each for each in texts):
        raise InvalidInput(f"labels={text[:200]!r}: give names of columns as text, as in {_EXAMPLE}")
    found = LabelSource(targets=tuple(targets), **given)
    if found.kind and found.kind not in KINDS:
        raise InvalidInput(f"labels= has the kind {found.kind!r}: give one of {', '.join(KINDS)}")
    if len(found.targets) > 1 and (found.separator or found.kind == "class"):
        raise InvalidInput("labels= with several targets makes numbers: leave out separator and kind")
    return found
