"""What a process and its children cost, from /proc: seconds of CPU, and memory that nothing else shares."""

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
    found = [pid]
    for one in found:
        for listed in glob(f"/proc/{one}/task/*/children"):  # none where it has ended
            with suppress(OSError):  # it ended meanwhile
                found += [int(child) for child in Path(listed).read_text().split()]
    return found


def cpu_s(pids: Iterable[int]) -> float:
    """User and system time of these processes, and of children of theirs that have ended."""
    total = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it ended; its parent has counted it
            continue
        total += sum(int(field) for field in fields[11:15])  # utime, stime, cutime, cstime
    return total / _TICKS


def anonymous_bytes(pids: Iterable[int]) -> int:
    """Pss_Anon and page tables: shared pages (page cache, memfds) are no part of it."""
    total = 0
    for pid in pids:
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:  # it ended meanwhile
            continue
        for name, text in (("Pss_Anon", rollup), ("VmPTE", status)):
            found = re.search(rf"^{name}:\s+(\d+) kB", text, re.M)
            total += int(found[1]) << 10 if found else 0
    return total
