"""Tells tables about the data (`meta/`, `stats.parquet`) from the data: files of one format are one table by their columns.

Columns of several files are matched by name, and a file may lack some. A file that shares few columns with most others is
no part of their table. Files that a glob or list names are one table whatever their columns are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from cachesvc.catalog.compiler import Inputs, words_of
from cachesvc.core.errors import InvalidInput

_WORDS = frozenset({"meta", "metadata", "stats", "info"})
_COMPARED = 32
"""Number of other files whose columns are those of the data."""
_SHOWN = 4
"""Number of columns that an error names."""

ColumnsOf = Callable[[Sequence[int]], Mapping[int, Collection[str]]]
"""Reads the names of the columns of entries; it leaves out entries whose columns cannot be told."""


def is_about_data(path: str, whole: bool = True) -> bool:
    """Tell whether a folder or file is named as a description of other data; not `whole`: whether its stem begins or ends
    so (`episodes_stats.parquet`)."""
    *folders, name = path.lower().split("/")
    stem = name.partition(".")[0]
    if not _WORDS.isdisjoint((*folders, stem)):
        return True
    words = words_of(stem)
    return not whole and bool(words) and not _WORDS.isdisjoint((words[0], words[-1]))


def tables_about(inputs: Inputs, columns_of: ColumnsOf) -> tuple[frozenset[int], list[str]]:
    """Return entries that describe the data, and the note on them: their names say so, and they have other columns."""
    about = [
        at
        for at, entry in enumerate(inputs.entries)
        if not entry.named and is_about_data(entry.path, whole=False)
    ]
    others = sorted(set(range(len(inputs.entries))).difference(about))
    if not about or not others:
        return frozenset(), []
    columns = columns_of([*about, *others[:_COMPARED]])
    data = {name for at in others[:_COMPARED] for name in columns.get(at, ())}
    tables = [at for at in about if at in columns and 2 * len(data.intersection(columns[at])) <= len(data)]
    if not tables or not data:
        return frozenset(), []
    first = inputs.entries[tables[0]].object.uri
    more = f" and {len(tables) - 1:,} more describe" if len(tables) > 1 else " describes"
    return frozenset(tables), [
        f"{first}{more} the data by name and by other columns, and no row of it is a sample"
    ]


def check_one_table(inputs: Inputs, columns: Mapping[int, Collection[str]]) -> None:
    """Raise InvalidInput for a file that shares fewer than half of its columns with most files, or of theirs with it.
    `columns`: the names by entry."""
    sets = {at: frozenset(names) for at, names in columns.items() if names and not inputs.entries[at].named}
    sizes, counts = Counter[frozenset[str]](), Counter(sets.values())
    if len(counts) < 2:
        return
    for at, names in sets.items():
        sizes[names] += inputs.entries[at].object.size_bytes
    usual = max(counts, key=lambda names: (counts[names], sizes[names]))
    odd = {names for names in counts if 2 * len(names & usual) < min(len(names), len(usual))}
    for at, names in sets.items():
        if names in odd:
            other = next(each for each, columns_of_it in sets.items() if columns_of_it == usual)
            raise InvalidInput(
                f"{inputs.entries[at].object.uri} has the columns {_some(names)}, and {inputs.entries[other].path} "
                f"{_some(usual)}: they are not one table. Open them apart; a glob or list reads all that it names as one"
            )


def _some(names: Collection[str]) -> str:
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, sorted(names)[:_SHOWN])) + more
