"""The files of a catalog and of a listing, and where their bytes lie."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cachesvc.catalog.build import DirectBytes, build
from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.options import Options
from cachesvc.catalog.survey import survey
from cachesvc.core.model import ObjectVersion
from cachesvc.gateway.snapshots import Snapshot, files_listed, files_of
from cachesvc.sources.files import FilesSource
from tests.support import datasets


def compiled(folder: Path) -> tuple[Catalog, bytes]:
    """The catalog of a folder's files in extents of 8 KiB, and its whole address space."""
    source = FilesSource(())
    found = survey(
        [f"file://{folder}"], Options(format="files", labels="none", extent_bytes=8192), lambda _: source
    )
    path = folder.parent / "catalog.lmdb"
    build(found, str(path), lambda _: source, DirectBytes(lambda _: source), lambda done, total: None)
    catalog = Catalog.open(str(path))
    space = bytearray(catalog.space_bytes)
    for index, start in enumerate(catalog.extent_starts.tolist()):
        for piece in catalog.extent(index).pieces:
            into = memoryview(space)[start : start + piece.length]
            source.read_into(piece.object, piece.offset, into)
            start += piece.length
    return catalog, bytes(space)


def test_each_file_lies_at_its_address_whatever_extents_it_shares_or_fills(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sizes = [0, 1, 100, 3000, 8191, 8192, 8193, 30_000, *rng.integers(0, 2000, 40).tolist()]
    files = {f"{n % 3}/{n:02d}.{'txt' if n % 2 else 'bin'}": rng.bytes(size) for n, size in enumerate(sizes)}
    datasets.write_files(tmp_path / "data", files)
    catalog, space = compiled(tmp_path / "data")
    found = files_of(catalog)
    assert {
        path: space[file.address : file.address + file.version.size_bytes] for path, file in found.items()
    } == files


def test_a_file_that_was_opened_by_its_name_is_the_root(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / ".hidden").write_bytes(b"some bytes")
    source = FilesSource(())
    found = survey([f"file://{tmp_path}/data/.hidden"], Options(format="files"), lambda _: source)
    assert [entry.path for entry in found.entries] == [".hidden"]


def test_folders_are_the_parents_of_files() -> None:
    versions = [ObjectVersion(f"s3://b/top/{path}", 1, "") for path in ("a", "x/b", "x/y/c", "x/y/d")]
    snapshot = Snapshot("s3://b/top", files_listed("s3://b/top", versions), lambda _: FilesSource(()))
    assert snapshot.folders == {"": {"a", "x"}, "x": {"b", "y"}, "x/y": {"c", "d"}}
    assert [snapshot.has(path) for path in ("x", "x/b", "x/z", "x/y/c/e")] == [True, True, False, False]


def test_a_listing_leaves_out_what_datasets_leave_out_and_other_prefixes() -> None:
    paths = ("top/a", "top/.hidden", "top/_SUCCESS", "top2/b", "top/")
    versions = [ObjectVersion(f"s3://b/{path}", 1, "") for path in paths]
    assert [*files_listed("s3://b/top", versions)] == ["a"]
    assert [*files_listed("s3://b/top/.hidden", versions[1:2])] == [""], "unless it is named exactly"
