"""Images are RGB, as ImageFolder and WebDataset give them, or in the requested mode. Errors name the files of
images that differ."""

from __future__ import annotations

import io
import json
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from cachesvc.core.errors import CorruptData, InvalidInput
from loader import DataLoader, mix, open_dataset
from loader.datasets.decoding.decode import decoder
from loader.datasets.decoding.images import IMAGE_MODES, Converter
from tests.support import datasets
from tests.support.datasets import tar_bytes, write_files
from tests.support.training.loader_fakes import compiled, in_memory

MODES = {
    "1": "png",
    "L": "png",
    "LA": "png",
    "P": "png",
    "RGB": "png",
    "RGBA": "png",
    "I;16": "png",
    "I": "tiff",
    "F": "tiff",
    "CMYK": "jpeg",
    "YCbCr": "tiff",
}


def image(mode: str, size: tuple[int, int] = (8, 6)) -> Image.Image:
    """Make an image of several colours. The entries of a palette differ from the colours' numbers."""
    pixels = np.arange(size[0] * size[1] * 4, dtype=np.uint8).reshape(size[1], size[0], 4)
    made = Image.fromarray(pixels)
    if mode == "P":
        return made.convert("RGB").quantize(5)
    return made.convert("L").convert(mode) if mode in ("I;16", "I", "F", "1") else made.convert(mode)


def stored(mode: str, size: tuple[int, int] = (8, 6)) -> bytes:
    file = io.BytesIO()
    image(mode, size).save(file, MODES[mode])
    return file.getvalue()


@pytest.mark.filterwarnings("ignore:an image of field")
@pytest.mark.parametrize("mode", MODES)
def test_an_image_of_any_mode_equals_image_folders(mode: str) -> None:
    raw = stored(mode)
    plain = Image.open(io.BytesIO(raw))
    for wanted in IMAGE_MODES:
        found = decoder("x", MODES[mode], Converter("x", wanted))(raw)
        right = plain.convert(wanted) if wanted else plain
        assert (found.mode, found.tobytes()) == (right.mode, right.tobytes())


def test_an_image_that_is_rgb_is_not_copied() -> None:
    decoded = decoder("x", "png")(stored("RGB"))
    assert isinstance(decoded, Image.Image)
    assert type(decoded).__name__ == "PngImageFile", "a copy is a plain Image"


def _files(root: Path, bodies: dict[str, bytes]) -> None:
    write_files(root, {f"a/{name}.png": body for name, body in bodies.items()})


def _tar(root: Path, bodies: dict[str, bytes]) -> None:
    write_files(root, {"0.tar": tar_bytes({name: {"png": body} for name, body in bodies.items()})})


def _mds(root: Path, bodies: dict[str, bytes]) -> None:
    datasets.mds_shards(root, {"png": "png"}, [{"png": body} for body in bodies.values()], 1)


@pytest.mark.parametrize("write", [_files, _tar, _mds])
def test_images_are_rgb_in_every_format(
    tmp_path: Path, write: Callable[[Path, dict[str, bytes]], None]
) -> None:
    write(tmp_path / "d", {name: stored(mode) for name, mode in (("p", "P"), ("l", "L"), ("a", "RGBA"))})
    for mode, found in (("RGB", {"RGB"}), ("L", {"L"}), (None, {"P", "L", "RGBA"})):
        rows = open_dataset(tmp_path / "d", fields=("png",), image_mode=mode)  # type: ignore[arg-type]
        assert {rows[n][0].mode for n in range(3)} == found
    assert {each[0].mode for each in open_dataset(tmp_path / "d", fields=("png",))} == {"RGB"}


def test_mds_pixels_and_image_lists_are_rgb(tmp_path: Path) -> None:
    palette = image("P").convert("L")
    pil = np.asarray([8, 6, 1], "<u4").tobytes() + b"L" + palette.tobytes()
    grey = stored("L")
    several = np.asarray([1, len(grey)], "<u4").tobytes() + grey
    listed = np.asarray([0, 1, len(pil)], "<u4").tobytes() + pil
    columns = {"pil": "pil", "some": "jpeg_array", "list": "list[pil]"}
    datasets.mds_shards(tmp_path / "d", columns, [{"pil": pil, "some": several, "list": listed}], 1)
    for mode, found in (("RGB", "RGB"), ("L", "L"), (None, "L")):
        (sample,) = in_memory(compiled(tmp_path / "d", tmp_path), image_mode=mode)
        assert [sample["pil"].mode, sample["some"][0].mode, sample["list"][0].mode] == [found] * 3


