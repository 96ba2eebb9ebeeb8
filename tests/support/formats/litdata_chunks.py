"""Writes datasets in the layout of litData's `optimize`, by code that shares nothing with the reader's."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import zstandard

from tests.support.datasets import write_files

LEAF: dict[str, Any] = {"type": None, "context": None, "children_spec": []}


def litdata(
    root: Path,
    types: Mapping[str, str],
    items: Sequence[Sequence[bytes]],
    per_chunk: int,
    form: str = "plain",
    **config: Any,
) -> Path:
    """Write items whose values have these names and types of litData. `form`: one of `FORMS`. Return the folder."""
    level = {"batch": "batch", "sample": "sample"}.get(form)
    told: dict[str, Any] = {
        "compression": None if form == "plain" else "zstd",
        "compression_level": level,
        "data_format": list(types.values()),
        "data_spec": json.dumps([1, tree(list(types))]),
        "encryption": None,
        "item_loader": "PyTreeLoader",
    }
    bodies = [struct.pack(f"<{len(item)}I", *map(len, item)) + b"".join(item) for item in items]
    files: dict[str, bytes] = {}
    chunks: list[dict[str, Any]] = []
    for begin in range(0, len(bodies), per_chunk):
        part = bodies[begin : begin + per_chunk]
        name = f"chunk-0-{len(chunks)}{'.zstd' if form == 'chunk' else ''}.bin"
        files[name] = FORMS[form](part)
        chunks.append(
            {"chunk_bytes": len(plain(part)), "chunk_size": len(part), "dim": None, "filename": name}
        )
    files["index.json"] = json.dumps({"chunks": chunks, "config": told | config}).encode()
    write_files(root, files)
    return root


def tree(names: Sequence[str]) -> dict[str, Any]:
    """Return torch's tree of a dict with these keys."""
    return {
        "type": "builtins.dict",
        "context": json.dumps(list(names)),
        "children_spec": [LEAF] * len(names),
    }


def plain(bodies: Sequence[bytes]) -> bytes:
    """Return a chunk: u32 items, u32 offsets, items."""
    offsets = np.cumsum([4 * (len(bodies) + 2), *map(len, bodies)]).astype("<u4")
    return struct.pack("<I", len(bodies)) + offsets.tobytes() + b"".join(bodies)


def framed(bodies: Sequence[bytes], rows: int = 3) -> bytes:
    """Return a chunk of zstd frames of a few items each."""
    parts = [bodies[at : at + rows] for at in range(0, len(bodies), rows)]
    frames = [zstandard.compress(b"".join(part)) for part in parts]
    head = struct.pack("<8sHHIII", b"LDFZ01\0\0", 1, 0, len(bodies), rows, len(frames))
    head += np.cumsum([0, *map(len, bodies)]).astype("<u4").tobytes()
    at, table = len(head) + 24 * len(frames), b""
    for number, (part, frame) in enumerate(zip(parts, frames, strict=True)):
        table += struct.pack("<IIQII", number * rows, len(part), at, len(frame), sum(map(len, part)))
        at += len(frame)
    return head + table + b"".join(frames)


FORMS: dict[str, Callable[[Sequence[bytes]], bytes]] = {
    "plain": plain,
    "chunk": lambda bodies: zstandard.compress(plain(bodies)),
    "batch": framed,
    "sample": lambda bodies: plain([zstandard.compress(body) for body in bodies]),
}
"""litData's `compression_level`s, and none."""


def litdata_rows(
    root: Path, rows: Sequence[Mapping[str, Any]], per_chunk: int, compression: str | None = None
) -> Path:
    """Write dicts as chunks that hold an Arrow file, with record batches of 4 rows. Return the folder."""
    names = list(rows[0])
    litdata(root, dict.fromkeys(names, "json"), [[b""] * len(names)] * len(rows), per_chunk)
    for number, begin in enumerate(range(0, len(rows), per_chunk)):
        table = pyarrow.Table.from_pylist([dict(row) for row in rows[begin : begin + per_chunk]])
        sink = pyarrow.BufferOutputStream()
        options = pyarrow.ipc.IpcWriteOptions(compression=compression)
        with pyarrow.ipc.new_file(sink, table.schema, options=options) as out:
            out.write_table(table, max_chunksize=4)
        body = sink.getvalue().to_pybytes()
        head = np.array([len(table), *[4 * (len(table) + 2)] * (len(table) + 1)], "<u4").tobytes()
        tail = struct.pack("<I8s", len(body), b"LDARW01\0")
        (root / f"chunk-0-{number}.bin").write_bytes(head + body + tail)
    return root
