"""Recognises folders in which a manifest says which files count: tables of data lakes, shards of other tools.

Files that a table has dropped stay in its folder, so reading all of them gives deleted rows and, after a compaction, every
row twice. Such a folder is a container that is not read, whatever the names of its files are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

from cachesvc.catalog.compiler import ListedObject
from cachesvc.catalog.containers import BY_EXTENSION, Container

_LIVE_FILES = (
    "whose {} says which files count and is not read: open a list of these ({}), or write it as Parquet"
)


def _table(name: str, manifest: str, advice: str) -> Container:
    return Container(f"of {name}", (), (), _LIVE_FILES.format(manifest, advice))


_CONTAINERS = {
    "delta": _table("a Delta Lake table", "_delta_log", "DeltaTable(uri).file_uris()"),
    "iceberg": _table("an Iceberg table", "metadata", "table.inspect.files() in pyiceberg"),
    "hudi": _table("a Hudi table", ".hoodie", "the _hoodie_file_name of its rows"),
    "lance": BY_EXTENSION["lance"],
    "streaming": Container(
        "of Streaming's JSON or CSV shards",
        (),
        (),
        "whose index is not read: open the shards by a glob (shard.*.json with format='jsonl', shard.*.csv)",
    ),
}
_MARKS = re.compile(
    r"""(?:^|/)(?:
    (?P<delta>_delta_log/)
    |(?P<iceberg>metadata/(?:v\d+|\d+-[0-9a-f]{8}-[0-9a-f-]{27})(?:\.gz)?\.metadata\.json$)
    |(?P<hudi>\.hoodie(?:/|_partition_metadata$))
    |(?P<lance>_versions/[^/]+\.manifest$)
    |(?P<streaming>shard\.\d+\.(?:json|[ctx]sv)\.meta(?:\.\w+)?$)
    )""",
    re.VERBOSE,
)
"""The files, below the folder of a table, that only such a table has."""


def marked(path: str) -> tuple[str, Container] | None:
    """Return the folder that a file marks, as the beginning of its path, and what it is; None for other files."""
    mark = _MARKS.search(path)
    if mark is None or mark.lastgroup is None:
        return None
    return path[: mark.start(mark.lastgroup)].rstrip("/"), _CONTAINERS[mark.lastgroup]


class Manifests:
    """The folders below a dataset's URIs that have a manifest, by their URIs."""

    def __init__(self, folders: Mapping[str, Container]) -> None:
        self._folders = dict(folders)
        self._of = lru_cache(4096)(self._of_folder)

    def __bool__(self) -> bool:
        return bool(self._folders)

    def container(self, entry: ListedObject) -> Container | None:
        """Return what the object is a part of, None for an object that no manifest is about."""
        return self._of(entry.object.uri.rpartition("/")[0]) if self._folders else None

    def _of_folder(self, uri: str) -> Container | None:
        while uri and uri not in self._folders:
            uri = uri.rpartition("/")[0]
        return self._folders.get(uri)
