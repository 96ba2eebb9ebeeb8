"""Reads many ranges of files in one system call: io_uring (Linux 5.6 and newer; containers often forbid it).

What the page cache holds is copied during the call; for the rest the disk works on all ranges at once. A disk error is a
result, as with preadv.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from typing import Any

import numpy as np

from loader.reading.active_reads import Ints
from loader.reading.address_range import Bytes

_SETUP, _ENTER = 425, 426  # system calls, of every architecture
_OP_READ = 22  # IORING_OP_READ
_GET_EVENTS = 1  # IORING_ENTER_GETEVENTS
_SQ_RING, _CQ_RING, _SQES = 0, 0x8000000, 0x10000000  # IORING_OFF_...
_ENTRIES = 256
"""Reads submitted at once."""
_U32 = 1 << 32
_SQE = np.dtype(
    [
        ("opcode", "u1"),
        ("flags", "u1"),
        ("priority", "u2"),
        ("fd", "i4"),
        ("offset", "u8"),
        ("address", "u8"),
        ("length", "u4"),
        ("rw_flags", "u4"),
        ("user_data", "u8"),
        ("rest", "u8", 3),
    ]
)  # struct io_uring_sqe
_CQE = np.dtype([("user_data", "u8"), ("result", "i4"), ("flags", "u4")])  # struct io_uring_cqe

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.argtypes = (ctypes.c_long,) * 7
_libc.syscall.restype = ctypes.c_long


class Ring:
    """The queues of one thread."""

    def __init__(self) -> None:
        """Raises OSError where the kernel has no io_uring, or forbids it."""
        params = np.zeros(30, np.uint32)  # struct io_uring_params
        self._fd = _call(_SETUP, _ENTRIES, params.ctypes.data)
        try:
            entries, completions = int(params[0]), int(params[1])
            sq, cq = params[10:20].tolist(), params[20:30].tolist()
            submission = self._mapped(sq[6] + 4 * entries, _SQ_RING)
            completion = self._mapped(cq[5] + _CQE.itemsize * completions, _CQ_RING)
            self._sqes = np.frombuffer(self._mapped(_SQE.itemsize * entries, _SQES), _SQE)
        except BaseException:
            os.close(self._fd)
            raise
        self._slots = np.frombuffer(submission, np.uint32, entries, sq[6])
        self._tail = np.frombuffer(submission, np.uint32, 1, sq[1])
        self._done_head = np.frombuffer(completion, np.uint32, 1, cq[0])
        self._done_tail = np.frombuffer(completion, np.uint32, 1, cq[1])
        self._done = np.frombuffer(completion, _CQE, completions, cq[5])
        self._numbers = np.arange(max(entries, completions))
        self._sqes["opcode"], self._sqes["user_data"] = _OP_READ, self._numbers[:entries]
        self._unsubmitted = self._due = 0
        self._memory: Any = None
        """What reads that are under way write to."""

    def __del__(self) -> None:
        os.close(self._fd)

    def read(self, fds: Ints, offsets: Ints, lengths: Ints, out: Bytes, places: Ints) -> Ints:
        """Read `lengths[i]` bytes from `offsets[i]` of file `fds[i]` to `out[places[i]:]`. Returns the bytes of each, or
        its negative error number. Raises OSError where the kernel refuses the call."""
        addresses = out.__array_interface__["data"][0] + places
        found = np.empty(len(fds), np.int64)
        for begin in range(0, len(fds), len(self._slots)):
            part = slice(begin, begin + len(self._slots))
            found[part] = self._read(fds[part], offsets[part], addresses[part], lengths[part], out)
        return found

    def _read(self, fds: Ints, offsets: Ints, addresses: Ints, lengths: Ints, out: Bytes) -> Ints:
        if self._due:  # an exception of a signal handler left them
            self._complete(np.empty(len(self._slots), np.int64))
        count, tail = len(fds), int(self._tail[0])
        entries = self._sqes[:count]
        entries["fd"], entries["offset"], entries["address"], entries["length"] = (
            fds,
            offsets,
            addresses,
            lengths,
        )
        numbers = self._numbers[:count]
        self._slots[tail + numbers & len(self._slots) - 1] = numbers
        self._memory, self._unsubmitted, self._due = out, count, count
        self._tail[0] = (tail + count) % _U32
        found = np.empty(count, np.int64)
        self._complete(found)
        return found

    def _complete(self, found: Ints) -> None:
        """Submit what is not submitted, wait until nothing is due, and set the results."""
        while self._due:
            try:
                self._unsubmitted -= _call(_ENTER, self._fd, self._unsubmitted, self._due, _GET_EVENTS)
            except OSError as error:
                if error.errno not in (errno.EINTR, errno.EAGAIN, errno.EBUSY):
                    raise
            head = int(self._done_head[0])
            ready = (int(self._done_tail[0]) - head) % _U32
            done = self._done[head + self._numbers[:ready] & len(self._done) - 1]
            found[done["user_data"].astype(np.int64)] = done["result"]
            self._due -= ready
            self._done_head[0] = (head + ready) % _U32
        self._memory = None

    def _mapped(self, size_bytes: int, offset: int) -> mmap.mmap:
        return mmap.mmap(self._fd, size_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE, offset=offset)


def ring_of_thread() -> Ring | None:
    """Return this thread's ring; None where there is none."""
    try:
        found: Ring | None = _of_thread.ring
    except AttributeError:
        try:
            found = Ring()
        except OSError:
            found = None
        _of_thread.ring = found
    return found


def give_up_ring() -> None:
    """Use no ring in this thread from now on."""
    _of_thread.ring = None


def _call(number: int, *arguments: int) -> int:
    result: int = _libc.syscall(number, *arguments, *(0,) * (6 - len(arguments)))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def _forget() -> None:
    """A forked child shares no ring with its parent."""
    global _of_thread
    _of_thread = threading.local()


_of_thread = threading.local()
os.register_at_fork(after_in_child=_forget)
