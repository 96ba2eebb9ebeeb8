"""Typed errors -> gRPC statuses: the one place."""

from __future__ import annotations

from typing import NoReturn

import grpc

from cachesvc.client.control import CODE_KEY
from cachesvc.core import errors
from cachesvc.core.errors import CacheError

STATUSES: dict[type[CacheError], grpc.StatusCode] = {
    errors.InvalidInput: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotAllowed: grpc.StatusCode.PERMISSION_DENIED,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.CorruptData: grpc.StatusCode.DATA_LOSS,
    errors.SourceChanged: grpc.StatusCode.FAILED_PRECONDITION,
    errors.SourceUnavailable: grpc.StatusCode.UNAVAILABLE,
    errors.OutOfSpace: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.TierFailed: grpc.StatusCode.UNAVAILABLE,
    errors.Busy: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DaemonUnavailable: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.StateMismatch: grpc.StatusCode.FAILED_PRECONDITION,
}


_ENDS_BYTES = 1000
"""Of each end of a longer message: it travels as a header, in which a byte may take three, and gRPC drops answers whose
headers take 8 KiB."""


class statuses:
    """A typed error of the body ends the call."""

    def __init__(self, context: grpc.ServicerContext) -> None:
        self._context = context

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, CacheError):
            abort(self._context, error)


def abort(context: grpc.ServicerContext, error: CacheError) -> NoReturn:
    """End a call with an error's status, its code in the trailing metadata."""
    context.set_trailing_metadata(((CODE_KEY, str(error.code)),))
    status = next(
        (STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES), grpc.StatusCode.UNKNOWN
    )
    context.abort(status, _line(str(error)))


def _line(message: str) -> str:
    """On one line that a header can hold, with its beginning and its end: what is wrong, and the mend."""
    line = " ".join(message.splitlines()).encode(errors="replace")
    if len(line) <= 2 * _ENDS_BYTES:
        return line.decode()
    begin, end = (part.decode(errors="ignore") for part in (line[:_ENDS_BYTES], line[-_ENDS_BYTES:]))
    return f"{begin} ... {end}"
