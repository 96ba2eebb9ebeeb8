"""A folder whose manifest says which files count is refused by name: some of its rows are deleted, or there twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from cachesvc.catalog.options import Options
from cachesvc.catalog.survey import survey
from cachesvc.core.errors import InvalidInput
from cachesvc.sources.open import Sources, SourceSettings
from tests.support.catalog_reader import compiled
from tests.support.datasets import write_files
from tests.support.folders import IMAGES, left_out, opened, parquet, refusal

pytestmark = pytest.mark.pure
UUID = "0b1c2d3e-0000-4000-8000-0123456789ab"
TABLES = {
    "Delta Lake": (
        "_delta_log/00000000000000000000.json",
        "_delta_log/00000000000000000001.checkpoint.parquet",
    ),
    "Iceberg": ("metadata/v1.metadata.json", "metadata/snap-1.avro", "metadata/version-hint.text"),
    "Iceberg table": (f"metadata/00000-{UUID}.gz.metadata.json", f"metadata/{UUID}-m0.avro"),
    "Hudi": (".hoodie/hoodie.properties", ".hoodie/001.commit"),
    "Hudi table": (".hoodie_partition_metadata",),
}
ONE_OR_TWO = pytest.mark.parametrize("rows", [("a.parquet",), ("x=1/a.parquet", "x=2/b.parquet")])


@ONE_OR_TWO
@pytest.mark.parametrize("table", TABLES)
def test_a_table_of_a_data_lake_is_refused_by_name(tmp_path: Path, table: str, rows: tuple[str, ...]) -> None:
    parquet(*(tmp_path / "d" / "t" / name for name in rows))
    write_files(tmp_path / "d" / "t", dict.fromkeys(TABLES[table], b"{}"))
    for folder in ("d", "d/t"):
        error = refusal(tmp_path / folder)
        assert table in error
        assert "says which files count" in error
        assert "or write it as Parquet" in error
        assert table in refusal(tmp_path / folder, format="parquet")
    assert compiled([str(tmp_path / "d" / "t" / name) for name in rows]).samples == 2 * len(rows)
    assert compiled(tmp_path / "d", Options(format="files")).samples >= len(rows)


def test_the_file_system_shows_the_hidden_folder_of_a_hudi_table(tmp_path: Path) -> None:
    parquet(tmp_path / "d" / "a.parquet")
    write_files(tmp_path / "d", {".hoodie/hoodie.properties": b"", ".snapshot/a.parquet": b""})
    with pytest.raises(InvalidInput, match="a Hudi table"):
        survey([f"file://{tmp_path}/d"], Options(), Sources(SourceSettings()))
    everything = survey([f"file://{tmp_path}/d"], Options(format="files"), Sources(SourceSettings()))
    assert [entry.path for entry in everything.entries] == ["a.parquet"]


def test_a_table_beside_more_other_data_is_left_out(tmp_path: Path) -> None:
    parquet(*(tmp_path / "d" / f"{n}.parquet" for n in range(4)), tmp_path / "d" / "t" / "a.parquet")
    catalog = opened(tmp_path / "d", {"t/_delta_log/0.json": b"{}"})
    assert (catalog.samples, left_out(catalog)) == (8, (2, 6, "0.json"))
    assert opened(tmp_path / "e", IMAGES | {"t/_delta_log/0.json": b"{}"}).samples == 10


def test_folders_of_these_names_are_tables_with_a_manifest_only(tmp_path: Path) -> None:
    sidecars = {f"metadata/{n}.metadata.json": b"{}" for n in range(3)} | {"_versions/1.txt": b"1"}
    assert opened(tmp_path / "d", IMAGES | sidecars).samples == 10


@pytest.mark.parametrize("commits", [1, 4])
def test_files_of_lance_are_no_samples_however_many_describe_them(tmp_path: Path, commits: int) -> None:
    names = [
        f"t.lance/{name}"
        for n in range(commits)
        for name in (f"_versions/{n}.manifest", f"_transactions/{n}.txn")
    ]
    write_files(tmp_path / "d", dict.fromkeys([*names, "t.lance/data/0.lance"], b"\0"))
    for folder in ("d", "d/t.lance"):
        assert "Lance, which is not read: convert it to Parquet" in refusal(tmp_path / folder)


@pytest.mark.parametrize(("extension", "format"), [("json", "jsonl"), ("csv", "csv")])
def test_text_shards_of_streaming_are_opened_by_a_glob(tmp_path: Path, extension: str, format: str) -> None:
    rows = b'{"a": 1}\n' if extension == "json" else b"a\n1\n"
    names = [f"shard.0000{n}.{extension}" for n in range(2)]
    shards = dict.fromkeys(names, rows) | {f"{name}.meta": b"\1" for name in names}
    error = refusal(tmp_path / "d", shards | {"index.json": b"{}"})
    assert "of Streaming's JSON or CSV shards, whose index is not read: open the shards by a glob" in error
    shown = compiled([str(tmp_path / "d" / name) for name in names], Options(format=format))
    assert shown.samples == 2


def test_what_spark_has_not_committed_is_no_data(tmp_path: Path) -> None:
    parquet(tmp_path / "d" / "a.parquet", tmp_path / "d" / "_temporary" / "0" / "a.parquet")
    catalog = compiled(tmp_path / "d")
    assert (catalog.samples, catalog.notes[0].endswith("tools: _temporary/")) == (2, True)
