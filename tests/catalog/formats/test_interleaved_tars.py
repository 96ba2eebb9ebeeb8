"""Samples whose members do not lie together in their tar (https://github.com/ray-project/ray/issues/44068)."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from cachesvc.catalog.catalog import Catalog
from cachesvc.core.errors import CorruptData, InvalidInput
from tests.support.catalog_reader import samples_of
from tests.support.datasets import tar_of
from tests.support.folders import opened

pytestmark = pytest.mark.pure


def one_kind_after_another(count: int, size: int = 5) -> list[tuple[str, bytes]]:
    kinds = {"cls": b"%d", "jpg": b"%d", "txt": b"t%d"}
    return [
        (f"{n}.{kind}", (body % n).ljust(size if kind == "jpg" else 1, b"."))
        for kind, body in kinds.items()
        for n in range(count)
    ]


def fields(catalog: Catalog) -> list[dict[str, bytes | None]]:
    names = [field.name for field in catalog.fields]
    return [dict(zip(names, sample, strict=True)) for sample in samples_of(catalog)]


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz"])
def test_members_of_one_key_are_joined_in_the_order_of_the_first(tmp_path: Path, name: str) -> None:
    members = one_kind_after_another(20)
    body = tar_of(*members[:20], *reversed(members[20:40]), *members[40:])
    catalog = opened(tmp_path / "d", {name: gzip.compress(body) if name.endswith("gz") else body})
    assert [catalog.key(sample) for sample in range(20)] == [str(n) for n in range(20)]
    expected = [{"cls": b"%d" % n, "jpg": (b"%d" % n).ljust(5, b"."), "txt": b"t%d" % n} for n in range(20)]
    assert fields(catalog) == expected
    assert catalog.find("label == 7 and txt == 't7'").tolist() == [7]
    (note,) = catalog.notes
    assert note.startswith("the members of 20 samples lie apart")
    assert f"'18' in {tmp_path}/d/{name}" in note
    assert "tar --sort=name" in note


def test_members_in_the_next_extent_are_joined_and_others_refused(tmp_path: Path) -> None:
    body = tar_of(*one_kind_after_another(3, 600))
    assert len(opened(tmp_path / "near", {"a.tar": body}, extent_bytes=8192).extent_sizes) > 1
    assert len(fields(opened(tmp_path / "near", {}, extent_bytes=8192))) == 3
    far = tar_of(*one_kind_after_another(3, 9000))
    with pytest.raises(InvalidInput, match=r"a\.tar: '2\.jpg' at offset .* tar --sort=name"):
        opened(tmp_path / "far", {"a.tar": far}, extent_bytes=8192)
    spread = opened(tmp_path / "far", {"a.tar": far}, extent_bytes=32768)
    assert [sorted(sample) for sample in fields(spread)] == [["cls", "jpg", "txt"]] * 3


def test_a_sample_that_is_repeated_stays_another_sample(tmp_path: Path) -> None:
    members = [
        ("a.jpg", b"1"),
        ("a.cls", b"1"),
        ("b.jpg", b"2"),
        ("a.jpg", b"3"),
        ("a.cls", b"3"),
        ("b.cls", b"2"),
    ]
    catalog = opened(
        tmp_path / "d", {"x.tar": tar_of(*members), "y.tar": tar_of(("b.jpg", b"4"), ("b.cls", b"4"))}
    )
    assert [(catalog.key(at), *row.values()) for at, row in enumerate(fields(catalog))] == [
        ("x.tar/a:0", b"1", b"1"),
        ("x.tar/b", b"2", b"2"),
        ("x.tar/a:2", b"3", b"3"),
        ("y.tar/b", b"4", b"4"),
    ]
    with pytest.raises(CorruptData, match=r"'a\.jpg' at offset 1024 is the second \.jpg"):
        opened(tmp_path / "twice", {"x.tar": tar_of(("a.jpg", b"1"), ("a.jpg", b"2"))})


def test_a_damaged_archive_leaves_no_note_on_its_samples(tmp_path: Path) -> None:
    whole = tar_of(("k.jpg", b"1"), ("k.cls", b"1"))
    damaged = tar_of(*one_kind_after_another(4))[:-12000]
    catalog = opened(tmp_path / "d", {"a.tar": damaged, "b.tar": whole}, on_error="skip")
    assert (catalog.samples, [note for note in catalog.notes if "lie apart" in note]) == (1, [])
