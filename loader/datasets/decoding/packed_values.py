"""Decodes values that are packed: gzip around another value, and `.npz` archives of arrays. Memory is bounded."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np

from cachesvc.sources.decompression import decompressed

MAX_UNPACKED_BYTES = 1 << 30
"""Limit of one value, unpacked."""
_LOCAL = "value"


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
