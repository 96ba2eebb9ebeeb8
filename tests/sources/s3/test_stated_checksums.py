"""Checksums and MD5 tags that a server states of an object, compared with its bytes; without a server."""

from __future__ import annotations

import base64
import hashlib
import zlib
from typing import Any

import pytest

from cachesvc.core.errors import CorruptData, SourceUnavailable
from cachesvc.core.model import ObjectVersion
from cachesvc.sources.s3.stated_checksums import StatedChecksums

GOOD, BAD = b"good bytes", b"bad bytes."
MD5 = hashlib.md5(GOOD).hexdigest()


def version(name: str = "x", tag: str = MD5, size_bytes: int = len(GOOD)) -> ObjectVersion:
    return ObjectVersion(f"s3://b/{name}", size_bytes, tag)


def crc(data: bytes) -> str:
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()


def check(
    checksums: StatedChecksums, data: bytes, found: ObjectVersion | None = None, **headers: str
) -> None:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    checksums.check(found or version(), named, (memoryview(data),))


def test_the_same_wrong_bytes_twice_in_a_row_are_corrupt() -> None:
    checksums = StatedChecksums(tags_are_md5=True)
    for data, error in ((BAD, SourceUnavailable), (GOOD, None), (BAD, SourceUnavailable), (BAD, CorruptData)):
        if error is None:
            check(checksums, data)
            continue
        with pytest.raises(error):
            check(checksums, data)


def test_the_memory_of_damaged_objects_is_bounded() -> None:
    checksums = StatedChecksums(tags_are_md5=True)
    for name in ("x", *map(str, range(1 << 12)), "x"):
        with pytest.raises(SourceUnavailable, match="damaged"):
            check(checksums, BAD, version(name))


def test_a_tag_that_equals_an_md5_shows_that_tags_are_md5s() -> None:
    checksums = StatedChecksums(tags_are_md5=False)
    check(checksums, GOOD)
    for error in (SourceUnavailable, CorruptData):
        with pytest.raises(error):
            check(checksums, BAD, version("y"))


def test_tags_that_are_no_md5s_are_not_compared_again() -> None:
    checksums = StatedChecksums(tags_are_md5=False)
    with pytest.raises(SourceUnavailable):
        check(checksums, BAD)
    assert checksums.worth_a_head(version())
    check(checksums, BAD)
    assert not checksums.worth_a_head(version())
    check(checksums, BAD, version("y"))


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    ("headers", "compared"),
    [
        ({}, "always"),
        ({"x_amz_server_side_encryption": "AES256"}, "known"),
        ({"x_amz_server_side_encryption": "aws:kms"}, "never"),
        ({"x_amz_server_side_encryption_customer_algorithm": "AES256"}, "never"),
    ],
)
def test_a_tag_is_compared_unless_the_object_may_be_encrypted(
    known: bool, headers: dict[str, Any], compared: str
) -> None:
    checksums = StatedChecksums(tags_are_md5=known)
    if compared == "always" or (compared == "known" and known):
        with pytest.raises(SourceUnavailable):
            check(checksums, BAD, **headers)
    else:
        check(checksums, BAD, **headers)


@pytest.mark.parametrize("said", ["no base64!", f"{crc(GOOD)}!", f"{crc(GOOD)}-2"])
def test_a_malformed_or_composite_checksum_is_not_compared(said: str) -> None:
    check(StatedChecksums(tags_are_md5=False), BAD, version(tag=""), x_amz_checksum_crc32=said)


@pytest.mark.parametrize(
    ("headers", "compared"),
    [
        ({"x_amz_checksum_crc32": crc(GOOD), "x_amz_checksum_type": "FULL_OBJECT"}, True),
        ({"x_amz_checksum_crc32": crc(GOOD), "x_amz_checksum_type": "COMPOSITE"}, False),
        ({"x_amz_checksum_crc32": f"{crc(GOOD)}-2"}, False),
        ({"x_amz_checksum_crc32": crc(GOOD)}, False),  # Garage states composite ones like this
        ({}, False),
    ],
)
def test_an_object_uploaded_in_parts_is_compared_with_a_full_object_checksum_alone(
    headers: dict[str, str], compared: bool
) -> None:
    checksums, parted = StatedChecksums(tags_are_md5=True), version(tag=f"{'0' * 32}-2")
    check(checksums, GOOD, parted, **headers)
    if compared:
        with pytest.raises(SourceUnavailable, match="its crc32 differs"):
            check(checksums, BAD, parted, **headers)
    else:
        check(checksums, BAD, parted, **headers)
