"""Says in a few words why a call to another node failed."""

from __future__ import annotations

import re

import grpc

from cachesvc.core.limits import PEER_CALL_S

_WRAPPED = re.compile(
    r"failed to connect to all addresses; last error: \w+: \S+ (Failed to connect to remote host: )?(connect: )?"
)
_NAMES = re.compile(r"DNS resolution failed for (\S+?):.*|.*[Cc]ould not (?:contact DNS servers|resolve).*")
MAX_REASON = 200
"""Characters of a reason."""


def reason(error: grpc.RpcError) -> str:
    """Return the reason of a failed call on one line, without what gRPC puts around it."""
    code, details = error.code(), " ".join((error.details() or "").split())
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"it did not answer in {PEER_CALL_S:g} s"
    if code is grpc.StatusCode.UNAVAILABLE:
        if _NAMES.fullmatch(details):
            return "its name does not resolve"
        return _WRAPPED.sub("", details)[:MAX_REASON] or "it cannot be reached"
    return f"{code.name}: {details}"[:MAX_REASON]
