"""Files in extents of their own, in the order of their names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cachesvc.catalog.formats import objects
from cachesvc.catalog.options import Options
from cachesvc.core.errors import NotFound
from tests.support import datasets
from tests.support.catalog_reader import compiled, samples_of

OPTIONS = Options(format="objects", extent_bytes=8192)


def test_each_file_is_a_sample_in_the_order_of_names(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    files = {f"{n:02d}.{'jpg' if n % 2 else 'txt'}": rng.bytes(n * 1000) for n in range(25)}
    datasets.write_files(tmp_path, files)
    catalog = compiled(tmp_path, OPTIONS)
    assert [sample[0] for sample in samples_of(catalog)] == list(files.values())
    assert len(catalog.extent_sizes) == sum(-(-len(body) // 8192) for body in files.values())
    pieces = [catalog.extent(index).pieces for index in range(len(catalog.extent_sizes))]
    assert all(len(each) == 1 for each in pieces)
    assert [each[0].object.uri for each in pieces] == sorted(each[0].object.uri for each in pieces)


def test_a_file_has_the_same_extents_alone_and_in_its_folder(tmp_path: Path) -> None:
    datasets.write_files(tmp_path / "data", {f"{n}.bin": bytes([n]) * 20_000 for n in range(3)})
    folder = compiled(tmp_path / "data", OPTIONS)
    alone = compiled(tmp_path / "data" / "1.bin", OPTIONS)
    assert set(alone.extents()) < set(folder.extents())


def test_neighbours_share_extents_where_there_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "MOST_EXTENTS", 10)
    files = {f"{n:03d}": bytes([n]) * (n % 7 * 100) for n in range(95)} | {"big": bytes(30_000)}
    datasets.write_files(tmp_path, files)
    catalog = compiled(tmp_path, OPTIONS)
    assert [sample[0] for sample in samples_of(catalog)] == [files[name] for name in sorted(files)]
    assert len(catalog.extent_sizes) < 20


def test_large_files_are_cut_into_larger_parts_where_there_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "MOST_EXTENTS", 10)
    datasets.write_files(tmp_path, {"a": bytes(300_000), "b": b"b", "c": bytes(200_000)})
    assert len(compiled(tmp_path, OPTIONS).extent_sizes) <= 10


def test_whole_files_are_one_extent_each_alone_and_in_their_folder(tmp_path: Path) -> None:
    files = {"a": bytes(9 << 20), "b": b"", "c": b"c" * 5000}
    datasets.write_files(tmp_path / "data", files)
    whole = Options(format="whole", extent_bytes=8192)
    catalog = compiled(tmp_path / "data", whole)
    assert [sample[0] for sample in samples_of(catalog)] == list(files.values())
    assert catalog.extent_sizes.tolist() == [9 << 20, 5000]
    assert set(compiled(tmp_path / "data" / "c", whole).extents()) == set(catalog.extents()[1:])
    datasets.write_files(tmp_path / "none", {"a": b""})
    with pytest.raises(NotFound, match="every file is empty"):
        compiled(tmp_path / "none", whole)


def test_empty_files_are_samples_and_nothing_else_is_not_found(tmp_path: Path) -> None:
    datasets.write_files(tmp_path / "some", {"a": b"", "b": b"b", "c": b""})
    catalog = compiled(tmp_path / "some", OPTIONS)
    assert [sample[0] for sample in samples_of(catalog)] == [b"", b"b", b""]
    datasets.write_files(tmp_path / "none", {"a": b""})
    with pytest.raises(NotFound, match="every file is empty"):
        compiled(tmp_path / "none", OPTIONS)
