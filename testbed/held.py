"""Memory, descriptors and threads that a daemon and its children hold at one moment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from testbed.node import open_files


@dataclass(frozen=True, slots=True)
class Held:
    """Resources of the daemon's processes. `children_rss_kb` is the memory of its fillers and builder."""

    rss_kb: int
    descriptors: int
    threads: int
    memfds: int
    children_rss_kb: int


def held(pid: int) -> Held:
    """Read from /proc what the daemon `pid` and its children hold now."""
    names = open_files(pid)
    children = psutil.Process(pid).children(recursive=True)
    return Held(
        rss_kb=_anonymous_kb(pid),
        descriptors=sum(not name.startswith("/memfd:") for name in names),
        threads=len(os.listdir(f"/proc/{pid}/task")),
        memfds=sum(name.startswith("/memfd:") for name in names),
        children_rss_kb=sum(_anonymous_kb(child.pid) for child in children),
    )


def _anonymous_kb(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
