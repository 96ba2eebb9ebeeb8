"""What a server says about the bytes of an object, compared with the bytes that came.

S3's checksums and entity tags are of whole objects, or of the digests of the parts in which they were uploaded, not of
ranges. What came in one answer, a part too, is compared with what that answer says. What was read by ranges is compared
over plain HTTP, when all of it is there, with what HEADs say, where the tag may be of MD5s; TLS has seen a bit that flipped
already. An object that no single extent holds, and that is not read by parts, has over plain HTTP TCP's 16-bit sum alone.
https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity-upload.html
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
_SPAN = re.compile(r"bytes ([0-9]{1,15})-([0-9]{1,15})/([0-9]{1,15})")
_TAG = re.compile(r"([0-9a-f]{32})(?:-([1-9][0-9]{0,4}))?")


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


class _OfParts:
    """A composite: the digest of the digests of parts of so many bytes each, the last one shorter."""

    def __init__(self, begin: Callable[[], _Hash], part_bytes: int) -> None:
        self._begin, self._part_bytes = begin, part_bytes
        self._whole, self._part, self._left = begin(), begin(), part_bytes

    def update(self, data: memoryview, /) -> None:
        while len(data):
            if not self._left:
                self._whole.update(memoryview(self._part.digest()))
                self._part, self._left = self._begin(), self._part_bytes
            taken = data[: self._left]
            self._part.update(taken)
            data, self._left = data[len(taken) :], self._left - len(taken)

    def digest(self) -> bytes:
        self._whole.update(memoryview(self._part.digest()))
        return self._whole.digest()


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
        self._warned = False
        self._lock = threading.Lock()

    def checks(self, version: ObjectVersion) -> bool:
        """Whether the tag may be of MD5s, so that it is worth a HEAD to learn what it is."""
        return self._tags_are_md5 is not False and bool(_TAG.fullmatch(version.etag))

    def by_parts(self, version: ObjectVersion, headers: dict[str, str]) -> bool:
        """Whether only who knows the size of its parts can compare it with what is said of it."""
        stated = [_stated(version, headers, name) for name in STATED]
        composites = [composite for expected, composite in stated if expected]
        said = bool(composites) or self._tag(version, headers) is not None
        return parts_of(version) > 0 and said and all(composites)

    def check(
        self, version: ObjectVersion, headers: dict[str, str], data: Iterable[memoryview], part_bytes: int = 0
    ) -> None:
        """`part_bytes` of an object that was uploaded in parts of that size; 0 where that is not known.

        Raises SourceUnavailable for bytes that do not match (they may come right the next time), and CorruptData when
        the same wrong bytes come twice: then they are stored like that. Of parts whose sizes may differ nobody can tell
        that: they are read as they come then, with a warning.
        """
        for name, begin in STATED.items():
            expected, composite = _stated(version, headers, name)
            size_bytes = part_bytes or (version.size_bytes if parts_of(version) == 1 else 0)
            if expected and (size_bytes or not composite):
                begin = partial(_OfParts, begin, size_bytes) if composite else begin
                unsure = composite and parts_of(version) > 2
                self._compare(version.uri, expected, _digest(begin(), data), name, unsure)
                return
        tag = self._tag(version, headers)
        if tag and (part_bytes or not tag[2]):
            begin = partial(hashlib.md5, usedforsecurity=False)
            begin = partial(_OfParts, begin, part_bytes) if tag[2] else begin
            self._compare(version.uri, bytes.fromhex(tag[1]), _digest(begin(), data), "MD5", bool(tag[2]))

    def check_part(
        self, version: ObjectVersion, number: int, headers: dict[str, str], data: memoryview
    ) -> bool:
        """Of a part, whether its checksum was stated and is that of its bytes. Raises SourceUnavailable for bytes that do
        not match. The same bytes a second time are taken, with a warning: servers stated the object's for its parts."""
        for name, begin in STATED.items():
            expected = _decoded(headers.get(f"x-amz-checksum-{name}", ""))
            if expected:
                what = f"part {number} of {version.uri}"
                return self._compare(what, expected, _digest(begin(), (data,)), name, unsure=True)
        return False

    def _tag(self, version: ObjectVersion, headers: dict[str, str]) -> re.Match[str] | None:
        """Of MD5s, as far as is known."""
        checked = self.checks(version) and not _encrypted(headers, bool(self._tags_are_md5))
        return _TAG.fullmatch(version.etag) if checked else None

    def _compare(self, what: str, expected: bytes, found: bytes, name: str, unsure: bool) -> bool:
        tag = name == "MD5" and not unsure
        with self._lock:
            before = self._suspects.pop(what, None)
            if found == expected:
                self._tags_are_md5 = True if tag else self._tags_are_md5
                return True
            if before != found or unsure:
                if len(self._suspects) >= _SUSPECTS:
                    self._suspects.clear()
                self._suspects[what] = found
            if before != found:
                raise SourceUnavailable(f"{what} arrived damaged: its {name} differs")
            if tag and self._tags_are_md5 is None:
                self._tags_are_md5 = False
                log.warning("entity tags of this server are no MD5: they are not checked")
                return False
            warned, self._warned = self._warned, self._warned or unsure
        if not unsure:
            raise CorruptData(f"{what} does not match its own {name}; write the object again")
        if not warned:
            log.warning("%s is not what the %s of parts says: it is read as it comes", what, name)
        return False


def parts_of(version: ObjectVersion) -> int:
    """In how many parts it was uploaded, by its tag; 0 where that says nothing of parts."""
    tag = _TAG.fullmatch(version.etag)
    return int(tag[2] or 0) if tag else 0


def part_bytes_of(version: ObjectVersion, second: dict[str, str]) -> int:
    """Bytes of each of its parts but the last, by the headers of a HEAD of the second one; 0 where that is not told, or
    their sizes are seen to differ."""
    count = parts_of(version)
    if count == 1:
        return version.size_bytes
    found = _SPAN.fullmatch(second.get("content-range", ""))
    first, last, size = (int(each) for each in found.groups()) if found else (0, 0, 0)
    alike = first > 0 and size == version.size_bytes and (count == 2 or last + 1 == 2 * first)
    return first if alike and -(-size // first) == count else 0


def _stated(version: ObjectVersion, headers: dict[str, str], name: str) -> tuple[bytes, bool]:
    """A checksum, none where it is empty, and whether it is one of its parts' checksums. Of an object of parts it says
    which, by its type or "-12" behind it, or nothing: Garage's are of parts, and say neither."""
    text, _, parts = headers.get(f"x-amz-checksum-{name}", "").partition("-")
    kind = headers.get("x-amz-checksum-type", "").upper()
    composite = bool(parts) or kind == "COMPOSITE"
    if parts_of(version) and not composite and kind != "FULL_OBJECT":
        return b"", False
    return _decoded(text), composite


def _decoded(text: str) -> bytes:
    """Nothing, where it is no checksum, or one of checksums ("-12" behind it)."""
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        return b""


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
