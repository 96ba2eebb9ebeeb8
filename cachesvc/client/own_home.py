"""The folder of what this user's processes keep: catalogs that they compiled without a daemon."""

from __future__ import annotations

import os
import tempfile


def kept_here(version: str) -> str:
    """The path at which this user's catalog of a version lies, if there is one."""
    return f"{own_home()}/catalogs/{version}.lmdb"


def own_home() -> str:
    """The folder of catalogs built by this user: in $XDG_CACHE_HOME or ~/.cache, else in the temporary folder."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    home = f"{base}/cachesvc"
    try:
        os.makedirs(home, mode=0o700, exist_ok=True)
    except OSError:
        home = f"{tempfile.gettempdir()}/cachesvc-{os.getuid()}"
        os.makedirs(home, mode=0o700, exist_ok=True)
    return home
