"""What is compared with what a server says of an object, and when it is believed; without a server."""

from __future__ import annotations

import base64
import hashlib
import zlib

import pytest

from cachesvc.core.errors import CorruptData, SourceUnavailable
from cachesvc.core.model import ObjectVersion
from cachesvc.sources.s3.digests import WholeObject, part_bytes_of
from cachesvc.sources.s3.http import Answer
from cachesvc.sources.s3.parts import UNTOLD, Parts, is_not_the_part, of_the_moment, part_at

GOOD, BAD = b"good bytes", b"bad bytes."
MD5 = hashlib.md5(GOOD).hexdigest()
MANY = 1 << 16


def version(name: str = "x", tag: str = MD5, size_bytes: int = len(GOOD)) -> ObjectVersion:
    return ObjectVersion(f"s3://b/{name}", size_bytes, tag)


def parted(count: int, size_bytes: int) -> ObjectVersion:
    return version(tag=f"{'0' * 32}-{count}", size_bytes=size_bytes)


def crc(data: bytes) -> str:
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()


def composite(*parts: bytes) -> str:
    return crc(b"".join(zlib.crc32(part).to_bytes(4, "big") for part in parts))


def check(whole: WholeObject, data: bytes, found: ObjectVersion | None = None, **headers: str) -> None:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    whole.check(found or version(), named, (memoryview(data),))


def test_a_range_is_no_part_of_an_object_of_another_count() -> None:
    """Of parts of 40, 40 and 20."""
    assert [part_at(parted(3, 100), at, size) for at, size in ((0, 40), (40, 40), (80, 20))] == [1, 2, 3]
    for at, size in ((20, 20), (0, 50), (50, 50), (0, 100), (60, 40), (81, 19), (40, 0), (100, 0), (0, 0)):
        assert part_at(parted(3, 100), at, size) == 0, (at, size)
    assert part_at(parted(2, 100), 50, 50) == 2
    assert part_at(parted(1, 100), 0, 100) == 0


@pytest.mark.parametrize(
    ("status", "span", "other"),
    [
        (206, "bytes 5-9/20", False),
        (206, "bytes 5-8/20", True),
        (206, "", True),
        (200, "bytes 5-9/20", True),
        (404, "", True),
        (501, "", True),
        (429, "", False),
        (503, "", False),
    ],
)
def test_an_answer_is_the_part_or_asks_for_patience_or_the_range_is_asked_for(
    status: int, span: str, other: bool
) -> None:
    assert is_not_the_part(Answer(status, {"content-range": span}, 5, False), 5, 5) == other


def test_which_errors_may_be_gone_at_the_next_try() -> None:
    assert [of_the_moment(status) for status in (500, 502, 503, 501, 404)] == [True, True, True, False, False]


def test_a_server_is_asked_for_parts_until_that_many_objects_in_a_row_say_nothing() -> None:
    parts = Parts()
    for _ in range(2 * UNTOLD):
        parts.told(version("one"), False)  # one object, whatever its parts
    assert not parts.worth_asking(version("one"))
    assert parts.worth_asking(version("two"))
    for number in range(UNTOLD - 1):
        parts.told(version(f"{number}"), False)
    assert not parts.worth_asking(version("two"))


def test_what_is_remembered_of_objects_is_bounded() -> None:
    parts = Parts()
    parts.told(version("silent"), False)
    for _ in range(UNTOLD):
        parts.failed(version("failed"))
    assert not parts.worth_asking(version("silent"))
    assert not parts.worth_asking(version("failed"))
    for number in range(MANY):
        parts.told(version(f"{number}"), False)
        parts.told(version("good"), True)
        parts.failed(version(f"{number}"))
    assert parts.worth_asking(version("silent"))
    assert parts.worth_asking(version("failed"))


def test_the_same_wrong_bytes_twice_in_a_row_are_what_is_stored() -> None:
    whole = WholeObject(tags_are_md5=True)
    for data, error in ((BAD, SourceUnavailable), (GOOD, None), (BAD, SourceUnavailable), (BAD, CorruptData)):
        if error is None:
            check(whole, data)
            continue
        with pytest.raises(error):
            check(whole, data)


def test_of_many_damaged_objects_some_are_read_once_more() -> None:
    whole = WholeObject(tags_are_md5=True)
    for name in ("x", *map(str, range(1024)), "x"):
        with pytest.raises(SourceUnavailable, match="damaged"):
            check(whole, BAD, version(name))


def test_a_tag_that_was_an_md5_once_shows_what_tags_are() -> None:
    whole = WholeObject(tags_are_md5=False)
    check(whole, GOOD)
    for error in (SourceUnavailable, CorruptData):
        with pytest.raises(error):
            check(whole, BAD, version("y"))


