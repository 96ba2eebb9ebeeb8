"""The file system that the kubelet of this node watches."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

KUBELET = ("/var/lib/kubelet", *(("/etc/hosts",) if "KUBERNETES_SERVICE_HOST" in os.environ else ()))
"""Paths on that file system: the kubelet's own folder, and in a pod a file that it mounts from there."""
KUBELET_FREE = 0.15
"""The kubelet's `imagefs.available`, by default; `nodefs.available` is 10 %."""


def kubelet_disk_free(places: Sequence[str] = KUBELET) -> float | None:
    """Return the free part of it, from 0 to 1; None where this process sees no kubelet."""
    for place in places:
        with suppress(OSError):
            disk = os.statvfs(place)
            return disk.f_bavail / disk.f_blocks if disk.f_blocks else None
    return None
