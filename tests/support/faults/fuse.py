"""A read-only FUSE file system of one folder that fails as an NFS server does.

It speaks the kernel's FUSE protocol itself, since a few kinds of requests need no libfuse. Mounting needs root and
/dev/fuse; `FaultyMount.why_not` says what is missing.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from testbed import WAIT_S

_LOOKUP, _FORGET, _GETATTR, _OPEN, _READ, _STATFS = 1, 2, 3, 14, 15, 17
_RELEASE, _FLUSH, _INIT, _OPENDIR, _READDIR, _RELEASEDIR, _INTERRUPT, _BATCH_FORGET = (
    18,
    25,
    26,
    27,
    28,
    29,
    36,
    42,
)
_ROOT = 1
_MNT_DETACH = 2
_LIBC = ctypes.CDLL(None, use_errno=True)
_IN = struct.Struct("=IIQQIIII")
_OUT = struct.Struct("=IiQ")


@dataclass
class File:
    """A file's bytes and modification time. `fail`: errno of the next `times` reads (or, with `at_open`, opens).
    `hang`: reads are not answered until `FaultyMount.go_on`. `write_while_read`: new contents after the next read."""

    data: bytes
    mtime_ns: int = 1_700_000_000_000_000_000
    fail: int = 0
    times: int = 0
    at_open: bool = False
    hang: bool = False
    write_while_read: bytes | None = None


@dataclass
class FaultyMount:
    """Context manager; mounted at `path`. Clients may cache attributes for `attributes_s`. While `lookups_hang`, lookups
    of names, attributes and the folder are not answered. `weather` is called before each answer: it may wait, and a
    result other than 0 is the errno of the answer."""

    path: Path
    files: dict[str, File] = field(default_factory=dict)
    attributes_s: int = 0
    reads: int = 0
    lookups_hang: bool = False
    weather: Callable[[], int] | None = None

    @staticmethod
    def why_not() -> str:
        """Reason why this machine cannot mount; "" when it can."""
        if os.geteuid():
            return "mounting FUSE needs root"
        try:
            os.close(os.open("/dev/fuse", os.O_RDWR))
        except OSError as error:
            return f"/dev/fuse: {error.strerror}"
        return ""

    def __enter__(self) -> FaultyMount:
        self.path.mkdir(parents=True, exist_ok=True)
        self._fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={self._fd},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
        if _LIBC.mount(b"faulty", bytes(self.path), b"fuse", 1, options):  # 1: read-only
            raise OSError(ctypes.get_errno(), "cannot mount FUSE")
        self.hung = threading.Event()
        self._free = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(4)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.go_on()
        _LIBC.umount2(bytes(self.path), _MNT_DETACH)
        for thread in self._threads:
            thread.join(WAIT_S)
        os.close(self._fd)

    def go_on(self) -> None:
        """Answer all hanging requests, and let none hang from now on."""
        self.lookups_hang = False
        self._free.set()

    def _serve(self) -> None:
        while True:
            try:
                request = os.read(self._fd, 1 << 20)
            except OSError as error:
                if error.errno in (errno.ENODEV, errno.EBADF):
                    return  # unmounted
                continue
            _, opcode, unique, node, *_ = _IN.unpack_from(request)
            if opcode in (_FORGET, _BATCH_FORGET, _INTERRUPT):
                continue
            try:
                body, code = self._answer(opcode, node, request[_IN.size :]), 0
            except OSError as error:
                body, code = b"", -int(error.errno or errno.EIO)
            try:
                os.write(self._fd, _OUT.pack(_OUT.size + len(body), code, unique) + body)
            except OSError:  # the caller is dead, or the mount is gone
                pass

    def _answer(self, opcode: int, node: int, body: bytes) -> bytes:
        names = list(self.files)
        if opcode == _INIT:
            major, minor, ahead, _ = struct.unpack_from("=IIII", body)
            return struct.pack("=IIIIHHII", major, min(minor, 31), ahead, 0, 8, 8, 4096, 1).ljust(64, b"\0")
        if opcode in (_LOOKUP, _GETATTR, _READDIR) and self.lookups_hang:
            self.hung.set()
            self._free.wait()
        told = self.weather if opcode in (_LOOKUP, _GETATTR, _OPEN, _OPENDIR, _READ, _READDIR) else None
        if told is not None and (code := told()):
            raise OSError(code, os.strerror(code))
        if opcode == _LOOKUP:
            name = os.fsdecode(body.rstrip(b"\0"))
            if name not in self.files:
                raise OSError(errno.ENOENT, name)
            number = names.index(name) + 2
            return struct.pack("=QQQQII", number, 0, 0, self.attributes_s, 0, 0) + self._attributes(number)
        if opcode == _GETATTR:
            return struct.pack("=QII", self.attributes_s, 0, 0) + self._attributes(node)
        if opcode in (_OPEN, _OPENDIR):
            if opcode == _OPEN and self.files[names[node - 2]].at_open:
                self._fail(self.files[names[node - 2]])
            return struct.pack("=QII", node, 1, 0)  # FOPEN_DIRECT_IO: no read is answered from the page cache
        if opcode == _READ:
            return self._read(self.files[names[node - 2]], *struct.unpack_from("=QQI", body)[1:])
        if opcode == _READDIR:
            return self._entries(*struct.unpack_from("=QQI", body)[1:])
        if opcode == _STATFS:
            return bytes(80)
        if opcode in (_RELEASE, _RELEASEDIR, _FLUSH):
            return b""
        raise OSError(errno.ENOSYS, "not implemented")

    def _fail(self, file: File) -> None:
        with self._lock:
            if file.times > 0:
                file.times -= 1
                raise OSError(file.fail, os.strerror(file.fail))

    def _read(self, file: File, offset: int, size: int) -> bytes:
        self.reads += 1
        if file.hang and not self._free.is_set():
            self.hung.set()
            self._free.wait()
        if not file.at_open:
            self._fail(file)
        found = file.data[offset : offset + size]
        if file.write_while_read is not None:
            file.data, file.write_while_read = file.write_while_read, None
            file.mtime_ns += 1_000_000_000
        return found

    def _attributes(self, node: int) -> bytes:
        if node == _ROOT:
            size, at, mode = 0, 0, stat.S_IFDIR | 0o755
        else:
            file = self.files[list(self.files)[node - 2]]
            size, at, mode = len(file.data), file.mtime_ns, stat.S_IFREG | 0o644
        seconds, rest = divmod(at, 1_000_000_000)
        times = (seconds, seconds, seconds, rest, rest, rest)
        return struct.pack("=QQQQQQIIIIIIIIII", node, size, 8, *times, mode, 1, 0, 0, 0, 4096, 0)

    def _entries(self, offset: int, size: int) -> bytes:
        found = b""
        for number, name in enumerate(list(self.files)[offset:], start=offset):
            raw = os.fsencode(name)
            entry = struct.pack("=QQII", number + 2, number + 1, len(raw), stat.S_IFREG >> 12) + raw
            entry = entry.ljust(-(-len(entry) // 8) * 8, b"\0")
            if len(found) + len(entry) > size:
                break
            found += entry
        return found
