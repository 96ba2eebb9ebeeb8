"""The processes that work for a daemon."""

from __future__ import annotations

import os
from pathlib import Path

import psutil


def children(pid: int) -> list[int]:
    """Of a daemon: the process that fillers are forked from, fillers, builder; those that have ended left out."""
    return [each.pid for each in psutil.Process(pid).children(recursive=True)]


def slow_fillers(folder: Path) -> tuple[Path, str]:
    """While that file is there, no process does anything that was forked by a Python with this PYTHONPATH."""
    (folder / "first").mkdir()
    held = folder / "first" / "held"
    lines = [
        "import os, time",
        "def hold():",
        f"    while os.path.exists({str(held)!r}):",
        "        time.sleep(0.01)",
        "os.register_at_fork(after_in_child=hold)",
        "",
    ]
    (folder / "first" / "sitecustomize.py").write_text("\n".join(lines))
    return held, f"{folder}/first:{os.environ.get('PYTHONPATH', '')}"