@pytest.mark.parametrize("mode", ["rgb", "RGBA", "", 3, ["RGB"], True])
def test_an_unknown_image_mode_is_refused_with_the_choices(tmp_path: Path, mode: Any) -> None:
    _files(tmp_path / "d", {"0": stored("RGB")})
    with pytest.raises(InvalidInput, match=r"image_mode=.*'RGB', 'L', None") as caught:
        open_dataset(tmp_path / "d", image_mode=mode)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("decode", [None, len])
def test_an_image_mode_without_decoding_is_refused(tmp_path: Path, decode: Any) -> None:
    _files(tmp_path / "d", {"0": stored("RGB")})
    with pytest.raises(InvalidInput, match="image_mode='L' is for decode='auto'"):
        open_dataset(tmp_path / "d", decode=decode, image_mode="L")


def _pixels(found: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(found)).permute(2, 0, 1)


def _as_array(found: Any) -> dict[str, Any]:
    return {"image": np.array(found), "size": found.size}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("transform", [_pixels, _as_array])
def test_an_error_names_the_files_of_images_that_differ(tmp_path: Path, workers: int, transform: Any) -> None:
    sizes = {"0": (8, 6), "1": (8, 6), "2": (9, 6), "3": (8, 6)}
    _files(tmp_path / "d", {name: stored("RGB", size) for name, size in sizes.items()})
    rows = open_dataset(tmp_path / "d", transform=transform)
    with pytest.raises(
        InvalidInput, match=r"a/[013]\.png has .*a/2\.png has|a/2\.png has .*a/[013]\.png has"
    ) as caught:
        list(DataLoader(rows, batch_size=4, shuffle=True, num_workers=workers))
    assert "6, 9" in str(caught.value)


def test_an_error_names_large_images_and_images_in_mixtures(tmp_path: Path) -> None:
    for name, size in (("one", (200, 100)), ("two", (201, 100))):
        _files(tmp_path / name, {name: stored("RGB", size)})
    one, two = (open_dataset(tmp_path / name, transform=_pixels) for name in ("one", "two"))
    with pytest.raises(
        InvalidInput, match=r"a/(one|two)\.png has shape \[3, 100, 20[01]\] and a/(one|two)\.png"
    ):
        list(DataLoader(mix({one: 1, two: 1}), batch_size=2))


def _stacked(samples: list[Any]) -> torch.Tensor:
    return torch.stack(samples)


def test_an_error_of_collate_fn_names_the_files_in_a_note(tmp_path: Path) -> None:
    _files(tmp_path / "d", {name: stored("RGB", (8, 6 + int(name))) for name in "01"})
    rows = open_dataset(tmp_path / "d", transform=_pixels)
    with pytest.raises(RuntimeError, match="equal size") as caught:
        list(DataLoader(rows, batch_size=2, collate_fn=_stacked))
    notes = "".join(getattr(caught.value, "__notes__", ["a/0.png a/1.png"]))
    assert "a/0.png" in notes
    assert "a/1.png" in notes


def test_other_collation_errors_are_torchs(tmp_path: Path) -> None:
    _files(tmp_path / "d", {name: stored("RGB", (8, 6 + int(name))) for name in "01"})
    with pytest.raises(TypeError, match="found <class 'PIL"):
        list(DataLoader(open_dataset(tmp_path / "d"), batch_size=2))


def test_images_without_pillow_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, body = tmp_path / "data", stored("RGB")
    write_files(data, {"a.png": body})
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(
        InvalidInput,
        match=re.escape("pip install '.[images]' in a checkout"),
    ):
        open_dataset(data)
    assert open_dataset(data, decode=None)[0] == body


RAMP = np.linspace(0, 65535, 12 * 12).astype(np.uint16).reshape(12, 12)
"""Depths of more than 8 bits (https://github.com/python-pillow/Pillow/issues/5991)."""


def encoded(pixels: np.ndarray[Any, Any], form: str) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form)
    return file.getvalue()


def _columns(root: Path, bodies: dict[str, bytes]) -> None:
    struct = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    cells = pa.array([{"bytes": body, "path": None} for body in bodies.values()], struct)
    info = {"info": {"features": {"png": {"_type": "Image"}}}}
    root.mkdir(parents=True)
    table = pa.table({"png": cells}).replace_schema_metadata({"huggingface": json.dumps(info)})
    pq.write_table(table, root / "0.parquet")


