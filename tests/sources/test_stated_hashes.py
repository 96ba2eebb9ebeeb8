"""A piece is compared with the hash that its index states, and read a second time where it differs."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pyarrow
import pytest
import xxhash

from cachesvc.core.errors import CorruptData, InvalidInput, SourceUnavailable
from cachesvc.core.model import ObjectVersion, Piece, extent_of
from cachesvc.sources.arrow_codecs import CODECS, unpacked
from cachesvc.sources.fetch import Fetcher
from cachesvc.sources.files import FilesSource
from cachesvc.sources.stated_hashes import check_stated, hash_checker, is_known
from tests.support.datasets import hashed

DATA = os.urandom(200_000)
_HASHES = ("sha1", "sha256", "md5", "blake2b", "sha3_256", "xxh32", "xxh64", "xxh128", "xxh3_64", "xxh3_128")


@pytest.mark.parametrize("algorithm", _HASHES)
def test_bytes_with_the_stated_hash_pass(algorithm: str) -> None:
    check = hash_checker("s3://b/x", f"{algorithm}:{hashed(DATA, [algorithm])[algorithm].upper()}")
    assert is_known(algorithm)
    check([memoryview(DATA[:70_000]), memoryview(DATA[70_000:])])


def test_other_bytes_are_read_again_and_corrupt_where_two_reads_agree() -> None:
    check = hash_checker("s3://b/x", f"sha1:{hashlib.sha1(DATA).hexdigest()}")
    for wrong in (b"one", b"two"):
        with pytest.raises(SourceUnavailable, match="s3://b/x has the sha1"):
            check([memoryview(wrong)])
    with pytest.raises(CorruptData, match="two reads agree"):
        check([memoryview(b"two")])


@pytest.mark.parametrize("algorithm", ["blake9", "shake_128", ""])
def test_an_algorithm_without_a_fixed_digest_is_unknown(algorithm: str) -> None:
    assert not is_known(algorithm)


def test_an_unknown_algorithm_is_refused() -> None:
    with pytest.raises(InvalidInput, match="hashes of 'blake9' are not known here"):
        hash_checker("s3://b/x", "blake9:00")


@pytest.mark.parametrize("part_bytes", [1 << 16, 1 << 20])
def test_a_plain_object_is_compared_in_one_part_or_several(
    tmp_path: Path, target: int, part_bytes: int
) -> None:
    path, source = tmp_path / "x", FilesSource()
    path.write_bytes(DATA)
    version, right = source.head(str(path)), hashlib.sha256(DATA).hexdigest()
    fetcher = Fetcher(lambda _: source, threads=4, part_bytes=part_bytes)
    try:
        fetcher.fetch(extent_of([Piece(version, 0, len(DATA), hash=f"sha256:{right}")]), target)
        assert os.pread(target, len(DATA) + 1, 0) == DATA
        with pytest.raises(CorruptData, match=f"{path} has the sha256 {right}, its index says 00"):
            fetcher.fetch(extent_of([Piece(version, 0, len(DATA), hash="sha256:00")]), target)
    finally:
        fetcher.close()


def test_a_hash_is_part_of_the_id_of_an_extent(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(DATA)
    version = FilesSource().head(str(tmp_path / "x"))
    ids = {extent_of([Piece(version, 0, len(DATA), hash=hash)]).id for hash in ("", "sha1:00", "sha1:01")}
    assert len(ids) == 3


@pytest.mark.pure
@pytest.mark.parametrize("codec", CODECS)
def test_packed_bytes_decode_to_the_stated_size_or_are_corrupt(codec: str) -> None:
    packed = pyarrow.compress(DATA, codec, asbytes=True)
    assert bytes(unpacked("s3://b/x", codec, memoryview(packed), len(DATA))) == DATA
    for size in (len(DATA) + 1, len(DATA) - 1, 0):
        with pytest.raises(CorruptData, match="s3://b/x"):
            unpacked("s3://b/x", codec, memoryview(packed), size)
    for damaged in (packed[:-5], b"", b"\xff" * 40):
        with pytest.raises(CorruptData, match="s3://b/x"):
            unpacked("s3://b/x", codec, memoryview(damaged), len(DATA))


SHA256 = hashlib.sha256(DATA).hexdigest()


def filled(data: bytes) -> int:
    fd = os.memfd_create("extent")
    os.write(fd, data)
    return fd


def pieces() -> tuple[Piece, ...]:
    """A part of an object, then two whole ones: the index states the hash of one, the hub that of the other."""
    size, etag = len(DATA), f"{'0' * 40}-{SHA256}"
    return (
        Piece(ObjectVersion("hf://datasets/o/n/a", size, etag), 0, 10),
        Piece(
            ObjectVersion("s3://bucket/b", size, "tag"),
            0,
            size,
            hash=f"xxh64:{xxhash.xxh64(DATA).hexdigest()}",
        ),
        Piece(ObjectVersion("hf://datasets/o/n/c", size, etag), 0, size),
    )


@pytest.mark.parametrize(
    ("wrong_at", "named"), [(0, ""), (10, "s3://bucket/b"), (10 + len(DATA), "hf://datasets/o/n/c")]
)
def test_whole_objects_of_an_extent_are_compared(wrong_at: int, named: str) -> None:
    extent = extent_of(pieces())
    data = bytearray(DATA[:10] + DATA + DATA)
    data[wrong_at] ^= 1
    fd = filled(bytes(data))
    try:
        if named:
            with pytest.raises(SourceUnavailable, match=named):
                check_stated(extent, fd)
        else:
            check_stated(extent, fd)
    finally:
        os.close(fd)
