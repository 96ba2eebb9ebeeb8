"""Reads the `index.json` of MDS and litData: finds it among the objects, parses it a value at a time, with one window
of the text and one value in memory, and checks the types of its fields."""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from json import JSONDecodeError, JSONDecoder
from typing import Any

from cachesvc.catalog.compiler import Inputs, ListedObject
from cachesvc.core.errors import CorruptData, InvalidInput

_INDEX_BYTES = 512 << 20
"""Limit of an index, about a million shards. It is parsed in windows."""
_WINDOW_BYTES = 4 << 20
_VALUE_CHARS = 1 << 20
"""Limit of a value that is parsed whole: brackets take 27 times as much memory."""
_SPACES = re.compile(r"[ \t\n\r]*")
_parse = JSONDecoder().raw_decode


class JsonStream:
    """One JSON object in UTF-8, read in order by `read(offset, length)`.

    For each name of `fields` the caller takes the value, by `value` or `items`. Raises CorruptData, which names `where`,
    for other JSON, and for a value of `value_chars` or more.
    """

    def __init__(
        self,
        where: str,
        read: Callable[[int, int], bytes],
        size_bytes: int,
        window_bytes: int = _WINDOW_BYTES,
        value_chars: int = _VALUE_CHARS,
    ) -> None:
        self._where, self._read, self._size_bytes = where, read, size_bytes
        self._window_bytes, self._value_chars = window_bytes, value_chars
        self._decode = getincrementaldecoder("utf-8-sig")().decode
        self._text, self._at = "", 0
        self._read_bytes, self._dropped_chars = 0, 0
        self._long = f"{value_chars:,} characters or more"

    def fields(self) -> Iterator[str]:
        """Yield the name of each field; only white space may follow the object."""
        for _ in self._each("{", "}"):
            name = self.value()
            if not isinstance(name, str):
                raise self._wrong("a name is no text")
            self._take(":")
            yield name
        if self._next():
            raise self._wrong("more follows the end")

    def items(self) -> Iterator[Any]:
        """Return an iterator over the values of a list."""
        return (self.value() for _ in self._each("[", "]"))

    def value(self) -> Any:
        """Parse and return one whole value."""
        self._next()
        self._look_ahead()
        try:
            value, end = _parse(self._text, self._at)
        except JSONDecodeError as error:
            cut = f", or it has {self._long}" if self._read_bytes < self._size_bytes else ""
            raise self._wrong(error.msg + cut, error.pos - self._at) from error
        except (ValueError, RecursionError) as error:  # too many digits, or too deep brackets
            raise self._wrong(str(error)) from error
        if end - self._at >= self._value_chars:
            raise self._wrong(f"a value has {self._long}")
        self._at = end
        return value

    def _each(self, opening: str, closing: str) -> Iterator[None]:
        """Yield once before each element between brackets; the caller takes the element."""
        self._take(opening)
        if self._next() == closing:
            self._at += 1
            return
        found = ","
        while found == ",":
            yield
            found = self._next()
            if found not in (",", closing):
                raise self._wrong(f"{closing!r} or a comma is missing")
            self._at += 1

    def _take(self, char: str) -> None:
        if self._next() != char:
            raise self._wrong(f"{char!r} is missing")
        self._at += 1

    def _next(self) -> str:
        """Skip white space and return the next character without taking it; "" at the end."""
        while True:
            self._look_ahead()
            match = _SPACES.match(self._text, self._at)
            assert match is not None, "the pattern matches the empty string"
            self._at = match.end()
            if self._at < len(self._text) or self._read_bytes == self._size_bytes:
                return self._text[self._at : self._at + 1]

    def _look_ahead(self) -> None:
        """Read on until the window holds as many characters as a value may have, or all the rest."""
        while len(self._text) - self._at < self._value_chars and self._read_bytes < self._size_bytes:
            length = min(self._window_bytes, self._size_bytes - self._read_bytes)
            raw = self._read(self._read_bytes, length)
            self._read_bytes += length
            try:
                text = self._decode(raw, self._read_bytes == self._size_bytes)
            except UnicodeDecodeError as error:
                raise self._wrong(f"no UTF-8 ({error.reason})") from error
            self._dropped_chars += self._at
            self._text, self._at = self._text[self._at :] + text, 0

    def _wrong(self, what: str, ahead: int = 0) -> CorruptData:
        at = self._dropped_chars + self._at + ahead
        return CorruptData(f"{self._where} is broken at character {at:,}: {what}")


