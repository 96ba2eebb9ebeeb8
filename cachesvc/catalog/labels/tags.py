"""Collects searchable values from sidecars and tables."""

from __future__ import annotations

import json
import keyword
import re
import unicodedata
from array import array
from bisect import bisect_left
from typing import Any

import numpy as np

from cachesvc.catalog.columns import Array, TextColumn, ints
from cachesvc.catalog.labels.label_encoding import (
    EncodedLabels,
    Value,
    encode_columns,
    encode_labels,
    encode_lists,
    mixed_label,
)
from cachesvc.core.safe_text import printable

SIDECARS = ("cls", "json", "txt")
SIDECAR_BYTES = 64 << 10
"""A longer sidecar is data, not a tag, and is not read when the catalog is built."""
MAX_TAGS = 64
MAX_DROPPED = 1000
"""Limit of left-out names that are counted: data may hold millions of them."""
MAX_VALUE_CHARS = 1 << 16
"""A longer value is left out, and noted."""
_RESERVED = {"key", "label", "shard"}
_JSON_LABEL = "label of .json"
"""Internal name of the `label` of `.json` sidecars; no tag can have it."""

NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
"""Text that is a number; "007" is not one."""


def tag_name(raw: str) -> str:
    """Turn the name of a column or key into a Python identifier, normalised as Python's parser does."""
    letters = unicodedata.normalize("NFKC", raw.strip())
    name = "".join(each if f"_{each}".isidentifier() else "_" for each in letters) or "_"
    clash = not name.isidentifier() or keyword.iskeyword(name) or name in _RESERVED
    return f"_{name}" if clash else name


