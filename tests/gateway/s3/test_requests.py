"""The bucket and the key that a request names."""

from __future__ import annotations

import pytest

from cachesvc.gateway.s3.errors import S3Error
from cachesvc.gateway.s3.requests import place


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
