"""A power cut that loses what was not synced."""

from __future__ import annotations

import os
import random
import stat
from pathlib import Path


class Durable:
    """Records what reached the disk: a file's bytes and a directory's names as of their last fsync."""

    def __init__(self) -> None:
        self.bytes: dict[int, bytes] = {}
        self.names: dict[str, dict[str, int]] = {}
        self.kept: list[int] = []

    def sync(self, fd: int) -> None:
        found = os.fstat(fd)
        if stat.S_ISDIR(found.st_mode):
            path = os.readlink(f"/proc/self/fd/{fd}")
            self.names[path] = {e.name: e.inode() for e in os.scandir(path) if e.is_file()}
        else:
            if found.st_ino not in self.bytes:
                self.kept.append(os.dup(fd))  # so that no other file gets its inode number
            again = Path(f"/proc/self/fd/{fd}")  # `fd` may be open for writing only
            self.bytes[found.st_ino] = again.read_bytes()

    def cut(self, chance: random.Random, from_: Path, to: Path) -> None:
        """Write to `to` a state of `from_` that a power cut may leave: each unsynced name or removal took place or did
        not, and unsynced bytes are zeros, garbage, or partly present."""
        for path in [p for p in from_.rglob("*") if p.is_dir()]:
            there = {e.name: e.inode() for e in os.scandir(path) if e.is_file()}
            old = self.names.get(str(path), {})
            (to / path.relative_to(from_)).mkdir(parents=True, exist_ok=True)
            for name in sorted(there.keys() | old.keys()):
                inode = chance.choice([found.get(name) for found in (there, old)])
                if inode is not None:
                    (to / path.relative_to(from_) / name).write_bytes(self.left(chance, inode, path / name))

    def left(self, chance: random.Random, inode: int, path: Path) -> bytes:
        if inode in self.bytes:
            return self.bytes[inode]
        now = path.read_bytes() if path.exists() else b""
        whole = chance.randrange(len(now) + 1)
        return now[:whole] + chance.choice([bytes(len(now) - whole), chance.randbytes(len(now) - whole)])

    def close(self) -> None:
        for fd in self.kept:
            os.close(fd)


class Cut(Exception):
    """The power fails during a sync."""
