"""Servers with one unusual habit each, which is neither an outage nor an overwrite: read, or one clear error at once."""

from __future__ import annotations

import gzip
import hashlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from cachesvc.core.errors import (
    CacheError,
    CorruptData,
    InvalidInput,
    NotAllowed,
    NotFound,
    SourceChanged,
    SourceUnavailable,
)
from cachesvc.core.model import ObjectVersion
from cachesvc.sources.fetch import PART_BYTES
from cachesvc.sources.resilient import Resilience, Resilient
from cachesvc.sources.s3.responses import same_tag
from cachesvc.sources.s3.s3 import S3Source
from loader import DataLoader, open_dataset
from testbed import WAIT_S
from testbed.node import Daemon
from tests.support.clock import Clock
from tests.support.faults.fake_s3 import FakeS3, Object
from tests.support.faults.s3_answers import DATA, put
from tests.support.reads import read

STORED = gzip.compress(b"the same line, again and again\n" * 3000, mtime=0)
MOST = 8
"""The most requests until a reader gets the error: two tries of two requests, and the HEADs and LISTs that decide."""


def listed(source: S3Source) -> ObjectVersion:
    (found,) = source.list("s3://bucket/")
    return found


def patient(source: S3Source) -> Resilient:
    return Resilient(source, Resilience(), clock := Clock(), sleep=clock.sleep)


def decodes_unless_told(handler: BaseHTTPRequestHandler) -> bool:
    return "gzip" not in handler.headers.get("Accept-Encoding", "")


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("way", ["stored", "decoded"])
def test_an_encoding_that_the_name_does_not_say_is_an_error_that_names_it(
    fake: FakeS3, source: S3Source, named: bool, way: str
) -> None:
    put(fake, STORED, key="x.jsonl")
    fake.decodes = decodes_unless_told if way == "decoded" else lambda handler: False
    fake.names_encoding = named
    for size in (len(STORED), 50):
        with pytest.raises(CorruptData, match="stored with Content-Encoding: gzip"):
            read(source, listed(source), 0, size)


@pytest.mark.parametrize("named", [False, True])
def test_an_object_with_a_content_encoding_is_read_as_it_is_stored(
    fake: FakeS3, source: S3Source, named: bool
) -> None:
    put(fake, STORED, key="x.gz")
    fake.decodes, fake.names_encoding = decodes_unless_told, named
    version = listed(source)
    assert read(source, version) == STORED
    assert read(source, version, 7, 50) == STORED[7:57]
    assert fake.asked == ["LIST", "GET", "GET", "GET"]


def test_decoded_bytes_of_the_stored_length_are_not_accepted(fake: FakeS3, source: S3Source) -> None:
    data = os.urandom(50)
    while len(gzip.compress(data, mtime=0)) != len(data):
        data = data[:-1] + b"a" * (1 + len(gzip.compress(data, mtime=0)) - len(data))
    version = put(fake, gzip.compress(data, mtime=0), key="x.gz")
    fake.decodes, fake.names_encoding = decodes_unless_told, True
    assert read(source, version) == gzip.compress(data, mtime=0)


@pytest.mark.parametrize("span", [(0, len(STORED)), (5, 10)])
def test_a_server_that_always_decodes_is_an_error_that_names_the_encoding(
    fake: FakeS3, source: S3Source, span: tuple[int, int]
) -> None:
    version = put(fake, STORED, key="x.gz")
    fake.decodes, fake.names_encoding = lambda handler: True, True
    with pytest.raises(CorruptData, match="stored with Content-Encoding: gzip, and the server decodes it"):
        read(source, version, *span)
    assert fake.asked == ["GET", "GET", "HEAD"]


def test_a_server_that_decodes_without_stating_it_is_an_error_after_two_reads(
    fake: FakeS3, source: S3Source
) -> None:
    version = put(fake, STORED, key="x.gz")
    fake.decodes = lambda handler: handler.command == "GET"
    with pytest.raises(CorruptData, match="Content-Encoding: gzip"):
        read(source, version)
    fake.decodes, fake.asked = lambda handler: True, []
    with pytest.raises(CorruptData, match="twice, and its HEAD says otherwise"):
        patient(source).read_into(version, 3, memoryview(bytearray(5)))
    assert len(fake.asked) <= MOST


