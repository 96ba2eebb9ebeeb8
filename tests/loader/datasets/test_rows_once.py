"""Every row that a writer wrote is read once, in any order, with any workers and ranks, after a resume, and by a daemon."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import date, datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import zstandard

from loader import DataLoader, open_dataset
from testbed.node import Daemon
from testbed.servers import SeaweedFS
from tests.support.datasets import tar_bytes, write_files

COUNT = 300
Row = dict[str, Any]


def table(rows: int = COUNT) -> pa.Table:
    """Make rows of every kind, with nulls at each level."""
    chats = [
        [{"role": ("user", "bot")[k % 2], "content": f"é{n}"} for k in range(n % 4)] for n in range(rows)
    ]
    return pa.table(
        {
            "n": range(rows),
            "text": [f"text {n}" if n % 7 else None for n in range(rows)],
            "messages": chats,
            "tags": [[f"t{n}", None][: n % 3] if n % 5 else None for n in range(rows)],
            "nested": pa.array([[[n, None], []], None][n % 2] for n in range(rows)),
            "ids": pa.array([list(range(n % 5)) for n in range(rows)], pa.list_(pa.int32())),
            "map": pa.array([[("a", n), ("b", None)] for n in range(rows)], pa.map_(pa.string(), pa.int64())),
            "when": pa.array(
                [datetime(2020, 1, 1, 0, 0, n % 60, n) for n in range(rows)], pa.timestamp("us", "UTC")
            ),
            "day": pa.array([date(1960 + n % 90, 1, 1) if n % 3 else None for n in range(rows)]),
            "price": pa.array([Decimal(n) / 100 for n in range(rows)], pa.decimal128(38, 2)),
            "kind": pa.array([("x", "y", None)[n % 3] for n in range(rows)]).dictionary_encode(),
            "raw": [struct.pack("<q", n) for n in range(rows)],
        }
    )


def _parquet(rows: pa.Table) -> bytes:
    body = io.BytesIO()
    pq.write_table(rows, body, row_group_size=90)
    return body.getvalue()


def _arrow(rows: pa.Table, new: Callable[..., Any]) -> bytes:
    body = io.BytesIO()
    with new(body, rows.schema) as out:
        out.write_table(rows, max_chunksize=90)
    return body.getvalue()


def _packed(rows: pa.Table) -> bytes:
    body = io.BytesIO()
    feather.write_feather(rows, body, compression="lz4", chunksize=90)
    return body.getvalue()


COLUMNS: dict[str, tuple[str, Callable[[pa.Table], bytes]]] = {
    "parquet": ("0.parquet", _parquet),
    "arrow stream": ("0.arrow", lambda rows: _arrow(rows, pa.ipc.new_stream)),
    "arrow file": ("0.arrow", lambda rows: _arrow(rows, pa.ipc.new_file)),
    "feather, lz4": ("0.feather", _packed),
}


def chats(begin: int, end: int) -> list[Row]:
    """Make rows with nested messages and other keys in each file."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"say {n} ü\u2028"},
                {"role": "assistant", "content": "x" * n},
            ],
            "n": n,
            **({"score": n / 7} if begin % 2 else {"source": None}),
        }
        for n in range(begin, end)
    ]


def json_lines(rows: list[Row]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=row["n"] % 2 == 0) + "\n" for row in rows).encode()


def csv_file(rows: list[Row], separator: str = ",") -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), delimiter=separator)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def cells(begin: int, end: int) -> list[Row]:
    return [
        {"text": f'line "{n}",\n\t;ü', "n": n, "half": n / 2, "empty": "" if n % 2 else "x"}
        for n in range(begin, end)
    ]


