"""Members of tars decode as WebDataset decodes them: gzip around a value, `.npz`, `.id`; pickles are refused."""

from __future__ import annotations

import gzip
import io
import pickle
import tracemalloc
import zipfile
import zlib
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from cachesvc.core.errors import CorruptData, InvalidInput
from loader import open_dataset
from loader.datasets.decoding.decode import arrays_of, decode_field, decoder, gunzipped
from tests.support.datasets import tar_bytes, write_files


def npz(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (3, 2), (1, 2, 3)).save(file, "PNG")
    return file.getvalue()


MEMBERS = {
    "json.gz": gzip.compress(b'{"a": [1]}'),
    "seg.png.gz": gzip.compress(png()),
    "cls.gz": gzip.compress(b"7") + gzip.compress(b"8"),
    "nii.gz": gzip.compress(b"volume"),
    "gz": gzip.compress(b"bare"),
    "npz": npz(x=np.arange(6).reshape(2, 3), y=np.float32(1.5)),
    "id": b"0042",
    "inx": b"9",
    "transcript": "schön".encode(),
    "jsn": b"[1]",
}


def test_members_decode_as_webdataset_decodes_them(tmp_path: Path) -> None:
    write_files(tmp_path, {"0.tar": tar_bytes({"k": MEMBERS})})
    (sample,) = open_dataset(tmp_path)
    assert sample["json.gz"] == {"a": [1]}
    assert (sample["seg.png.gz"].mode, sample["seg.png.gz"].getpixel((0, 0))) == ("RGB", (1, 2, 3))
    assert (sample["cls.gz"], sample["nii.gz"], sample["gz"]) == (78, b"volume", b"bare")
    assert (sample["id"], sample["inx"], sample["transcript"], sample["jsn"]) == (42, 9, "schön", [1])
    assert sample["npz"]["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (sample["npz"]["y"].dtype, sample["npz"]["y"].item()) == (np.float32, 1.5)
    raw = open_dataset(tmp_path, decode=None)[0]
    assert raw == MEMBERS


def test_a_name_as_id_stays_text() -> None:
    assert decoder("id", "id")(b"n01440764_18") == "n01440764_18"


@pytest.mark.parametrize("encoding", ["pkl", "pickle", "pt", "pkl.gz", "pth.gz", "pyd"])
def test_pickles_are_refused_also_in_gzip(encoding: str) -> None:
    with pytest.raises(InvalidInput, match="is a pickle"):
        decoder("x", encoding)


def test_pickled_objects_in_an_archive_are_refused() -> None:
    for raw in (npz(x=np.asarray([{"a": 1}], object)), npz(x=np.arange(3), y=np.asarray([print], object))):
        with pytest.raises(CorruptData, match="holds Python objects"):
            decode_field(decoder("x", "npz"), raw, lambda: "k")
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as made:
        made.writestr("x.npy", pickle.dumps([1]))
    assert decode_field(decoder("x", "npz"), archive.getvalue(), lambda: "k") == {"x": pickle.dumps([1])}, (
        "bytes, as numpy"
    )


def bomb() -> bytes:
    """256 MiB of zeros in gzip."""
    packer, parts = zlib.compressobj(1, zlib.DEFLATED, 31), []
    for _ in range(256):
        parts.append(packer.compress(bytes(1 << 20)))
    return b"".join([*parts, packer.flush()])


def test_bombs_are_refused_in_bounded_memory() -> None:
    limit_bytes = 8 << 20
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("x.npy", bytes(64 << 20))
    unpacked, arrays = gunzipped(bytes, limit_bytes), partial(arrays_of, limit_bytes=limit_bytes)
    for decode, raw in ((unpacked, bomb()), (arrays, zipped.getvalue())):
        tracemalloc.start()
        try:
            with pytest.raises(CorruptData, match="unpacks to more than 8 MiB"):
                decode_field(decode, raw, lambda: "k")
            assert tracemalloc.get_traced_memory()[1] < 200 << 20
        finally:
            tracemalloc.stop()


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(["npz", "json.gz", "cls.gz"]))
def test_damaged_values_are_a_typed_error(data: st.DataObject, encoding: str) -> None:
    raw = bytearray(MEMBERS[encoding])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        if data.draw(st.booleans()):
            raw[at] = data.draw(st.integers(0, 255))
        elif len(raw) > 1:
            del raw[at]
    with suppress(CorruptData):
        decode_field(decoder("x", encoding), bytes(raw), lambda: "k")
