"""Every format reads back the bytes that were written."""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
import tempfile
from operator import eq, ge, gt, le, lt, ne
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.formats.files import buckets
from cachesvc.catalog.layout import Fixed
from cachesvc.catalog.options import Options
from cachesvc.core.errors import CacheError, CorruptData, InvalidInput, NotFound
from tests.support.catalog_reader import Folder, compiled, samples_of
from tests.support.datasets import (
    array_file,
    image_folder,
    labelled_table,
    mds_shards,
    megatron,
    records,
    tar_bytes,
    tar_shards,
    tokens,
    write_files,
)

DATA = Path(__file__).parent / "data"
SMALL = 8192


def test_image_folder_gives_bytes_classes_and_bounded_extents(tmp_path: Path) -> None:
    files = image_folder(tmp_path / "d", ["cat", "dog", "eel"], 20, 900)
    catalog = compiled(tmp_path / "d", Options(extent_bytes=SMALL))
    assert catalog.format == "files"
    assert catalog.classes == ("cat", "dog", "eel")
    assert catalog.extent_sizes.max() <= SMALL
    assert catalog.stored_bytes == sum(map(len, files.values()))
    assert catalog.labels is not None
    for sample, (body,) in enumerate(samples_of(catalog)):
        key = catalog.key(sample)
        assert files[key] == body
        assert catalog.classes[catalog.labels[sample]] == key.split("/")[0]
    assert [catalog.key(i)[:3] for i in catalog.find("label == 'cat'")] == ["cat"] * 20


def test_shared_stems_are_one_sample_with_tags(tmp_path: Path) -> None:
    files = {f"x{i}.jpg": bytes([i]) * i for i in range(30)}
    files |= {f"x{i}.json": json.dumps({"width": i, "city": f"c{i % 3}"}).encode() for i in range(25)}
    files |= {f"x{i}.cls": str(i % 4).encode() for i in range(30)}
    write_files(tmp_path / "d", files)
    catalog = compiled(tmp_path / "d", Options(extent_bytes=SMALL))
    names = [field.name for field in catalog.fields]
    for sample, row in enumerate(samples_of(catalog)):
        assert row == tuple(files.get(f"{catalog.key(sample)}.{name}") for name in names)
    found = catalog.find("width >= 20 and city in ['c0', 'c1'] and not key.startswith('x21')")
    assert sorted(catalog.key(i) for i in found) == ["x22", "x24"]
    assert catalog.classes == ("0", "1", "2", "3")
    assert all(int(catalog.key(i)[1:]) % 4 == 2 for i in catalog.find("label == 2"))


def test_a_name_without_extension_gets_a_field_of_its_own(tmp_path: Path) -> None:
    files = {"x": b"bare", "x.file": b"file", "x._file": b"_file", "y": b"y"}
    write_files(tmp_path / "d", files)
    catalog = compiled(tmp_path / "d", Options(extent_bytes=SMALL))
    names = [field.name for field in catalog.fields]
    assert sorted(names) == ["__file", "_file", "file"]
    found = {
        catalog.key(sample): dict(zip(names, row, strict=True))
        for sample, row in enumerate(samples_of(catalog))
    }
    assert found["x"] == {"__file": b"bare", "_file": b"_file", "file": b"file"}
    assert found["y"] == {"__file": b"y", "_file": None, "file": None}


def test_a_name_that_ends_with_a_dot_is_a_sample_of_its_own(tmp_path: Path) -> None:
    write_files(tmp_path / "d", {"x": b"bare", "x.": b"dot", "x.jpg": b"one", "y": bytes(3 * SMALL)})
    catalog = compiled(tmp_path / "d", Options(format="files", extent_bytes=SMALL))
    fields = [field.name for field in catalog.fields]
    found = {catalog.key(i): dict(zip(fields, row, strict=True)) for i, row in enumerate(samples_of(catalog))}
    assert found["x"] == {"file": b"bare", "jpg": b"one"}
    assert found["x."] == {"file": b"dot", "jpg": None}


