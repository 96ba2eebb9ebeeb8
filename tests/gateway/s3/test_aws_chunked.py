"""Bodies whose chunks are signed, as AWS documents them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachesvc.gateway.s3.aws_chunked import SignedChunks
from cachesvc.gateway.s3.errors import S3Error
from cachesvc.gateway.s3.signature import ChunkSignatures, Claimed

SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
SCOPE = ("20130524", "us-east-1", "s3", "aws4_request")
SIZES = (65_536, 1024, 0)
PLAIN = (
    "4f232c4386841ef735655705268965c44a0e4690baa4adea153f7db9fa80a0a9",
    "ad80c730a21e5b8d04586a2213dd63b9a0e99e0e2307b0ade35a65485a288648",
    "0055627c9e194cb4542bae2aa5492e3c1575bbb81b612b7d234b86a503ef5497",
    "b6c6ea8a5354eaf15b3cb7646744f4275b71ea724fed81ceb9323e279d449df9",
)
"""The signatures of the request and of the chunks in "Transferring Payload in Multiple Chunks"."""
TRAILED = (
    "106e2a8a18243abcf37539882f36619c00e2dfc72633413f02d3b74544bfeb8e",
    "b474d8862b1487a5145d686f57f013e54db672cee1c953b3010fb58501ef5aa2",
    "1c1344b170168f8e65b41376b44b20fe354e373826ccbbe2c1d40a8cae51e5c7",
    "2ca2aba2005185cf7159c6277faf83795951dd77a3a99e6e65d5c9f85863f992",
)
"""The same of its example with trailers."""
CHECKSUM = b"x-amz-checksum-crc32c:sOO8/Q=="
OF_TRAILER = b"x-amz-trailer-signature:d81f82fc3505edab99d459891051a732e8730629a2e4a59689829ca17fe2e435"


def body(signatures: tuple[str, ...], end: bytes) -> bytes:
    chunks = [
        b"%x;chunk-signature=%s\r\n" % (size, signed.encode()) + (b"a" * size + b"\r\n") * bool(size)
        for size, signed in zip(SIZES, signatures[1:])
    ]
    return b"".join(chunks) + end + b"\r\n"


def reader(first: str, trailers: bool) -> SignedChunks:
    claim = Claimed("AKID", "", SCOPE, "20130524T000000Z", (), first, "")
    return SignedChunks(ChunkSignatures(claim, SECRET), trailers)


SIGNED = body(PLAIN, b"")
WITH_TRAILERS = body(TRAILED, CHECKSUM + b"\n\r\n" + OF_TRAILER + b"\r\n")


@given(st.lists(st.integers(1, len(WITH_TRAILERS)), max_size=5))
def test_signatures_of_the_documentation_are_taken_out_however_the_bytes_come(cuts: list[int]) -> None:
    kept = b"".join(b"%x\r\n" % size + (b"a" * size + b"\r\n") * bool(size) for size in SIZES)
    for sent, signed, wanted in (
        (SIGNED, PLAIN, b"a" * sum(SIZES)),
        (WITH_TRAILERS, TRAILED, kept + CHECKSUM + b"\r\n\r\n"),
    ):
        chunks = reader(signed[0], signed is TRAILED)
        places = [0, *sorted(cuts), len(sent)]
        assert b"".join(chunks.feed(sent[a:b]) for a, b in itertools.pairwise(places)) == wanted
        assert chunks.ended


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (SIGNED.replace(b"aaaa", b"aaab", 1), "SignatureDoesNotMatch"),
        (SIGNED.replace(b"10000;", b"ffff;", 1), "IncompleteBody"),
        (SIGNED.replace(b";chunk-signature", b"", 1), "IncompleteBody"),
        (SIGNED + b"x", "IncompleteBody"),
        (SIGNED[:-2] + CHECKSUM + b"\r\n\r\n", "IncompleteBody"),
        (b"x" * 20_000, "IncompleteBody"),
        (WITH_TRAILERS.replace(b"sOO8", b"sOO9"), "SignatureDoesNotMatch"),
        (WITH_TRAILERS.replace(OF_TRAILER + b"\r\n", b""), "SignatureDoesNotMatch"),
        (WITH_TRAILERS[:-2] + b"x-amz-other:1\r\n\r\n", "IncompleteBody"),
    ],
)
def test_other_bodies_are_refused(wrong: bytes, code: str) -> None:
    trailed = TRAILED[1].encode() in wrong
    with pytest.raises(S3Error) as refusal:
        reader((TRAILED if trailed else PLAIN)[0], trailed).feed(wrong)
    assert refusal.value.code == code
