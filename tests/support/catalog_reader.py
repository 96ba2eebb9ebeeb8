"""A local directory as a source, and a minimal reader of an address space, for the catalog's tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from cachesvc.catalog.build import DirectBytes, build
from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.layout import Indirect
from cachesvc.catalog.options import Options
from cachesvc.catalog.survey import survey
from cachesvc.core.errors import SourceChanged
from cachesvc.core.model import ObjectVersion
from cachesvc.sources.decompression import decompressed
from cachesvc.sources.source import OnReceived, ignore_received

DEFAULT = Options()


class Folder:
    """A directory as a source: URIs are absolute paths."""

    def __init__(self) -> None:
        self.reads: list[str] = []

    def list(self, prefix: str) -> Iterator[ObjectVersion]:
        root = Path(prefix)
        paths = [root] if root.is_file() else (path for path in root.rglob("*") if path.is_file())
        for path in sorted(paths, key=str):
            yield self.head(str(path))

    def head(self, uri: str) -> ObjectVersion:
        found = Path(uri).stat()
        return ObjectVersion(uri, found.st_size, f"{found.st_mtime_ns}-{found.st_ctime_ns}")

    def read_into(
        self, version: ObjectVersion, offset: int, into: memoryview, received: OnReceived = ignore_received
    ) -> None:
        if self.head(version.uri) != version:
            raise SourceChanged(f"{version.uri} changed")
        self.reads.append(version.uri)
        with open(version.uri, "rb") as file:
            file.seek(offset)
            assert file.readinto(into) == len(into)

    def checker(self, version: ObjectVersion) -> None:
        pass

    def close(self) -> None:
        """Do nothing, since no resource is held."""


def compiled(root: Path | Sequence[str], options: Options = DEFAULT, folder: Folder | None = None) -> Catalog:
    """Survey, build and open a catalog without a daemon."""
    source = folder or Folder()
    uris = [str(root)] if isinstance(root, Path) else list(root)
    found = survey(uris, options, lambda uri: source)
    into = Path(uris[0]).parent / f".{found.id}.catalog"
    build(found, str(into), lambda uri: source, DirectBytes(lambda uri: source), lambda done, total: None)
    return Catalog.open(str(into))


def space_of(catalog: Catalog) -> np.ndarray:
    """Return the whole address space, filled; uint8[space_bytes]."""
    space = np.zeros(catalog.space_bytes, np.uint8)
    for index, start in enumerate(catalog.extent_starts.tolist()):
        for piece in catalog.extent(index).pieces:
            raw = Path(piece.object.uri).read_bytes()
            if piece.codec:
                raw = b"".join(decompressed(piece.object.uri, piece.codec, [raw]))
            else:
                raw = raw[piece.offset : piece.offset + piece.length]
            assert len(raw) == piece.length
            space[start : start + len(raw)] = np.frombuffer(raw, np.uint8)
            start += len(raw)
    return space


def samples_of(catalog: Catalog) -> list[tuple[bytes | None, ...]]:
    """Return every sample's fields, read as a loader reads them; assert that each lies in its extent."""
    space, ids = space_of(catalog), np.arange(catalog.samples)
    addresses, lengths = catalog.locate(ids)
    if isinstance(catalog.layout, Indirect):
        pairs = space[addresses + np.arange(8)].view("<u4")
        addresses, lengths = catalog.settle(ids, pairs)
    owner = np.repeat(np.arange(len(catalog.extent_sizes)), np.diff(catalog.extent_first))
    firsts = np.where(lengths < 0, np.iinfo(np.int64).max, addresses).min(axis=1)
    ends = catalog.extent_starts + catalog.extent_sizes
    assert ((firsts >= catalog.extent_starts[owner]) & (firsts <= ends[owner])).all()
    rows = [
        tuple(None if n < 0 else space[a : a + n].tobytes() for a, n in zip(row, sizes, strict=True))
        for row, sizes in zip(addresses.tolist(), lengths.tolist(), strict=True)
    ]
    return [catalog.split(row[0] or b"") for row in rows] if isinstance(catalog.layout, Indirect) else rows
