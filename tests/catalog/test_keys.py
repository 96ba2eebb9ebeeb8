"""The key of a sample names one sample, and its shard one file, also where files or members of tars share their names."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import feather

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.options import Options
from tests.support.catalog_reader import compiled
from tests.support.datasets import tar_bytes, tar_of, write_files

pytestmark = pytest.mark.pure


def parquet() -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"a": [1, 2, 3]}), buffer)
    return buffer.getvalue()


def arrow() -> bytes:
    buffer = io.BytesIO()
    feather.write_feather(pa.table({"a": [1, 2, 3]}), buffer)
    return buffer.getvalue()


def npy() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.arange(6).reshape(3, 2))
    return buffer.getvalue()


KINDS: dict[str, tuple[str, bytes, dict[str, object]]] = {
    "parquet": ("part-0.parquet", parquet(), {}),
    "arrow": ("part-0.arrow", arrow(), {}),
    "records": ("part-0.npy", npy(), {}),
    "tokens": (
        "part-0.bin",
        np.arange(9, dtype="<u2").tobytes(),
        {"format": "tokens", "dtype": "uint16", "seq_len": 3},
    ),
    "jsonl": ("part-0.jsonl", b'{"a": 1}\n' * 3, {}),
    "csv": ("part-0.csv", b"a\n1\n2\n3\n", {}),
    "text": ("part-0.txt", b"a\nb\nc\n", {"format": "text"}),
    "documents": ("part-0.txt", b"a b c", {"format": "documents"}),
    "files": ("part-0.jpg", b"x", {}),
    "webdataset": ("part-0.tar", tar_bytes({f"{n}": {"txt": b"x"} for n in range(3)}), {}),
}


def keys_of(catalog: Catalog) -> list[str]:
    return [catalog.key(sample) for sample in range(catalog.samples)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_names_one_sample(tmp_path: Path, kind: str) -> None:
    name, body, options = KINDS[kind]
    paths = [f"books/{name}", f"web/2024/{name}", f"web/2024/other-{name}"]
    write_files(tmp_path, dict.fromkeys(paths, body))
    catalog = compiled(tmp_path, Options(**options))  # type: ignore[arg-type]
    keys = keys_of(catalog)
    assert len(set(keys)) == len(keys) == catalog.samples
    assert [catalog.find(f"key == {key!r}").tolist() for key in keys] == [[n] for n in range(len(keys))]
    assert any(key.startswith("web/2024/part-0") for key in keys)
    if kind != "files":
        for shard in (*paths[:2], f"other-{name}"):
            found = catalog.find(f"shard == {shard!r}").tolist()
            assert len(found) == len(keys) // 3
            if kind != "webdataset":
                assert keys[found[0]] == f"{shard}:0"


@pytest.mark.parametrize("kind", KINDS)
def test_keys_of_files_with_names_of_their_own_stay_short(tmp_path: Path, kind: str) -> None:
    name, body, options = KINDS[kind]
    write_files(tmp_path, {f"books/{name}": body})
    catalog = compiled(tmp_path, Options(**options))  # type: ignore[arg-type]
    wanted = {"files": f"books/{name}", "webdataset": "0"}.get(kind, f"{name}:0")
    assert catalog.key(0) == wanted


def test_below_several_uris_keys_begin_in_their_common_folder(tmp_path: Path) -> None:
    write_files(tmp_path, {"a/part-0.csv": b"n\n1\n", "b/part-0.csv": b"n\n2\n"})
    catalog = compiled([str(tmp_path / "a"), str(tmp_path / "b")])
    assert keys_of(catalog) == ["a/part-0.csv:0", "b/part-0.csv:0"]


def test_members_of_one_name_have_the_key_of_their_archive(tmp_path: Path) -> None:
    """Archives may each number their members from 0, and one archive may hold a sample twice."""
    zero = ("0.txt", b"x")
    twice, other = tar_of(zero, ("1.txt", b"y"), zero), tar_of(zero, ("2.txt", b"z"))
    write_files(tmp_path, {"a.tar": twice, "b.tar": other})
    assert keys_of(compiled(tmp_path)) == ["a.tar/0:0", "1", "a.tar/0:2", "b.tar/0", "2"]
