"""Decodes the bytes of a field by extension or column encoding. Pickles are refused."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Iterable
from decimal import Decimal
from itertools import pairwise
from typing import Any

import numpy as np

from cachesvc.catalog.layout import LITDATA
from cachesvc.core.errors import CorruptData, InvalidInput
from cachesvc.sources.decompression import decompressed
from loader.datasets.decoding.images import Converter, image_decoder, is_read, pillow
from loader.datasets.decoding.litdata_values import value_decoder

Decoder = Callable[[bytes], Any]
MEND = "repair the file, leave the sample out by DataLoader(on_error='skip'), or the field by fields="
PACKED = ".gz"
"""End of the encoding of a value in gzip."""
_MDS_IMAGES = frozenset({"pil", "jpeg_array", "jpegarray"})
_REFUSED = frozenset({"pkl", "pickle", "pyd", "pt", "pth", "joblib"})
_SCALARS = {"bool": "?", "int": "<i8", "float64": "<f8", "float32": "<f4", "float16": "<f2"} | {
    f"{sign}int{bits}": f"<{sign[:1] or 'i'}{bits // 8}" for sign in ("u", "") for bits in (8, 16, 32, 64)
}

_ARRAY_TYPES = {8: "u1", 9: "i1", 16: "<u2", 17: "<i2", 18: "<f2"} | {
    bits + kind: f"<{letter}{bits // 8}" for bits in (32, 64) for kind, letter in enumerate("uif")
}
"""MDS's numbers of array types."""
MAX_UNPACKED_BYTES = 1 << 30
"""Limit of one value of gzip or `.npz`, unpacked."""
_LOCAL = "value"


def decoder(name: str, encoding: str, convert: Converter | None = None) -> Decoder:
    """Return the decoder of a field; fields of unknown encoding stay bytes. `convert` applies to images, RGB if None.

    Raises InvalidInput for pickles, and for images where Pillow is not installed.
    """
    convert = convert or Converter(name, "RGB")
    if encoding.startswith(LITDATA):
        return _litdata(name, encoding.removeprefix(LITDATA), convert)
    kind = _kind(encoding)
    if encoding.endswith(PACKED):
        return gunzipped(decoder(name, encoding.removesuffix(PACKED), convert))
    if kind in _REFUSED:
        raise InvalidInput(
            f"field {name!r} is a pickle ({encoding}), which can run code when it is read; choose other fields=, "
            "or read its bytes with decode=None"
        )
    if is_read(kind):
        return image_decoder(name, convert)
    if kind in _MDS_IMAGES:
        return _raw_image(name, convert) if kind == "pil" else _value_list(image_decoder(name, convert))
    if kind in _SCALARS:
        return _scalar(_SCALARS[kind])
    if kind.startswith("list[") and kind.endswith("]"):
        return _value_list(decoder(name, kind[5:-1], convert), 4)
    if kind == "ndarray" or kind.startswith("ndarray:"):
        return _ndarray(kind)
    return _PLAIN.get(kind, bytes)


def _litdata(name: str, kind: str, convert: Converter) -> Decoder:
    """Return the decoder of a type of litData: its own ones, then images and pickles as in other formats."""
    base = kind.partition(":")[0]
    if base in ("jpeg", "image"):
        return image_decoder(name, convert)
    if base in ("pil", "jpeg_array", "pickle"):
        return decoder(name, base, convert)
    if base == "graph":
        return decoder(name, "pickle", convert)
    return value_decoder(name, kind) or bytes


def number_type(encoding: str) -> str:
    """Return numpy's type of a field whose values are single numbers; "" for other fields."""
    if encoding.startswith(LITDATA):
        return {"int": "<i8", "float": "<f8"}.get(encoding.removeprefix(LITDATA), "")
    return _SCALARS.get(_kind(encoding), "")


def text_kind(encoding: str) -> type | None:
    """Return str or bytes for a field whose values are these as they are stored; None for other fields."""
    kind = encoding.removeprefix(LITDATA) if encoding.startswith(LITDATA) else _kind(encoding)
    return {"str": str, "bytes": bytes}.get(kind)


def is_image(encoding: str) -> bool:
    """Return whether a field of this encoding holds image files."""
    kind = encoding.removeprefix(LITDATA).partition(":")[0] if encoding.startswith(LITDATA) else ""
    return kind in ("jpeg", "image") or is_read(_kind(encoding))


def are_images(encodings: Iterable[str]) -> bool:
    """Return whether several fields, of these encodings, hold one image each."""
    return sum(is_image(each) or _kind(each.removeprefix(LITDATA)) == "pil" for each in encodings) > 1


def _kind(encoding: str) -> str:
    kind = encoding.lower().rpartition(".")[2] if "." in encoding else encoding.lower()
    return "jpeg" if kind.startswith("jpeg:") else kind  # MDS appends the quality


def _raw_image(name: str, convert: Converter) -> Decoder:
    """MDS `pil`: width, height and the length of the mode's name; then the name and the raw pixels."""
    image = pillow(name)

    def decode(raw: bytes) -> Any:
        width, height, length = np.frombuffer(raw, "<u4", 3).tolist()
        stored, pixels = raw[12 : 12 + length].decode(), raw[12 + length :]
        if width * height > 8 * len(pixels):  # one bit per pixel is the smallest mode
            raise ValueError("not enough image data")
        return convert(image.frombytes(stored, (width, height), pixels))

    return decode


