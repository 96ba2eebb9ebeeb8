"""Objects of the fake S3 server, and reads of them."""

from __future__ import annotations

import hashlib
import os

from cachesvc.core.model import ObjectVersion
from tests.support.faults.fake_s3 import FakeS3, Object

DATA = os.urandom(100_000)


def put(
    server: FakeS3, data: bytes, sent: bytes | None = None, key: str = "x", **headers: str
) -> ObjectVersion:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    etag = named.pop("etag", hashlib.md5(data).hexdigest())
    server.objects[key] = Object(len(data), etag, data if sent is None else sent, named)
    return ObjectVersion(f"s3://bucket/{key}", len(data), etag)


ODD = (
    "a b.bin", "a+b.bin", "100%.bin", "%2e%2e/x.bin", "ü/日本/🙂.bin", "q?x=1&y#z.bin", "semi;colon,comma=.bin",
    "tilde~star*paren().bin", "quote'\".bin", "[1]{2}.bin", "a:b@c.bin", "<&>.bin",
)  # fmt: skip
