"""Samples of rows of text: what their writers wrote, in any order, with any workers and ranks, and after a resume."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from pyarrow import feather
from torch.utils.data import default_collate

from cachesvc.core.errors import CorruptData, InvalidInput
from loader import DataLoader, open_dataset
from testbed.node import Daemon
from testbed.servers import SeaweedFS
from tests.support.datasets import tar_bytes, write_files

COUNT = 300
Row = dict[str, Any]


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CACHESVC", "off")


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
    tars = [
        {f"{n:06}": {"txt": f"{n} {'y' * n}".encode(), "cls": b"%d" % n} for n in range(*part)}
        for part in parts
    ]
    names = ("0.tar", "1.tar.gz", "2.tar.zst")
    packs: tuple[Callable[[bytes], bytes], ...] = (bytes, gzip.compress, zstandard.compress)
    files = {name: pack(tar_bytes(tar)) for name, pack, tar in zip(names, packs, tars, strict=True)}
    return files, [{"txt": f"{n} {'y' * n}", "cls": n} for n in range(COUNT)]


KINDS = ("jsonl", "jsonl.gz", "csv", "text", "tar")


def digests(samples: list[Any]) -> Counter[str]:
    """Count the samples by the SHA-256 of what they hold."""
    return Counter(
        hashlib.sha256(json.dumps(sample, sort_keys=True).encode()).hexdigest() for sample in samples
    )


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
    """A daemon for s3://text-rows/."""
    s3_server.create_bucket("text-rows")
    options = ["--ram", "64MiB", "--allow", "s3://text-rows/"]
    with Daemon(tmp_path_factory.mktemp("node"), options, s3_server.env()) as daemon:
        yield daemon


@pytest.mark.parametrize("kind", KINDS)
def test_every_row_is_read_as_written_from_a_bucket_through_a_daemon(
    monkeypatch: pytest.MonkeyPatch, s3_server: SeaweedFS, node: Daemon, kind: str
) -> None:
    files, written = files_of(kind)
    for name, body in files.items():
        s3_server.client().put_object(Bucket="text-rows", Key=f"{kind}/{name}", Body=body)
    monkeypatch.setenv("CACHESVC_SOCKET", node.socket_dir)
    monkeypatch.setenv("CACHESVC", "require")
    found = [row for batch in loader(f"s3://text-rows/{kind}/", kind, num_workers=2) for row in batch]
    assert digests(found) == digests(written)


def test_fields_make_tuples(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.jsonl": b'{"a": 1, "b": [2]}\n{"b": null}\n[1]\n', "a.csv": b"a,b\n1,x\n,y\n"})
    rows = open_dataset(tmp_path / "a.jsonl", fields=("b", "a"))
    assert [rows[0], rows[1]] == [([2], 1), (None, None)]
    with pytest.raises(CorruptData, match=r"a\.jsonl line 3 is list and no object, which fields= needs"):
        rows[2]
    assert list(open_dataset(tmp_path / "a.csv", fields=("a",))) == [(1,), (None,)]
    with pytest.raises(InvalidInput, match="fields \\['c'\\] are not in the dataset, which has a, b"):
        open_dataset(tmp_path / "a.csv", fields="c")


def types_in(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {name: types_in(each) for name, each in batch.items()}
    return (type(batch), [*map(types_in, batch)]) if type(batch) in (list, tuple) else type(batch)


@pytest.mark.parametrize("fields", [None, ("text", "n"), "text", ("text",)], ids=str)
@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl", "a.parquet", "a.arrow"])
def test_batches_have_the_types_of_torchs_collation(tmp_path: Path, name: str, fields: Any) -> None:
    rows = [{"text": f"t{n}", "n": n} for n in range(4)]
    if name == "a.parquet":
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / name)
    elif name == "a.arrow":
        feather.write_feather(pa.Table.from_pylist(rows), str(tmp_path / name))
    else:
        write_files(
            tmp_path,
            {
                name: json_lines(rows)
                if name == "a.jsonl"
                else csv_file(rows, "\t" if name == "a.tsv" else ",")
            },
        )
    data = open_dataset(tmp_path / name, fields=fields)
    (batch,), wanted = DataLoader(data, 4), default_collate([data[n] for n in range(4)])
    assert types_in(batch) == types_in(wanted)
    (batch,) = DataLoader(data, 4, num_workers=1)
    assert types_in(batch) == types_in(wanted)


def test_rows_that_are_not_decoded_are_bytes(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.jsonl": b'{"a": 1}\r\n[2]\n'})
    assert list(open_dataset(tmp_path / "a.jsonl", decode=None)) == [b'{"a": 1}', b"[2]"]
    assert list(open_dataset(tmp_path / "a.jsonl", decode=len)) == [8, 3]
    with pytest.raises(InvalidInput, match="which has row"):
        open_dataset(tmp_path / "a.jsonl", decode=None, fields="a")


def test_a_column_that_a_file_lacks_is_none(tmp_path: Path) -> None:
    write_files(tmp_path / "d", {"0.csv": b"a,b\n1,x\n", "1.csv": b"c,a\n2.5,3\n"})
    rows = open_dataset(tmp_path / "d")
    assert list(rows) == [{"a": 1, "b": "x", "c": None}, {"a": 3, "b": None, "c": 2.5}]
    assert list(rows.where("c > 2")) == [{"a": 3, "b": None, "c": 2.5}]


@pytest.mark.parametrize(
    ("name", "body", "says"),
    [
        (
            "a.jsonl",
            b'{"n": 0}\n\n{"n": 1\n{"n": 2}\n',
            r"a\.jsonl line 3 is no JSON: Expecting ',' delimiter",
        ),
        ("a.csv", b"n,m\n0,0\n1\n2,2\n", r"a\.csv line 3 has 1 cells, its header 2; repair it"),
        ("a.csv", b'n,m\n0,0\n1,"x"y\n2,2\n', r"a\.csv line 3 is no CSV: ',' expected"),
        (
            "a.csv.gz",
            gzip.compress(b"n,m\n0,0\n1,\xff\n2,2\n", mtime=0),
            r"a\.csv\.gz line 3 is no UTF-8 text",
        ),
    ],
)
def test_a_malformed_row_is_named_and_can_be_skipped(
    tmp_path: Path, name: str, body: bytes, says: str
) -> None:
    write_files(tmp_path, {name: body})
    rows = open_dataset(tmp_path / name)
    with pytest.raises(CorruptData, match=says):
        rows[1]
    with pytest.raises(CorruptData, match=says):
        list(DataLoader(rows, 3, collate_fn=list))
    batches = DataLoader(rows, 3, collate_fn=list, on_error="skip")
    assert [row["n"] for batch in batches for row in batch] == [0, 2]
    assert batches.bad_samples[0].key == f"{name}:1"


@pytest.mark.parametrize(("name", "body"), [("a.jsonl", b'{"a": "x", "b": 1}\n'), ("a.csv", b"a,b\nx,1\n")])
def test_one_field_that_is_named_alone_is_its_value(tmp_path: Path, name: str, body: bytes) -> None:
    write_files(tmp_path, {name: body})
    assert [*open_dataset(tmp_path / name, fields="a")] == ["x"]
    assert [*open_dataset(tmp_path / name, fields=("a",))] == [("x",)]