class Tags:
    """Values by tag and sample. Names beyond the first `MAX_TAGS` are left out, and `notes` says so."""

    def __init__(self) -> None:
        self._samples: dict[str, array[int]] = {}
        self._values: dict[str, list[Value]] = {}
        self._lists: dict[str, dict[int, list[Any]]] = {}
        self._targets: tuple[str, ...] = ()
        self._dropped: set[str] = set()
        self._mixed = ""

    def add(self, sample: int, raw_name: str, value: object) -> None:
        """Add one value of a column or sidecar. The name `label` is that of the label, which may be a list."""
        self._add(sample, raw_name if raw_name == "label" else tag_name(raw_name), value)

    def _add(self, sample: int, name: str, value: object) -> None:
        """Add a value under a tag's name, unless it is neither text nor number, or empty, or too long.

        Lone surrogates, which JSON may hold and UTF-8 may not, become question marks.
        """
        if isinstance(value, list) and name in ("label", _JSON_LABEL):
            self._lists.setdefault(name, {})[sample] = value
            return
        if not isinstance(value, (str, int, float)) or not 0 < _chars(value) <= MAX_VALUE_CHARS:
            return
        if value != value:  # JSON's NaN: no value, as in a column of numbers
            return
        if isinstance(value, str):
            value = value.encode(errors="replace").decode()
        if name not in self._values and name not in ("label", _JSON_LABEL) and len(self._values) >= MAX_TAGS:
            if len(self._dropped) < MAX_DROPPED:
                self._dropped.add(name)
            return
        self._samples.setdefault(name, array("q")).append(sample)
        self._values.setdefault(name, []).append(value)

    def add_label(self, sample: int, value: object, columns: tuple[str, ...]) -> None:
        """Add a label of a table: the value of its one column, or a list of the values of several."""
        if len(columns) > 1:
            self._targets = columns
        self.add(sample, "label", value)

    def update(self, other: Tags) -> None:
        """Add what another has. Its labels replace those here."""
        if other.labelled:
            for name in ("label", _JSON_LABEL):
                for held in (self._samples, self._values, self._lists):
                    held.pop(name, None)
        for name, values in other._values.items():
            if name in self._values or len(self._values) < MAX_TAGS or name == "label":
                self._samples.setdefault(name, array("q")).extend(other._samples[name])
                self._values.setdefault(name, []).extend(values)
            else:
                self._dropped.add(name)
        self._lists.update(other._lists)
        self._targets = other._targets or self._targets

    def drop_samples(self, first: int) -> None:
        """Drop the values of samples from `first` on, which were added last."""
        for name, samples in list(self._samples.items()):
            kept = bisect_left(samples, first)
            del samples[kept:], self._values[name][kept:]
            if not kept:
                del self._samples[name], self._values[name]
        for lists in self._lists.values():
            for sample in [sample for sample in lists if sample >= first]:
                del lists[sample]

    def add_sidecar(self, sample: int, encoding: str, body: bytes) -> None:
        """Add the tags of a `.cls`, `.txt` or `.json` body. One that does not parse has no tags, and stays data."""
        try:
            text = body.decode().strip()
            if encoding == "json":
                self._add_json(sample, json.loads(text))
            elif text:
                self.add(sample, "label" if encoding == "cls" else encoding, text)
        except (ValueError, RecursionError):
            return

    def _add_json(self, sample: int, value: object) -> None:
        if isinstance(value, dict):
            for name, item in value.items():
                self._add(sample, _JSON_LABEL if name == "label" else tag_name(str(name)), item)

    @property
    def labelled(self) -> bool:
        """True where a sample has a label of a table or a `.cls` sidecar."""
        return "label" in self._values or "label" in self._lists

    def notes(self) -> list[str]:
        """Return notes for people on left-out tags and on numbers among class names."""
        many = "or more " if len(self._dropped) == MAX_DROPPED else ""
        dropped = f"{len(self._dropped)} {many}tags beyond the first ones are not searchable"
        classes = (
            f"labels are names of classes, since {printable(self._mixed)!r} is no number and others are: leave it "
            "empty to have numbers, or say labels='class'"
        )
        return [*([dropped] if self._dropped else []), *([classes] if self._mixed else [])]

    def conflicting(self) -> int:
        """Return the number of labels that differ from the first one of the same sample."""
        firsts: dict[int, Value] = {}
        given = zip(self._samples.get("label", ()), self._values.get("label", ()), strict=True)
        return sum(firsts.setdefault(sample, value) != value for sample, value in given)

    def take_labels(self, samples: int, kind: str, uri: str) -> EncodedLabels | None:
        """Remove the tag `label` and return it encoded by `encode_labels`, one per sample; None where there is none.

        The `label` of `.json` sidecars is used where there is no other label, else it becomes the tag `_label`. Raises the
        errors of `encode_labels`.
        """
        json_lists = self._lists.pop(_JSON_LABEL, {})
        if json_lists and not self.labelled:
            self._lists["label"] = json_lists
        if "label" in self._lists:
            return self._take_lists(samples, kind, uri)
        if _JSON_LABEL in self._values:
            name = "_label" if self.labelled else "label"
            self._samples.setdefault(name, array("q")).extend(self._samples.pop(_JSON_LABEL))
            self._values.setdefault(name, []).extend(self._values.pop(_JSON_LABEL))
        if "label" not in self._values:
            return None
        where, given = ints(self._samples.pop("label")), self._values.pop("label")
        values = [str(value) if isinstance(value, bool) else value for value in given]
        classes, codes = encode_labels(values, kind, uri)
        self._mixed = "" if kind else mixed_label(values)
        labels = np.full(samples, -1 if codes.dtype.kind == "i" else np.nan, codes.dtype)
        labels[where] = codes
        return classes, labels

    def _take_lists(self, samples: int, kind: str, uri: str) -> EncodedLabels:
        """Return labels, some or all of which are lists. A single one is a list of one."""
        lists = self._lists.pop("label")
        for name in ("label", _JSON_LABEL):
            for sample, value in zip(self._samples.pop(name, ()), self._values.pop(name, ()), strict=True):
                lists.setdefault(sample, [value])
        values = [lists.get(sample) for sample in range(samples)]
        return (
            encode_columns(values, self._targets, uri) if self._targets else encode_lists(values, kind, uri)
        )

    def columns(self, samples: int) -> dict[str, Array | tuple[Array, TextColumn]]:
        """Return every other tag: float64[samples], NaN for none, where all values are numbers; else int32 codes and the
        distinct texts."""
        return {name: self._column(name, samples) for name in sorted(self._values)}

    def _column(self, name: str, samples: int) -> Array | tuple[Array, TextColumn]:
        where, values = ints(self._samples[name]), self._values[name]
        numbers = [number_of(value) for value in values]
        if None not in numbers:
            column = np.full(samples, np.nan)
            column[where] = np.asarray(numbers, np.float64)
            return column
        texts = sorted({str(value) for value in values})
        index = {text: code for code, text in enumerate(texts)}
        codes = np.full(samples, -1, np.int32)
        codes[where] = [index[str(value)] for value in values]
        return codes, TextColumn(texts)


def _chars(value: Value) -> int:
    """Return the length of a value as text; for an integer its bits, which are cheap to count."""
    return value.bit_length() + 1 if isinstance(value, int) else len(str(value))


def number_of(value: Value) -> float | None:
    """Return a value as a float where float64 holds it exactly, else None."""
    if isinstance(value, str) and not NUMBER.fullmatch(value):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if isinstance(value, float) or abs(number) < 2**53 else None
