"""Decompression in steps: members one after another, truncation anywhere, and little memory for any ratio."""

from __future__ import annotations

import bz2
import gzip
import struct
import tracemalloc
from collections.abc import Callable

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from cachesvc.core.errors import CorruptData, InvalidInput
from cachesvc.sources.decompression import codec_of, decompressed

WRITERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "bz2": bz2.compress,
    "zstd": zstandard.compress,
}
BODY = b"".join(b"line %d\n" % n for n in range(3000))


def read(codec: str, stored: bytes, step: int = 1000) -> bytes:
    parts = (stored[at : at + step] for at in range(0, len(stored), step))
    return b"".join(decompressed("s3://b/x", codec, parts))


@pytest.mark.parametrize("codec", WRITERS)
def test_members_of_any_size_are_joined_however_they_arrive(codec: str) -> None:
    @given(st.lists(st.binary(max_size=300), max_size=5), st.integers(1, 400))
    def run(bodies: list[bytes], step: int) -> None:
        assert read(codec, b"".join(map(WRITERS[codec], bodies)), step) == b"".join(bodies)

    run()


@pytest.mark.parametrize("codec", WRITERS)
def test_an_object_that_ends_early_is_corrupt(codec: str) -> None:
    stored = WRITERS[codec](BODY)
    for end in {*range(1, 30), *range(1, len(stored), 97), len(stored) - 1}:
        with pytest.raises(CorruptData, match=f"s3://b/x is truncated: its {codec} stream does not end"):
            read(codec, stored[:end])
    assert read(codec, b"") == b""


@pytest.mark.parametrize("codec", WRITERS)
def test_other_bytes_are_corrupt(codec: str) -> None:
    for stored in (b"no such thing at all", WRITERS[codec](BODY) + b"and more"):
        with pytest.raises(CorruptData, match=f"s3://b/x is not valid {codec}"):
            read(codec, stored)


def test_padding_and_skippable_frames_hold_nothing() -> None:
    skippable = struct.pack("<II", 0x184D2A50, 4) + b"abcd"
    assert read("zstd", skippable + zstandard.compress(BODY) + skippable) == BODY
    assert read("gzip", gzip.compress(BODY) + bytes(5000) + gzip.compress(b"x") + bytes(9)) == BODY + b"x"


@pytest.mark.parametrize(
    "codec", [*sorted(WRITERS.keys() - {"bz2"}), pytest.param("bz2", marks=pytest.mark.slow)]
)
def test_a_step_takes_little_memory_however_well_the_data_compresses(codec: str) -> None:
    stored = WRITERS[codec](bytes(200 << 20))
    tracemalloc.start()
    try:
        assert sum(map(len, decompressed("s3://b/x", codec, [stored]))) == 200 << 20
        assert tracemalloc.get_traced_memory()[1] < 110 << 20
    finally:
        tracemalloc.stop()


def test_a_window_beyond_the_limit_is_corrupt() -> None:
    params = zstandard.ZstdCompressionParameters.from_level(3, window_log=28)
    writer = zstandard.ZstdCompressor(compression_params=params).compressobj()
    stored = writer.compress(BODY) + writer.flush()
    with pytest.raises(CorruptData, match=r"s3://b/x is not valid zstd: .*too much memory"):
        read("zstd", stored)


@pytest.mark.parametrize(
    ("uri", "codec"),
    [
        ("a.jsonl.gz", "gzip"),
        ("A.TGZ", "gzip"),
        ("b.zstd", "zstd"),
        ("b.tar.bz2", "bz2"),
        ("gz", "gzip"),
        ("a.txt", ""),
    ],
)
def test_the_codec_is_that_of_the_name(uri: str, codec: str) -> None:
    assert codec_of(f"s3://b/{uri}") == (codec if "." in uri else "")
    for unread in ("xz", "lz4", "br"):
        with pytest.raises(InvalidInput, match=f"compressed as {unread}, which is not read: recompress it"):
            codec_of(f"s3://b/{uri}.{unread}")