def test_a_number_that_may_be_a_class_name_or_its_index_is_refused(tmp_path: Path) -> None:
    labels = {"a": "1", "b": "2", "c": "cat"}
    write_files(tmp_path / "d", {f"{key}.bin": b"x" for key in labels})
    write_files(tmp_path / "d", {f"{key}.cls": label.encode() for key, label in labels.items()})
    catalog = compiled(tmp_path / "d", Options(extent_bytes=SMALL))
    assert sorted(catalog.key(i) for i in catalog.find("label == '1' or label == 'cat'")) == ["a", "c"]
    for search in ("label == 1", "label in [0, 1]", "label >= 1"):
        with pytest.raises(InvalidInput, match=r"index 0 is called '1'.*label == '1'"):
            catalog.find(search)


def test_a_class_that_does_not_exist_is_refused_in_one_line(tmp_path: Path) -> None:
    folders = ["a\nb", *(f"c{number:02d}" for number in range(30))]
    write_files(tmp_path / "d", {f"{folder}/0.bin": b"x" for folder in folders})
    catalog = compiled(tmp_path / "d", Options(extent_bytes=SMALL))
    with pytest.raises(InvalidInput, match=r"no class 'c'; there are: a\\nb, c00, .*, c18, and 11 more$"):
        catalog.find("label in ('c00', 'c')")
    assert len(catalog.find("label.startswith('d')")) == 0


@pytest.mark.parametrize("name", ["labels.csv", "metadata.jsonl", "Labels.CSV"])
def test_a_table_beside_the_files_labels_them(tmp_path: Path, name: str) -> None:
    write_files(tmp_path / "d", {f"{i}.png": bytes([i]) for i in range(6)})
    rows = [{"file_name": f"{i}.png", "label": "odd" if i % 2 else "even", "size": i} for i in range(6)]
    labelled_table(tmp_path / "d", name, rows)
    catalog = compiled(tmp_path / "d")
    assert catalog.samples == 6
    assert sorted(catalog.key(i) for i in catalog.find("label == 'odd' and size > 1")) == ["3.png", "5.png"]


def test_big_and_empty_files_are_read_and_a_new_file_changes_few_extents(tmp_path: Path) -> None:
    files = {f"f{i:03d}.bin_": bytes([i]) * (i * 17) for i in range(60)} | {"big.bin_": b"ab" * 15_000}
    write_files(tmp_path / "d", files)
    before = compiled(tmp_path / "d", Options(format="files", extent_bytes=SMALL))
    assert {before.key(i): row[0] for i, row in enumerate(samples_of(before))} == files
    write_files(tmp_path / "d", {"new.bin_": b"new"})
    after = compiled(tmp_path / "d", Options(format="files", extent_bytes=SMALL))
    assert len(set(before.extents()) - set(after.extents())) <= 1
    assert before.id != after.id


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2**64 - 1), st.integers(1, 60)),
        min_size=2,
        max_size=60,
        unique_by=lambda x: x[0],
    )
)
def test_adding_a_sample_leaves_every_other_bucket_as_it_was(pairs: list[tuple[int, int]]) -> None:
    def cut(kept: list[tuple[int, int]]) -> set[tuple[int, ...]]:
        hashes, sizes = zip(*sorted(kept), strict=True)
        runs = buckets(np.asarray(hashes, np.uint64), np.asarray(sizes, np.int64), 100)
        assert [low for low, _ in runs] == [0, *[high for _, high in runs[:-1]]]
        assert all(sum(sizes[low:high]) <= 100 for low, high in runs)
        return {hashes[low:high] for low, high in runs}

    assert len(cut(pairs[1:]) - cut(pairs)) <= 1


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_tar_members_come_back_across_extents(tmp_path: Path, form: int) -> None:
    name = "dir/" + ("n" * 150 if form != tarfile.USTAR_FORMAT else "n" * 90)
    samples = {f"{name}{i}": {"jpg": bytes([i]) * (i * 700), "seg.png": b"s" * i} for i in range(20)}
    write_files(
        tmp_path / "d",
        {"a.tar": tar_bytes(samples, form), "b.tar": tar_bytes({"z/last": {"jpg": b"q"}}, form)},
    )
    folder = Folder()
    catalog = compiled(tmp_path / "d", Options(extent_bytes=SMALL), folder)
    assert catalog.format == "webdataset"
    assert len(folder.reads) == len(catalog.extent_sizes)
    names = [field.name for field in catalog.fields]
    everything = samples | {"z/last": {"jpg": b"q"}}
    rows = {catalog.key(i): row for i, row in enumerate(samples_of(catalog))}
    assert rows == {key: tuple(fields.get(n) for n in names) for key, fields in everything.items()}


