"""Reads of single extents through a daemon's grants socket."""

from __future__ import annotations

import os

from cachesvc.client.grants import DaemonGrants
from cachesvc.client.protocol import Granted, Refused

ANSWER_S = 20.0


def contents(answer: Granted | Refused) -> bytes:
    """The bytes of a granted extent, whose descriptor is closed."""
    assert isinstance(answer, Granted)
    try:
        return os.pread(answer.fd, answer.size_bytes, answer.offset)
    finally:
        os.close(answer.fd)


def granted(grants: DaemonGrants, extent: int, timeout_s: float = ANSWER_S) -> Granted:
    """Acquire an extent, which must not be refused. The descriptor is the caller's."""
    (answer,) = grants.acquire([extent], timeout_s)
    assert isinstance(answer, Granted)
    return answer


def read_extent(grants: DaemonGrants, extent: int, timeout_s: float = ANSWER_S) -> bytes:
    """Acquire an extent, read it and release it."""
    found = contents(granted(grants, extent, timeout_s))
    grants.release([extent])
    return found