def files_of(kind: str) -> tuple[dict[str, bytes], list[Any]]:
    """Write COUNT samples in three files, and return them with what a reader must see."""
    parts = [(0, 101), (101, 220), (220, COUNT)]
    if kind.startswith("jsonl"):
        rows = [chats(*part) for part in parts]
        plain = [json_lines(part) for part in rows]
        files = {
            f"{at}.{kind}": gzip.compress(body) if kind.endswith("gz") else body
            for at, body in enumerate(plain)
        }
        return files, [row for part in rows for row in part]
    if kind == "csv":
        rows = [cells(*part) for part in parts]
        packed = zstandard.compress(csv_file(rows[2]))
        files = {"0.csv": csv_file(rows[0]), "1.tsv": csv_file(rows[1], "\t"), "2.csv.zst": packed}
        return files, [row for part in rows for row in part]
    if kind == "text":
        lines = [[f"{n} ü" * (n % 40) for n in range(*part)] for part in parts]
        files = {f"{at}.txt": "\n".join([*part, ""]).encode() for at, part in enumerate(lines)}
        return files, [line for part in lines for line in part]
    if kind in COLUMNS:
        rows_of_columns = table()
        return {COLUMNS[kind][0]: COLUMNS[kind][1](rows_of_columns)}, rows_of_columns.to_pylist()
    tars = [
        {f"{n:06}": {"txt": f"{n} {'y' * n}".encode(), "cls": b"%d" % n} for n in range(*part)}
        for part in parts
    ]
    names = ("0.tar", "1.tar.gz", "2.tar.zst")
    packs: tuple[Callable[[bytes], bytes], ...] = (bytes, gzip.compress, zstandard.compress)
    files = {name: pack(tar_bytes(tar)) for name, pack, tar in zip(names, packs, tars, strict=True)}
    return files, [{"txt": f"{n} {'y' * n}", "cls": n} for n in range(COUNT)]


KINDS = ("jsonl", "jsonl.gz", "csv", "text", "tar", *COLUMNS)


def plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, datetime):
        return value.astimezone(timezone.utc)
    return sorted((key, plain(each)) for key, each in value.items()) if isinstance(value, dict) else value


def digests(samples: Iterable[Any]) -> Counter[str]:
    """Count the samples by the SHA-256 of what they hold."""
    return Counter(hashlib.sha256(repr(plain(sample)).encode()).hexdigest() for sample in samples)


def loader(uri: str, kind: str, **arguments: Any) -> DataLoader[Any]:
    return DataLoader(
        open_dataset(uri, extent_bytes=8192, format="text" if kind == "text" else None),
        16,
        shuffle=True,
        collate_fn=list,
        **arguments,
    )


def epochs(uri: str, kind: str, expected: Counter[str]) -> None:
    """Assert that each of several ways through an epoch gives the expected samples, each once."""
    for workers in (0, 2):
        found = [row for batch in loader(uri, kind, num_workers=workers) for row in batch]
        assert digests(found) == expected
    ranks = [loader(uri, kind, rank=rank, world_size=2, last="pad") for rank in range(2)]
    shared = [row for each in ranks for batch in each for row in batch[: each.valid]]
    assert digests(shared) == expected
    first, rest = loader(uri, kind), loader(uri, kind)
    begun = [row for _, batch in zip(range(7), first, strict=False) for row in batch]
    rest.load_state_dict(first.state_dict())
    assert digests([*begun, *(row for batch in rest for row in batch)]) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_every_row_is_read_as_written_directly(tmp_path: Path, kind: str) -> None:
    files, written = files_of(kind)
    write_files(tmp_path / "d", files)
    assert len(digests(written)) >= COUNT - 10
    epochs(str(tmp_path / "d"), kind, digests(written))


@pytest.fixture(scope="module")
def node(s3_server: SeaweedFS, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon for s3://rows-once/."""
    s3_server.create_bucket("rows-once")
    options = ["--ram", "64MiB", "--allow", "s3://rows-once/"]
    with Daemon(tmp_path_factory.mktemp("node"), options, s3_server.env()) as daemon:
        yield daemon


def name_of(kind: str) -> str:
    return "".join(filter(str.isalnum, kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_row_is_read_as_written_from_a_bucket_through_a_daemon(
    monkeypatch: pytest.MonkeyPatch, s3_server: SeaweedFS, node: Daemon, kind: str
) -> None:
    files, written = files_of(kind)
    for name, body in files.items():
        s3_server.client().put_object(Bucket="rows-once", Key=f"{name_of(kind)}/{name}", Body=body)
    monkeypatch.setenv("CACHESVC_SOCKET", node.socket_dir)
    monkeypatch.setenv("CACHESVC", "require")
    found = [
        row for batch in loader(f"s3://rows-once/{name_of(kind)}/", kind, num_workers=2) for row in batch
    ]
    assert digests(found) == digests(written)