def test_names_that_the_webdataset_library_skips_are_skipped(tmp_path: Path) -> None:
    keys = ["__meta__", "__meta__/a", "__a__b", "d/__a__", "a"]
    body = tar_bytes({key: {"jpg": key.encode()} for key in keys})
    write_files(tmp_path / "d", {"a.tar": body})
    catalog = compiled(tmp_path / "d")
    assert [row[0] for row in samples_of(catalog)] == [b"__meta__", b"__a__b", b"d/__a__", b"a"]


def test_a_tar_with_checksums_of_signed_bytes_is_read(tmp_path: Path) -> None:
    body = tar_bytes({"é": {"jpg": b"q"}}, tarfile.USTAR_FORMAT)
    rest = body[:148] + b" " * 8 + body[156:512]
    signed = sum(byte - 256 if byte > 127 else byte for byte in rest)
    write_files(tmp_path / "d", {"a.tar": body[:148] + f"{signed:06o}\0 ".encode() + body[156:]})
    assert compiled(tmp_path / "d").key(0) == "é"
    write_files(tmp_path / "d", {"a.tar": body[:148] + f"{signed + 1:06o}\0 ".encode() + body[156:]})
    assert "checksum does not match" in str(_refusal(tmp_path / "d"))


def test_tar_sidecars_are_searchable(tmp_path: Path) -> None:
    tar_shards(tmp_path / "d", 2, 12, 300)
    catalog = compiled(tmp_path / "d", Options(extent_bytes=SMALL))
    found = [
        catalog.key(i) for i in catalog.find("label == '1' and source == 's0' and shard == '000001.tar'")
    ]
    assert found == ["001-00004", "001-00010"]


@pytest.mark.parametrize("name", ["mds-plain", "mds-zstd"])
def test_shards_of_the_mosaicml_writer_are_compiled_without_their_rows(tmp_path: Path, name: str) -> None:
    folder = Folder()
    catalog = _copied(tmp_path, DATA / name, folder)
    heads = {path.name for path in (DATA / name).glob("*.mds")}  # four bytes of each
    assert {Path(uri).name for uri in folder.reads} == {"index.json"} | heads
    names = [field.name for field in catalog.fields]
    rows = [dict(zip(names, row, strict=True)) for row in samples_of(catalog)]
    assert [row["text"] for row in rows] == [f"sample {i}".encode() for i in range(40)]
    assert [int.from_bytes(row["number"] or b"", "little") for row in rows] == list(range(40))
    assert [row["payload"] for row in rows] == [bytes([i]) * (i * 5) for i in range(40)]
    assert catalog.key(0) == f"shard.00000.mds{'.zstd' if 'zstd' in name else ''}:0"


def _copied(tmp_path: Path, origin: Path, folder: Folder):  # type: ignore[no-untyped-def]
    write_files(tmp_path / "d", {path.name: path.read_bytes() for path in origin.iterdir()})
    return compiled(tmp_path / "d", folder=folder)


@pytest.mark.parametrize("suffix", [".bin", ".npy"])
@pytest.mark.parametrize("record_bytes", [64, 100, 3073])
def test_records_are_one_array(tmp_path: Path, suffix: str, record_bytes: int) -> None:
    rows = [records(tmp_path / "d" / f"{i}{suffix}", 40 + i, record_bytes, seed=i) for i in range(3)]
    catalog = compiled(
        tmp_path / "d", Options(format="records", record_bytes=record_bytes, extent_bytes=SMALL)
    )
    assert [row[0] for row in samples_of(catalog)] == [row.tobytes() for row in np.concatenate(rows)]
    assert isinstance(catalog.layout, Fixed)
    assert (catalog.layout.record_bytes, catalog.key(41)) == (record_bytes, f"1{suffix}:1")
    assert catalog.stored_bytes == catalog.samples * record_bytes


def test_a_partial_record_is_dropped_and_noted(tmp_path: Path) -> None:
    write_files(tmp_path / "d", {"a.bin": bytes(1000)})
    catalog = compiled(tmp_path / "d", Options(record_bytes=300))
    assert (catalog.samples, catalog.stored_bytes, len(catalog.notes)) == (3, 900, 1)