def _value_list(decode: Decoder, skipped_bytes: int = 0) -> Decoder:
    """Decodes a list: the number of values, the size of each, then the values. MDS `jpeg_array` has this form; a
    `list[...]` has 4 more bytes in front."""

    def each(raw: bytes) -> Any:
        count = int(np.frombuffer(raw, "<u4", 1, skipped_bytes)[0])
        begin = skipped_bytes + 4
        sizes = np.frombuffer(raw[begin:], "<u4", count).tolist()
        bounds = np.cumsum([begin + 4 * count, *sizes]).tolist()
        return [decode(raw[low:high]) for low, high in pairwise(bounds)]

    return each


def _scalar(dtype: str) -> Decoder:
    def decode(raw: bytes) -> Any:
        return np.frombuffer(raw, dtype)[0].item()

    return decode


def _ndarray(encoding: str) -> Decoder:
    """MDS `ndarray:dtype:shape`. A value begins with what the encoding leaves open: a number for the type, then one
    byte with the number of dimensions (6 bits) and the log of a dimension's width in bytes (2 bits), then the
    dimensions."""
    _, stated, sides = (*encoding.split(":"), "", "")[:3]
    fixed = [int(side) for side in sides.split(",")] if sides else None

    def decode(raw: bytes) -> Any:
        dtype, at = (stated, 0) if stated else (_ARRAY_TYPES[raw[0]], 1)
        shape = fixed
        if shape is None:
            count, width = raw[at] >> 2, 1 << (raw[at] & 3)
            shape = np.frombuffer(raw, f"<u{width}", count, at + 1).tolist()
            at += 1 + count * width
        return np.frombuffer(raw, dtype, offset=at).reshape(shape).copy()

    return decode


def _id(raw: bytes) -> int | str:
    """A whole number, as for WebDataset; a name, which WebDataset refuses, stays text."""
    try:
        return int(raw)
    except ValueError:
        return raw.decode()


def _number(raw: bytes) -> int | float:
    try:
        return int(raw)
    except ValueError:
        return float(raw)


def array_of(raw: bytes) -> Any:
    """Return one array of a `.npy` file. Memory is taken for the data present, not for the size in the header."""
    file, layout = io.BytesIO(raw), np.lib.format
    old = layout.read_magic(file) == (1, 0)  # 3.0 differs from 2.0 only in field names
    shape, fortran, dtype = layout.read_array_header_1_0(file) if old else layout.read_array_header_2_0(file)
    if dtype.hasobject:
        raise ValueError("it holds Python objects; save plain arrays")
    # raises TypeError if the header promises more data than there is
    return np.ndarray(shape, dtype, raw, file.tell(), order="F" if fortran else "C").copy("K")


def arrays_of(raw: bytes, limit_bytes: int = MAX_UNPACKED_BYTES) -> dict[str, Any]:
    """Return the arrays of a `.npz` file by name, as WebDataset does. Raises ValueError for more than `limit_bytes`."""
    found: dict[str, Any] = {}
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        infos = archive.infolist()
        _check_size(sum(info.file_size for info in infos), limit_bytes)
        for info in infos:
            with archive.open(info) as member:
                body = member.read(info.file_size + 1)
            name = info.filename.removesuffix(".npy")
            found[name] = array_of(body) if body.startswith(b"\x93NUMPY") else body
    return found


def gunzipped(
    decode: Callable[[bytes], Any], limit_bytes: int = MAX_UNPACKED_BYTES
) -> Callable[[bytes], Any]:
    """Return a decoder of the same values in gzip, which raises ValueError for more than `limit_bytes`."""

    def unpacked(raw: bytes) -> Any:
        parts, size = [], 0
        for part in decompressed(_LOCAL, "gzip", [raw]):
            parts.append(part)
            size += len(part)
            _check_size(size, limit_bytes)
        return decode(b"".join(parts))

    return unpacked


def _check_size(size_bytes: int, limit_bytes: int) -> None:
    if size_bytes > limit_bytes:
        raise ValueError(f"it unpacks to more than {limit_bytes >> 20:,} MiB")


_PLAIN: dict[str, Decoder] = {
    "json": json.loads,
    "jsn": json.loads,
    "txt": bytes.decode,
    "text": bytes.decode,
    "transcript": bytes.decode,
    "str": bytes.decode,
    "cls": _number,
    "cls2": int,
    "index": int,
    "inx": int,
    "id": _id,
    "str_int": int,
    "str_float": float,
    "str_decimal": lambda raw: Decimal(raw.decode()),
    "npy": array_of,
    "npz": arrays_of,
}


def decode_field(decode: Decoder, raw: bytes | None, where: Callable[[], str]) -> Any:
    """Decode one field's value; None for an absent field. Raises CorruptData, which names the sample by `where`,
    and MemoryError."""
    if raw is None:
        return None
    try:
        return decode(raw)
    except MemoryError:
        raise
    except Exception as error:  # decoders of other libraries raise EOFError, TypeError or their own
        raise CorruptData(f"{where()} does not decode: {error}; {MEND}") from error
