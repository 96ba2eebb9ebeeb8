"""The source of all other URLs, through fsspec and an installed driver."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from typing import Any, TypeVar

import fsspec
from fsspec import AbstractFileSystem

from cachesvc.core.errors import (
    CacheError,
    CorruptData,
    InvalidInput,
    NotAllowed,
    NotFound,
    SourceChanged,
    SourceUnavailable,
    translating,
)
from cachesvc.core.limits import DRIVER_CALL_S, DRIVER_LIST_S
from cachesvc.core.model import ObjectVersion
from cachesvc.core.safe_text import redacted
from cachesvc.sources.limited_calls import LimitedCall
from cachesvc.sources.s3.responses import RepeatedFaults, check_encoding, encoding_of, same_tag
from cachesvc.sources.source import OnReceived, Source, ignore_received

log = logging.getLogger(__name__)
_VERSION_KEYS = (
    "ETag", "etag", "e_tag", "checksum", "md5", "content_md5", "generation",
    "mtime", "last_modified", "LastModified", "updated", "modified", "created",
    "modificationTime", "blob_id",  # WebHDFS, Hugging Face
)  # fmt: skip
_VERSION_NAMES = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        "e_?tag|check_?sum|chksum|md5|sha_?(1|256)|crc|hash",
        "generation|revision|^rev$|version",
        "modif|mtime|last_?write|updated|changed",
        "created|unique",
    )
)
"""What drivers call a version, the surest first; for those that use none of the names above. FTP says `modify`, Dropbox
`content_hash`, archives `CRC`."""
_ENCODINGS = ("contentEncoding", "content_encoding", "ContentEncoding", "content-encoding")


_MOST_CALLS = 128
"""Calls of one driver at a time, including those that were given up and still run."""
_T = TypeVar("_T")


class FsspecSource(Source):
    """A `Source` over one fsspec file system, for example of `gs://`, `az://`, `memory://`.

    A version is what the driver states as one: an entity tag, checksum or modification time in `info`, or its `modified` or
    `ukey`. Without any, objects have no version, and one warning says so.
    A HEAD after each read finds a change before and during it. Drivers raise exceptions of any type, not only OSError, for
    storage that fails. A call that takes too long is given up: it goes on in a thread of its own, which ends no process.
    """

    def __init__(self, filesystem: Any, call_s: float = DRIVER_CALL_S, list_s: float = DRIVER_LIST_S) -> None:
        self._filesystem = filesystem
        self._call_s, self._list_s = call_s, list_s
        self._most = _MOST_CALLS if _takes_threads(filesystem) else 1
        self._running = threading.Semaphore(self._most)
        self._repeated = RepeatedFaults()
        self._warned = False

    def list(self, prefix: str) -> Iterator[ObjectVersion]:
        """Yield every file below `prefix`, sorted by name, or the file that it names. Raises NotFound, and InvalidInput for
        names that are not UTF-8."""
        with _translating(prefix):
            self._filesystem.invalidate_cache()
            path = self._filesystem._strip_protocol(prefix)
            found = self._within(self._list_s, prefix, lambda: self._filesystem.find(path, detail=True))
            if not found and not self._within(self._call_s, prefix, lambda: self._filesystem.exists(path)):
                raise NotFound(f"{prefix}: no such file or folder")
        for name in sorted(found, key=_utf8):
            if found[name].get("type", "file") == "file":
                # Drivers write names in their own way; URIs keep the prefix as it was given.
                yield self._version(prefix.rstrip("/") + name[len(path.rstrip("/")) :], name, found[name])

    def head(self, uri: str) -> ObjectVersion:
        """Return the object's current version. Raises NotFound."""
        with _translating(uri):
            self._filesystem.invalidate_cache()
            path = self._filesystem._strip_protocol(uri)
            found = self._within(self._call_s, uri, lambda: self._filesystem.info(path))
        if found.get("type", "file") != "file":
            raise NotFound(f"{uri} is not a file")
        return self._version(uri, path, found)

    def read_into(
        self, version: ObjectVersion, offset: int, into: memoryview, received: OnReceived = ignore_received
    ) -> None:
        """Read a range, then check that the object is still that version."""
        if not len(into):
            return
        with _translating(version.uri):
            path = self._filesystem._strip_protocol(version.uri)
            end = offset + len(into)
            data = self._within(
                self._call_s, version.uri, lambda: self._filesystem.cat_file(path, start=offset, end=end)
            )
        now = self.head(version.uri)
        if now.size_bytes != version.size_bytes or not same_tag(now.etag, version.etag):
            raise SourceChanged(f"{version.uri} is no longer the version that was listed; open it again")
        if len(data) != len(into):
            what = f"{version.uri}: its driver gave {len(data)} bytes of the {len(into)} asked for"
            if self._repeated.failed(version.uri, offset):
                raise CorruptData(
                    f"{what}, twice; an object with a Content-Encoding may be decoded on the way"
                )
            raise SourceUnavailable(what)
        self._repeated.succeeded(version.uri, offset)
        into[:] = data

    def _version(self, uri: str, path: str, info: dict[str, Any]) -> ObjectVersion:
        if info.get("size") is None:
            raise InvalidInput(f"{uri}: its size is unknown, so it cannot be cached")
        encoding = next((info[key] for key in _ENCODINGS if info.get(key)), "")
        check_encoding(uri, encoding_of({"content-encoding": str(encoding)}))
        tag = _stated_version(info)
        if tag is None and _states(self._filesystem, "modified"):
            tag = self._asked(uri, lambda: self._filesystem.modified(path))
        if tag is None and _states(self._filesystem, "ukey"):
            tag = self._asked(uri, lambda: self._filesystem.ukey(path))
        if tag is None and not self._warned:
            self._warned = True
            log.warning(
                "%s: its driver states no version, so a file that is overwritten with the same size is not noticed",
                redacted(uri),
            )
        if isinstance(tag, datetime):  # some drivers return a datetime from `info` and a number from `find`
            tag = tag.timestamp()
        return ObjectVersion(uri, int(info["size"]), "" if tag is None else str(tag).strip('"'))

    def _asked(self, uri: str, call: Callable[[], object]) -> object:
        """Return what a method of the driver says of a file; None where it is not implemented."""
        with _translating(uri), suppress(NotImplementedError):
            return self._within(self._call_s, uri, call)
        return None

    def _within(self, limit_s: float, uri: str, call: Callable[[], _T]) -> _T:
        """Return what a call of the driver returns. Raises what it raises, and SourceUnavailable after the limit."""
        if not self._running.acquire(timeout=limit_s):
            raise SourceUnavailable(f"{uri}: {self._most} calls of its driver have not answered")

        def run() -> _T:
            try:
                return call()
            except (FileNotFoundError, PermissionError):
                raise
            except BaseException:
                if self._most == 1:
                    self._open_again()
                raise
            finally:
                self._running.release()

        late = f"{uri}: its driver has not answered in {limit_s:.0f} s"
        return LimitedCall(run, "driver").result_within(limit_s, lambda: SourceUnavailable(late))

    def _open_again(self) -> None:
        """Make a new driver: the connection of the old one may be lost, or in the middle of an answer."""
        old = self._filesystem
        with suppress(Exception):  # the next call fails, too, and is tried again
            self._filesystem = type(old)(*old.storage_args, **old.storage_options, skip_instance_cache=True)


