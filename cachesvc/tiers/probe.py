"""Probe of a cache directory: a small read past the page cache, or a small write that is read back."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cachesvc.core.errors import OutOfSpace, TierFailed
from cachesvc.system.descriptors import closing_fd
from cachesvc.tiers.tier import translated

_BYTES = 4096
_PATTERN = b"cachesvc" * (_BYTES // 8)
_OWN_LIMITS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


@dataclass(frozen=True, slots=True)
class Room:
    """The size of a file system, and its bytes that this user may still write."""

    total_bytes: int
    free_bytes: int


def room(directory: Path) -> Room:
    """Measure the file system of a directory. Raises OSError."""
    disk = os.statvfs(directory)
    return Room(disk.f_frsize * disk.f_blocks, disk.f_frsize * disk.f_bavail)


def probe(directory: Path, where: str, thorough: bool, sync: bool = True) -> Room:
    """Read the probe file in `directory`, and return the disk's room. `thorough` writes the file anew first; without
    `sync` it writes another file instead, without waiting for the disk, and removes it. `where`: the directory's name in
    errors.

    Raises `TierFailed`. A full disk is healthy, and so is one that this process's own limits keep it from using: their
    room is 0.
    """
    try:
        with translated(where, "use the cache directory"):
            if thorough and sync:
                _write(directory)
            elif thorough:
                write_and_remove(directory)
            if _read(directory / "probe") != _PATTERN:
                raise TierFailed(f"{where}: what was written there reads differently; replace the disk")
            return room(directory)
    except OutOfSpace:
        return Room(0, 0)
    except TierFailed as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno in _OWN_LIMITS:
            return Room(0, 0)
        raise


def _write(directory: Path) -> None:
    _new(directory, os.fsync)
    os.rename(directory / "probe.new", directory / "probe")


def write_and_remove(directory: Path) -> None:
    """Create, rename and remove a file, as a fill and an eviction do. Raises OSError."""
    _new(directory, lambda _: None)
    os.rename(directory / "probe.new", directory / "probe.gone")
    os.unlink(directory / "probe.gone")


def _new(directory: Path, sync: Callable[[int], None]) -> None:
    new = directory / "probe.new"
    with suppress(FileNotFoundError):
        os.unlink(new)
    with closing_fd(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)) as fd:
        os.write(fd, _PATTERN)
        sync(fd)


def _read(path: Path) -> bytes:
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system without direct reads
            raise
        fd = os.open(path, flags)
    with closing_fd(fd), mmap.mmap(-1, _BYTES) as page:  # direct reads need an aligned buffer
        os.preadv(fd, [page], 0)
        return bytes(page)
