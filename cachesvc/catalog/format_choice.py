"""Chooses the format of a listing: more than half of its data objects decide, by their names.

Every data object counts for its kind. These objects are ignored: those that share a shard's stem (`000.json` beside
`000.tar`), possible tables of labels, and texts such as JSON and YAML, unless they outnumber the shards. Objects that
are never data do not count either. A container that is not read is a kind of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from cachesvc.catalog.compiler import ListedObject, split_name
from cachesvc.catalog.containers import ZARR, Container, refusal
from cachesvc.catalog.described_data import is_about_data
from cachesvc.catalog.formats.all_formats import FORMATS
from cachesvc.catalog.kinds import IGNORED, PLAIN, TABLES, Kind, extension_of, kind_of
from cachesvc.catalog.manifests import Manifests
from cachesvc.catalog.options import Options
from cachesvc.core.errors import InvalidInput, NotFound

_INDEXED: tuple[Kind, ...] = ("mds", "litdata")
"""Kinds whose shards are listed by an `index.json`."""
_SHOWN = 4
"""Number of kinds that an error names."""
_SHARDS = ("webdataset", "mds", "parquet", "tfrecord")
"""The formats of shards, in order of precedence where several share a stem."""
_TEXTS = frozenset({"json", "txt", "cls", "yaml", "yml", "toml", "xml", "ini", "cfg", "csv", "tsv", "jsonl"})
"""Extensions of files that may describe others."""


class FormatCounts:
    """The kind of each entry, given the others. `indexed`: an `index.json` lies directly below a URI."""

    def __init__(
        self,
        entries: Sequence[ListedObject],
        zarrs: Collection[str],
        manifests: Manifests,
        options: Options,
    ) -> None:
        self._entries = entries
        self._kinds = [manifests.container(entry) or _kind(entry, zarrs) for entry in entries]
        self.indexed = any(entry.path == "index.json" for entry in entries)
        self._ignored: set[int] = set()  # data objects that do not count
        self._described = False  # arrays are samples that other files describe, not rows of records
        if not set(self._kinds) <= {PLAIN, IGNORED} or any(entry.extension == "idx" for entry in entries):
            self._apply_stems()
            self._apply_texts()
        self._apply_descriptions()
        self._tables = [at for at, entry in enumerate(entries) if self._may_be_table(at, entry)]
        self._apply_tables(options.table)
        if self._described:
            self._count_as_files({"records"}, range(len(entries)))

    def counts(self) -> Counter[Kind]:
        """Return how many objects count for each kind."""
        return Counter(
            kind for at, kind in enumerate(self._kinds) if kind != IGNORED and at not in self._ignored
        )

    def of(self, wanted: Kind) -> list[ListedObject]:
        """Return the objects of a kind."""
        return [entry for entry, kind in zip(self._entries, self._kinds, strict=True) if kind == wanted]

    def first(self, wanted: Kind) -> ListedObject:
        """Return the first object that counts for a kind."""
        return next(
            entry
            for at, entry in enumerate(self._entries)
            if self._kinds[at] == wanted and at not in self._ignored
        )

    def files(self) -> list[ListedObject]:
        """Return the plain files, and possible tables about them."""
        tables = set(self._tables)
        return [entry for at, entry in enumerate(self._entries) if self._kinds[at] == PLAIN or at in tables]

    def _may_be_table(self, at: int, entry: ListedObject) -> bool:
        """Tell whether an entry lies directly below a URI and is named like a table."""
        return self._kinds[at] in ("csv", "jsonl") and entry.extension in TABLES and "/" not in entry.path

    def _apply_tables(self, named: str) -> None:
        """Ignore the table named by `labels`, and others unless they outnumber the files that they may label."""
        beside = self._ignored.union(self._tables)
        data = sum(kind != IGNORED and at not in beside for at, kind in enumerate(self._kinds))
        ignored = set(self._tables if len(self._tables) <= data else ())
        if named:
            chosen = [at for at, entry in enumerate(self._entries) if entry.path == named]
            self._tables += chosen
            ignored.update(chosen)
        self._ignored |= ignored
        self._described |= bool(ignored)

    def _apply_texts(self) -> None:
        """Ignore texts beside shards, unless they outnumber the shards."""
        plain = [at for at, kind in enumerate(self._kinds) if kind == PLAIN and at not in self._ignored]
        texts = [at for at in plain if self._entries[at].extension in _TEXTS]
        shards = sum(kind not in (PLAIN, IGNORED) for kind in self._kinds)
        if len(texts) <= shards:
            self._ignored.update(texts)

    def _apply_descriptions(self) -> None:
        """Ignore objects that are named as a description of the data, if there are others."""
        data = {at for at, kind in enumerate(self._kinds) if kind != IGNORED} - self._ignored
        about = {at for at in data if not self._entries[at].named and is_about_data(self._entries[at].path)}
        if about != data:
            self._ignored |= about

    def _apply_stems(self) -> None:
        """Ignore objects that share a stem with a shard.

        A container or array that shares its stem with plain data (`x.jpg` and `x.npz`) is a field of that sample.
        """
        for mates in self._mates():
            kinds = {self._kinds[at] for at in mates}
            plain = [at for at in mates if self._kinds[at] == PLAIN]
            shard = next((format for format in _SHARDS if format in kinds), "")
            if shard:
                self._ignored.update(at for at in mates if self._kinds[at] != shard)
            elif any(self._entries[at].extension == "idx" for at in mates):
                self._count_as_tokens(mates)
            elif any(self._entries[at].extension not in _TEXTS for at in plain):
                self._described |= "records" in kinds
                self._count_as_files(kinds - {IGNORED}, mates)
            elif plain and "records" in kinds:
                self._described = True
            else:
                self._ignored.update(plain)

    def _mates(self) -> Iterable[list[int]]:
        """Return groups of objects that share a stem with one that is not a plain file.

        `000.tar.idx` shares the stem of `000.tar`.
        """
        special = {
            entry.object.uri
            for entry, kind in zip(self._entries, self._kinds, strict=True)
            if kind != PLAIN and (kind != IGNORED or entry.extension == "idx")
        }
        stems = {split_name(uri)[0] for uri in special}
        mates: dict[str, list[int]] = {}
        for at, entry in enumerate(self._entries):
            stem = split_name(entry.object.uri)[0]
            stem = split_name(stem)[0] if stem in special else stem
            if stem in stems:
                mates.setdefault(stem, []).append(at)
        return mates.values()

    def _count_as_tokens(self, mates: Sequence[int]) -> None:
        """Count a `.bin` with an `.idx` as tokens, and ignore texts of their stem."""
        for at in mates:
            if self._entries[at].extension == "bin":
                self._kinds[at] = "tokens"
            elif self._kinds[at] == PLAIN and self._entries[at].extension in _TEXTS:
                self._ignored.add(at)

    def _count_as_files(self, kinds: Collection[Kind], among: Iterable[int]) -> None:
        for at in among:
            if self._kinds[at] in kinds:
                self._kinds[at] = PLAIN


def _kind(entry: ListedObject, zarrs: Collection[str]) -> Kind:
    found = kind_of(entry.name)
    return ZARR if ".zarr/" in entry.object.uri.lower() or _is_chunk(entry, found, zarrs) else found


def _is_chunk(entry: ListedObject, kind: Kind, zarrs: Collection[str]) -> bool:
    """Tell whether an object lies in the folder of a Zarr array and is named like a chunk (`0.0`)."""
    if not zarrs or kind != PLAIN or not (extension_of(entry.name) == "" or entry.name == "zarr.json"):
        return False
    uri = entry.object.uri
    while "/" in uri:
        uri = uri.rpartition("/")[0]
        if uri in zarrs:
            return True
    return False


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
    objects = FormatCounts(entries, zarrs, manifests, options)
    format = _majority(uri, objects, options)
    if format == "files":
        return Choice(format, objects.files(), True)
    if format == "records":
        return Choice(format, objects.of(format), True)
    return Choice(format, _selected(format, entries, manifests), True)


def _selected(format: str, entries: Sequence[ListedObject], manifests: Manifests) -> list[ListedObject]:
    """Return the objects of a format that no manifest is about. Raises InvalidInput where there are no others."""
    selected = FORMATS[format].select(entries)
    if not manifests or format == "files":
        return selected
    rest = [entry for entry in selected if manifests.container(entry) is None]
    container = manifests.container(selected[0]) if selected else None
    if container is not None and not rest:
        raise refusal(selected[0].object.uri, container, len(selected))
    return rest


def _stated(entries: Sequence[ListedObject], options: Options) -> str:
    """Return the format implied by an option, where there are arrays that it applies to; else ""."""
    if not (options.seq_len or options.record_bytes or options.dtype or options.header_bytes):
        return ""
    extensions = {entry.extension for entry in entries if kind_of(entry.name) != "litdata"}
    if extensions.isdisjoint(("bin", "npy", "ds")):
        return ""
    return "tokens" if options.seq_len or not extensions.isdisjoint(("idx", "ds")) else "records"


def _majority(uri: str, objects: FormatCounts, options: Options) -> str:
    """Return the format of more than half of the data objects. An index of another format must not contradict it."""
    counts = objects.counts().most_common()
    if not counts:
        return _without_data(uri, objects, options)
    best, count = counts[0]
    readable = [kind for kind, _ in counts if isinstance(kind, str)]
    most = 2 * count > sum(each for _, each in counts)
    contradicted = objects.indexed and best not in _INDEXED and any(kind in _INDEXED for kind, _ in counts)
    if isinstance(best, Container) and (most or not readable) and not contradicted:
        raise refusal(objects.of(best)[0].object.uri, best, count)
    if isinstance(best, str) and most and not contradicted:
        return best
    held = ", ".join(
        f"{count:,} {kind.name if isinstance(kind, Container) else kind} ({objects.first(kind).path})"
        for kind, count in counts[:_SHOWN]
    )
    names = (objects.first(kind).extension for kind in readable)
    globs = ", ".join(f"*.{name}" for name in names if name)
    why = "index.json names other objects than most" if contradicted else "none of them more than half"
    raise InvalidInput(
        f"{uri} holds several kinds of data, {why}: {held}. Say format= ({', '.join(readable)}), "
        f"or open one kind by a glob ({globs})"
    )


def _without_data(uri: str, objects: FormatCounts, options: Options) -> str:
    """Return the format whose compiler reports what is missing: the files of a table, the shards of an index."""
    if options.table:
        return "files"
    if objects.indexed:
        return "mds"
    raise NotFound(f"{uri} holds only read-mes, logs and similar files: format='files' reads them as samples")
