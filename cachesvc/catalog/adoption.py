"""Adopts a catalog that was left beside the data, after checking that it is whole and of these objects.

Anyone who may write there may have forged it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.column_file import verify_digest
from cachesvc.catalog.expiry import UNUSED_BYTES
from cachesvc.catalog.survey import Survey
from cachesvc.catalog.validation import check_catalog
from cachesvc.core.errors import CacheError, CorruptData, OutOfSpace
from cachesvc.core.model import MAX_EXTENTS, ObjectVersion
from cachesvc.sources.source import Source

_log = logging.getLogger(__name__)
_READ_BYTES = 8 << 20
_BESIDE_BYTES = 64 << 20
"""A catalog left beside less data than this, of many small files, may be larger than the data."""


def adopt(survey: Survey, beside: ObjectVersion, into: str, sources: Callable[[str], Source]) -> bool:
    """Copy the catalog left beside the data to `into` if it is whole, of this version, and names these objects only.

    Returns False, and logs why, where it is not used.
    """
    temporary = f"{into}.{os.getpid()}.beside"
    try:
        _check_beside(survey, beside, os.path.dirname(into) or ".")
        _download(beside, temporary, sources(beside.uri))
        verify_digest(temporary)
        catalog = Catalog.open(temporary)
        if catalog.id != survey.id or catalog.format not in survey.formats:
            raise CorruptData(f"its version is {catalog.id}, the data's is {survey.id}")
        if catalog.objects != len(survey.entries) or any(
            catalog.object(index) != entry.object for index, entry in enumerate(survey.entries)
        ):
            raise CorruptData("its objects are not those of the listing")
        if len(catalog.extent_sizes) > MAX_EXTENTS:
            raise CorruptData(f"it has more than {MAX_EXTENTS:,} extents")
        check_catalog(catalog)
        os.replace(temporary, into)
    except (CacheError, OSError) as error:  # OSError: no room for it, though perhaps for a built one
        _log.warning("%s is not used: %s", beside.uri, error)
        return False
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
    return True


def _check_beside(survey: Survey, beside: ObjectVersion, directory: str) -> None:
    """Raise CorruptData for a catalog larger than its data, which costs more to fetch than to build.

    Raises OutOfSpace, or OSError, where it would take more than half of the free space of its disk.
    """
    size, data = beside.size_bytes, sum(entry.object.size_bytes for entry in survey.entries)
    most = min(max(data, _BESIDE_BYTES), UNUSED_BYTES)
    if size > most:
        raise CorruptData(f"it has {size:,} bytes; one beside {data:,} bytes of data has {most:,} at most")
    disk = os.statvfs(directory)
    free_bytes = disk.f_bavail * disk.f_frsize
    if size > free_bytes // 2:
        raise OutOfSpace(f"it has {size:,} bytes, {directory} {free_bytes:,} left")


def _download(version: ObjectVersion, path: str, source: Source) -> None:
    with open(path, "wb") as file:
        for offset in range(0, version.size_bytes, _READ_BYTES):
            buffer = bytearray(min(_READ_BYTES, version.size_bytes - offset))
            source.read_into(version, offset, memoryview(buffer))
            file.write(buffer)
        file.flush()
        os.fsync(file.fileno())
