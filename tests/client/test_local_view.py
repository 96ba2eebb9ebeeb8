"""The comparison of a local dataset with what this process sees at its path."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cachesvc.catalog.build import DirectBytes, build
from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.options import Options
from cachesvc.catalog.survey import survey
from cachesvc.client import local_view
from cachesvc.sources.files import FilesSource
from cachesvc.sources.uri import expand, glob, has_glob
from tests.support import datasets

pytestmark = pytest.mark.pure

OPTIONS = Options(format="files", labels="none")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    files = {f"{folder}/{n}.bin": bytes([n]) * 300 for folder in ("a", "b") for n in range(20)}
    datasets.write_files(tmp_path / "data", files)
    return tmp_path / "data"


def compiled(tmp_path: Path, *uris: str, real: str = "") -> Catalog:
    """The catalog that a daemon makes of these URIs. `real`: what a single one leads to there."""
    source, found = FilesSource(), []
    for uri in expand([real] if real else list(uris)):
        found += [each.uri for each in glob(source, f"file://{uri}")] if has_glob(uri) else [f"file://{uri}"]
    surveyed = survey(found, OPTIONS, lambda _: source)
    path = str(tmp_path / "catalog.lmdb")
    build(surveyed, path, lambda _: source, DirectBytes(lambda _: source), lambda done, total: None)
    return Catalog.open(path)


@pytest.fixture(params=["listed", "sampled"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Few files are listed; of many some are compared."""
    if request.param == "sampled":
        monkeypatch.setattr(local_view, "MAX_LISTED", 10)
    return str(request.param)


@pytest.mark.parametrize(
    "typed", ["{}", "{}/", "{}/a", "{}/a/7.bin", "{}/*/*.bin", "{}/{{a,b}}", "{}/b/?.bin"]
)
def test_the_same_files_are_the_same_however_they_are_named(data: Path, tmp_path: Path, typed: str) -> None:
    uri = typed.format(data)
    assert not local_view.difference([uri], OPTIONS, compiled(tmp_path, uri))


def test_several_uris_are_compared(data: Path, tmp_path: Path) -> None:
    uris = [f"{data}/a", f"{data}/b/3.bin"]
    catalog = compiled(tmp_path, *uris)
    assert not local_view.difference(uris, OPTIONS, catalog)
    (data / "b" / "3.bin").write_bytes(b"another")
    assert local_view.difference(uris, OPTIONS, catalog).endswith("3.bin")


def test_a_file_with_the_size_and_time_of_the_other_is_another(data: Path, tmp_path: Path) -> None:
    catalog, one = compiled(tmp_path, str(data)), data / "b" / "7.bin"
    before = one.stat()
    one.unlink()
    one.write_bytes(b"x" * before.st_size)
    os.utime(one, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert local_view.difference([str(data)], OPTIONS, catalog).endswith("7.bin")


def test_a_file_that_is_missing_here_is_a_difference(data: Path, tmp_path: Path) -> None:
    catalog = compiled(tmp_path, str(data))
    (data / "a" / "3.bin").unlink()
    assert local_view.difference([str(data)], OPTIONS, catalog)


def test_a_file_that_the_daemon_does_not_see_is_a_difference_in_a_small_listing(
    data: Path, tmp_path: Path, way: str
) -> None:
    catalog = compiled(tmp_path, str(data))
    (data / "a" / "more.bin").write_bytes(b"more")
    (data / "a" / ".hidden").write_bytes(b"no data")
    found = local_view.difference([str(data)], OPTIONS, catalog)
    assert found.endswith("more.bin") == (way == "listed")


def test_a_link_that_the_daemon_does_not_follow_is_none(data: Path, tmp_path: Path) -> None:
    catalog = compiled(tmp_path, str(data))
    (data / "a" / "link.bin").symlink_to(data / "b" / "3.bin")
    assert not local_view.difference([str(data)], OPTIONS, catalog)


def test_links_of_the_path_may_differ_where_the_files_are_the_same(data: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(data)
    assert not local_view.difference([str(link)], OPTIONS, compiled(tmp_path, str(link), real=str(data)))


def test_a_path_that_is_not_here_or_empty_is_not_compared(data: Path, tmp_path: Path) -> None:
    catalog = compiled(tmp_path, str(data))
    data.rename(tmp_path / "elsewhere")
    assert not local_view.difference([str(data)], OPTIONS, catalog)
    data.mkdir()
    assert not local_view.difference([str(data)], OPTIONS, catalog)


def test_data_of_another_format_is_a_difference(data: Path, tmp_path: Path) -> None:
    rows = Options(format="jsonl")
    datasets.write_files(tmp_path / "rows", {"x.jsonl": b'{"a": 1}\n'})
    source = FilesSource()
    surveyed = survey([f"file://{tmp_path}/rows"], rows, lambda _: source)
    path = str(tmp_path / "catalog.lmdb")
    build(surveyed, path, lambda _: source, DirectBytes(lambda _: source), lambda done, total: None)
    (tmp_path / "rows").rename(tmp_path / "elsewhere")
    data.rename(tmp_path / "rows")
    assert local_view.difference([f"{tmp_path}/rows"], rows, Catalog.open(path))


def test_a_folder_of_many_that_is_mounted_is_compared(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = compiled(tmp_path, str(data))
    monkeypatch.setattr(local_view, "MAX_LISTED", 10)
    monkeypatch.setattr(local_view, "MAX_COMPARED", 2)  # the first and the last file alone
    (data / "b" / "0.bin").write_bytes(b"another")
    assert not local_view.difference([str(data)], OPTIONS, catalog)
    mounts = tmp_path / "mounts"
    mounts.write_text(f"30 1 0:5 / / rw - ext4 x rw\n31 30 0:6 / {data}/b rw - ext4 x rw\n")
    monkeypatch.setattr("cachesvc.tiers.mounts.MOUNTS", mounts)
    assert local_view.difference([str(data)], OPTIONS, catalog).endswith("b/0.bin")


def test_files_are_found_by_folder_name_and_pattern(data: Path, tmp_path: Path) -> None:
    assert local_view.finds_files([str(data), f"{data}/a/3.bin", f"{data}/b/*.bin"])
    assert not local_view.finds_files([str(data), f"{data}/c"])
    assert not local_view.finds_files([f"{data}/*.txt"])
