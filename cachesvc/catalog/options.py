"""The options that say how a dataset is read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cachesvc.core.arguments import text, whole_number
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


MAX_NUMBER = 1 << 40
"""Limit of bytes and tokens of a sample or extent: more than memory holds, and too few for sums of int64 to overflow."""

PROJECTED = ("parquet",)
"""Formats that fetch only the requested fields."""


def fields_text(names: Iterable[str]) -> str:
    """Return names as `Options.fields` holds them; the same for any order."""
    return json.dumps(sorted(set(names)))


@dataclass(frozen=True, slots=True)
class Options:
    """Options for reading a dataset. They are part of its digest, so another option makes another dataset version.

    `format`: "" infers it. `extent_bytes`: a multiple of the page; 0 takes the daemon's setting, else 64 MiB. `dtype`: a
    numpy dtype, with a shape where records have one ("(3,32,32)u1"). `seq_len`, `overlap`: in tokens. `labels`: the origin
    of labels ("folder", "none", or the name of a CSV/JSONL file beside the data; "" infers it), or their kind ("class" or
    "float"), or both ("truth.csv:float"), or a JSON object (`labels_text`). `header_bytes`: bytes before the items of each
    `.bin`; 0 infers them. `on_error`: "skip" leaves out damaged archives; "" and "raise" make them an error. `fields`: a
    JSON list of the fields that are read of formats that store columns apart (`PROJECTED`); "" for all. `split`: the split
    that is read, by its name or a keyword of it; "" where there is one, "all" for all of them. `separator`: the character
    between the cells of CSV; "" infers it.

    Raises InvalidInput for numbers out of range, and for arguments that are not text.
    """

    format: str = ""
    extent_bytes: int = 0
    dtype: str = ""
    seq_len: int = 0
    overlap: int = 0
    record_bytes: int = 0
    labels: str = ""
    header_bytes: int = 0
    on_error: str = ""
    fields: str = ""
    split: str = ""
    separator: str = ""

    def __post_init__(self) -> None:
        for name in ("format", "dtype", "labels", "on_error", "fields", "split", "separator"):
            text(name, getattr(self, name))
        for name in ("extent_bytes", "seq_len", "overlap", "record_bytes", "header_bytes"):
            given = whole_number(name, getattr(self, name), 0, MAX_NUMBER)
            object.__setattr__(self, name, given)  # numpy's integers cannot be written as JSON
        if self.on_error not in ("", "raise", "skip"):
            raise InvalidInput(f"on_error={self.on_error!r}: give 'raise' or 'skip'")
        if "[" in self.split or "+" in self.split:
            raise InvalidInput(
                f"split={self.split!r}: name one split, such as 'train'; select() and take() choose samples of it"
            )
        if len(self.separator) > 1 or self.separator in ('"', "\n", "\r", "\0"):
            raise InvalidInput(
                f"separator={self.separator!r}: give the one character between the cells, such as '|'"
            )
        object.__setattr__(self, "on_error", self.on_error.replace("raise", ""))
        object.__setattr__(self, "labels", checked_labels(self.labels))

    @property
    def label_source(self) -> LabelSource:
        """The parsed `labels`."""
        return parse_labels(self.labels)

    @property
    def field_names(self) -> tuple[str, ...]:
        """The fields that are read; () for all."""
        try:
            names = json.loads(self.fields) if self.fields else []
        except ValueError:
            names = None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise InvalidInput(f"fields={self.fields!r} is no list of names")
        return tuple(names)

    @property
    def labels_from(self) -> str:
        """The origin of labels: "folder", "none", or "table"; "" infers it."""
        source = self.label_source
        return "table" if source.needs_table else source.origin

    @property
    def label_kind(self) -> str:
        """The kind of labels, one of `KINDS`; "" infers it."""
        return self.label_source.kind

    @property
    def table(self) -> str:
        """The table of labels that is named, "" for none."""
        return self.label_source.table
