"""Compares a dataset on a local path with the files that this process sees there.

A container may mount another folder at the path than the daemon's, and a service with a private `/tmp` sees none of it.
The kernel keeps ctime, so another file has another version, even with the size and mtime of the daemon's. A path that this
process does not see, or sees as an empty folder, is not compared: a trainer needs the daemon's sockets and no data.
"""

from __future__ import annotations

import bisect
import os
from collections import Counter
from collections.abc import Iterator, Sequence

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.listing import listing
from cachesvc.catalog.options import Options
from cachesvc.catalog.survey import survey
from cachesvc.core.errors import CacheError, NotAllowed, SourceUnavailable
from cachesvc.core.model import ObjectVersion
from cachesvc.sources.file_attributes import stat_from_server
from cachesvc.sources.files import FilesSource, etag_of, under
from cachesvc.sources.uri import canonical, expanded, local_path
from cachesvc.system.descriptors import closing_fd
from cachesvc.tiers.mounts import all_mounts

MAX_LISTED = 4096
"""Entries of a listing that is compared whole: some milliseconds, or a second of an NFS server's. Of more files some are
compared."""
MAX_COMPARED = 64


class _TooMany(Exception):
    """The listing has more entries than are compared whole."""


def difference(uris: Sequence[str], options: Options, catalog: Catalog) -> str:
    """Name a file that is another one here than in the catalog, or is in one of the two alone; "" for none.

    All `uris` are local. Another version may also be a change since the daemon listed the files: open again, and compare
    again.
    """
    typed = [str(local_path(canonical(uri))).rstrip("/") for uri in uris]
    places = [_literal(path) for path in typed]
    if not all(map(_has_entries, places)):
        return ""
    if catalog.objects <= MAX_LISTED:
        try:
            return _difference_of_listings(uris, options, catalog)
        except _TooMany:
            pass
    root = local_path(catalog.uri) or ""
    single = len(typed) == 1 and places == typed
    for version in _sample(catalog, places[0] if single else ""):
        path = str(local_path(version.uri))
        if single:  # the daemon has resolved the links of its own path
            path = typed[0] + path[len(root.rstrip("/")) :]
        elif not under(path, tuple(places)):
            continue
        if _differs(path, version):
            return path
    return ""


def finds_files(uris: Sequence[str]) -> bool:
    """Tell whether this process finds files at each of these local URIs."""
    source = FilesSource()
    try:
        return bool(listing(_expanded(uris, source), lambda _: source).entries)
    except CacheError:
        return False


def _difference_of_listings(uris: Sequence[str], options: Options, catalog: Catalog) -> str:
    """Compare the whole listing. Raises _TooMany."""
    steps = iter(range(MAX_LISTED))

    def count() -> None:
        if next(steps, None) is None:
            raise _TooMany

    source = FilesSource(heartbeat=count)
    try:
        entries = survey(_expanded(uris, source), options, lambda _: source).entries
    except (NotAllowed, SourceUnavailable):
        return ""  # another user, who may see less,
    except CacheError as error:  # the daemon's files made a dataset
        return str(error)
    here = Counter(_identity(entry.object) for entry in entries)
    there = Counter(_identity(catalog.object(index)) for index in range(catalog.objects))
    if lacking := there - here:
        return next(iter(lacking))[0]
    # A link may lead where the daemon must not go.
    plain = (entry.object.uri for entry in entries if _identity(entry.object) not in there)
    return next((path for uri in plain if not os.path.islink(path := str(local_path(uri)))), "")


def _identity(version: ObjectVersion) -> tuple[str, int, str]:
    return version.uri.rpartition("/")[2], version.size_bytes, version.etag


def _expanded(uris: Sequence[str], source: FilesSource) -> list[str]:
    return expanded([canonical(each) for each in uris], lambda _: source)


def _literal(path: str) -> str:
    """Return the part of a path before the first segment with a mark of a pattern."""
    marked = next((segment for segment in path.split("/") if any(mark in segment for mark in "*?[{")), None)
    return path if marked is None else path[: path.index(marked)].rstrip("/")


def _has_entries(path: str) -> bool:
    """Tell whether there is a file, or a folder with at least one entry, which this process may look at."""
    try:
        if not os.path.isdir(path):
            return os.path.exists(path)
        with os.scandir(path) as entries:
            return next(entries, None) is not None
    except OSError:
        return False


def _sample(catalog: Catalog, place: str) -> Iterator[ObjectVersion]:
    """Yield objects at even distances, and the first of each folder below `place` on which something is mounted."""
    count = catalog.objects
    for step in range(MAX_COMPARED):
        yield catalog.object(step * (count - 1) // (MAX_COMPARED - 1))
    below = f"{os.path.realpath(place)}/"
    for mount in [each.point for each in all_mounts() if each.point.startswith(below)] if place else ():
        prefix = f"{catalog.uri.rstrip('/')}{mount[len(place) :]}/"
        at = bisect.bisect_left(range(count), prefix, key=lambda index: catalog.object(index).uri)
        if at < count and catalog.object(at).uri.startswith(prefix):
            yield catalog.object(at)


def _differs(path: str, version: ObjectVersion) -> bool:
    """Tell whether the file has another version, or is not there. A file that may not be read counts as the same."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    with closing_fd(file):
        status = stat_from_server(file)
    return status.st_size != version.size_bytes or etag_of(status) != version.etag
