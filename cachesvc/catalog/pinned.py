"""Finds the kept catalog of a version that a caller names, without a request to the source."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.expiry import mark_used
from cachesvc.catalog.options import Options
from cachesvc.catalog.survey import survey
from cachesvc.core.errors import CacheError, NotFound
from cachesvc.core.model import ObjectVersion
from cachesvc.sources.source import OnReceived, Source, ignore_received
from cachesvc.sources.uri import expanded

_ID = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class _Kept(Source):
    """A `Source` that lists the objects of a catalog."""

    catalog: Catalog

    def list(self, prefix: str) -> Iterator[ObjectVersion]:
        root = prefix.rstrip("/")
        for index in range(self.catalog.objects):
            version = self.catalog.object(index)
            if version.uri == root or version.uri.startswith(f"{root}/"):
                yield version

    def head(self, uri: str) -> ObjectVersion:
        raise NotFound(f"{uri}: a version is looked up by listings alone")

    def read_into(
        self, version: ObjectVersion, offset: int, into: memoryview, received: OnReceived = ignore_received
    ) -> None:
        raise NotFound(f"{version.uri}: a version is looked up by listings alone")


def kept_version(directory: str, version: str, uris: Sequence[str], options: Options) -> bool:
    """Tell whether `directory` holds the catalog of this version of the data at these URIs, as these options read it.

    A version is the digest of the options and the objects, so the survey of a catalog's own objects gives its id only for
    the right URIs and options. The answer is also False where objects outside the catalog decided its format: the source
    must be listed then."""
    path = f"{directory}/{version}.lmdb"
    if not _ID.fullmatch(version) or not mark_used(path):
        return False
    try:
        catalog = Catalog.open(path)
        kept = _Kept(catalog)
        return survey(expanded(uris, lambda _: kept), options, lambda _: kept).id == version == catalog.id
    except (FileNotFoundError, CacheError):
        return False
