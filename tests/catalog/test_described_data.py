"""Tables about the data are no data: by name and columns they are left out, and by columns alone they are an error."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cachesvc.catalog.described_data import is_about_data
from cachesvc.catalog.options import Options
from tests.support.catalog_reader import compiled
from tests.support.folders import IMAGES, TAR, opened, refusal

pytestmark = pytest.mark.pure
Columns = Mapping[str, Sequence[object]]


def _parquet(columns: Columns) -> bytes:
    into = pa.BufferOutputStream()
    pq.write_table(pa.table(dict(columns)), into)
    return bytes(into.getvalue())


def _arrow(columns: Columns) -> bytes:
    table, into = pa.table(dict(columns)), pa.BufferOutputStream()
    with pa.ipc.new_stream(into, table.schema) as out:
        out.write_table(table)
    return bytes(into.getvalue())


def _rows(columns: Columns) -> list[tuple[object, ...]]:
    return list(zip(*columns.values(), strict=True))


def _jsonl(columns: Columns) -> bytes:
    return "".join(json.dumps(dict(zip(columns, row))) + "\n" for row in _rows(columns)).encode()


def _csv(columns: Columns) -> bytes:
    return "".join(",".join(map(str, row)) + "\n" for row in [tuple(columns), *_rows(columns)]).encode()


WRITERS: dict[str, Callable[[Columns], bytes]] = {
    "parquet": _parquet,
    "arrow": _arrow,
    "jsonl": _jsonl,
    "csv": _csv,
    "jsonl.gz": lambda columns: gzip.compress(_jsonl(columns)),
}
FRAMES: dict[str, Sequence[object]] = {"state": [0.5] * 4, "frame": [1, 2, 3, 4], "episode": [0, 0, 1, 1]}
EPISODES: dict[str, Sequence[object]] = {"episode": [0, 1], "length": [2, 2]}
EACH = pytest.mark.parametrize("kind", WRITERS)


@EACH
@pytest.mark.parametrize(
    "names",
    [
        ("meta/episodes/0", "meta/tasks"),
        ("metadata",),
        ("stats",),
        ("x/episodes_stats",),
        ("Info/a", "info_1"),
    ],
)
def test_a_table_named_as_a_description_is_left_out_with_a_note(
    tmp_path: Path, kind: str, names: Sequence[str]
) -> None:
    write = WRITERS[kind]
    about = {f"{name}.{kind}": write(EPISODES) for name in names}
    catalog = opened(tmp_path / "d", {f"data/0.{kind}": write(FRAMES)} | about)
    assert (catalog.samples, [field.name for field in catalog.fields]) == (4, list(FRAMES))
    (note,) = [note for note in catalog.notes if "the data by name and by other columns" in note]
    assert f".{kind} describes the data" in note or " and 1 more describe the data" in note
    given = compiled(tmp_path / "d", Options(format=kind.partition(".")[0]))
    assert given.samples == 4


@EACH
def test_a_table_of_such_a_name_with_the_columns_of_the_data_is_data(tmp_path: Path, kind: str) -> None:
    write = WRITERS[kind]
    files = {f"{name}/0.{kind}": write(FRAMES) for name in ("meta", "web")}
    catalog = opened(tmp_path / "d", files)
    assert (catalog.samples, catalog.notes) == (8, ())
    assert compiled(tmp_path / "d" / "meta").samples == 4


@EACH
def test_a_file_of_other_columns_is_an_error_that_names_it(tmp_path: Path, kind: str) -> None:
    write = WRITERS[kind]
    files = {f"{n}.{kind}": write(FRAMES) for n in range(3)} | {
        f"errors/rejected.{kind}": write({"error": ["bad"]})
    }
    error = refusal(tmp_path / "d", files)
    assert (
        f"errors/rejected.{kind} has the columns 'error', and 0.{kind} 'episode', 'frame', 'state'" in error
    )
    assert "not one table" in error
    one_by_one = [str(tmp_path / "d" / name) for name in files]
    assert compiled(one_by_one).samples == 13


@EACH
def test_columns_may_drift(tmp_path: Path, kind: str) -> None:
    write = WRITERS[kind]
    files: dict[str, Columns] = {
        "0": FRAMES,
        "1": {"state": [0.5], "frame": [1]},
        "2": FRAMES | {"new": [1] * 4, "more": [2] * 4},
    }
    written = {f"{name}.{kind}": write(columns) for name, columns in files.items()}
    assert opened(tmp_path / "d", written).samples == 9


def test_descriptions_do_not_outvote_the_data(tmp_path: Path) -> None:
    about = {f"meta/{name}.jsonl": _jsonl(EPISODES) for name in ("episodes", "tasks", "episodes_stats")}
    catalog = opened(tmp_path / "d", about | {"meta/info.json": b"{}", "data/0.parquet": _parquet(FRAMES)})
    assert (catalog.format, catalog.samples) == ("parquet", 4)
    catalog = opened(tmp_path / "e", {f"metadata/{n}.parquet": b"PAR1" for n in range(3)} | {"0.tar": TAR})
    assert (catalog.format, catalog.samples) == ("webdataset", 1)
    assert opened(tmp_path / "f", IMAGES | {"metadata.csv": b"a,b\n1,2\n"}).format == "files"
    error = refusal(tmp_path / "g", {"meta/info.json": b"{}", "0.parquet": b"PAR1", "cam.mp4": b"1"})
    assert "1 parquet (0.parquet), 1 files (cam.mp4)" in error


def test_a_description_whose_first_line_is_long_is_compared_as_a_whole(tmp_path: Path) -> None:
    long = _jsonl({"length": ["x" * (1 << 17)]})
    error = refusal(tmp_path / "d", {"0.jsonl": _jsonl(FRAMES), "meta.jsonl": long})
    assert "meta.jsonl has the columns 'length', and 0.jsonl" in error or "0.jsonl has the columns" in error


@pytest.mark.parametrize(
    "path", ["metal/0.parquet", "statistics.csv", "x/information.jsonl", "0.parquet", "metaworld/0"]
)
def test_other_names_describe_nothing(path: str) -> None:
    assert not is_about_data(path, whole=False)
