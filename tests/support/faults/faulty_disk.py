"""A disk that misbehaves on demand: a FUSE pass-through, `python -m tests.support.faults.faulty_disk BACKING MOUNT FAULT`.

The file FAULT holds what every call does first:

    (empty)                 nothing
    eio, enospc, erofs      fail with that error
    0.1                     wait so many seconds
    hang                    wait until the file has other contents
    rename 0.1              wait in calls of this name only
    fsync:/tmp/ eio         fail in such calls on paths that contain this text only
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

START_S = 10.0
FAILS = {"eio": errno.EIO, "enospc": errno.ENOSPC, "erofs": errno.EROFS}


class FaultyDisk:
    """The mount in its own process. Context manager; skips the test where there is no FUSE."""

    def __init__(self, root: Path) -> None:
        self.path = root / "faulty"
        self.backing = root / "backing"
        self._fault = root / "fault"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> FaultyDisk:
        self.path.mkdir()
        self.backing.mkdir()
        self.behave("")
        command = [
            sys.executable,
            "-m",
            "tests.support.faults.faulty_disk",
            str(self.backing),
            str(self.path),
        ]
        self._process = subprocess.Popen([*command, str(self._fault)], stderr=subprocess.PIPE)
        deadline = time.monotonic() + START_S
        while not os.path.ismount(self.path):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._process.kill()
                pytest.skip(
                    "NOT TESTED: a disk with EIO and 5 s answers needs mfusepy, libfuse and /dev/fuse"
                )
            time.sleep(0.02)
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Remove the disk. Calls that hang in it end with an error; nothing else could end them."""
        if self._process is None:
            return
        self._process.kill()
        self._process.communicate()
        self._process = None
        subprocess.run(["umount", "-l", str(self.path)], check=False, capture_output=True)

    def behave(self, fault: str) -> None:
        """Set what each call does from now on, as the module's docstring says."""
        new = self._fault.with_suffix(".new")
        new.write_text(fault)
        new.rename(self._fault)


def serve(backing: str, mount: str, fault: str) -> None:
    """Serve until unmounted."""
    import mfusepy

    def misbehave(call: str, path: str) -> None:
        while (kind := Path(fault).read_text()) == "hang":
            time.sleep(0.05)
        name, _, what = kind.rpartition(" ")
        only, _, where = name.partition(":")
        if not what or only not in ("", call) or where not in path:
            return
        if what in FAILS:
            raise mfusepy.FuseOSError(FAILS[what])
        time.sleep(float(what))

    def faulty(call: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a call on the backing directory with the fault."""

        def run(self: object, path: str, *args: Any) -> Any:
            if call.__name__ not in ("getattr", "release"):
                misbehave(call.__name__, path)
            try:
                return call(self, backing + path, *args)
            except OSError as error:
                raise mfusepy.FuseOSError(error.errno) from None

        return run

    class PassThrough(mfusepy.Operations):
        use_ns = True

        @faulty
        def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
            found = os.lstat(path)
            names = ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid", "st_ino", "st_blocks")
            times = {name: getattr(found, f"{name}_ns") for name in ("st_atime", "st_mtime", "st_ctime")}
            return {name: getattr(found, name) for name in names} | times

        @faulty
        def readdir(self, path: str, fh: int) -> list[str]:
            return [".", "..", *os.listdir(path)]

        @faulty
        def statfs(self, path: str) -> dict[str, int]:
            found = os.statvfs(path)
            names = ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree")
            return {name: getattr(found, name) for name in names}

        @faulty
        def mkdir(self, path: str, mode: int) -> int:
            os.mkdir(path, mode)
            return 0

        @faulty
        def rmdir(self, path: str) -> int:
            os.rmdir(path)
            return 0

        @faulty
        def unlink(self, path: str) -> int:
            os.unlink(path)
            return 0

        @faulty
        def rename(self, old: str, new: str) -> int:
            os.rename(old, backing + new)
            return 0

        @faulty
        def create(self, path: str, mode: int, fi: object = None) -> int:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)

        @faulty
        def open(self, path: str, flags: int) -> int:
            return os.open(path, flags & os.O_ACCMODE)

        @faulty
        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            return os.pread(fh, size, offset)

        @faulty
        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            return os.pwrite(fh, data, offset)

        @faulty
        def truncate(self, path: str, length: int, fh: int | None = None) -> int:
            os.truncate(path if fh is None else fh, length)
            return 0

        @faulty
        def fsync(self, path: str, datasync: int, fh: int) -> int:
            os.fsync(fh)
            return 0

        @faulty
        def release(self, path: str, fh: int) -> int:
            os.close(fh)
            return 0

    mfusepy.FUSE(PassThrough(), mount, foreground=True, allow_other=True)


if __name__ == "__main__":
    serve(*sys.argv[1:])
