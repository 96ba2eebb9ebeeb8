"""Maps typed errors to gRPC statuses; no other module does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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


_END_BYTES = 1000
"""The bytes that are kept of each end of a longer message. It travels as a header, where a byte may be escaped to three,
and gRPC drops responses with headers of more than 8 KiB."""


@contextmanager
def errors_as_statuses(context: grpc.ServicerContext) -> Iterator[None]:
    """End the call with a status where the body raises a typed error."""
    try:
        yield
    except CacheError as error:
        abort(context, error)


def abort(context: grpc.ServicerContext, error: CacheError) -> NoReturn:
    """End a call with an error's status, and with its code in the trailing metadata."""
    context.set_trailing_metadata(((CODE_KEY, str(error.code)),))
    status = next(
        (STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES), grpc.StatusCode.UNKNOWN
    )
    context.abort(status, _one_line(str(error)))


def _one_line(message: str) -> str:
    """Shorten a message to one line that a header can hold. Its beginning says what is wrong, and its end what to do."""
    line = " ".join(message.splitlines()).encode(errors="replace")
    if len(line) <= 2 * _END_BYTES:
        return line.decode()
    begin, end = (part.decode(errors="ignore") for part in (line[:_END_BYTES], line[-_END_BYTES:]))
    return f"{begin} ... {end}"
