"""CPU time and unshared memory of a process and its children, from /proc."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from glob import glob
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def family(pid: int) -> list[int]:
    """The process and its living descendants."""
    pids = [pid]
    for one in pids:
        for listed in glob(f"/proc/{one}/task/*/children"):  # empty when the process has ended
            with suppress(OSError):  # the process ended meanwhile
                pids += [int(child) for child in Path(listed).read_text().split()]
    return pids


def cpu_s(pids: Iterable[int]) -> float:
    """User and system time of these processes, and of their children that have ended, in seconds."""
    total = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # the process ended; its parent counts its time
            continue
        total += sum(int(field) for field in fields[11:15])  # utime, stime, cutime, cstime
    return total / _TICKS


def anonymous_bytes(pids: Iterable[int]) -> int:
    """Anonymous memory (Pss_Anon) and page tables of these processes. Shared pages (page cache, memfds) do not count."""
    total = 0
    for pid in pids:
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:  # the process ended meanwhile
            continue
        for name, text in (("Pss_Anon", rollup), ("VmPTE", status)):
            line = re.search(rf"^{name}:\s+(\d+) kB", text, re.M)
            total += int(line[1]) << 10 if line else 0
    return total
