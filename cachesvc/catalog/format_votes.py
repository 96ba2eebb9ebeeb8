"""Counts the objects of a listing as votes for formats.

Every data object votes for its kind. Abstaining are objects that share a shard's stem (`000.json` beside `000.tar`),
possible tables of labels, and texts such as JSON and YAML that are not more than the shards. Objects beside the data have
no vote. A container that is not read is a kind of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from cachesvc.catalog.compiler import ListedObject, split_name
from cachesvc.catalog.containers import ZARR
from cachesvc.catalog.described_data import is_about_data
from cachesvc.catalog.kinds import ASIDE, PLAIN, TABLES, Kind, extension_of, kind_of
from cachesvc.catalog.manifests import Manifests
from cachesvc.catalog.options import Options

_SHARDS = ("webdataset", "mds", "parquet", "tfrecord")
"""The formats of shards, in order of precedence where several share a stem."""
_TEXTS = frozenset({"json", "txt", "cls", "yaml", "yml", "toml", "xml", "ini", "cfg", "csv", "tsv", "jsonl"})
"""Extensions of files that may describe others."""


class FormatVotes:
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
        self._abstaining: set[int] = set()  # data objects without a vote
        self._described = False  # arrays are samples that other files describe, not rows of records
        if not set(self._kinds) <= {PLAIN, ASIDE} or any(entry.extension == "idx" for entry in entries):
            self._apply_stems()
            self._apply_texts()
        self._apply_descriptions()
        self._tables = [at for at, entry in enumerate(entries) if self._may_be_table(at, entry)]
        self._apply_tables(options.table)
        if self._described:
            self._count_as_files({"records"}, range(len(entries)))

    def counts(self) -> Counter[Kind]:
        """Return the number of votes for each kind."""
        return Counter(
            kind for at, kind in enumerate(self._kinds) if kind != ASIDE and at not in self._abstaining
        )

    def of(self, wanted: Kind) -> list[ListedObject]:
        """Return the objects of a kind."""
        return [entry for entry, kind in zip(self._entries, self._kinds, strict=True) if kind == wanted]

    def first(self, wanted: Kind) -> ListedObject:
        """Return the first object that votes for a kind."""
        return next(
            entry
            for at, entry in enumerate(self._entries)
            if self._kinds[at] == wanted and at not in self._abstaining
        )

    def files(self) -> list[ListedObject]:
        """Return the plain files, and possible tables about them."""
        tables = set(self._tables)
        return [entry for at, entry in enumerate(self._entries) if self._kinds[at] == PLAIN or at in tables]

    def _may_be_table(self, at: int, entry: ListedObject) -> bool:
        """Tell whether an entry lies directly below a URI and is named like a table."""
        return self._kinds[at] in ("csv", "jsonl") and entry.extension in TABLES and "/" not in entry.path

    def _apply_tables(self, named: str) -> None:
        """Let the table named by `labels` abstain, and others unless they outnumber the files that they may label."""
        beside = self._abstaining.union(self._tables)
        data = sum(kind != ASIDE and at not in beside for at, kind in enumerate(self._kinds))
        abstaining = set(self._tables if len(self._tables) <= data else ())
        if named:
            chosen = [at for at, entry in enumerate(self._entries) if entry.path == named]
            self._tables += chosen
            abstaining.update(chosen)
        self._abstaining |= abstaining
        self._described |= bool(abstaining)

    def _apply_texts(self) -> None:
        """Let texts beside shards abstain, unless they outnumber the shards."""
        plain = [at for at, kind in enumerate(self._kinds) if kind == PLAIN and at not in self._abstaining]
        texts = [at for at in plain if self._entries[at].extension in _TEXTS]
        shards = sum(kind not in (PLAIN, ASIDE) for kind in self._kinds)
        if len(texts) <= shards:
            self._abstaining.update(texts)

    def _apply_descriptions(self) -> None:
        """Let objects that are named as a description of the data abstain, if there are others."""
        data = {at for at, kind in enumerate(self._kinds) if kind != ASIDE} - self._abstaining
        about = {at for at in data if not self._entries[at].named and is_about_data(self._entries[at].path)}
        if about != data:
            self._abstaining |= about

    def _apply_stems(self) -> None:
        """Let objects that share a stem with a shard abstain.

        A container or array that shares its stem with plain data (`x.jpg` and `x.npz`) is a field of that sample.
        """
        for mates in self._mates():
            kinds = {self._kinds[at] for at in mates}
            plain = [at for at in mates if self._kinds[at] == PLAIN]
            shard = next((format for format in _SHARDS if format in kinds), "")
            if shard:
                self._abstaining.update(at for at in mates if self._kinds[at] != shard)
            elif any(self._entries[at].extension == "idx" for at in mates):
                self._count_as_tokens(mates)
            elif any(self._entries[at].extension not in _TEXTS for at in plain):
                self._described |= "records" in kinds
                self._count_as_files(kinds - {ASIDE}, mates)
            elif plain and "records" in kinds:
                self._described = True
            else:
                self._abstaining.update(plain)

    def _mates(self) -> Iterable[list[int]]:
        """Return groups of objects that share a stem with one that is not a plain file.

        `000.tar.idx` shares the stem of `000.tar`.
        """
        special = {
            entry.object.uri
            for entry, kind in zip(self._entries, self._kinds, strict=True)
            if kind != PLAIN and (kind != ASIDE or entry.extension == "idx")
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
        """Count a `.bin` with an `.idx` as tokens; texts of their stem abstain."""
        for at in mates:
            if self._entries[at].extension == "bin":
                self._kinds[at] = "tokens"
            elif self._kinds[at] == PLAIN and self._entries[at].extension in _TEXTS:
                self._abstaining.add(at)

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
