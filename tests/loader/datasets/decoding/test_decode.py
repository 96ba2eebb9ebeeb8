"""Stored bytes decoded to values, or a typed error that names the sample."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from cachesvc.core.errors import (
    CorruptData,
)
from loader.datasets.decoding.decode import decode_field, decoder
from tests.support import datasets
from tests.support.training.loader_fakes import compiled, in_memory


@settings(max_examples=30, deadline=None)
@given(st.integers(-(2**31), 2**31 - 1))
def test_numbers_decode_to_what_was_written(value: int) -> None:
    assert decoder("n", "int32")(value.to_bytes(4, "little", signed=True)) == value
    assert decoder("n", "cls")(str(value).encode()) == value
    assert decoder("n", "json")(str(value).encode()) == value


def test_null_is_a_value_and_not_an_absent_field(home: Path) -> None:
    rows = [{"n": b"7", "x": b"null"}, {"n": b"8", "x": b"{}"}]
    datasets.mds_shards(home / "d", {"n": "str_int", "x": "json"}, rows, 2)
    assert list(in_memory(compiled(home / "d", home))) == [{"n": 7, "x": None}, {"n": 8, "x": {}}]


def test_images_that_mosaicml_wrote_are_decoded(home: Path) -> None:
    pixels = np.arange(6 * 4 * 3, dtype=np.uint8)
    pil = np.asarray([4, 6, 3], "<u4").tobytes() + b"RGB" + pixels.tobytes()
    files = [io.BytesIO(), io.BytesIO()]
    for at, file in enumerate(files):
        Image.new("RGB", (8 + at, 8)).save(file, "JPEG")
    bodies = [file.getvalue() for file in files]
    several = np.asarray([2, *map(len, bodies)], "<u4").tobytes() + b"".join(bodies)
    columns = {"one": "pil", "some": "jpeg_array", "same": "jpegarray"}
    datasets.mds_shards(home / "d", columns, [{"one": pil, "some": several, "same": several}], 1)
    (sample,) = in_memory(compiled(home / "d", home))
    assert (sample["one"].mode, sample["one"].size) == ("RGB", (4, 6))
    assert np.array_equal(np.asarray(sample["one"]).ravel(), pixels)
    for name in ("some", "same"):
        assert [image.size for image in sample[name]] == [(8, 8), (9, 8)]


def test_arrays_and_lists_that_mosaicml_wrote_are_decoded(home: Path) -> None:
    open_shape = b"\x08\x02\x03" + np.arange(6, dtype="<f4").tobytes()
    wide = b"\x05\x2c\x01" + bytes(300)  # one side, in two bytes
    picture = np.asarray([4, 1, 1], "<u4").tobytes() + b"Lgrey"
    row = {
        "shape": open_shape,
        "dtype": b"\x11" + np.asarray([-1, 2], "<i2").tobytes(),
        "both": b"\x42" + open_shape[:3] + np.arange(6, dtype="<f8").tobytes(),
        "wide": wide,
        "pictures": np.asarray([0, 2, 17, 17], "<u4").tobytes() + picture * 2,
        "none": bytes(8),
        "exact": b"1.10",
    }
    encodings = [
        "ndarray:float32",
        "ndarray::2",
        "ndarray",
        "ndarray:uint8",
        "list[pil]",
        "list[png]",
        "str_decimal",
    ]
    datasets.mds_shards(home / "d", dict(zip(row, encodings, strict=True)), [row], 1)
    (sample,) = in_memory(compiled(home / "d", home), image_mode=None)
    assert sample["shape"].dtype == "f4"
    assert sample["shape"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert sample["dtype"].tolist() == [-1, 2]
    assert sample["wide"].shape == (300,)
    assert sample["both"].dtype == "f8"
    assert sample["both"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert [image.tobytes() for image in sample["pictures"]] == [b"grey"] * 2
    assert sample["none"] == []
    assert str(sample["exact"]) == "1.10"


def saved(array: np.ndarray, version: tuple[int, int] | None = None) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version)
    return file.getvalue()


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize("array", [np.arange(6.0).reshape(2, 3).T, np.asarray(7), np.zeros((0, 3), ">i2")])
def test_an_array_decodes_to_what_was_saved(array: np.ndarray, version: tuple[int, int]) -> None:
    found = decode_field(decoder("x", "npy"), saved(array, version), lambda: "sample 3")
    assert (found.dtype, found.shape, found.tolist()) == (array.dtype, array.shape, array.tolist())


def test_a_missing_array_and_several_arrays_are_corrupt() -> None:
    several = io.BytesIO()
    np.savez(several, a=np.zeros(3))
    whole = saved(np.zeros(1000, "u1"))
    huge = whole.replace(b"(1000,), }           ", b"(100000000000000,), }")
    assert len(huge) == len(whole)
    for raw in (whole[:-1], huge, several.getvalue(), b""):
        with pytest.raises(CorruptData, match="does not decode"):
            decode_field(decoder("x", "npy"), raw, lambda: "sample 3")


@pytest.mark.parametrize("encoding", ["pil", "jpeg_array", "list[pil]", "ndarray", "ndarray:uint8"])
@pytest.mark.parametrize(
    "raw",
    [b"", b"\xff" * 4, b"\xff" * 40, b"\2\0\0\0\2\0\0\0\3\0\0\0RGB12", b"\1\0\0\0\1\0\0\0\4\0\0\0nosuch"],
)
def test_bytes_that_are_no_image_are_corrupt(encoding: str, raw: bytes) -> None:
    with pytest.raises(CorruptData, match=r"does not decode: .* DataLoader\(on_error='skip'\)"):
        decode_field(decoder("x", encoding), raw, lambda: "sample 3")


def bitmap_of(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (1, 1)).save(file, "BMP")
    return file.getvalue()[:18] + np.asarray([width, height], "<i4").tobytes() + file.getvalue()[26:]


@pytest.mark.parametrize(
    ("kind", "raw"),
    [
        ("npy", b""),
        ("npy", b"\x93NUMPY\1\0\2\0{\n"),
        ("json", b"[" * 200_000),
        ("bmp", bitmap_of(1 << 15, 1 << 15)),
        ("pil", b"\xff\xff\xff\xff\0\0\0\0\1\0\0\0L"),
    ],
    ids=["an empty file", "a cut header", "too deep", "too large", "too wide"],
)
def test_any_error_of_a_decoder_is_corrupt_data(kind: str, raw: bytes) -> None:
    with pytest.raises(CorruptData, match=r"^sample 3 does not decode"):
        decode_field(decoder(f"x.{kind}", kind), raw, lambda: "sample 3")


@pytest.mark.parametrize("encoding", ["jpeg:90", "list[jpeg:90]"])
def test_a_jpeg_encoding_with_a_quality_is_decoded(
    encoding: str,
) -> None:
    file = io.BytesIO()
    Image.new("RGB", (3, 2)).save(file, "JPEG", quality=90)
    raw = file.getvalue()
    if encoding.startswith("list"):
        raw = np.asarray([0, 1, len(raw)], "<u4").tobytes() + raw
    found = decode_field(decoder("x", encoding), raw, lambda: "sample 3")
    assert (found[0] if isinstance(found, list) else found).size == (3, 2)
