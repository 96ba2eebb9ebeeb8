"""The bucket and the key that a request names."""

from __future__ import annotations

import pytest

from cachesvc.gateway.s3.errors import S3Error
from cachesvc.gateway.s3.passing import passed_headers
from cachesvc.gateway.s3.requests import check_conditions, place, span
from cachesvc.gateway.s3.writes import deletion


@pytest.mark.parametrize(
    ("path", "host", "found"),
    [
        ("/bucket/a/b", "127.0.0.1:9000", ("bucket", "a/b")),
        ("/bucket/a%2Fb%20%25", "node7:9000", ("bucket", "a/b %")),
        ("/bucket", "localhost", ("bucket", "")),
        ("/", "localhost", ("", "")),
        ("/a/b", "bucket.localhost:9000", ("bucket", "a/b")),
        ("/a//b", "my.bucket.node7", ("my.bucket", "a//b")),
        ("/bucket/k", "1.localhost.example.com", ("bucket", "k")),
    ],
)
def test_buckets_are_named_by_path_or_by_host(path: str, host: str, found: tuple[str, str]) -> None:
    assert place(path, host, ["localhost", "node7"]) == found


@pytest.mark.parametrize("path", ["/..", "/a", "/bucket/" + "k" * 1025, "/bucket/%ff", "/b%00cket/k"])
def test_what_names_no_bucket_or_key_is_refused(path: str) -> None:
    with pytest.raises(S3Error) as refusal:
        place(path, "localhost", ["localhost"])
    assert refusal.value.code == "InvalidURI"


TAG, MODIFIED = '"abc"', "Sat, 28 Nov 2026 09:00:00 GMT"
BEFORE, AFTER = "Sat, 28 Nov 2026 08:00:00 GMT", "Sat, 28 Nov 2026 10:00:00 GMT"


@pytest.mark.parametrize(
    ("header", "found"),
    [
        ("bytes=0-0", (0, 1)),
        ("bytes=5-", (5, 10)),
        ("bytes=5-99", (5, 10)),
        (f"bytes=5-{2**64 - 1}", (5, 10)),
        ("bytes=-3", (7, 10)),
        ("bytes=-30", (0, 10)),
        ("bytes=9-8", None),
        ("bytes=0-1,3-4", None),
        ("bytes=-", None),
        ("items=0-1", None),
        ("bytes=x-1", None),
    ],
)
def test_a_range_is_the_bytes_that_it_names_or_is_ignored(header: str, found: tuple[int, int] | None) -> None:
    assert span(header, 10) == found


@pytest.mark.parametrize(
    ("header", "size_bytes"), [("bytes=10-", 10), ("bytes=0-", 0), ("bytes=-0", 10), ("bytes=-1", 0)]
)
def test_a_range_without_bytes_is_refused_with_the_size(header: str, size_bytes: int) -> None:
    with pytest.raises(S3Error) as refusal:
        span(header, size_bytes)
    assert (refusal.value.code, refusal.value.headers) == (
        "InvalidRange",
        {"Content-Range": f"bytes */{size_bytes}"},
    )


CONDITIONS: dict[str, list[dict[str, str]]] = {
    "": [
        {},
        {"if-match": TAG},
        {"if-match": "abc"},
        {"if-match": '"x", "abc"'},
        {"if-match": "*"},
        {"if-none-match": '"x"'},
        {"if-modified-since": BEFORE},
        {"if-unmodified-since": AFTER},
        {"if-match": TAG, "if-unmodified-since": BEFORE},  # RFC 9110, 13.2.2: the tag decides
        {"if-none-match": '"x"', "if-modified-since": AFTER},
        {"if-modified-since": "yesterday"},
    ],
    "PreconditionFailed": [{"if-match": '"x"'}, {"if-unmodified-since": BEFORE}],
    "NotModified": [{"if-none-match": TAG}, {"if-none-match": "*"}, {"if-modified-since": MODIFIED}],
}


@pytest.mark.parametrize("code", CONDITIONS)
def test_conditions_decide_in_the_order_of_the_standard(code: str) -> None:
    for headers in CONDITIONS[code]:
        found = ""
        try:
            check_conditions(headers, TAG, MODIFIED)
        except S3Error as refusal:
            found = refusal.code
        assert found == code, headers


def test_deletions_are_written_anew_in_one_form() -> None:
    said = "<D:Delete xmlns:D='x'><D:Object><D:Key>a&amp;b &#233;&#13;</D:Key></D:Object><D:Quiet>true</D:Quiet></D:Delete>"
    document, keys = deletion(said.encode())
    assert keys == ["a&b é\r"]
    assert deletion(document) == (document, keys)
    assert b"<Quiet>true</Quiet>" in document


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<Delete/>",
        b"<Delete><Object><Key></Key></Object></Delete>",
        b"<Delete><Object><Key><![CDATA[a]]></Key></Object></Delete>",
        b"<!DOCTYPE d [<!ENTITY e 'x'>]><Delete><Object><Key>&e;</Key></Object></Delete>",
        "<Delete><Object><Key>a</Key></Object></Delete>".encode("utf-16"),
    ],
)
def test_deletions_in_other_forms_are_refused(body: bytes) -> None:
    with pytest.raises(S3Error) as refusal:
        deletion(body)
    assert refusal.value.code == "MalformedXML"


def test_headers_that_would_be_lost_are_refused_and_those_of_the_signature_replaced() -> None:
    kept = {"content-type": "x/y", "x-amz-meta-a": "b", "x-amz-checksum-crc32": "x", "if-none-match": "*"}
    own = {
        "host": "h",
        "authorization": "a",
        "x-amz-date": "d",
        "x-amz-security-token": "t",
        "x-amz-acl": "private",
    }
    assert passed_headers({**kept, **own}) == kept
    for name in (
        "x-amz-acl",
        "x-amz-grant-read",
        "x-amz-object-lock-mode",
        "x-amz-server-side-encryption-customer-key",
        "x-amz-copy-source-server-side-encryption-customer-key",
        "x-amz-bypass-governance-retention",
    ):
        with pytest.raises(S3Error) as refusal:
            passed_headers({name: "x"})
        assert refusal.value.code == "NotImplemented", name
