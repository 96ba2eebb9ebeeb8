"""Writers of small datasets in every format. Each returns what a reader must see."""

from __future__ import annotations

import bz2
import csv
import gzip
import hashlib
import io
import json
import struct
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import xxhash
import zstandard

Sample = dict[str, bytes]


def write_files(root: Path, files: Mapping[str, bytes]) -> None:
    """Write plain files, given by relative path."""
    for path, body in files.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(body)


def image_folder(
    root: Path, classes: Sequence[str], per_class: int, size_bytes: int, seed: int = 0
) -> dict[str, bytes]:
    """Write `class/000001.jpg`, ... of random bytes; return path -> body."""
    draw = np.random.default_rng(seed)
    files = {
        f"{name}/{number:06d}.jpg": draw.bytes(size_bytes + number % 7)
        for name in classes
        for number in range(per_class)
    }
    write_files(root, files)
    return files


def labelled_table(root: Path, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a table as CSV or JSONL, by the suffix of its name."""
    root.mkdir(parents=True, exist_ok=True)
    if name.endswith(".jsonl"):
        (root / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return
    with open(root / name, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def tar_of(*members: tuple[str, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    """A tar of (name, body) in this order."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
        for name, body in members:
            info = tarfile.TarInfo(name)
            info.size = len(body)
            archive.addfile(info, io.BytesIO(body))
    return buffer.getvalue()


def tar_bytes(samples: Mapping[str, Sample], form: int = tarfile.PAX_FORMAT) -> bytes:
    """One WebDataset shard of `samples`: key -> extension -> body."""
    named = ((f"{key}.{ext}", body) for key, fields in samples.items() for ext, body in fields.items())
    return tar_of(*named, form=form)


def tar_shards(root: Path, shards: int, per_shard: int, size_bytes: int, seed: int = 0) -> dict[str, Sample]:
    """Write `000000.tar`, ... of (jpg, cls, json) samples; return key -> fields."""
    draw, everything = np.random.default_rng(seed), {}
    for shard in range(shards):
        samples = {
            f"{shard:03d}-{number:05d}": {
                "jpg": draw.bytes(size_bytes + number),
                "cls": str(number % 3).encode(),
                "json": json.dumps({"width": number, "source": f"s{number % 2}"}).encode(),
            }
            for number in range(per_shard)
        }
        write_files(root, {f"{shard:06d}.tar": tar_bytes(samples)})
        everything.update(samples)
    return everything


def mds_shards(
    root: Path,
    columns: Mapping[str, str],
    samples: Sequence[Mapping[str, bytes]],
    per_shard: int,
    compression: str = "",
    hashes: Sequence[str] = (),
) -> None:
    """Write MDS version 2 with variable-size columns, in the layout of MosaicML's writer.

    `compression`: one of `MDS_PACKERS`. `hashes`: names of hashlib's algorithms and of xxhash's.
    """
    root.mkdir(parents=True, exist_ok=True)
    shards = []
    for number in range(0, len(samples), per_shard):
        name = f"shard.{number // per_shard:05d}.mds"
        raw = mds_bytes(
            [[sample[column] for column in columns] for sample in samples[number : number + per_shard]]
        )
        shard: dict[str, Any] = {
            "column_encodings": list(columns.values()),
            "column_names": list(columns),
            "column_sizes": [None] * len(columns),
            "compression": compression or None,
            "format": "mds",
            "hashes": list(hashes),
            "raw_data": {"basename": name, "bytes": len(raw), "hashes": hashed(raw, hashes)},
            "samples": len(samples[number : number + per_shard]),
            "size_limit": 1 << 26,
            "version": 2,
            "zip_data": None,
        }
        if compression:
            raw = MDS_PACKERS[compression](raw)
            name += f".{compression}"
            shard["zip_data"] = {"basename": name, "bytes": len(raw), "hashes": hashed(raw, hashes)}
        (root / name).write_bytes(raw)
        shards.append(shard)
    (root / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))


def hashed(data: bytes, names: Sequence[str]) -> dict[str, str]:
    """Return the hashes of data by the names of their algorithms, in hex digits."""
    return {
        name: getattr(xxhash, name)(data).hexdigest()
        if name.startswith("xx")
        else hashlib.new(name, data).hexdigest()
        for name in names
    }


MDS_PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "br": lambda data: pyarrow.compress(data, "brotli", asbytes=True),
    "bz2": bz2.compress,
    "gz": gzip.compress,
    "snappy": lambda data: pyarrow.compress(data, "snappy", asbytes=True),
    "zstd": zstandard.compress,
}
"""What MDS's compressions do to a shard."""


def mds_bytes(rows: Sequence[Sequence[bytes]]) -> bytes:
    """One raw MDS shard: u32 count, u32 offsets, rows of u32 sizes and bodies."""
    bodies = [struct.pack(f"<{len(row)}I", *map(len, row)) + b"".join(row) for row in rows]
    offsets = np.cumsum([4 + 4 * (len(rows) + 1), *map(len, bodies)]).astype("<u4")
    return struct.pack("<I", len(rows)) + offsets.tobytes() + b"".join(bodies)


def records(path: Path, count: int, record_bytes: int, seed: int = 0) -> np.ndarray:
    """Write fixed-size records, raw or `.npy`; return uint8[count, record_bytes]."""
    rows = np.random.default_rng(seed).integers(0, 256, (count, record_bytes), np.uint8)
    return array_file(path, rows)


def tokens(path: Path, count: int, dtype: str = "<u2", seed: int = 0) -> np.ndarray:
    """Write a token stream, raw or `.npy`; return it."""
    return array_file(path, np.random.default_rng(seed).integers(0, 50_000, count).astype(dtype))


def array_file(path: Path, array: np.ndarray) -> np.ndarray:
    """Write an array, raw or `.npy` by the path's suffix; return it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".npy":
        np.save(path, array)
    else:
        path.write_bytes(array.tobytes())
    return array


def megatron(stem: Path, documents: Sequence[Sequence[int]], dtype: str = "<u2") -> np.ndarray:
    """Write a Megatron `.bin/.idx` pair with one sequence per document; return the concatenated tokens."""
    code = {"|u1": 1, "<i4": 4, "<u2": 8}[np.dtype(dtype).str]
    lengths = np.asarray([len(document) for document in documents], "<i4")
    stream = np.concatenate([np.asarray(document, dtype) for document in documents])
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]) * stream.dtype.itemsize
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(lengths), len(lengths) + 1)
    bounds = np.arange(len(lengths) + 1, dtype="<i8")
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".bin").write_bytes(stream.tobytes())
    stem.with_suffix(".idx").write_bytes(
        head + lengths.tobytes() + starts.astype("<i8").tobytes() + bounds.tobytes()
    )
    return stream
