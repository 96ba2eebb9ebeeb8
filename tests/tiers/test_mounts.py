"""Whether a cache directory lies on a file system of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from cachesvc.core.errors import NotReady
from cachesvc.tiers.mounts import all_mounts, check_own, misplaced, mount_of

pytestmark = pytest.mark.pure
HOST = """\
1 0 8:1 / / rw - ext4 /dev/a rw
2 1 8:2 / /mnt/with\\040space rw - xfs /dev/b rw
3 1 0:9 / /mnt/net rw shared:1 - nfs4 server:/x rw
4 1 8:1 /srv/cache /mnt/bound rw - ext4 /dev/a rw
5 1 8:3 / /data rw - xfs /dev/c rw"""
SERVICE = """\
1 0 8:1 / / ro - ext4 /dev/a rw
2 1 8:2 / /mnt/nvme0 ro - xfs /dev/b rw
3 2 8:2 /cache /mnt/nvme0/cache rw - xfs /dev/b rw"""
POD = """\
1 0 0:50 / / rw - overlay overlay rw
2 1 8:2 / /mnt/nvme0 rw - xfs /dev/b rw
3 1 8:1 /mnt/nvme1 /mnt/nvme1 rw - ext4 /dev/a rw
4 1 8:3 /cache /mnt/nvme2/cache rw - xfs /dev/c rw"""
FSTAB = """\
# /dev/x /data/commented xfs
/dev/a / ext4 defaults 0 0
UUID=1 /data/nvme0 xfs nofail 0 0
UUID=2 /data xfs nofail 0 0
/swap none swap sw 0 0"""


def test_the_innermost_mount_holds_a_path() -> None:
    mounts = all_mounts(HOST)
    assert mount_of("/mnt/with space/cache", mounts).kind == "xfs"
    assert mount_of("/mnt/netting", mounts).kind == "ext4"
    assert mount_of("/mnt/net/x", mounts).kind == "nfs4"


@pytest.mark.parametrize(
    ("mounts", "path"),
    [(HOST, "/data/cache"), (HOST, "/mnt/net"), (SERVICE, "/mnt/nvme0/cache"), (POD, "/mnt/nvme0/cache")],
)
def test_a_mounted_disk_is_accepted(mounts: str, path: str) -> None:
    check_own(path, all_mounts(mounts))
    assert misplaced(path, all_mounts(mounts), "") == ""


@pytest.mark.parametrize(
    ("mounts", "path", "where"),
    [
        (HOST, "/mnt/nvme0", "the root disk"),
        (HOST, "/mnt/bound/x", "the root disk"),
        (SERVICE.replace("8:2", "8:1"), "/mnt/nvme0/cache", "the root disk"),
        (POD, "/mnt", "the root disk"),
        (POD, "/mnt/nvme1/cache", "a part of a disk, /mnt/nvme1"),
        (POD, "/mnt/nvme2/cache", "a part of a disk, /cache"),
    ],
)
def test_a_disk_that_is_not_mounted_is_refused(mounts: str, path: str, where: str) -> None:
    with pytest.raises(NotReady, match=f"{path} lies on {where}, and not on a file system of its own; mount"):
        check_own(path, all_mounts(mounts))


def test_the_root_disk_and_a_mount_point_without_its_mount_are_said() -> None:
    mounts = all_mounts(HOST)
    assert misplaced("/home/me/cache", mounts, "") == "/home/me/cache lies on the root disk"
    assert misplaced("/data/cache", mounts, FSTAB) == ""
    assert "/etc/fstab mounts at /data/nvme0: none is mounted" in misplaced(
        "/data/nvme0/cache", mounts, FSTAB
    )


def test_this_machine_has_mounts(tmp_path: Path) -> None:
    assert mount_of(str(tmp_path)).point.startswith("/")
