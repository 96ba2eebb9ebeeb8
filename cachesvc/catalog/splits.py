"""Finds the splits of a dataset (train, validation, test) and its configurations by the names below its URIs.

The keywords and separators are those of Hugging Face's `datasets`. A folder or file names a split if the first or the last
word of its name is a keyword; the outermost level with two splits counts. Names that the user wrote choose nothing: the
bucket, the prefix, and the files of a glob or list.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from cachesvc.catalog.compiler import ListedObject, split_name, words_of
from cachesvc.catalog.containers import COMPRESSIONS
from cachesvc.catalog.kinds import IGNORED, TABLES, kind_of
from cachesvc.core.errors import InvalidInput

ALL = "all"
"""The value of the option `split` that reads all splits as one dataset."""
_KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SPLITS = {word: split for split, words in _KEYWORDS.items() for word in words}
_COUNTERS = ("of", "part", "shard", "chunk")
"""Words that may follow a keyword, before or between the numbers of shards."""
_HUB_STEM = re.compile(r"(.+)-\d{5}-of-\d{5}.*")
"""The stems of shards at Hugging Face's hub. Directly in `data/` their names may be any split's."""
_HUB_CONFIGURATION = re.compile(r"([^/]+)/([^/]+?)(?:-\d{5}-of-\d{5}[^/]*|/\d{4}\.parquet)")
"""Paths of shards of a configuration at the hub: `CONFIGURATION/SPLIT-00000-of-00001.parquet`, and
`CONFIGURATION/SPLIT/0000.parquet` of its converted datasets."""
_SHOWN = 8
"""Number of splits or configurations that an error names."""


class _Name(NamedTuple):
    """The split that a folder or file names, and its own name, which may be more precise (`train-clean-100`)."""

    split: str
    own: str


_Level = dict[_Name, list[int]]
"""The entries of each name at one depth of the paths."""


def canonical_split(split: str) -> str:
    """Return the name of a split by one of its keywords; other names as they are."""
    return _SPLITS.get(split.lower(), split)


@lru_cache(4096)
def split_of(name: str) -> str:
    """Return the split that a folder's name or the stem of a file's name begins or ends with, "" for none."""
    words = words_of(name)
    while words and words[-1] in _COUNTERS:
        words.pop()
    return (_SPLITS.get(words[0]) or _SPLITS.get(words[-1]) or "") if words else ""


def check_one_split(uri: str, entries: Sequence[ListedObject], file_names: bool) -> None:
    """Raise InvalidInput where two splits at one level, or two configurations, are more than half of the data `entries`.

    `file_names`: the names of files count too. Each file must not be a sample then.
    """
    if file_names:
        _check_one_configuration(uri, entries)
    level = _level_of_splits(
        _levels([entry for entry in entries if not entry.named], file_names), len(entries)
    )
    if level is None:
        return
    counts = _counts(level)
    shown = ", ".join(
        f"{name} ({count:,} file{'s' * (count > 1)})" for name, count in counts.most_common(_SHOWN)
    )
    first = "train" if "train" in counts else next(iter(counts))
    raise InvalidInput(
        f'{uri} holds {len(counts)} splits, {shown}: choose one by split="{first}" (--split {first}); split="{ALL}" reads '
        "all of them as one dataset"
    )


def choose_split(
    uri: str, entries: Sequence[ListedObject], split: str
) -> tuple[list[ListedObject], list[str]]:
    """Return the entries of a split, and a note on data that no split names.

    Paths do not contain the folder of the split, so that its folders are the classes. Raises InvalidInput where no name
    is this split's, and for several configurations.
    """
    data = [entry for entry in entries if kind_of(entry.name) != IGNORED]
    _check_one_configuration(uri, data)
    split = canonical_split(split)
    for file_names in (False, True):  # folders come before files
        levels = _levels(entries, file_names)
        level = _level_of_splits(levels, len(entries)) or {}
        if _of(level, split):
            break
    else:
        level = max(levels, key=lambda each: len(_of(each, split)), default={})
        if not _of(level, split):
            raise InvalidInput(f"{uri} has no split {split!r}: {_known(levels)}")
    depth, chosen = levels.index(level), _of(level, split)
    others = {at for named_at in level.values() for at in named_at}.difference(chosen)
    tables = _tables_beside(entries, depth, chosen, split)
    found, nameless = list[ListedObject](), list[ListedObject]()
    for at, entry in enumerate(entries):
        if at in chosen:
            found.append(_without_folder(entry, depth))
        elif at in tables:
            found.append(entry)
        elif at not in others and kind_of(entry.name) != IGNORED and not _of_file("", entry.name):
            nameless.append(entry)
    if not nameless:
        return found, []
    return found, [
        f"{len(nameless):,} of {len(data):,} objects belong to no split and were left out, the first is "
        f"{nameless[0].object.uri}"
    ]


def _levels(entries: Sequence[ListedObject], file_names: bool) -> list[_Level]:
    """Return the names of splits at each depth of the paths."""
    levels = list[_Level]()
    for at, entry in enumerate(entries):
        folder, _, name = entry.path.rpartition("/")
        names = list(_of_folders(folder))
        if file_names and (found := _of_file(folder, name)):
            names.append((folder.count("/") + bool(folder), found))
        for depth, found in names:
            levels.extend({} for _ in range(depth + 1 - len(levels)))
            levels[depth].setdefault(found, []).append(at)
    return levels


@lru_cache(4096)
def _of_folders(path: str) -> tuple[tuple[int, _Name], ...]:
    """Return the depth and the name of each folder of a path that names a split."""
    named = ((depth, _Name(split_of(folder), folder)) for depth, folder in enumerate(path.split("/")))
    return tuple((depth, name) for depth, name in named if name.split)


def _of_file(folder: str, name: str) -> _Name | None:
    """Return the name of a file that names a split, None for none."""
    stem, extension = split_name(name)
    if extension.lower() in COMPRESSIONS:
        stem = split_name(stem)[0]
    shards = _HUB_STEM.fullmatch(stem)
    own = canonical_split(shards[1] if shards else stem)
    split = own if shards and folder == "data" else split_of(stem)
    return _Name(split, own) if split else None


def _level_of_splits(levels: Sequence[_Level], entries: int) -> _Level | None:
    """Return the outermost level at which two splits or more are more than half of the entries, None for none."""
    return next(
        (each for each in levels if len(counts := _counts(each)) > 1 and 2 * counts.total() > entries), None
    )


def _counts(level: _Level) -> Counter[str]:
    """Return the number of entries of each split."""
    counts: Counter[str] = Counter()
    for name, named in level.items():
        counts[name.split] += len(named)
    return counts


def _of(level: _Level, split: str) -> set[int]:
    """Return the entries of a split, or of an own name."""
    return {at for name, named in level.items() if split in name for at in named}


def _known(levels: Sequence[_Level]) -> str:
    """Return the splits that any name has, as the end of an error."""
    names = list(dict.fromkeys(name for level in levels for name in _counts(level)))
    return f"there are {', '.join(names[:_SHOWN])}" if names else "no name below it says so; leave split= out"


def _tables_beside(
    entries: Sequence[ListedObject], depth: int, chosen: Collection[int], split: str
) -> set[int]:
    """Return tables directly below the URI that may label the files of a split's folder."""
    rows = any(kind_of(entries[at].name) in ("csv", "jsonl") and "/" in entries[at].path for at in chosen)
    if depth or rows or not any("/" in entries[at].path for at in chosen):
        return set()
    return {
        at
        for at, entry in enumerate(entries)
        if "/" not in entry.path
        and entry.extension in TABLES
        and at not in chosen
        and split in (_of_file("", entry.path) or (split,))
    }