def test_npy_rows_keep_type_and_shape(tmp_path: Path) -> None:
    array_file(tmp_path / "d" / "a.npy", np.arange(5 * 3 * 4, dtype="<f4").reshape(5, 3, 4))
    layout = compiled(tmp_path / "d").layout
    assert isinstance(layout, Fixed)
    assert (layout.dtype, layout.shape, layout.record_bytes) == ("<f4", (3, 4), 48)


@pytest.mark.parametrize(
    ("seq_len", "overlap", "suffix"), [(128, 1, ".bin"), (100, 0, ".npy"), (1000, 33, ".bin")]
)
def test_token_sequences_overlap_and_share_extents(
    tmp_path: Path, seq_len: int, overlap: int, suffix: str
) -> None:
    streams = [tokens(tmp_path / "d" / f"{i}{suffix}", 9000 + i, seed=i) for i in range(2)]
    options = Options(format="tokens", dtype="uint16", seq_len=seq_len, overlap=overlap, extent_bytes=SMALL)
    catalog = compiled(tmp_path / "d", options)
    expected = [
        stream[at : at + seq_len + overlap].tobytes()
        for stream in streams
        for at in range(0, len(stream) - seq_len - overlap + 1, seq_len)
    ]
    assert [row[0] for row in samples_of(catalog)] == expected
    other = compiled(tmp_path / "d", Options(format="tokens", dtype="uint16", seq_len=64, extent_bytes=SMALL))
    assert other.extents() == catalog.extents()


def test_a_dtype_that_contradicts_the_tokens_is_refused(tmp_path: Path) -> None:
    megatron(tmp_path / "d" / "corpus", [[1, 2, 3, 4]])
    assert compiled(tmp_path / "d", Options(seq_len=2, dtype="uint16")).samples == 2
    with pytest.raises(InvalidInput, match="holds <u2, not dtype int32"):
        compiled(tmp_path / "d", Options(seq_len=2, dtype="int32"))


def test_megatron_pairs_keep_their_documents(tmp_path: Path) -> None:
    documents = [list(range(n)) for n in (5, 1000, 1, 700)]
    stream = megatron(tmp_path / "d" / "corpus", documents)
    catalog = compiled(tmp_path / "d", Options(seq_len=64, extent_bytes=4096))
    assert catalog.documents is not None
    assert catalog.documents.tolist() == [0, 5, 1005, 1006, 1706]
    assert b"".join(row[0] or b"" for row in samples_of(catalog)) == stream[: 64 * catalog.samples].tobytes()


def test_a_megatron_index_is_not_a_record(tmp_path: Path) -> None:
    stream = megatron(tmp_path / "d" / "corpus", [[1, 2, 3], [4, 5, 6]])
    catalog = compiled(tmp_path / "d", Options(format="records", dtype="uint16"))
    assert b"".join(row[0] or b"" for row in samples_of(catalog)) == stream.tobytes()


def _refusal(root: Path, options: Options = Options()) -> CacheError:  # noqa: B008
    with pytest.raises(CacheError) as caught:
        compiled(root, options)
    assert "\n" not in str(caught.value)
    return caught.value


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4 * 512 * 6 - 1))
def test_a_tar_cut_anywhere_is_corrupt(cut: int) -> None:
    whole = tar_bytes({f"k{i}": {"jpg": bytes([65 + i]) * 700} for i in range(5)}, tarfile.USTAR_FORMAT)
    body = 5 * (512 + 1024)
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder) / "d", {"a.tar": whole[: min(cut, body)]})
        error = _refusal(Path(folder) / "d", Options(extent_bytes=4096))
    assert isinstance(error, CorruptData)
    assert "a.tar" in str(error)
    assert "offset" in str(error)