def test_tags_that_are_none_are_looked_at_no_more() -> None:
    whole = WholeObject(tags_are_md5=False)
    with pytest.raises(SourceUnavailable):
        check(whole, BAD)
    assert whole.checks(version())
    check(whole, BAD)
    assert not whole.checks(version())
    check(whole, BAD, version("y"))


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
def test_a_tag_is_compared_unless_a_key_may_have_made_it(
    known: bool, headers: dict[str, str], compared: str
) -> None:
    whole = WholeObject(tags_are_md5=known)
    if compared == "always" or (compared == "known" and known):
        with pytest.raises(SourceUnavailable):
            check(whole, BAD, **headers)
    else:
        check(whole, BAD, **headers)


@pytest.mark.parametrize("said", ["no base64!", f"{crc(GOOD)}!", f"{crc(GOOD)}-2"])
def test_what_is_no_checksum_of_the_bytes_is_not_compared(said: str) -> None:
    check(WholeObject(tags_are_md5=False), BAD, version(tag=""), x_amz_checksum_crc32=said)


def test_a_checksum_of_an_object_of_parts_counts_where_it_says_of_what_it_is() -> None:
    found, parts = parted(2, 10), (GOOD[:6], GOOD[6:])
    whole = WholeObject(tags_are_md5=False)
    check(whole, BAD, found, x_amz_checksum_crc32=crc(GOOD))
    with pytest.raises(SourceUnavailable):
        check(whole, BAD, found, x_amz_checksum_crc32=crc(GOOD), x_amz_checksum_type="FULL_OBJECT")
    check(whole, GOOD, found, x_amz_checksum_crc32=crc(GOOD), x_amz_checksum_type="FULL_OBJECT")
    said = {"x-amz-checksum-crc32": f"{composite(*parts)}-2"}
    whole.check(found, said, (memoryview(BAD),))  # nobody knows the size of its parts
    whole.check(found, said, (memoryview(GOOD),), part_bytes=6)
    for error in (SourceUnavailable, CorruptData):
        with pytest.raises(error):
            whole.check(found, said, (memoryview(BAD),), part_bytes=6)
    assert whole.by_parts(found, said)
    assert not whole.by_parts(version(), {"x-amz-checksum-crc32": f"{composite(*parts)}-2"})
    full = {"x-amz-checksum-crc32": crc(GOOD), "x-amz-checksum-type": "FULL_OBJECT"}
    assert not whole.by_parts(found, full)


def test_an_object_of_one_part_is_compared_by_the_size_that_it_has() -> None:
    found, said = parted(1, 10), {"x-amz-checksum-crc32": f"{composite(GOOD)}-1"}
    whole = WholeObject(tags_are_md5=False)
    whole.check(found, said, (memoryview(GOOD),))
    with pytest.raises(SourceUnavailable):
        whole.check(found, said, (memoryview(BAD),))
    assert part_bytes_of(found, {}) == 10


def test_parts_whose_sizes_may_differ_are_read_as_they_come_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found, said = parted(3, 10), {"x-amz-checksum-crc32": f"{composite(GOOD)}-3"}
    whole = WholeObject(tags_are_md5=False)
    for name in ("x", "y"):
        one = ObjectVersion(f"s3://b/{name}", found.size_bytes, found.etag)
        with pytest.raises(SourceUnavailable):
            whole.check(one, said, (memoryview(BAD),), part_bytes=4)
        whole.check(one, said, (memoryview(BAD),), part_bytes=4)
    assert caplog.text.count("read as it comes") == 1


def test_a_part_that_does_not_match_twice_is_taken_and_one_without_a_checksum_says_so() -> None:
    whole, said = WholeObject(tags_are_md5=True), {"x-amz-checksum-crc32": crc(GOOD)}
    assert whole.check_part(version(), 1, said, memoryview(GOOD))
    assert not whole.check_part(version(), 1, {}, memoryview(BAD))
    with pytest.raises(SourceUnavailable, match="part 2 of"):
        whole.check_part(version(), 2, said, memoryview(BAD))
    assert not whole.check_part(version(), 2, said, memoryview(BAD))
    assert not whole.check_part(version(), 2, said, memoryview(BAD)), "and so it stays"


@pytest.mark.parametrize(
    ("count", "size", "span", "part_bytes"),
    [
        (2, 100, "bytes 60-99/100", 60),
        (3, 100, "bytes 40-79/100", 40),
        (3, 100, "bytes 50-79/100", 0),
        (3, 100, "bytes 40-69/100", 0),
        (3, 100, "bytes 40-79/101", 0),
        (4, 100, "bytes 40-79/100", 0),
        (2, 100, "bytes 0-99/100", 0),
        (2, 100, "bytes 30-99/100", 0),
        (2, 100, "", 0),
    ],
)
def test_the_size_of_parts_is_told_by_the_second_one(
    count: int, size: int, span: str, part_bytes: int
) -> None:
    assert part_bytes_of(parted(count, size), {"content-range": span}) == part_bytes
