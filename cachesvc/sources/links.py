"""Resolves the links of a path one step at a time, so that a caller knows before each step which path it will touch.

`os.path.realpath` is a single call: when it hangs, the mount is unknown, and it raises when a link is removed meanwhile.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable

MAX_LINKS = 40
"""Linux's limit: a path with more links cannot be opened."""
Follow = Callable[[str], str]
"""Returns the target of the link at a path, as it is written there; "" where there is no link."""


def follow(path: str) -> str:
    """Read the link at a path; "" for anything else, also for a path that does not exist or cannot be examined."""
    try:
        return os.readlink(path) if stat.S_ISLNK(os.lstat(path).st_mode) else ""
    except OSError:
        return ""


def real(path: str, follow: Follow = follow) -> str:
    """Return an absolute path without links, dots and double slashes. Segments that do not exist stay as they are; a path
    of more than `MAX_LINKS` links is returned unchanged. `follow` is called only with paths whose folder has no links."""
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