@pytest.mark.parametrize("form", ["gnu", "pax", "pax --sparse-version=0.0", "pax --sparse-version=0.1"])
def test_a_tar_of_sparse_files_is_refused(tmp_path: Path, form: str) -> None:
    write_files(tmp_path, {"k.jpg": b"begin", "d/a.tar": b""})
    with open(tmp_path / "k.jpg", "r+b") as file:
        file.seek(1 << 20)
        file.write(b"end")
    subprocess.run(
        f"tar --format={form} --sparse -C {tmp_path} -cf {tmp_path}/d/a.tar k.jpg".split(), check=True
    )
    error = _refusal(tmp_path / "d")
    assert isinstance(error, InvalidInput)
    assert "--sparse" in str(error)


@pytest.mark.parametrize("kind", [b"D", b"X", b"M", b"Z"])
def test_bodies_of_other_member_kinds_are_skipped(tmp_path: Path, kind: bytes) -> None:
    other = tarfile.TarInfo("x")
    other.type, other.size = kind, 11
    body = b"11 foo=bar\n".ljust(512, b"\0")
    write_files(tmp_path / "d", {"a.tar": other.tobuf() + body + tar_bytes({"k": {"jpg": b"q"}})})
    catalog = compiled(tmp_path / "d")
    assert [row[0] for row in samples_of(catalog)] == [b"q"]


def test_extensions_that_differ_in_case_alone_are_one_field(tmp_path: Path) -> None:
    write_files(tmp_path / "d", {"x.JPG": b"1", "x.json": b"{}", "y.jpg": b"2", "y.JSON": b"{}"})
    catalog = compiled(tmp_path / "d")
    assert [field.name for field in catalog.fields] == ["jpg", "json"]
    assert (catalog.locate(np.arange(2))[1] > 0).all()
    write_files(tmp_path / "e", {"x.JPG": b"1", "x.jpg": b"22", "y.JPG": b"3", "y.jpg": b"4", "z.jpg": b"5"})
    assert [field.name for field in compiled(tmp_path / "e").fields] == ["JPG", "jpg"]


PETS = {f"{kind}/{n}.jpg": b"1" for kind in ("cat", "dog") for n in range(5)}


@pytest.mark.parametrize(
    ("files", "more"),
    [
        (PETS, {"cat/3.png": b"2"}),
        (PETS, {"cat/3.JPG": b"2"}),
        (PETS, {"cat/3.png": b"2", "dog/3.webp": b"2", "dog/3.gif": b"3"}),
        ({name.replace("jpg", "wav"): body for name, body in PETS.items()}, {"cat/3.mp3": b"2"}),
    ],
)
def test_a_stem_shared_by_chance_changes_no_other_sample(
    tmp_path: Path, files: dict[str, bytes], more: dict[str, bytes]
) -> None:
    write_files(tmp_path / "d", files)
    before = compiled(tmp_path / "d")
    write_files(tmp_path / "d", more)
    after = compiled(tmp_path / "d")
    assert (after.samples, after.classes, len(after.fields)) == (10 + len(more), ("cat", "dog"), 1)
    assert {before.key(n) for n in range(10)} | more.keys() == {after.key(n) for n in range(after.samples)}
    assert sum("share a stem with another and are samples of their own" in note for note in after.notes) == 1


def test_a_picture_and_its_mask_are_fields_where_most_samples_have_both(tmp_path: Path) -> None:
    masks = {f"{kind}/{n}.png": b"2" for kind in ("cat", "dog") for n in range(3)}
    write_files(tmp_path / "d", PETS | masks)
    catalog = compiled(tmp_path / "d")
    assert ([field.name for field in catalog.fields], catalog.samples) == (["jpg", "png"], 10)


def test_one_sidecar_that_makes_dicts_of_labelled_samples_is_noted(tmp_path: Path) -> None:
    write_files(tmp_path / "d", PETS | {"cat/3.txt": b"a cat"})
    (note,) = compiled(tmp_path / "d").notes
    assert note.startswith(
        "1 of 10 samples have the field 'txt', the first is cat/3: because of it all samples are dicts"
    )
    assert note.endswith("say fields=('jpg', 'label')")