def indices(inputs: Inputs, tool: str, merges: bool = False) -> list[ListedObject]:
    """Return the index of each URI: the one directly below it, which may list its subfolders' shards, else its only one.

    With `merges`, several indices of subfolders are one dataset, as Streaming's `merge_index` makes it; the outermost ones
    count. Raises InvalidInput where there is none, or several that are no parts of one dataset.
    """
    below: dict[str, list[ListedObject]] = {}
    for entry in inputs.entries:
        if entry.name == "index.json":
            below.setdefault(entry.object.uri.removesuffix(entry.path), []).append(entry)
    if not below:
        raise InvalidInput(f"{inputs.uri} has {tool} shards but no index.json")
    chosen = []
    for root, found in below.items():
        outermost = _outermost(found)
        if len(outermost) > 1 and not merges:
            paths = ", ".join(entry.path for entry in outermost[:4])
            raise InvalidInput(
                f"{root} holds {len(outermost)} {tool} datasets ({paths}): open one of them, or a list of them"
            )
        chosen += outermost
    return chosen


def _outermost(found: Sequence[ListedObject]) -> list[ListedObject]:
    """Leave out indices below the folder of another one: a merged index lists the shards of subfolders itself."""
    folders = {entry.path.removesuffix("index.json") for entry in found}

    def is_below(entry: ListedObject) -> bool:
        parts = entry.path.split("/")[:-1]
        above = ("".join(f"{part}/" for part in parts[:depth]) for depth in range(len(parts)))
        return any(folder in folders for folder in above)

    return [entry for entry in found if not is_below(entry)]


def stream_of(inputs: Inputs, index: ListedObject) -> JsonStream:
    """Begin to parse an index. Raises CorruptData for one beyond the limit."""
    uri, size = index.object.uri, index.object.size_bytes
    if size > _INDEX_BYTES:
        raise CorruptData(f"{uri} has {size} bytes; an index of more than {_INDEX_BYTES} is not read")
    return JsonStream(uri, lambda offset, length: inputs.fetch(index.object, offset, length), size)


class Listed:
    """The objects that the indices of a dataset have named, each once. `noun`: what an object holds."""

    def __init__(self, inputs: Inputs, noun: str) -> None:
        self._places = {entry.object.uri: at for at, entry in enumerate(inputs.entries)}
        self._noun, self._named = noun, set[int]()

    def place(self, index: ListedObject, name: str, where: str) -> int:
        """Return the object that an index names, by its number. Raises CorruptData for one that does not exist, and for one
        that was named before."""
        at = self._places.get(f"{index.object.uri.rpartition('/')[0]}/{name}")
        if at is None:
            raise CorruptData(f"{where} names {name!r}, which does not exist")
        if at in self._named:
            raise CorruptData(f"{where} names {name!r} again: its {self._noun} would be read twice an epoch")
        self._named.add(at)
        return at


@dataclass(frozen=True, slots=True)
class JsonRecord:
    """A JSON object with checked access to its fields."""

    where: str
    value: Any

    def take(self, name: str, kind: type) -> Any:
        """Return a field of a type; integers may not be negative. Raises CorruptData naming it."""
        value = self.value.get(name) if isinstance(self.value, dict) else None
        negative = isinstance(value, int) and value < 0
        if not isinstance(value, kind) or isinstance(value, bool) or negative:
            raise CorruptData(f"{self.where}: field {name!r} is missing or no {kind.__name__}")
        return value

    def record(self, name: str) -> JsonRecord:
        """Return a nested object."""
        return JsonRecord(f"{self.where}.{name}", self.take(name, dict))
