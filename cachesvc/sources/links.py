"""Where a path leads, a step at a time: who follows the links knows before each step what it will touch.

`os.path.realpath` does the same in one call, which can hang in a mount that nobody knows the name of, and raises
where a link goes away under its eyes.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable

MAX_LINKS = 40
"""Linux follows no more: such a path cannot be opened."""
Follow = Callable[[str], str]
"""What the link at a path leads to, as it is written there; "" where there is none."""


def follow(path: str) -> str:
    """Asks the file system. What is not there (any more), or cannot be looked at, is no link."""
    try:
        return os.readlink(path) if stat.S_ISLNK(os.lstat(path).st_mode) else ""
    except OSError:
        return ""


def real(path: str, follow: Follow = follow) -> str:
    """An absolute path without links, dots and double slashes. What does not exist stays as it is, and so does a path
    of more than `MAX_LINKS`. `follow` is asked only about paths whose folder has no links."""
    here, links, rest = "", 0, path.split("/")[::-1]
    while rest:
        name = rest.pop()
        if name == "..":
            here = here.rpartition("/")[0]
        elif name not in ("", "."):
            if target := follow(f"{here}/{name}"):
                links += 1
                if links > MAX_LINKS:
                    return path
                here = "" if target.startswith("/") else here
                rest += target.split("/")[::-1]
            else:
                here = f"{here}/{name}"
    return here or "/"
