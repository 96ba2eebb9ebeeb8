"""Bytes -> values, by extension or column encoding. Nothing here unpickles."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from cachesvc.core.errors import CorruptData, InvalidInput

Decoder = Callable[[bytes], Any]
IMAGES = frozenset({"jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm"})
_MDS_IMAGES = frozenset({"pil", "jpeg_array", "jpegarray"})
_REFUSED = frozenset({"pkl", "pickle", "pyd", "pt", "pth", "joblib"})
_SCALARS = {"int": "<i8", "float64": "<f8", "float32": "<f4", "float16": "<f2"} | {
    f"{sign}int{bits}": f"<{sign[:1] or 'i'}{bits // 8}" for sign in ("u", "") for bits in (8, 16, 32, 64)
}


def decoder(name: str, encoding: str) -> Decoder:
    """How to decode a field; bytes stay bytes where nothing is known of them.

    Raises InvalidInput for pickles, and for images where Pillow is not installed.
    """
    kind = encoding.lower().rpartition(".")[2] if "." in encoding else encoding.lower()
    if kind in _REFUSED:
        raise InvalidInput(
            f"field {name!r} is a pickle ({encoding}), which can run code when it is read; choose other fields=, "
            "or read its bytes with decode=None"
        )
    if kind in IMAGES:
        return _image(name)
    if kind in _MDS_IMAGES:
        return _pixels(name) if kind == "pil" else _several(_image(name))
    if kind in _SCALARS:
        return _scalar(_SCALARS[kind])
    if kind.startswith("ndarray:"):
        return _ndarray(kind)
    return _PLAIN.get(kind, bytes)


def _pillow(name: str) -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise InvalidInput(
            f"field {name!r} is an image and Pillow is not installed; pip install pillow, or decode=None for bytes"
        ) from None
    return Image


def _image(name: str) -> Decoder:
    image = _pillow(name)

    def decode(raw: bytes) -> Any:
        opened = image.open(io.BytesIO(raw))
        opened.load()
        return opened

    return decode


def _pixels(name: str) -> Decoder:
    """MDS `pil`: width, height and the length of the mode's name, the name, the pixels as they are."""
    image = _pillow(name)

    def decode(raw: bytes) -> Any:
        width, height, length = np.frombuffer(raw, "<u4", 3).tolist()
        mode, pixels = raw[12 : 12 + length].decode(), raw[12 + length :]
        if width * height > 8 * len(pixels):  # an image of bits is the smallest
            raise ValueError("not enough image data")
        return image.frombytes(mode, (width, height), pixels)

    return decode


def _several(decode: Decoder) -> Decoder:
    """MDS `jpeg_array`: how many images, the size of each, then one behind the other."""

    def each(raw: bytes) -> Any:
        count = int(np.frombuffer(raw, "<u4", 1)[0])
        bounds = np.cumsum([4 + 4 * count, *np.frombuffer(raw[4:], "<u4", count).tolist()]).tolist()
        return [decode(raw[low:high]) for low, high in pairwise(bounds)]

    return each


def _scalar(dtype: str) -> Decoder:
    def decode(raw: bytes) -> Any:
        return np.frombuffer(raw, dtype)[0].item()

    return decode


def _ndarray(encoding: str) -> Decoder:
    """MDS `ndarray:dtype:shape` with both given; others carry a header of their own and stay bytes."""
    _, _, rest = encoding.partition(":")
    dtype, _, shape = rest.partition(":")
    if not dtype or not shape:
        return bytes
    sides = tuple(int(side) for side in shape.split(","))

    def decode(raw: bytes) -> Any:
        return np.frombuffer(raw, dtype).reshape(sides).copy()

    return decode


def _text(raw: bytes) -> str:
    return raw.decode()


def _number(raw: bytes) -> int:
    return int(raw)


def _npy(raw: bytes) -> Any:
    return np.load(io.BytesIO(raw), allow_pickle=False)


_PLAIN: dict[str, Decoder] = {
    "json": json.loads,
    "txt": _text,
    "text": _text,
    "str": _text,
    "cls": _number,
    "cls2": _number,
    "index": _number,
    "id": _text,
    "str_int": _number,
    "str_float": float,
    "npy": _npy,
}


def decoded(decode: Decoder, raw: bytes | None, where: Callable[[], str]) -> Any:
    """One field's value; None for an absent field. Raises CorruptData naming the sample (`where`), and MemoryError."""
    if raw is None:
        return None
    try:
        return decode(raw)
    except MemoryError:
        raise
    except (
        Exception
    ) as error:  # decoders of other people, which meet any bytes: EOFError, TypeError, Pillow's own
        raise CorruptData(
            f"{where()} does not decode: {error}; mend the file or leave the field out"
        ) from error
