"""The file system on which a directory lies, as /proc/self/mountinfo and /etc/fstab state it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cachesvc.core.errors import NotReady

MOUNTS = Path("/proc/self/mountinfo")
_ESCAPED = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system. `root` is the part of it that is mounted: "/" unless it is a bind mount or a subvolume."""

    device: str
    root: str
    point: str
    kind: str


def mount_of(path: str, mounts: Sequence[Mount] | None = None) -> Mount:
    """Return the mount that holds `path`, by default of those of this process."""
    wanted, best = os.path.realpath(path), Mount("", "", "", "unknown")
    for each in all_mounts() if mounts is None else mounts:
        if _is_inside(wanted, each.point) and len(each.point) >= len(best.point):
            best = each
    return best


def check_own(path: str, mounts: Sequence[Mount] | None = None) -> None:
    """Raise NotReady unless a whole file system other than the root one is mounted, and `path` lies on it. A bind mount of
    a part, as systemd makes for a service, is of that file system where the whole is mounted too."""
    mounts = all_mounts() if mounts is None else mounts
    mount, root = mount_of(path, mounts), mount_of("/", mounts)
    whole = any(each.root == "/" for each in mounts if each.device == mount.device)
    if mount.device == root.device or not whole:
        where = "the root disk" if mount.device == root.device else f"a part of a disk, {mount.root}"
        raise NotReady(
            f"{path} lies on {where}, and not on a file system of its own; mount its disk, or give --nvme without"
            " ,mounted"
        )


def misplaced(path: str, mounts: Sequence[Mount] | None = None, fstab: str | None = None) -> str:
    """Return why a cache directory is perhaps not where it is meant to be; "" where nothing shows that. A workstation may
    mean its root disk. `fstab` is the text of /etc/fstab."""
    mounts = all_mounts() if mounts is None else mounts
    if fstab is None:
        fstab = ""
        with suppress(OSError, ValueError):
            fstab = Path("/etc/fstab").read_text()
    wanted, points = os.path.realpath(path), {each.point for each in mounts}
    for point in _mount_points(fstab):
        if _is_inside(wanted, point) and point not in points:
            return f"{path} is not on the disk that /etc/fstab mounts at {point}: none is mounted there"
    on_root = mount_of(path, mounts).device == mount_of("/", mounts).device
    return f"{path} lies on the root disk" if on_root else ""


def all_mounts(text: str | None = None) -> list[Mount]:
    """Parse the text of /proc/self/mountinfo, by default this process's. Touches none of the file systems."""
    mounts = []
    for line in (MOUNTS.read_text("utf-8", "surrogateescape") if text is None else text).split("\n"):
        if line:
            left, _, right = line.partition(" - ")
            device, root, point = left.split(" ")[2:5]
            mounts.append(Mount(device, _plain(root), _plain(point), right.split(" ")[0]))
    return mounts


def _mount_points(fstab: str) -> Iterator[str]:
    for line in fstab.splitlines():
        words = line.split()
        if len(words) > 1 and not words[0].startswith("#") and words[1].startswith("/"):
            yield _plain(words[1])


def _is_inside(path: str, point: str) -> bool:
    return path == point or path.startswith(point.rstrip("/") + "/")


def _plain(name: str) -> str:
    return _ESCAPED.sub(lambda octal: chr(int(octal[1], 8)), name)