@pytest.mark.parametrize("form", ["png", "tiff"])
@pytest.mark.parametrize("write", [_files, _tar, _mds, _columns])
def test_images_of_16_bits_are_clipped_with_one_warning(
    tmp_path: Path, write: Callable[[Path, dict[str, bytes]], None], form: str
) -> None:
    write(tmp_path / "d", {name: encoded(RAMP, form) for name in "01"})
    modes: tuple[Literal["RGB"], Literal["L"]] = "RGB", "L"
    for mode in modes:
        rows = open_dataset(tmp_path / "d", fields="png", image_mode=mode)
        with pytest.warns(UserWarning, match=r"'png' .* is clipped at 255 .* image_mode=None") as said:
            assert [rows[0].mode, rows[1].mode] == [mode, mode]
        assert sum("is clipped" in str(each.message) for each in said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = open_dataset(tmp_path / "d", fields="png", image_mode=None)
        assert [np.array_equal(row, RAMP) for row in rows] == [True, True]


def test_depth_maps_beside_images_keep_their_values(tmp_path: Path) -> None:
    pair = {"jpg": stored("CMYK"), "png": encoded(RAMP, "png")}
    write_files(tmp_path / "d", {f"0.{name}": body for name, body in pair.items()})
    write_files(tmp_path / "t", {"0.tar": tar_bytes({"0": pair})})
    for root in ("d", "t"):
        rows = open_dataset(tmp_path / root)
        with pytest.warns(UserWarning, match=r"'png' .* keeps its mode beside other images") as said:
            sample = rows[0]
        assert (sample["jpg"].mode, len(said)) == ("RGB", 1)
        assert np.array_equal(sample["png"], RAMP)
        with pytest.warns(UserWarning, match="keeps its mode"):
            assert np.array_equal(open_dataset(tmp_path / root, fields="png")[0], RAMP)


@pytest.mark.parametrize(
    "pixels",
    [np.arange(200, dtype=np.uint16).reshape(10, 20), np.full((9, 9), 7, np.int32)],
    ids=["16", "32"],
)
def test_values_that_fit_8_bits_are_not_warned_of(pixels: np.ndarray[Any, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = decoder("x", "tiff", Converter("x", "L"))(encoded(pixels, "tiff"))
    assert np.array_equal(found, pixels)


@pytest.mark.filterwarnings("ignore:an image of field")
def test_the_mode_that_a_feature_states_stands_for_none(tmp_path: Path) -> None:
    struct = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    info = {"info": {"features": {"png": {"_type": "Image", "mode": "L"}}}}
    cells = pa.array([{"bytes": stored("RGB"), "path": None}], struct)
    (tmp_path / "d").mkdir()
    table = pa.table({"png": cells}).replace_schema_metadata({"huggingface": json.dumps(info)})
    pq.write_table(table, tmp_path / "d/0.parquet")
    assert open_dataset(tmp_path / "d", image_mode=None)[0].mode == "L"
    assert open_dataset(tmp_path / "d")[0].mode == "RGB"


# ---- images that some installations of Pillow read


def test_avif_and_jfif_are_images_where_pillow_reads_them(tmp_path: Path) -> None:
    jpeg = stored("YCbCr")
    bodies = {
        "a/0.jfif": stored("CMYK"),
        "a/1.jpe": stored("CMYK"),
        "b/0.jpg": stored("CMYK"),
        "b/1.tif": jpeg,
    }
    if ".avif" in Image.registered_extensions():
        file = io.BytesIO()
        image("RGB").save(file, "AVIF")
        bodies["b/2.avif"] = file.getvalue()
    write_files(tmp_path / "d", bodies)
    dataset = open_dataset(tmp_path / "d")
    found = sorted((label, sample.size, sample.mode) for sample, label in dataset)
    assert found == [(0, (8, 6), "RGB")] * 2 + [(1, (8, 6), "RGB")] * (len(bodies) - 2)


def test_images_without_their_plugin_stay_bytes_or_say_what_to_install(tmp_path: Path) -> None:
    if ".heic" in Image.registered_extensions():
        pytest.skip("pillow-heif is installed")
    body = b"\0\0\0\x18ftypheic" + bytes(100)
    write_files(tmp_path / "alone", {"0.heic": body, "1.heic": body})
    assert list(open_dataset(tmp_path / "alone")) == [body, body]
    write_files(tmp_path / "mixed", {"0.heic": body, "1.jpg": stored("CMYK")})
    dataset = open_dataset(tmp_path / "mixed")
    place = next(at for at in range(2) if dataset.catalog.key(at) == "0.heic")
    assert dataset[1 - place].mode == "RGB"
    with pytest.raises(CorruptData, match=r"0\.heic .* pip install pillow-heif"):
        dataset[place]
