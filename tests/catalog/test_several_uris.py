"""Several URIs open as one dataset: each contributes objects, or the error names the one that does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from cachesvc.catalog.options import Options
from cachesvc.catalog.survey import survey
from cachesvc.core.errors import CacheError, InvalidInput, NotFound
from cachesvc.sources.open import Sources, SourceSettings
from cachesvc.sources.uri import canonical
from loader import open_dataset
from tests.support import datasets

SOURCES = Sources(SourceSettings())


@pytest.fixture
def here(tmp_path: Path) -> Path:
    datasets.write_files(tmp_path / "pets", {f"cat/{n}.jpg": b"x" * 99 for n in range(3)})
    datasets.tar_shards(tmp_path / "tar", 3, 2, 300)
    datasets.mds_shards(tmp_path / "mds", {"x": "bytes"}, [{"x": b"1"}, {"x": b"2"}], 2)
    datasets.write_files(tmp_path / "none", {"_SUCCESS": b"", ".hidden/a": b"1"})
    (tmp_path / "raw").mkdir()
    datasets.records(tmp_path / "raw" / "a.bin", 4, 64)
    return tmp_path


def entries(here: Path, *names: str, **options: object) -> list[str]:
    uris = SOURCES.expand([canonical(f"{here}/{name}") for name in names])
    found = survey(uris, Options(**options), SOURCES)  # type: ignore[arg-type]
    return [entry.object.uri.removeprefix(f"file://{here}/") for entry in found.entries]


def test_each_uri_contributes_its_objects(here: Path) -> None:
    assert entries(here, "tar/000000.tar", "tar/000002.tar") == ["tar/000000.tar", "tar/000002.tar"]
    assert len(entries(here, "tar/", "tar/000001.tar")) == 3  # named twice, listed once
    assert len(entries(here, "pets/", "tar/", format="files")) == 6


@pytest.mark.parametrize(
    ("names", "error", "match"),
    [
        (
            ("pets/", "tar/"),
            InvalidInput,
            r"3 files .* 3 webdataset .*format= \(files, webdataset\).*\*\.tar",
        ),
        (("tar/", "raw/"), InvalidInput, "raw/ holds no webdataset data"),
        (("mds/", "pets/"), InvalidInput, r"index\.json names other objects than most: 3 files .*, 1 mds"),
        (("tar/", "none/"), NotFound, "none/ holds no data"),
        (("tar/", "nowhere/"), NotFound, "nowhere"),
        (("tar/000000.tar", "tar/000077.tar"), NotFound, "000077.tar"),
        (("tar/{000000..000009}.tar",), NotFound, "000003.tar"),
        (("tar/*.tar", "pets/*.tar"), NotFound, r"pets/\*.tar matches no object"),
    ],
)
def test_a_uri_without_data_is_named(
    here: Path, names: tuple[str, ...], error: type[CacheError], match: str
) -> None:
    with pytest.raises(error, match=match):
        entries(here, *names)


def test_equal_paths_below_several_are_several_samples(tmp_path: Path) -> None:
    for name in ("a", "b"):
        datasets.write_files(tmp_path / name, {f"{n}.txt": f"{name}{n}".encode() for n in range(3)})
    data = open_dataset([str(tmp_path / "a"), str(tmp_path / "b")], decode=None, labels="none")
    assert sorted(data[n] for n in range(len(data))) == [b"a0", b"a1", b"a2", b"b0", b"b1", b"b2"]
    assert sorted(data.catalog.key(n) for n in range(6)) == [
        "a/0.txt",
        "a/1.txt",
        "a/2.txt",
        "b/0.txt",
        "b/1.txt",
        "b/2.txt",
    ]


def test_each_uri_has_its_own_mds_index(tmp_path: Path) -> None:
    for folder, body in (("a", b"1"), ("b/train", b"2")):
        datasets.mds_shards(tmp_path / folder, {"x": "bytes"}, [{"x": body}] * 3, 2)
    data = open_dataset([str(tmp_path / "a"), str(tmp_path / "b")], decode=None)
    assert sorted(data[n] for n in range(len(data))) == [b"1"] * 3 + [b"2"] * 3