def _without_folder(entry: ListedObject, depth: int) -> ListedObject:
    """Return the entry without the folder at this depth of its path, as if that folder had been opened."""
    folders = entry.path.split("/")
    return (
        entry
        if depth >= len(folders) - 1
        else replace(entry, path="/".join(folders[:depth] + folders[depth + 1 :]))
    )


def _check_one_configuration(uri: str, entries: Sequence[ListedObject]) -> None:
    """Raise InvalidInput where folders of shards as Hugging Face's hub names them are more than half of the entries."""
    counts = Counter(_configurations(entries))
    if len(counts) < 2 or 2 * counts.total() <= len(entries):
        return
    names = sorted(counts)
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    raise InvalidInput(
        f"{uri} holds {len(names):,} configurations, {', '.join(names[:_SHOWN])}{more}, which are datasets of their own: "
        f'open one of them ({uri.rstrip("/")}/{names[0]}), or a list of them; split="{ALL}" reads everything as one dataset'
    )


def _configurations(entries: Sequence[ListedObject]) -> Iterator[str]:
    """Yield the configuration of each entry that lies in one."""
    for entry in entries:
        named = _HUB_CONFIGURATION.fullmatch(entry.path)
        if named and split_of(named[2]) and not split_of(named[1]):
            yield named[1]