def test_a_tar_member_of_absurd_size_is_corrupt(tmp_path: Path) -> None:
    info = tarfile.TarInfo("k.jpg")
    info.size = 1 << 50
    write_files(tmp_path / "d", {"a.tar": info.tobuf(tarfile.GNU_FORMAT) + bytes(2048)})
    assert "offset 0" in str(_refusal(tmp_path / "d"))


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index.clear(),
        lambda index: index.update(shards=3),
        lambda index: index["shards"][0].pop("samples"),
        lambda index: index["shards"][0].update(samples=-1),
        lambda index: index["shards"][0]["raw_data"].update(bytes="many"),
        lambda index: index["shards"][0]["raw_data"].update(basename="../../etc/passwd"),
        lambda index: index["shards"][0].update(column_sizes=[]),
        lambda index: index["shards"].append(None),
    ],
)
def test_a_corrupt_mds_index_is_named(tmp_path: Path, change) -> None:  # type: ignore[no-untyped-def]
    mds_shards(tmp_path / "d", {"x": "bytes"}, [{"x": b"abc"}] * 5, 2)
    path = tmp_path / "d" / "index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))
    error = _refusal(tmp_path / "d")
    assert isinstance(error, CorruptData)
    assert "index.json" in str(error)


def test_invalid_datasets_are_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert isinstance(_refusal(tmp_path / "empty"), NotFound)
    write_files(tmp_path / "zero", {"a.jpg": b"", "b.jpg": b""})
    assert isinstance(_refusal(tmp_path / "zero"), NotFound)
    write_files(tmp_path / "two", {"a.tar": b"", "index.json": b"{}", "shard.00000.mds": b""})
    assert "Say format= (webdataset, mds)" in str(_refusal(tmp_path / "two"))
    assert "unknown format 'zarr'" in str(_refusal(tmp_path / "two", Options(format="zarr")))
    write_files(tmp_path / "raw", {"a.bin": bytes(100)})
    assert "record_bytes" in str(_refusal(tmp_path / "raw", Options(format="records")))
    assert "--seq-len" in str(_refusal(tmp_path / "raw", Options(format="tokens", dtype="u2")))


def test_mds_in_an_unread_compression_is_refused(tmp_path: Path) -> None:
    mds_shards(tmp_path / "d", {"x": "bytes"}, [{"x": b"abc"}] * 5, 2)
    path = tmp_path / "d" / "index.json"
    path.write_text(path.read_text().replace('"compression": null', '"compression": "lzma"'))
    assert "'lzma'" in str(_refusal(tmp_path / "d"))
    path.unlink()
    assert "no index.json" in str(_refusal(tmp_path / "d"))


def test_codes_that_look_like_numbers_stay_text_and_gaps_match_nothing(tmp_path: Path) -> None:
    write_files(tmp_path / "d", {f"{i}.png": bytes([i]) for i in range(3)})
    rows = [{"path": f"{i}.png", "zip": f"00{i}", "size": "" if i == 1 else str(i)} for i in range(3)]
    labelled_table(tmp_path / "d", "about.csv", rows)
    catalog = compiled(tmp_path / "d")
    assert [catalog.key(i) for i in catalog.find("zip == '002'")] == ["2.png"]
    assert sorted(catalog.key(i) for i in catalog.find("size != 7")) == ["0.png", "2.png"]


def _about(root: Path, rows: list[str]) -> Catalog:
    """Compile images with a JSON sidecar each, named by their number."""
    write_files(root, {f"{i}.jpg": b"q" for i in range(len(rows))})
    write_files(root, {f"{i}.json": row.encode() for i, row in enumerate(rows)})
    return compiled(root)


def _found(catalog: Catalog, expression: str) -> list[str]:
    return sorted(catalog.key(sample) for sample in catalog.find(expression).tolist())


def test_json_with_nan_and_infinity_is_searchable(tmp_path: Path) -> None:
    scores = ["0.25", "NaN", "0.75", "Infinity", "-Infinity"]
    catalog = _about(tmp_path / "d", [f'{{"score": {score}}}' for score in scores])
    assert _found(catalog, "score > 0.5") == ["2", "3"]
    assert _found(catalog, "score < 9 or score != 1") == ["0", "2", "3", "4"]


@pytest.mark.parametrize("name", ["caption", "label"])
def test_a_lone_surrogate_in_json_does_not_refuse_the_data(tmp_path: Path, name: str) -> None:
    catalog = _about(tmp_path / "d", [f'{{"{name}": "cut \\ud83d"}}', f'{{"{name}": "\\ud83d\\ude00"}}'])
    assert _found(catalog, f"{name} == 'cut ?'") == ["0"]
    assert _found(catalog, f"{name} == '\U0001f600'") == ["1"]


