"""The bucket and the key that a request names."""

from __future__ import annotations

import pytest

from cachesvc.gateway.s3.errors import S3Error
from cachesvc.gateway.s3.requests import check_conditions, place, span


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
