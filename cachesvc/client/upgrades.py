"""Upgrades of the daemon, as its clients see them: it is gone for a moment, and is waited for."""

from __future__ import annotations

import os
import time

from cachesvc.config import CONTROL_SOCKET, UPGRADING
from cachesvc.core.limits import UPGRADE_WAIT_S


def is_upgrading(directory: str) -> bool:
    """Tell whether the daemon in a directory of sockets is being replaced by another, which serves in a moment."""
    try:
        return time.time() - os.stat(f"{directory}/{UPGRADING}").st_mtime < UPGRADE_WAIT_S
    except OSError:
        return False


def is_back(directory: str) -> bool:
    """Tell whether a call that failed may succeed now: a daemon has bound its socket again."""
    return os.path.exists(f"{directory}/{CONTROL_SOCKET}")