@pytest.mark.parametrize(
    ("given", "name"), [("area m²", "area_m2"), ("ﬁt", "fit"), ("½", "_1_2"), ("𐄇", "_"), ("größe", "größe")]
)
def test_tag_names_become_identifiers(tmp_path: Path, given: str, name: str) -> None:
    catalog = _about(tmp_path / "d", [json.dumps({given: i}) for i in range(3)])
    assert catalog.names() == ("key", name)
    assert _found(catalog, f"{name} == 1") == ["1"]


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (
            ["15", "150", "1.5", "2e300", "-5"],
            {"x.endswith('0')": "13", "x.endswith('5')": "024", "'.' in x": "2"},
        ),
        (
            ['"15"', '"150"', "null", '"2"'],
            {"x == '15'": "0", "x in ['2', '150', 'x']": "13", "x != '15'": "13"},
        ),
        (['"15"', '"150"', "null", '"2"'], {"x not in ['15', '015']": "13"}),
        (
            ["2.0", "2", '"big"', "true"],
            {"x == 2": "01", "x == 2.0": "01", "x != 2.0": "23", "x == True": "3"},
        ),
    ],
    ids=[
        "spelled as usual",
        "text is found as written",
        "text is left out as written",
        "among texts, as numbers",
    ],
)
def test_numbers_and_texts_are_compared(tmp_path: Path, values: list[str], found: dict[str, str]) -> None:
    catalog = _about(tmp_path / "d", [f'{{"x": {value}}}' for value in values])
    assert {search: "".join(_found(catalog, search)) for search in found} == found


def test_numbers_kept_as_text_are_found(tmp_path: Path) -> None:
    rows = [
        '{"id": 6548334012087083217}',
        '{"id": 6548334012087083218}',
        '{"id": 7}',
        '{"id": "seven"}',
        "{}",
    ]
    catalog = _about(tmp_path / "d", rows)
    assert _found(catalog, "id == 6548334012087083217") == ["0"]
    assert _found(catalog, "id in [6548334012087083218, 7, 'seven']") == ["1", "2", "3"]
    assert _found(catalog, "id != 7") == ["0", "1", "3"]
    with pytest.raises(InvalidInput, match="cannot be ordered"):
        catalog.find("id > 7")


def test_integers_that_float64_rounds_to_one_are_told_apart(tmp_path: Path) -> None:
    catalog = _about(tmp_path / "d", [f'{{"id": {2**53 + more}}}' for more in range(2)])
    assert _found(catalog, f"id == {2**53}") == ["0"]
    assert _found(catalog, f"id == {2**53 + 1}") == ["1"]


def test_numbers_that_float64_does_not_hold_have_an_order(tmp_path: Path) -> None:
    sizes = (9, 2**53 + 1, 2**53, None, 2**64 + 1, -(10**40), 2.5, 1e300)
    catalog = _about(tmp_path / "d", [json.dumps({} if size is None else {"n": size}) for size in sizes])
    for sign, compare in (("<", lt), ("<=", le), (">", gt), (">=", ge), ("==", eq), ("!=", ne)):
        for constant in (5, 9, 2**53, 2**53 + 1, 2**64 + 1, -(10**41), 1e299):
            expected = [
                str(at) for at, size in enumerate(sizes) if size is not None and compare(size, constant)
            ]
            assert _found(catalog, f"n {sign} {constant}") == expected
    floats = _about(tmp_path / "e", ['{"n": 9007199254740992.0}', "{}"])
    assert _found(floats, f"n < {2**53 + 1}") == _found(floats, f"n != {2**53 + 1}") == ["0"]
    assert _found(floats, f"n >= {2**53 + 1}") == []
    mixed = _about(tmp_path / "f", ['{"n": 1}', '{"n": "big"}', '{"n": "%s"}' % ("9" * 5000)])
    with pytest.raises(InvalidInput, match="5 cannot be ordered against '9999999999"):
        mixed.find("n > 5")
    assert _found(mixed, "n == 1") == ["0"]


