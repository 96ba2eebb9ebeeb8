"""Multipart objects, and a proxy that flips bits."""

from __future__ import annotations

import base64
import hashlib
import itertools
import os
import zlib

from cachesvc.core.model import Piece, extent_of
from cachesvc.sources.fetch import Fetcher
from cachesvc.sources.resilient import Resilient
from cachesvc.sources.s3.s3 import S3Source
from testbed.servers import SeaweedFS

DATA = os.urandom(100_000)
FLIPPED = DATA[:77_777] + bytes([DATA[77_777] ^ 4]) + DATA[77_778:]
PART = 30_000


def fetched(source: S3Source | Resilient, piece: Piece, target: int, part_bytes: int = PART) -> bytes:
    """What a fetch of one piece writes."""
    fetcher = Fetcher(lambda _: source, threads=4, part_bytes=part_bytes)
    try:
        fetcher.fetch(extent_of([piece]), target)
    finally:
        fetcher.close()
    return os.pread(target, piece.length, 0)


def upload(server: SeaweedFS, bucket: str, data: bytes, part_bytes: int, stated: str) -> None:
    """As `x`, in parts: with the composite checksum that SDKs send today, or with none."""
    client, at = server.client(), {"Bucket": bucket, "Key": "x"}
    said = {"ChecksumAlgorithm": stated.upper()} if stated else {}
    number = client.create_multipart_upload(**at, **said)["UploadId"]
    done = []
    for start in range(0, len(data), part_bytes):
        part = {"PartNumber": start // part_bytes + 1}
        body = data[start : start + part_bytes]
        answer = client.upload_part(**at, **part, **said, UploadId=number, Body=body)
        sums = {name: answer[name] for name in ("ETag", "ChecksumCRC32") if name in answer}
        done.append({**part, **sums})
    client.complete_multipart_upload(**at, UploadId=number, MultipartUpload={"Parts": done})
    assert ("ChecksumCRC32" in client.head_object(**at, ChecksumMode="ENABLED")) == bool(stated)


def crc32(data: bytes) -> str:
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()


def composite(parts: list[int]) -> tuple[str, str]:
    """The tag and the CRC-32 of DATA in parts of so many bytes."""
    bounds = [0, *itertools.accumulate(parts)]
    pieces = [DATA[start:end] for start, end in itertools.pairwise(bounds)]
    tag = hashlib.md5(b"".join(hashlib.md5(piece).digest() for piece in pieces)).hexdigest()
    crc = crc32(b"".join(zlib.crc32(piece).to_bytes(4, "big") for piece in pieces))
    return f"{tag}-{len(parts)}", f"{crc}-{len(parts)}"
