"""What a listing is a dataset of: more than half of its data objects decide, by their names alone.

Objects beside the data do not count, nor do those that share a shard's stem (`000.json` beside `000.tar`), nor what may
be a table of labels. A container that is not read counts as a kind of its own, and is refused where it has the majority.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from cachesvc.catalog.containers import CSV, JSONL, ZARR, Container, refusal
from cachesvc.catalog.formats import files, fixed, mds, parquet, tokens, webdataset
from cachesvc.catalog.inputs import Entry, Options, split_name
from cachesvc.catalog.kinds import ASIDE, PLAIN, TABLES, Kind, kind_of
from cachesvc.core.errors import InvalidInput, NotFound

SELECT: dict[str, Callable[[Sequence[Entry]], list[Entry]]] = {
    "files": files.select,
    "webdataset": webdataset.select,
    "mds": mds.select,
    "parquet": parquet.select,
    "records": fixed.select,
    "tokens": tokens.select,
}
_SIDECARS = frozenset({"json", "txt", "cls", "yaml", "yml", "xml", "csv", "tsv", "jsonl"})
"""Extensions of files that describe another one of their stem."""
_MANY = 4
"""Kinds that an error names."""


@dataclass(frozen=True, slots=True)
class Choice:
    """`entries`: the objects of the dataset. `found_out`: by their names; no format was given."""

    format: str
    entries: list[Entry]
    found_out: bool


def choose(uri: str, entries: Sequence[Entry], zarrs: Collection[str], options: Options) -> Choice:
    """The format that is given, or that an option is for, or that most objects have. `zarrs`: URIs of folders that hold
    Zarr arrays. Raises InvalidInput for an unknown format, for objects of several kinds of which none has the majority,
    and for containers that are not read; NotFound for no data object."""
    given = options.format or _stated(entries, options)
    if given:
        if given not in SELECT:
            raise InvalidInput(f"unknown format {given!r}; there are: {', '.join(SELECT)}")
        return Choice(given, SELECT[given](entries), False)
    kinds = _Kinds(entries, zarrs, options)
    format = _majority(uri, kinds, options)
    if format == "files":
        return Choice(format, kinds.files(), True)
    return Choice(format, kinds.of(format) if format == "records" else SELECT[format](entries), True)


def _stated(entries: Sequence[Entry], options: Options) -> str:
    """The format that an option is for, where there are arrays to read by it; else ""."""
    if not (options.seq_len or options.record_bytes or options.dtype):
        return ""
    found = {entry.extension for entry in entries}
    if found.isdisjoint(("bin", "npy")):
        return ""
    return "tokens" if options.seq_len or "idx" in found else "records"


def _majority(uri: str, kinds: _Kinds, options: Options) -> str:
    """The format of more than half of the data objects."""
    counts = kinds.counted().most_common()
    total = sum(count for _, count in counts)
    if not total:
        if options.table:
            return "files"
        if kinds.hold("index.json"):  # its shards are lost, which mds says
            return "mds"
        raise NotFound(
            f"{uri} holds nothing but read-mes, logs and the like: format='files' reads them as samples"
        )
    best, count = counts[0]
    readable = [kind for kind, _ in counts if isinstance(kind, str)]
    if isinstance(best, Container) and (2 * count > total or not readable):
        raise refusal(kinds.of(best)[0].object.uri, best, count)
    if isinstance(best, str) and 2 * count > total:
        return best
    held = ", ".join(
        f"{count:,} {kind.name if isinstance(kind, Container) else kind} ({kinds.of(kind)[0].path})"
        for kind, count in counts[:_MANY]
    )
    extensions = [kinds.of(kind)[0].extension for kind in readable]
    globs = ", ".join(f"*.{extension}" for extension in extensions if extension)
    raise InvalidInput(
        f"{uri} holds several kinds of data, none of them more than half: {held}. Say format= ({', '.join(readable)}), "
        f"or open one kind by a glob ({globs})"
    )


class _Kinds:
    """The kind of each entry in the light of the others."""

    def __init__(self, entries: Sequence[Entry], zarrs: Collection[str], options: Options) -> None:
        self._entries = entries
        self._kinds = [ZARR if _in_zarr(entry, zarrs) else kind_of(entry.name) for entry in entries]
        self._silent: set[int] = set()  # data that does not decide
        self._samples_of_arrays = False
        self._weigh_stems()
        self._tables = [at for at, entry in enumerate(entries) if self._may_be_table(at, entry)]
        self._weigh_tables(options.table)
        if self._samples_of_arrays:
            self._replace("records")

    def counted(self) -> Counter[Kind]:
        """How many objects decide for each kind."""
        return Counter(
            kind for at, kind in enumerate(self._kinds) if kind != ASIDE and at not in self._silent
        )

    def hold(self, name: str) -> bool:
        """Whether any object has that name."""
        return any(entry.name == name for entry in self._entries)

    def of(self, wanted: Kind) -> list[Entry]:
        """The objects of a kind."""
        return [entry for entry, kind in zip(self._entries, self._kinds, strict=True) if kind == wanted]

    def files(self) -> list[Entry]:
        """Plain files, and what may be a table about them."""
        tables = set(self._tables)
        return [
            entry
            for at, (entry, kind) in enumerate(zip(self._entries, self._kinds, strict=True))
            if kind == PLAIN or at in tables
        ]

    def _may_be_table(self, at: int, entry: Entry) -> bool:
        """Directly below a URI, under a usual name."""
        return self._kinds[at] in (CSV, JSONL) and entry.extension in TABLES and "/" not in entry.path

    def _weigh_tables(self, named: str) -> None:
        """Tables of labels do not decide: the one that is named, and those that are fewer than what they may label."""
        data = sum(kind != ASIDE for kind in self._kinds) - len(self._silent) - len(self._tables)
        silent = set(self._tables if len(self._tables) <= data else ())
        if named:
            chosen = [at for at, entry in enumerate(self._entries) if entry.path == named]
            self._tables += chosen
            silent.update(chosen)
        self._silent |= silent
        self._samples_of_arrays |= bool(silent)

    def _weigh_stems(self) -> None:
        """What shares a stem with a shard says something about it. A container or an array that shares its stem with
        plain data (`x.jpg` and `x.npz`) is a field of that sample."""
        for mates in self._mates():
            kinds = {self._kinds[at] for at in mates}
            plain = [at for at in mates if self._kinds[at] == PLAIN]
            shard = next((format for format in ("webdataset", "mds", "parquet") if format in kinds), "")
            if shard:
                self._silent.update(at for at in mates if self._kinds[at] != shard)
            elif any(self._entries[at].extension not in _SIDECARS for at in plain):
                self._samples_of_arrays |= "records" in kinds
                if any(self._entries[at].extension == "idx" for at in mates):
                    self._index(mates)
                else:
                    self._replace(*kinds - {ASIDE}, among=mates)
            elif plain and "records" in kinds:
                self._samples_of_arrays = True
            else:
                self._silent.update(plain)

    def _mates(self) -> Iterable[list[int]]:
        """Objects that share a stem with one that is no plain file, by stem. `000.tar.idx` shares that of `000.tar`."""
        special = {
            entry.object.uri
            for entry, kind in zip(self._entries, self._kinds, strict=True)
            if kind != PLAIN and (kind != ASIDE or entry.extension == "idx")
        }
        stems = {split_name(uri)[0] for uri in special}
        mates: dict[str, list[int]] = {}
        for at, entry in enumerate(self._entries if special else ()):
            stem = split_name(entry.object.uri)[0]
            stem = split_name(stem)[0] if stem in special else stem
            if stem in stems:
                mates.setdefault(stem, []).append(at)
        return mates.values()

    def _index(self, mates: Sequence[int]) -> None:
        """A `.bin` with an `.idx` holds tokens; what else has their stem describes them."""
        for at in mates:
            if self._entries[at].extension == "bin":
                self._kinds[at] = "tokens"
            elif self._kinds[at] == PLAIN and self._entries[at].extension in _SIDECARS:
                self._silent.add(at)

    def _replace(self, *kinds: Kind, among: Sequence[int] | None = None) -> None:
        """Take objects of these kinds for plain files."""
        for at in range(len(self._kinds)) if among is None else among:
            if self._kinds[at] in kinds:
                self._kinds[at] = PLAIN


def _in_zarr(entry: Entry, zarrs: Collection[str]) -> bool:
    """Whether the object lies in a folder of Zarr arrays, which is called so or holds what they have."""
    uri = entry.object.uri
    if ".zarr/" in uri.lower():
        return True
    while zarrs and "/" in uri:
        uri = uri.rpartition("/")[0]
        if uri in zarrs:
            return True
    return False
