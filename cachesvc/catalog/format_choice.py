"""Chooses the format of a listing: more than half of its data objects decide, by their names (`format_votes.py`)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from cachesvc.catalog.compiler import ListedObject
from cachesvc.catalog.containers import Container, refusal
from cachesvc.catalog.format_votes import FormatVotes
from cachesvc.catalog.formats.all_formats import FORMATS
from cachesvc.catalog.kinds import Kind, kind_of
from cachesvc.catalog.manifests import Manifests
from cachesvc.catalog.options import Options
from cachesvc.core.errors import InvalidInput, NotFound

_INDEXED: tuple[Kind, ...] = ("mds", "litdata")
"""Kinds whose shards are listed by an `index.json`."""
_SHOWN = 4
"""Number of kinds that an error names."""


@dataclass(frozen=True, slots=True)
class Choice:
    """`entries`: the objects of the dataset. `found_out`: the format was inferred from names, not given."""

    format: str
    entries: list[ListedObject]
    found_out: bool


def choose(
    uri: str,
    entries: Sequence[ListedObject],
    zarrs: Collection[str],
    manifests: Manifests,
    options: Options,
) -> Choice:
    """Choose the given format, else one implied by an option, else the one of most objects.

    `zarrs`: URIs of folders that hold Zarr arrays. Objects that `manifests` are about are read as files alone. Raises
    InvalidInput for an unknown format, for objects of several kinds without a majority, and for containers that are not
    read; NotFound where no object is data.
    """
    given = options.format or _stated(entries, options)
    if given:
        if given not in FORMATS:
            raise InvalidInput(f"unknown format {given!r}; there are: {', '.join(FORMATS)}")
        return Choice(given, _selected(given, entries, manifests), False)
    votes = FormatVotes(entries, zarrs, manifests, options)
    format = _majority(uri, votes, options)
    if format == "files":
        return Choice(format, votes.files(), True)
    if format == "records":
        return Choice(format, votes.of(format), True)
    return Choice(format, _selected(format, entries, manifests), True)


def _selected(format: str, entries: Sequence[ListedObject], manifests: Manifests) -> list[ListedObject]:
    """Return the objects of a format that no manifest is about. Raises InvalidInput where there are no others."""
    found = FORMATS[format].select(entries)
    if not manifests or format == "files":
        return found
    rest = [entry for entry in found if manifests.container(entry) is None]
    container = manifests.container(found[0]) if found else None
    if container is not None and not rest:
        raise refusal(found[0].object.uri, container, len(found))
    return rest


def _stated(entries: Sequence[ListedObject], options: Options) -> str:
    """Return the format implied by an option, where there are arrays that it applies to; else ""."""
    if not (options.seq_len or options.record_bytes or options.dtype or options.header_bytes):
        return ""
    found = {entry.extension for entry in entries if kind_of(entry.name) != "litdata"}
    if found.isdisjoint(("bin", "npy", "ds")):
        return ""
    return "tokens" if options.seq_len or not found.isdisjoint(("idx", "ds")) else "records"


def _majority(uri: str, votes: FormatVotes, options: Options) -> str:
    """Return the format of more than half of the data objects. An index of another format must not contradict it."""
    counts = votes.counts().most_common()
    if not counts:
        return _without_data(uri, votes, options)
    best, count = counts[0]
    readable = [kind for kind, _ in counts if isinstance(kind, str)]
    most = 2 * count > sum(each for _, each in counts)
    contradicted = votes.indexed and best not in _INDEXED and any(kind in _INDEXED for kind, _ in counts)
    if isinstance(best, Container) and (most or not readable) and not contradicted:
        raise refusal(votes.of(best)[0].object.uri, best, count)
    if isinstance(best, str) and most and not contradicted:
        return best
    held = ", ".join(
        f"{count:,} {kind.name if isinstance(kind, Container) else kind} ({votes.first(kind).path})"
        for kind, count in counts[:_SHOWN]
    )
    names = (votes.first(kind).extension for kind in readable)
    globs = ", ".join(f"*.{name}" for name in names if name)
    why = "index.json names other objects than most" if contradicted else "none of them more than half"
    raise InvalidInput(
        f"{uri} holds several kinds of data, {why}: {held}. Say format= ({', '.join(readable)}), "
        f"or open one kind by a glob ({globs})"
    )


def _without_data(uri: str, votes: FormatVotes, options: Options) -> str:
    """Return the format whose compiler reports what is missing: the files of a table, the shards of an index."""
    if options.table:
        return "files"
    if votes.indexed:
        return "mds"
    raise NotFound(f"{uri} holds only read-mes, logs and similar files: format='files' reads them as samples")
