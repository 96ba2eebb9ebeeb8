"""What a server says about the bytes of an object, compared with the bytes that came.

It can be compared only where a whole object came in one answer: S3's checksums and entity tags are of objects (or
of the parts in which they were uploaded), not of ranges. Of a larger object, read by ranges, a bit that flips on
the way is seen by TLS, and over plain HTTP by TCP's 16-bit sum alone.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import logging
import re
import threading
import zlib
from collections.abc import Callable

from cachesvc.core.errors import CorruptData, SourceUnavailable
from cachesvc.core.model import ObjectVersion

log = logging.getLogger(__name__)
Digest = Callable[[memoryview], bytes]
_SUSPECTS = 1024
_MD5 = re.compile(r"[0-9a-f]{32}")


def _crc32(data: memoryview) -> bytes:
    return zlib.crc32(data).to_bytes(4, "big")


def _crt(name: str, size_bytes: int) -> dict[str, Digest]:
    """The two that only the AWS runtime computes at speed; without it they are not checked."""
    try:
        from awscrt import checksums
    except ImportError:
        return {}
    compute = getattr(checksums, name, None)
    return {name: lambda data: compute(data).to_bytes(size_bytes, "big")} if compute else {}


STATED: dict[str, Digest] = {
    **_crt("crc64nvme", 8),
    **_crt("crc32c", 4),
    "crc32": _crc32,
    "sha1": lambda data: hashlib.sha1(data, usedforsecurity=False).digest(),
    "sha256": lambda data: hashlib.sha256(data).digest(),
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

    def check(self, version: ObjectVersion, headers: dict[str, str], data: memoryview) -> None:
        """Raises SourceUnavailable for bytes that do not match (they may come right the next time), and CorruptData
        when the same wrong bytes come twice: then they are stored like that."""
        for name, digest in STATED.items():
            expected = _stated(headers, name)
            if expected is not None:
                self._compare(version, expected, digest(data), name)
                return
        if self._tags_are_md5 is not False and _is_md5(version, headers, bool(self._tags_are_md5)):
            found = hashlib.md5(data, usedforsecurity=False).digest()
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


def _is_md5(version: ObjectVersion, headers: dict[str, str], known: bool) -> bool:
    """Whether the tag should be the body's MD5: one part, and not encrypted with a key of the user's."""
    sealed = headers.get("x-amz-server-side-encryption", "")
    if "x-amz-server-side-encryption-customer-algorithm" in headers or sealed not in ("", "AES256"):
        return False
    return bool(_MD5.fullmatch(version.etag)) and (known or not sealed)