@pytest.mark.parametrize(
    "tag",
    [
        lambda where, etag: f'W/"{etag}"',
        lambda where, etag: f'"{etag}"' if where == "LIST" else f'W/"{etag}"',
        lambda where, etag: f'W/"{etag}"' if where == "LIST" else f'"{etag}"',
        lambda where, etag: f'"{etag.upper()}"' if where == "LIST" else f'"{etag}"',
        lambda where, etag: f'"{etag}"' if where == "LIST" else f'"{etag.upper()}"',
        lambda where, etag: etag if where == "LIST" else f'"{etag}"',
        lambda where, etag: f'"{etag}"' if where == "LIST" else etag,
        lambda where, etag: f'"{etag}"' if where != "GET" else f'W/"{etag}"',
    ],
)
def test_differently_written_tags_are_the_same_version(
    fake: FakeS3, source: S3Source, tag: Callable[[str, str], str]
) -> None:
    put(fake, DATA)
    fake.tag = tag
    version = listed(source)
    assert read(source, version) == DATA
    assert read(source, version, 5, 9) == DATA[5:14]
    check = source.checker(version)
    if check is not None:
        check([memoryview(DATA)])
    assert len(fake.asked) <= 6, "If-Match is given up once, not for each read"
    put(fake, DATA[::-1])
    with pytest.raises(SourceChanged, match="overwritten; open the dataset again"):
        read(source, version)


def test_concurrent_first_reads_with_weak_tags_are_sent_twice_each(fake: FakeS3, source: S3Source) -> None:
    version = put(fake, DATA)
    fake.tag = lambda where, etag: f'W/"{etag}"'
    together = threading.Barrier(8)

    def refuse(handler: BaseHTTPRequestHandler) -> None:
        if "If-Match" in handler.headers:
            together.wait(WAIT_S)

    fake.refuse = refuse
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda _: read(source, version), range(8))) == [DATA] * 8
    assert sorted(fake.asked) == ["GET"] * 16 + ["HEAD"] * 8


def test_tags_are_compared_without_their_syntax() -> None:
    md5 = hashlib.md5(b"x").hexdigest()
    assert same_tag(f'W/"{md5}"', md5.upper())
    assert same_tag(f'"{md5}-12"', f"{md5.upper()}-12")
    assert not same_tag(f"{md5}-12", f"{md5}-1")
    assert not same_tag("0x8DabC", "0x8Dabc")
    assert not same_tag('"aBc"', '"abc"')
    assert not same_tag("", md5)


def test_a_tag_that_only_listings_have_is_no_overwrite(fake: FakeS3, source: S3Source) -> None:
    put(fake, DATA)
    fake.tag = lambda where, etag: f'"{etag}"' if where == "LIST" else f'"{etag}-other"'
    version = listed(source)
    with pytest.raises(CorruptData, match="its version is unknown"):
        read(source, version)
    assert fake.asked == ["LIST", "GET", "HEAD", "LIST"]


def test_a_tag_that_only_a_get_has_is_no_overwrite(fake: FakeS3, source: S3Source) -> None:
    version = put(fake, DATA)
    fake.tag = lambda where, etag: f'"{etag}-gzip"' if where == "GET" else f'"{etag}"'
    with pytest.raises(CorruptData, match="twice, and its HEAD says otherwise"):
        patient(source).read_into(version, 0, memoryview(bytearray(version.size_bytes)))
    assert len(fake.asked) <= MOST


def test_another_length_than_listed_is_an_overwrite(fake: FakeS3, source: S3Source) -> None:
    version = put(fake, DATA, etag="constant")
    put(fake, DATA + b"more", etag="constant")
    for span in [(0, len(DATA)), (5, 10)]:
        with pytest.raises(SourceChanged, match="overwritten"):
            patient(source).read_into(version, span[0], memoryview(bytearray(span[1])))
    assert len(fake.asked) <= 2 * MOST


