"""The limit of open files of this process."""

from __future__ import annotations

import resource


def raise_open_files(wanted: int) -> int:
    """Raise the limit of open files to `wanted`, as far as the hard limit allows; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(soft, wanted)
