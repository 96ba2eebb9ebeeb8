"""Compares the bytes of an object with the checksum or MD5 entity tag that its server states.

S3 states these of whole objects, never of ranges. An object that comes in one response is compared with the headers of
that response. An object read by ranges over plain HTTP is compared, once it is complete, with the headers of a HEAD; over
TLS a flipped bit breaks the connection. Nothing is compared where no extent holds the whole object, or where an object
was uploaded in parts and the server states no full-object checksum: over plain HTTP these have TCP's 16-bit sum alone.
https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity-upload.html
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import logging
import re
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from cachesvc.core.errors import CorruptData, SourceUnavailable
from cachesvc.core.model import ObjectVersion
from cachesvc.sources.s3.responses import RepeatedFaults

log = logging.getLogger(__name__)
_MD5 = re.compile(r"[0-9a-f]{32}")
_TAG = re.compile(r"[0-9a-f]{32}(-[1-9][0-9]{0,4})?")
"""An MD5, or what S3 writes for an upload in parts: the MD5 of their MD5s and their number."""


class _Hash(Protocol):
    """The methods of hashlib's objects that are used here."""

    def update(self, data: memoryview, /) -> None: ...

    def digest(self) -> bytes: ...


class _Crc:
    """A cyclic redundancy check in S3's byte order. `compute(data, crc_before)` returns the next value."""

    def __init__(self, compute: Callable[[memoryview, int], int], size_bytes: int) -> None:
        self._compute, self._size_bytes, self._value = compute, size_bytes, 0

    def update(self, data: memoryview, /) -> None:
        self._value = self._compute(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(self._size_bytes, "big")


def _from_awscrt(name: str, size_bytes: int) -> dict[str, Callable[[], _Hash]]:
    """A CRC that only the AWS runtime computes fast; empty where that is not installed."""
    try:
        from awscrt import checksums
    except ImportError:
        return {}
    compute = getattr(checksums, name, None)
    return {name: partial(_Crc, compute, size_bytes)} if compute else {}


ALGORITHMS: dict[str, Callable[[], _Hash]] = {
    **_from_awscrt("crc64nvme", 8),
    **_from_awscrt("crc32c", 4),
    "crc32": partial(_Crc, zlib.crc32, 4),
    "sha1": partial(hashlib.sha1, usedforsecurity=False),
    "sha256": hashlib.sha256,
}
"""S3's additional checksums that are compared, the cheapest first."""


class StatedChecksums:
    """Compares whole objects of one server with what it states of them. Thread-safe.

    `tags_are_md5`: true if this is known of the server. Otherwise the first object decides: its entity tag equals the
    MD5 of its bytes, or it differs from the MD5 of the same bytes read twice, as tags of encrypted objects do.
    """

    def __init__(self, tags_are_md5: bool) -> None:
        self._tags_are_md5: bool | None = tags_are_md5 or None
        self._repeated = RepeatedFaults()

    def worth_a_head(self, version: ObjectVersion) -> bool:
        """Tell whether a HEAD may state something to compare."""
        return self._tags_are_md5 is not False and bool(_TAG.fullmatch(version.etag))

    def check(self, version: ObjectVersion, headers: dict[str, str], data: Iterable[memoryview]) -> None:
        """Compare all bytes of an object, in order, with the first checksum that `headers` state, else with an MD5 tag.

        Raises SourceUnavailable for bytes that differ, since the next read may bring the right ones, and CorruptData when
        the same wrong bytes come twice in a row: then they are stored like that.
        """
        for name, algorithm in ALGORITHMS.items():
            if expected := _full_object_checksum(version, headers, name):
                return self._compare(version.uri, expected, _digest(algorithm(), data), name)
        encrypted = _encrypted(headers, bool(self._tags_are_md5))
        if self._tags_are_md5 is not False and _MD5.fullmatch(version.etag) and not encrypted:
            found = _digest(hashlib.md5(usedforsecurity=False), data)
            self._compare(version.uri, bytes.fromhex(version.etag), found, "MD5")

    def _compare(self, uri: str, expected: bytes, found: bytes, name: str) -> None:
        if found == expected:
            self._tags_are_md5 = True if name == "MD5" else self._tags_are_md5
            return self._repeated.succeeded(uri, 0)
        if not self._repeated.failed(uri, 0, found):
            raise SourceUnavailable(f"{uri} arrived damaged: its {name} differs")
        self._repeated.succeeded(uri, 0)
        if name == "MD5" and self._tags_are_md5 is None:
            self._tags_are_md5 = False
            log.warning("entity tags of this server are no MD5: they are not checked")
            return None
        raise CorruptData(f"{uri} does not match its own {name}; write the object again")


def _full_object_checksum(version: ObjectVersion, headers: dict[str, str], name: str) -> bytes:
    """The stated checksum of all bytes; empty where none is stated. Composite checksums of parts have the type COMPOSITE or
    end in "-12". Garage's are composite and say neither, so an object uploaded in parts must state FULL_OBJECT."""
    kind = headers.get("x-amz-checksum-type", "").upper()
    if kind == "COMPOSITE" or (kind != "FULL_OBJECT" and not _in_one_part(version)):
        return b""
    try:
        return base64.b64decode(headers.get(f"x-amz-checksum-{name}", ""), validate=True)
    except binascii.Error:  # no checksum, or a composite one: "-" is not in the alphabet
        return b""


def _in_one_part(version: ObjectVersion) -> bool:
    """Tell whether the tag does not say that the object was uploaded in parts."""
    tag = _TAG.fullmatch(version.etag)
    return tag is None or tag[1] is None


def _encrypted(headers: dict[str, str], tags_are_md5: bool) -> bool:
    """Tell whether encryption may have made the tag something else than an MD5: a customer's key always does, the server's
    own (AES256) unless `tags_are_md5` is known."""
    server_side = headers.get("x-amz-server-side-encryption", "")
    customer_key = "x-amz-server-side-encryption-customer-algorithm" in headers
    return customer_key or server_side not in ("", "AES256") or bool(server_side and not tags_are_md5)


def _digest(begun: _Hash, data: Iterable[memoryview]) -> bytes:
    for piece in data:
        begun.update(piece)
    return begun.digest()
