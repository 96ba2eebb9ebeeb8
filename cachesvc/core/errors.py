"""Every error that a user can meet: whose fault it is, and what to do.

The errors form one tree. `code` is the process exit code of the CLI and the number on the grants wire; the gRPC status is
chosen from it in `daemon/statuses.py` alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cachesvc.core.safe_text import redacted

INTERRUPTED = 130
"""The exit code of Ctrl-C: 128 + SIGINT, as shells have it."""


class CacheError(Exception):
    """The root. The message is one line: what happened, to what, and what to do. It hides secrets in URLs."""

    code = 1
    received_bytes = 0
    """Bytes of an object's body that came before a read failed."""
    of_object = False
    """The error concerns one object; others of its source can be read."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(redacted(arg) if isinstance(arg, str) else arg for arg in args))


class translating:
    """Context manager that raises what `translate` makes of a foreign error of its body. Typed errors pass, also those that
    are OSErrors. A class, since a generator would cost each grant as much as the rest of `RamTier.open`."""

    __slots__ = ("_kinds", "_translate")

    def __init__(
        self, kinds: type[Exception] | tuple[type[Exception], ...], translate: Callable[[Any], CacheError]
    ) -> None:
        self._kinds, self._translate = kinds, translate

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, self._kinds) and not isinstance(error, CacheError):
            raise self._translate(error) from error


class InvalidInput(CacheError, ValueError):
    """The caller's arguments, URI, format or budgets make no sense."""

    code = 2


class NotAllowed(CacheError, PermissionError):
    """The allowlist, the socket's owner, or the source's credentials forbid it."""

    code = 3


class NotFound(CacheError, FileNotFoundError):
    """The bucket, prefix, object or dataset does not exist, or holds nothing."""

    code = 4


class CorruptData(CacheError):
    """Bytes at the source do not parse, do not match their checksum, or are not sent as they are stored."""

    code = 5


class SourceChanged(CacheError):
    """The source no longer holds what the catalog names: an object has another version, or a prefix is no longer the
    dataset version that was asked for."""

    code = 6


class SourceUnavailable(CacheError, ConnectionError):
    """The source throttles, times out or answers 5xx after all retries.

    `throttled`: it asked for fewer requests (429, 503). `retry_after_s`: the seconds that it asked to wait. `of_node`: the
    fault is this node's, such as credentials that cannot be refreshed, and the source may work.
    """

    code = 7
    of_node = False
    throttled = False
    retry_after_s = 0.0
    kept_bytes = 0
    """Bytes at the beginning of a read that came before it failed, and are right: the rest can be asked for."""
    progress = False
    """These bytes are a good part of the read: the source works, and only its answer was cut short."""


def fault_of_node(message: str) -> SourceUnavailable:
    """Return a SourceUnavailable whose cause is this node."""
    error = SourceUnavailable(message)
    error.of_node = True
    return error


class OutOfSpace(CacheError):
    """No tier can take the bytes: budgets, a full disk, or what is pinned and leased."""

    code = 8


class TierFailed(CacheError):
    """A cache directory or the RAM tier answers with errors; reads go on from elsewhere.

    `extent`: the index in its dataset of an extent whose cached copy could not be read; -1: none is known.
    """

    code = 9
    extent = -1


class DaemonUnavailable(CacheError, ConnectionError):
    """No daemon answers at the socket, and policy forbids reading directly.

    `for_good`: none ever will, so waiting is of no use.
    """

    code = 10
    for_good = False


class Busy(DaemonUnavailable):
    """The daemon takes no further call of this user for now."""

    code = 14


class DeadlineExceeded(CacheError, TimeoutError):
    """The answer did not come in time."""

    code = 11


class StateMismatch(CacheError, ValueError):
    """A job's saved state, its ranks or their arguments do not belong together. A changed source is `SourceChanged`."""

    code = 12


class PeerRankFailed(CacheError):
    """A rank of this job cannot read its data. All its ranks raise this, or exit with its code where they are blocked in a
    collective.

    `rank`: which one; `cause`: that rank's own error.
    """

    code = 13
    rank = -1
    cause: CacheError | None = None


class NotReady(CacheError):
    """The daemon cannot start yet: a name does not resolve, a port is in use, or a disk is not mounted. A later start may
    work."""

    code = 15


def is_bad_sample(error: Exception) -> bool:
    """Return whether a sample is the cause of an error: it is permanent, or user code raised it. An unavailable daemon or
    source, a lack of space and a wrong argument are not the sample's fault."""
    if isinstance(error, CacheError):
        return error.of_object or isinstance(error, (NotFound, CorruptData, SourceChanged))
    return not isinstance(error, MemoryError)


def kinds(root: type[CacheError] = CacheError) -> list[type[CacheError]]:
    """An error class and all its subclasses."""
    return [root] + [found for child in root.__subclasses__() for found in kinds(child)]


def from_code(code: int, message: str) -> CacheError:
    """The typed error for a wire code; the root for an unknown code."""
    kind = next((kind for kind in kinds() if kind.code == code), CacheError)
    return kind(message)


def install(extras: str) -> str:
    """Return the command that installs extras, for an error. In a checkout, since the name is not on PyPI."""
    return f"pip install '.[{extras}]' in a checkout of cachesvc"
