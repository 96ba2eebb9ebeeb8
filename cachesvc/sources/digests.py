"""What a server says about the bytes of an object, compared with the bytes that came.

S3's checksums and entity tags are of whole objects (or of the parts in which they were uploaded), not of ranges. What
came in one answer is compared with what that answer says. What was read by ranges is compared over plain HTTP, when
all of it is there, with what a HEAD says, where the tag may be an MD5; TLS has seen a bit that flipped already. An
object that was uploaded in parts, or that no single extent holds, has over plain HTTP TCP's 16-bit sum alone.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import logging
import re
import threading
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from cachesvc.core.errors import CorruptData, SourceUnavailable
from cachesvc.core.model import ObjectVersion

log = logging.getLogger(__name__)
_SUSPECTS = 1024
_MD5 = re.compile(r"[0-9a-f]{32}")


class _Hash(Protocol):
    """As hashlib's."""

    def update(self, data: memoryview, /) -> None: ...

    def digest(self) -> bytes: ...


class _Crc:
    """A cyclic redundancy check, as S3 writes it; `compute(data, of what came before)`."""

    def __init__(self, compute: Callable[[memoryview, int], int], size_bytes: int) -> None:
        self._compute, self._size_bytes, self._value = compute, size_bytes, 0

    def update(self, data: memoryview, /) -> None:
        self._value = self._compute(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(self._size_bytes, "big")


def _crt(name: str, size_bytes: int) -> dict[str, Callable[[], _Hash]]:
    """The two that only the AWS runtime computes at speed; without it they are not checked."""
    try:
        from awscrt import checksums
    except ImportError:
        return {}
    compute = getattr(checksums, name, None)
    return {name: partial(_Crc, compute, size_bytes)} if compute else {}


STATED: dict[str, Callable[[], _Hash]] = {
    **_crt("crc64nvme", 8),
    **_crt("crc32c", 4),
    "crc32": partial(_Crc, zlib.crc32, 4),
    "sha1": partial(hashlib.sha1, usedforsecurity=False),
    "sha256": hashlib.sha256,
}
"""Additional checksums of S3 that are checked, the cheapest first."""


class WholeObject:
    """Checks whole objects as they arrive; of one server, for many threads.

    `tags_are_md5`: known of this server. Elsewhere the first tag that is an MD5 shows it; a server where none is, and
    that sends the same bytes twice, has tags of another kind (encrypted objects, for example).
    """

    def __init__(self, tags_are_md5: bool) -> None:
        self._tags_are_md5: bool | None = tags_are_md5 or None
        self._suspects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def checks(self, version: ObjectVersion) -> bool:
        """Whether the tag may be an MD5, so that it is worth a HEAD to learn what it is."""
        return self._tags_are_md5 is not False and bool(_MD5.fullmatch(version.etag))

    def check(self, version: ObjectVersion, headers: dict[str, str], data: Iterable[memoryview]) -> None:
        """Raises SourceUnavailable for bytes that do not match (they may come right the next time), and CorruptData
        when the same wrong bytes come twice: then they are stored like that."""
        for name, begin in STATED.items():
            expected = _stated(headers, name)
            if expected is not None:
                self._compare(version, expected, _digest(begin(), data), name)
                return
        if self.checks(version) and not _encrypted(headers, bool(self._tags_are_md5)):
            found = _digest(hashlib.md5(usedforsecurity=False), data)
            self._compare(version, bytes.fromhex(version.etag), found, "MD5")

    def _compare(self, version: ObjectVersion, expected: bytes, found: bytes, name: str) -> None:
        tag = name == "MD5"
        with self._lock:
            before = self._suspects.pop(version.uri, None)
            if found == expected:
                self._tags_are_md5 = True if tag else self._tags_are_md5
                return
            if before != found:
                if len(self._suspects) >= _SUSPECTS:
                    self._suspects.clear()
                self._suspects[version.uri] = found
                raise SourceUnavailable(f"{version.uri} arrived damaged: its {name} differs")
            if tag and self._tags_are_md5 is None:
                self._tags_are_md5 = False
                log.warning("entity tags of this server are no MD5: they are not checked")
                return
        raise CorruptData(f"{version.uri} does not match its own {name}; write the object again")


def _stated(headers: dict[str, str], name: str) -> bytes | None:
    """A checksum of the whole object; one of its parts' checksums ("...-12") says nothing about its bytes."""
    text = headers.get(f"x-amz-checksum-{name}", "")
    if not text or "-" in text or headers.get("x-amz-checksum-type", "").upper() == "COMPOSITE":
        return None
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        return None


def _encrypted(headers: dict[str, str], known: bool) -> bool:
    """Whether the tag is no MD5 because of a key of the user's; with the server's own it is one where tags are `known`
    to be."""
    sealed = headers.get("x-amz-server-side-encryption", "")
    own = "x-amz-server-side-encryption-customer-algorithm" in headers or sealed not in ("", "AES256")
    return own or bool(sealed and not known)


def _digest(begun: _Hash, data: Iterable[memoryview]) -> bytes:
    for piece in data:
        begun.update(piece)
    return begun.digest()
