"""A named version is found among the kept catalogs, for its own URIs and options, and the source is not asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cachesvc.catalog.build import DirectBytes, build
from cachesvc.catalog.options import Options
from cachesvc.catalog.pinned import kept_version
from cachesvc.catalog.survey import survey
from cachesvc.sources.open import Sources, SourceSettings
from tests.support.datasets import tar_bytes

pytestmark = pytest.mark.pure
FOLDERS = {
    "files": ({"a/1.bin": b"1", "b/2.bin": b"22", "README.md": b"# x"}, Options()),
    "records": ({"0.bin": b"0123", "1.bin": b"4567"}, Options(format="records", record_bytes=2)),
    "tars": ({f"{n}.tar": tar_bytes({"x": {"txt": b"x" * n}}) for n in (1, 2)}, Options()),
    "json lines": ({"0.jsonl": b'{"a": 1}\n{"a": 2}\n', "notes.txt": b"n"}, Options()),
    "labels": ({"d/1.bin": b"1", "d/2.bin": b"2", "t.csv": b"file,label\nd/1.bin,a\nd/2.bin,b\n"},
               Options(format="files", labels="t.csv")),
}  # fmt: skip


@pytest.fixture(params=FOLDERS)
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str, str, Options]:
    """(catalogs, version, URI, options) of a folder that is gone."""
    files, options = FOLDERS[request.param]
    for name, data in files.items():
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    sources = Sources(SourceSettings())
    uri, catalogs = f"file://{tmp_path}/data/", tmp_path / "catalogs"
    catalogs.mkdir()
    found = survey([uri], options, sources)
    build(found, f"{catalogs}/{found.id}.lmdb", sources, DirectBytes(sources), lambda done, total: None)
    (tmp_path / "data").rename(tmp_path / "gone")
    return str(catalogs), found.id, uri, options


def test_a_kept_version_is_known_by_its_uri_and_options(kept: tuple[str, str, str, Options]) -> None:
    catalogs, version, uri, options = kept
    assert kept_version(catalogs, version, [uri], options)
    assert kept_version(catalogs, version, [uri.rstrip("/")], options)


def test_another_uri_other_options_or_another_version_are_not_it(kept: tuple[str, str, str, Options]) -> None:
    catalogs, version, uri, options = kept
    assert not kept_version(catalogs, version, [uri.replace("data", "dat")], options)
    assert not kept_version(catalogs, version, [f"{uri}a/"], options)
    assert not kept_version(catalogs, version, [uri, f"{uri}../other/"], options)
    assert not kept_version(catalogs, version, [uri], replace(options, extent_bytes=1 << 20))
    assert not kept_version(catalogs, version, [uri], replace(options, on_error="skip"))
    for other in ("", "0" * 32, "../catalogs/" + version, version.upper() + "x"):
        assert not kept_version(catalogs, other, [uri], options)


def test_a_damaged_catalog_is_not_it(kept: tuple[str, str, str, Options]) -> None:
    catalogs, version, uri, options = kept
    path = Path(catalogs, f"{version}.lmdb")
    path.write_bytes(path.read_bytes()[:5000])
    assert not kept_version(catalogs, version, [uri], options)