def open_fsspec(uri: str) -> FsspecSource:
    """Open the source of a URL. Raises InvalidInput when no driver for it is installed."""
    with _translating(uri):
        try:
            return FsspecSource(fsspec.core.url_to_fs(uri)[0])
        except (ImportError, ValueError, TypeError) as error:  # TypeError: the driver needs an argument
            reason = " ".join(str(error).split())[:200]
            raise InvalidInput(f"{uri}: no driver for this kind of URL ({reason})") from error


def _states(filesystem: Any, method: str) -> bool:
    """Tell whether a driver has a method of its own: fsspec's own `ukey` is a digest of all of `info`, the time of the last
    access included."""
    return getattr(type(filesystem), method, None) is not getattr(AbstractFileSystem, method)


def _takes_threads(filesystem: Any) -> bool:
    """Tell whether threads may share a driver: those of fsspec's event loop, Arrow's, and the one in memory. Others may
    have one connection, as FTP's has, and are called by one thread at a time."""
    kinds = {kind.__name__ for kind in type(filesystem).__mro__}
    single = "AbstractFileSystem" in kinds and not getattr(filesystem, "async_impl", False)
    return not single or not kinds.isdisjoint(("ArrowFSWrapper", "MemoryFileSystem"))


def _utf8(name: str) -> bytes:
    try:
        return name.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"a file name is not UTF-8: {name!a}; rename it") from error


def _translating(uri: str) -> translating:
    return translating(Exception, lambda error: _translated(error, uri))


def _translated(error: Exception, uri: str) -> CacheError:
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return NotFound(f"{uri}: no such file or folder")
    if isinstance(error, PermissionError):
        return NotAllowed(f"{uri}: access refused; check the credentials of its driver")
    return SourceUnavailable(f"{uri}: {' '.join(str(error).split())[:300] or type(error).__name__}")


def _stated_version(info: dict[str, Any]) -> Any:
    """Return what a driver's `info` states as the version of a file; None for nothing."""
    for key in _VERSION_KEYS:
        if info.get(key):
            return info[key]
    for pattern in _VERSION_NAMES:
        for key in sorted(key for key in info if pattern.search(key)):
            if info[key] and isinstance(info[key], str | int | float | datetime):
                return info[key]
    return None