@pytest.mark.parametrize(
    "expression",
    [
        "w == " + "1+" * 900 + "1",
        "w" + ".b" * 900 + " == 1",
        "w == " + "-" * 1500 + "1",
        "w == 0x" + "f" * 9000,
    ],
    ids=["sum", "dots", "minus", "digits"],
)
def test_an_absurd_search_is_one_clear_line(tmp_path: Path, expression: str) -> None:
    catalog = _about(tmp_path / "d", ['{"w": 1}', '{"w": 2}'])
    with pytest.raises(InvalidInput) as caught:
        catalog.find(expression)
    assert "\n" not in str(caught.value)


def test_an_npy_of_objects_is_refused_without_unpickling(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.asarray([{}], dtype=object), allow_pickle=True)
    write_files(tmp_path / "d", {"a.npy": buffer.getvalue()})
    assert isinstance(_refusal(tmp_path / "d"), InvalidInput)
    write_files(tmp_path / "e", {"a.npy": b"\x93NUMPY\x01\x00" + b"\xff" * 40})
    assert isinstance(_refusal(tmp_path / "e"), CorruptData)


@pytest.mark.parametrize("options", [Options(), Options(format="tokens", seq_len=2)])
@pytest.mark.parametrize("array", [np.zeros(7, "V0"), np.zeros((5, 3), "V0"), np.zeros((), "i4,u1")])
def test_an_npy_without_items_or_rows_is_refused(tmp_path: Path, array: np.ndarray, options: Options) -> None:
    array_file(tmp_path / "d" / "a.npy", array)
    with pytest.raises(
        (InvalidInput, NotFound), match="no bytes" if array.ndim else "scalar|no whole sample"
    ):
        compiled(tmp_path / "d", options)


def test_unrelated_files_that_share_a_stem_fit_their_extents(tmp_path: Path) -> None:
    files = {f"part.{n:03d}": bytes([n]) * 900 for n in range(60)}
    write_files(tmp_path / "d", files)
    catalog = compiled(tmp_path / "d", Options(extent_bytes=SMALL))
    assert catalog.extent_sizes.max() <= SMALL
    assert {catalog.key(i): row[0] for i, row in enumerate(samples_of(catalog))} == files


@pytest.mark.parametrize("padding", [0, 10_240])
def test_concatenated_archives_are_refused_and_not_left_out(tmp_path: Path, padding: int) -> None:
    both = tar_bytes({"a": {"jpg": b"1"}}) + bytes(padding) + tar_bytes({"b": {"jpg": b"2"}})
    write_files(tmp_path / "d", {"a.tar": both})
    error = _refusal(tmp_path / "d")
    assert isinstance(error, InvalidInput)
    assert f"offset {10_240 + padding}" in str(error)
    write_files(tmp_path / "d", {"a.tar": tar_bytes({"a": {"jpg": b"1"}}) + b"whatever".ljust(512, b"!")})
    assert compiled(tmp_path / "d").samples == 1


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE])
def test_members_that_are_links_are_left_out_and_noted(tmp_path: Path, kind: bytes) -> None:
    names = ["README", "b.jpg", "c.jpg"]
    links = b""
    for name in names:
        link = tarfile.TarInfo(name)
        link.type, link.linkname = kind, "a.jpg"
        links += link.tobuf()
    write_files(tmp_path / "d", {"a.tar": links + tar_bytes({"a": {"jpg": b"q"}})})
    catalog = compiled(tmp_path / "d")
    assert [row[0] for row in samples_of(catalog)] == [b"q"]
    (note,) = catalog.notes
    assert note.startswith("2 members are links")
    assert "'b.jpg'" in note
    write_files(tmp_path / "d", {"a.tar": links + bytes(1024)})
    assert "2 members are links" in str(_refusal(tmp_path / "d"))


def test_a_sidecar_that_spans_two_extents_reads_each_once(tmp_path: Path) -> None:
    said = {"jpg": bytes(60_000), "json": json.dumps({"width": 7, "boxes": "x" * 20_000}).encode()}
    write_files(tmp_path / "d", {"a.tar": tar_bytes({"k": said}, tarfile.USTAR_FORMAT)})
    folder = Folder()
    catalog = compiled(tmp_path / "d", Options(extent_bytes=1 << 16), folder)
    assert len(catalog.find("width == 7")) == 1
    assert len(folder.reads) == len(catalog.extent_sizes) == 2
