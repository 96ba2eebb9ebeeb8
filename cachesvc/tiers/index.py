"""The residency index of a cache directory: which extents are whole, and their checksums. One LMDB file."""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Iterator

import lmdb

from cachesvc.core.errors import TierFailed
from cachesvc.core.model import ExtentId
from cachesvc.tiers.tier import Checksums

log = logging.getLogger(__name__)
MAP_BYTES = 16 << 30
"""Address space, not disk: a million extents of 64 MiB are 0.6 GB of rows."""
_VERSION = 1
_ROW = struct.Struct("<BQ")


class ResidencyIndex:
    """Rows survive a crash of the process at once, and a power cut when `put` has returned."""

    def __init__(self, path: str) -> None:
        """Opens or makes the file. A file that LMDB cannot read is set aside: its extents are then garbage,
        which costs a refill and never a wrong byte."""
        self.path = path
        try:
            self._env = self._open()
        except lmdb.Error as error:
            log.error("a residency index is damaged and set aside", extra={"path": path, "error": str(error)})
            os.replace(path, f"{path}.damaged")
            self._env = self._open()

    def _open(self) -> lmdb.Environment:
        try:
            return lmdb.open(self.path, subdir=False, map_size=MAP_BYTES, lock=False, metasync=True)
        except OSError as error:
            raise TierFailed(f"{self.path} cannot be opened ({error.strerror}); mend the disk") from None

    def put(self, extent: ExtentId, checksums: Checksums) -> None:
        """Remember a committed extent, durably. Raises TierFailed."""
        with self._failing(), self._env.begin(write=True) as rows:
            rows.put(extent, _ROW.pack(_VERSION, checksums.size_bytes) + checksums.digests)

    def get(self, extent: ExtentId) -> Checksums | None:
        """A committed extent's checksums. Raises TierFailed."""
        with self._failing(), self._env.begin() as rows:
            raw = rows.get(extent)
        return None if raw is None else _unpack(raw)

    def delete(self, extents: list[ExtentId]) -> None:
        """Forget extents, in one transaction. Raises TierFailed."""
        with self._failing(), self._env.begin(write=True) as rows:
            for extent in extents:
                rows.delete(extent)

    def items(self) -> Iterator[tuple[ExtentId, int]]:
        """Every row's extent and size in bytes; rows of another version are skipped."""
        with self._env.begin() as rows:
            for key, raw in rows.cursor():
                if len(key) == 16 and len(raw) >= _ROW.size and raw[0] == _VERSION:
                    yield ExtentId(bytes(key)), _ROW.unpack_from(raw)[1]

    def close(self) -> None:
        """Flush and close."""
        self._env.close()

    def _failing(self) -> _Failing:
        return _Failing(self.path)


class _Failing:
    """LMDB's errors -> TierFailed."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (lmdb.Error, OSError)):
            raise TierFailed(f"{self._path} cannot be written ({error}); mend the disk") from None


def _unpack(raw: bytes) -> Checksums:
    version, size = _ROW.unpack_from(raw)
    if version != _VERSION:
        raise TierFailed(f"a residency row of version {version}; this program reads {_VERSION}")
    return Checksums(size, raw[_ROW.size :])