def test_a_server_that_ignores_ranges_is_no_outage(fake: FakeS3, source: S3Source) -> None:
    version = put(fake, DATA)

    def refuse(handler: BaseHTTPRequestHandler) -> None:
        del handler.headers["Range"]

    fake.refuse = refuse
    with pytest.raises(CorruptData, match="ignored the byte range"):
        patient(source).read_into(version, 5, memoryview(bytearray(10)))
    assert len(fake.asked) <= MOST
    assert read(source, version) == DATA


@pytest.mark.parametrize("count", [1_000, 2_500, 3_000])
def test_a_server_that_lists_by_version_1_is_listed_by_version_1(
    fake: FakeS3, source: S3Source, count: int
) -> None:
    fake.version_1 = True
    fake.objects = {f"p/{number:06} &": Object(1, "e") for number in range(count)}
    found = [version.uri for version in source.list("s3://bucket/p/")]
    assert found == [f"s3://bucket/p/{number:06} &" for number in range(count)]
    assert len(fake.asked) == -(-count // 1000)


@pytest.mark.parametrize(
    ("status", "code", "kind", "says"),
    [
        (403, "AccessDenied", NotAllowed, "check the credentials"),
        (403, "InvalidObjectState", NotAllowed, "archived: restore it"),
        (403, "RequestTimeTooSkewed", NotAllowed, "this machine's clock is wrong"),
        (400, "InvalidToken", NotAllowed, "check the credentials"),
        (400, "KMS.DisabledException", NotAllowed, "enable the KMS key"),
        (400, "InvalidRequest", NotAllowed, "SSE-C"),
        (400, "InvalidArgument", NotAllowed, "the server refuses this request"),
        (405, "MethodNotAllowed", NotAllowed, "the server refuses this request"),
        (501, "NotImplemented", NotAllowed, "the server refuses this request"),
        (301, "PermanentRedirect", InvalidInput, "set AWS_REGION"),
        (307, "TemporaryRedirect", InvalidInput, "set AWS_REGION"),
        (404, "NoSuchBucket", NotFound, "its bucket does not exist"),
    ],
)
def test_a_permanent_refusal_is_requested_once(
    fake: FakeS3, source: S3Source, status: int, code: str, kind: type[CacheError], says: str
) -> None:
    version = put(fake, DATA)
    fake.refuse = lambda handler: (status, code)
    with pytest.raises(kind, match=says) as caught:
        patient(source).read_into(version, 0, memoryview(bytearray(version.size_bytes)))
    assert fake.asked == ["GET"]
    assert "\n" not in str(caught.value)


def test_a_policy_that_allows_lists_below_a_prefix_alone(fake: FakeS3, source: S3Source) -> None:
    fake.objects = {f"team/data/{number}": Object(1, "e") for number in range(3)}

    def refuse(handler: BaseHTTPRequestHandler) -> tuple[int, str] | None:
        asked = parse_qs(urlsplit(handler.path).query).get("prefix", [""])[0]
        listed = fake.asked[-1] == "LIST" and not asked.startswith("team/data/")
        absent = fake.asked[-1] == "HEAD" and not handler.path.startswith("/bucket/team/data/")
        return (403, "AccessDenied") if listed or absent else None

    fake.refuse = refuse
    for uri in ("s3://bucket/team/data/", "s3://bucket/team/data"):
        assert len(list(source.list(uri))) == 3
    for uri in ("s3://bucket/team/", "s3://bucket/team"):
        with pytest.raises(NotAllowed):
            list(source.list(uri))


def test_a_policy_that_allows_reads_alone_opens_exact_names(fake: FakeS3, source: S3Source) -> None:
    fake.objects = {"d/x": Object(len(DATA), "e", data=DATA)}
    fake.refuse = lambda handler: (403, "AccessDenied") if fake.asked[-1] == "LIST" else None
    (version,) = source.list("s3://bucket/d/x")
    assert read(source, version) == DATA
    fake.objects = {"d/x": Object(len(DATA), "other", data=DATA)}
    with pytest.raises(SourceChanged):
        read(source, version)
    with pytest.raises(NotAllowed):
        list(source.list("s3://bucket/d"))


@pytest.mark.parametrize("page", ["<html><body>Log in</body></html>", "<html><br>Just a moment"])
def test_a_proxys_web_page_is_not_an_empty_listing(fake: FakeS3, source: S3Source, page: str) -> None:
    fake.listing = page
    with pytest.raises(SourceUnavailable, match=r"a web page \(.*AWS_ENDPOINT_URL"):
        list(patient(source).list("s3://bucket/d/"))


@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_a_lone_listing_or_read_outlasts_an_outage_of_a_hundred_seconds(
    fake: FakeS3, source: S3Source, status: int
) -> None:
    version, clock, back_at = put(fake, DATA), Clock(), 100.0
    patient = Resilient(source, Resilience(), clock, sleep=clock.sleep)
    fake.refuse = lambda handler: (status, "Error") if clock.now < back_at else None
    assert list(patient.list("s3://bucket/")) == [version]
    assert len(fake.asked) < 60, "one layer of retries"
    back_at = clock.now + 100
    assert patient.head(version.uri) == version


def test_each_page_of_a_listing_may_fail(fake: FakeS3, source: S3Source) -> None:
    fake.objects = {f"p/{number:06}": Object(number, f"e{number}") for number in range(5_000)}
    fake.refuse = lambda handler: (500, "InternalError") if fake.requests % 2 else None
    assert len(list(patient(source).list("s3://bucket/p/"))) == 5_000
    assert fake.asked == ["LIST"] * 10


def test_a_proxys_web_page_is_not_an_overwrite(fake: FakeS3, source: S3Source) -> None:
    version = put(fake, DATA)
    fake.objects["x"] = Object(len(DATA), data=b"<html>Log in</html>".ljust(len(DATA)))
    fake.tag = lambda where, etag: ""
    with pytest.raises(CacheError, match="an answer without an ETag"):
        read(source, version)


def habit(fake: FakeS3, name: str) -> None:
    if name == "decodes unless told":
        fake.decodes = decodes_unless_told
    elif name == "always decodes":
        fake.decodes, fake.names_encoding = lambda handler: True, True
    elif name == "weak tags of objects":
        fake.tag = lambda where, etag: f'"{etag}"' if where == "LIST" else f'W/"{etag}"'
    elif name == "lists by version 1":
        fake.version_1 = True
    elif name == "refuses":
        fake.refuse = lambda handler: (403, "AccessDenied") if fake.asked[-1] == "GET" else None
    elif name == "ignores ranges":
        fake.refuse = lambda handler: handler.headers.__delitem__("Range")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("decodes unless told", ""),
        pytest.param("weak tags of objects", "", marks=pytest.mark.slow),
        pytest.param("lists by version 1", "", marks=pytest.mark.slow),
        pytest.param("always decodes", "Content-Encoding: gzip", marks=pytest.mark.slow),
        ("refuses", "check the credentials"),
        ("ignores ranges", "ignored the byte range"),
    ],
)
def test_a_loader_with_a_daemon_reads_on_or_gets_the_error_at_once(
    fake: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    datum = gzip.compress(os.urandom(10_000), mtime=0)
    ranges = name == "ignores ranges"  # whole objects are requested without a range
    datum += bytes(PART_BYTES) if ranges else b""
    count = {"lists by version 1": 1_500, "ignores ranges": 2}.get(name, 20)
    etag = hashlib.md5(datum).hexdigest()
    fake.objects = {f"d/{number:04}.gz": Object(len(datum), etag, datum) for number in range(count)}
    habit(fake, name)
    options = ["--ram", "64MiB", "--fillers", "1", "--allow", "s3://bucket/"]
    with Daemon(tmp_path / "node", options, {"AWS_ENDPOINT_URL": fake.endpoint}) as daemon:
        monkeypatch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
        monkeypatch.setenv("CACHESVC", "require")
        data = open_dataset("s3://bucket/d/", format="files", decode=None)
        batches = DataLoader(data, 10, collate_fn=list)
        if not says:
            assert sum(bytes(sample) == datum for batch in batches for sample in batch) == count
            return
        with pytest.raises(CacheError, match=says) as caught:
            next(iter(batches))
        assert "overwritten" not in str(caught.value)
        assert "down" not in str(caught.value)
        assert fake.asked.count("GET") <= 2 * (count + MOST)
