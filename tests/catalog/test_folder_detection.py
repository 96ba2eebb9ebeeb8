"""The format of a folder: most data objects decide it, the others are noted, and no container is one opaque sample."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import numpy as np
import pytest

from cachesvc.catalog import kinds
from cachesvc.catalog.options import Options
from cachesvc.catalog.survey import survey
from cachesvc.core.errors import InvalidInput, NotFound
from cachesvc.sources.open import Sources, SourceSettings
from loader import open_dataset
from testbed.node import Daemon
from testbed.servers import SeaweedFS
from tests.support.catalog_reader import compiled
from tests.support.datasets import mds_shards, write_files
from tests.support.folders import BIG, HDF5, IMAGES, TAR, left_out, opened, parquet, refusal

# ---- the majority


@pytest.mark.parametrize(
    "unrelated", ["backup.tar", "embeddings.parquet", "old.zip", "x.h5", "cat/x.npy", "b.tar.gz", "a.mds"]
)
def test_one_unrelated_object_is_left_out(tmp_path: Path, unrelated: str) -> None:
    catalog = opened(tmp_path / "d", IMAGES | {unrelated: b"PAR1"})
    assert (catalog.format, catalog.samples, catalog.classes) == ("files", 10, ("cat", "dog"))
    assert left_out(catalog) == (1, 11, unrelated.rpartition("/")[2])


def test_an_unrelated_image_beside_shards_is_left_out(tmp_path: Path) -> None:
    catalog = opened(tmp_path / "d", {f"{n}.tar": TAR for n in range(3)} | {"logo.png": b"x"})
    assert (catalog.format, catalog.samples, left_out(catalog)) == ("webdataset", 3, (1, 4, "logo.png"))


@pytest.mark.parametrize(
    ("names", "format"),
    [
        (("a.tar", "B.TAR", "c.Tar"), "webdataset"),
        (("a.parquet", "B.PARQUET", "c.pq", "D.PARQ"), "parquet"),
        (("a.npy", "B.NPY"), "records"),
    ],
)
def test_names_are_matched_without_case(tmp_path: Path, names: tuple[str, ...], format: str) -> None:
    write = {
        "webdataset": lambda path: path.write_bytes(TAR),
        "parquet": parquet,
        "records": lambda path: path.write_bytes(npy(3)),
    }[format]
    (tmp_path / "d").mkdir()
    for name in names:
        write(tmp_path / "d" / name)
    catalog = compiled(tmp_path / "d")
    rows = {"webdataset": 1, "parquet": 2, "records": 3}[format]
    assert (catalog.format, catalog.samples, catalog.notes) == (format, rows * len(names), ())


def npy(rows: int) -> bytes:
    into = io.BytesIO()
    np.save(into, np.arange(2 * rows).reshape(rows, 2))
    return into.getvalue()


def test_megatron_pairs_are_matched_without_case(tmp_path: Path) -> None:
    lengths = np.array([300, 400], "<i4")
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 2, 3)
    index = head + lengths.tobytes() + bytes(16) + np.arange(3, dtype="<i8").tobytes()
    catalog = opened(tmp_path / "d", {"A.BIN": bytes(1400), "A.IDX": index}, seq_len=100)
    assert (catalog.format, catalog.samples) == ("tokens", 7)


@pytest.mark.parametrize(
    "beside",
    [
        {
            "README.md": b"r",
            "readme_en.txt": b"r",
            "LICENSE": b"l",
            "train.log": b"l",
            "SHA256SUMS": b"s",
            "a.tar.md5": b"m",
        },
        {"a.json": b"{}", "a.idx": b"i", "a.tar.idx": b"i", "a.txt": b"t"},
        {"a.parquet": b"PAR1", "a_stats.json": b"{}"},
        {"labels.csv": b"sun,moon\n"},
        {"idx/a.idx": b"i", "idx/b.idx": b"i"},
        {"dataset.yaml": b"y"},
    ],
)
def test_objects_beside_shards_have_no_vote(tmp_path: Path, beside: dict[str, bytes]) -> None:
    catalog = opened(tmp_path / "d", {"a.tar": TAR} | beside)
    assert (catalog.format, catalog.samples) == ("webdataset", 1)
    assert left_out(catalog)[:2] == (len(beside), len(beside) + 1)


def test_read_mes_are_neither_samples_nor_classes(tmp_path: Path) -> None:
    catalog = opened(
        tmp_path / "d", IMAGES | {"README.md": b"r", "cat/README": b"r", "dog/license.txt": b"l"}
    )
    assert (catalog.samples, catalog.classes) == (10, ("cat", "dog"))
    assert left_out(catalog)[:2] == (3, 13)


def test_read_mes_do_not_outvote_the_data(tmp_path: Path) -> None:
    readmes = {f"{n}/README.md": b"r" for n in range(9)}
    assert opened(tmp_path / "d", readmes | {"0/x.jpg": b"1"}).samples == 1
    assert "only read-mes" in refusal(tmp_path / "e", readmes)
    assert opened(tmp_path / "e", {}, format="files").samples == 9


def test_a_corpus_of_texts_is_read_as_files(tmp_path: Path) -> None:
    catalog = opened(tmp_path / "d", {f"{n}.txt": b"once" for n in range(3)} | {"README.md": b"r"})
    assert ([field.name for field in catalog.fields], catalog.samples) == (["txt"], 3)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (
            {"a.tar": TAR, "b.jpg": b"1"},
            ("1 webdataset (a.tar)", "1 files (b.jpg)", "webdataset, files", "*.tar, *.jpg"),
        ),
        ({"a.tar": TAR, "b.parquet": b"", "c.jpg": b""}, ("1 parquet (b.parquet)", "files", "*.parquet")),
        ({"a.tar": TAR, "b.h5": b""}, ("1 HDF5 (b.h5)", "format= (webdataset)", "(*.tar)")),
        ({"a.npy": npy(1), "b.jpg": b""}, ("1 records (a.npy)", "1 files (b.jpg)")),
    ],
)
def test_an_error_names_the_formats_where_none_has_a_majority(
    tmp_path: Path, files: dict[str, bytes], says: tuple[str, ...]
) -> None:
    error = refusal(tmp_path / "d", files)
    assert [word for word in says if word not in error] == []


def test_a_given_format_notes_left_out_objects(tmp_path: Path) -> None:
    files = {"a.tar": TAR, "b.jpg": b"1", "c.jpg": b"2", "README.md": b"r"}
    assert left_out(opened(tmp_path / "d", files, format="webdataset")) == (3, 4, "README.md")
    everything = compiled(tmp_path / "d", Options(format="files"))
    assert (everything.samples, everything.notes) == (4, ())


def test_an_option_that_only_one_format_has_selects_it(tmp_path: Path) -> None:
    """Write a folder like nanoGPT's."""
    files = {
        "train.bin": bytes(512),
        "val.bin": bytes(512),
        "meta.pkl": b"x",
        "input.txt": b"x",
        "prepare.py": b"x",
    }
    catalog = opened(tmp_path / "d", files, dtype="uint16", seq_len=32, split="all")
    assert (catalog.format, catalog.samples, left_out(catalog)) == ("tokens", 16, (3, 5, "input.txt"))


def test_a_container_or_array_that_shares_an_images_stem_is_a_field(tmp_path: Path) -> None:
    pairs = {f"{n}.{extension}": b"PK\3\4" for n in range(3) for extension in ("jpg", "npz", "npy")}
    catalog = opened(tmp_path / "d", pairs)
    assert ([field.name for field in catalog.fields], catalog.samples) == (["jpg", "npy", "npz"], 3)
    assert catalog.notes == ()


@pytest.mark.parametrize(
    "beside", [{f"{n}.json": b"{}" for n in range(2)}, {"labels.csv": b"file,label\n0.npy,1\n"}]
)
def test_arrays_with_a_describing_file_are_one_sample_each(tmp_path: Path, beside: dict[str, bytes]) -> None:
    arrays = {f"{n}.npy": npy(3) for n in range(4)}
    assert opened(tmp_path / "d", arrays).samples == 12
    catalog = opened(tmp_path / "d", beside)
    assert (catalog.format, catalog.samples) == ("files", 4)


def test_an_index_counts_for_its_shards_only(tmp_path: Path) -> None:
    mds_shards(tmp_path / "d" / "m", {"x": "bytes"}, [{"x": b"1"}] * 4, 2)
    assert compiled(tmp_path / "d").format == "mds"
    assert left_out(opened(tmp_path / "d", IMAGES)) == (3, 13, "index.json")
    error = refusal(tmp_path / "d" / "m", {f"{n}.jpg": b"1" for n in range(9)})
    assert "index.json names other objects than most: 9 files (0.jpg), 2 mds" in error
    assert "format= (files, mds)" in error


def test_one_zarr_file_does_not_outvote_other_data(tmp_path: Path) -> None:
    assert opened(tmp_path / "d", IMAGES | {".zattrs": b"{}"}).samples == 10


def test_compressed_and_plain_mds_shards_are_one_format(tmp_path: Path) -> None:
    mds_shards(tmp_path / "d", {"x": "bytes"}, [{"x": b"1"}] * 4, 2)
    write_files(tmp_path / "d", {"shard.00009.mds.zstd": b"x"})
    assert compiled(tmp_path / "d").format == "mds"


def test_globs_and_lists_follow_the_same_rule(tmp_path: Path) -> None:
    write_files(tmp_path / "d", {f"{n}.jpg": b"1" for n in range(4)} | {"b.tar": TAR, "README.md": b"r"})
    sources = Sources(SourceSettings())

    def found(*names: str) -> tuple[str, int, int]:
        uris = sources.expand([f"file://{tmp_path}/d/{name}" for name in names])
        made = survey(uris, Options(), sources)
        return made.format, len(made.entries), made.left_out

    assert found("") == found("*") == found("**/*") == ("files", 4, 2)
    assert found("{0,1,2}.jpg", "b.tar") == ("files", 3, 1)
    assert found("b.tar") == found("*.tar") == ("webdataset", 1, 0)
    with pytest.raises(InvalidInput, match=r"1 files \(0\.jpg\), 1 webdataset"):
        found("0.jpg", "b.tar")


# ---- images


def test_images_of_several_extensions_are_decoded(tmp_path: Path) -> None:
    names = ("a/1.jpg", "a/2.JPG", "b/3.jpeg", "b/4.png", "b/Thumbs.db")
    catalog = opened(tmp_path / "d", dict.fromkeys(names, b"x"))
    (field,) = catalog.fields
    assert (field.name, field.encoding in kinds.IMAGES) == ("image", True)
    assert (catalog.samples, catalog.classes) == (4, ("a", "b"))
    assert catalog.notes == ("left out, as left by operating systems and tools: Thumbs.db",)


def test_files_beside_mostly_images_belong_only_if_they_share_a_stem(tmp_path: Path) -> None:
    files = IMAGES | {"cat/0.txt": b"a caption", "annotations.json": b"{}", "notes.pdf": b"%PDF"}
    catalog = opened(tmp_path / "d", files)
    assert ([field.name for field in catalog.fields], catalog.samples) == (["jpg", "txt"], 10)
    assert catalog.classes == ("cat", "dog")
    assert left_out(catalog) == (2, 13, "annotations.json")


def test_images_among_as_many_other_files_stay_bytes_with_a_note(tmp_path: Path) -> None:
    files = {f"lidar/{n}.bin": b"\0" for n in range(3)} | {f"image/{n}.png": b"1" for n in range(3)}
    catalog = opened(tmp_path / "d", files)
    assert ([field.name for field in catalog.fields], catalog.samples) == (["file"], 6)
    assert any("3 .png, 3 .bin" in note or "3 .bin, 3 .png" in note for note in catalog.notes)


# ---- names that are never data


LITTER = (
    *(
        "Thumbs.db",
        "cat/desktop.ini",
        "cat/.DS_Store",
        "_SUCCESS",
        "@eaDir/cat/0.jpg",
        "cat/@eaDir/0.jpg/SYNO.jpg",
    ),
    *("__MACOSX/cat/._0.jpg", "lost+found/#1.jpg", ".ipynb_checkpoints/0.jpg", ".snapshot/daily/cat/0.jpg"),
    "cat/.ipynb_checkpoints/0-checkpoint.jpg",
)


def test_files_of_operating_systems_are_neither_samples_nor_classes(tmp_path: Path) -> None:
    catalog = opened(tmp_path / "d", IMAGES | dict.fromkeys(LITTER, b"litter"))
    assert (catalog.samples, catalog.classes) == (10, ("cat", "dog"))
    (note,) = catalog.notes
    assert note.endswith("tools: @eaDir/, Thumbs.db, __MACOSX/, desktop.ini and 1 names more")


def test_hive_partitions_are_columns_of_parquet_and_noted_elsewhere(tmp_path: Path) -> None:
    parquet(*(tmp_path / "d" / f"year={year}" / "p.parquet" for year in (2020, 2021)))
    globbed = [str(tmp_path / "d" / f"year={year}" / "p.parquet") for year in (2020, 2021)]
    for uris in (tmp_path / "d", globbed):
        catalog = compiled(uris)
        assert ([field.name for field in catalog.fields], catalog.notes) == (["a", "year"], ())
        assert catalog.find("year == 2021").tolist() == [2, 3]
    assert [field.name for field in compiled(tmp_path / "d" / "year=2020").fields] == ["a"]
    said = "folders such as year=2020 are neither columns nor classes: no sample holds year"
    pictures = opened(
        tmp_path / "e", {f"year={year}/{n}.jpg": b"1" for year in (2020, 2021) for n in range(2)}
    )
    assert pictures.classes == ()
    assert any(said in note for note in pictures.notes)
    asked = compiled(tmp_path / "e", Options(labels="folder"))
    assert (asked.classes, asked.notes) == (("year=2020", "year=2021"), ())


# ---- with and without a daemon, on a file system and in a bucket

SEVERAL = {
    "unrelated": IMAGES | {"backup.tar": TAR, "README.md": b"r"},
    "tables": IMAGES | {"rows.csv": b"a,b\n1,2\n"},
    "mixed": {"a.tar": TAR, "b.jpg": b"1"},
    "records": {"train.h5": b"x"},
    "hdf5": {"x.dat": HDF5},
    "splits": {f"{split}.jsonl": b'{"a": 1}\n' for split in ("train", "test")},
    "unknown": {"x.weird": b"\0" + BIG},
}


def told(uri: str) -> tuple[object, ...]:
    """Return the error or result of opening a dataset, without its location."""
    try:
        data = open_dataset(uri, decode=None)
    except (InvalidInput, NotFound) as error:
        return type(error).__name__, str(error).replace(uri, "")
    notes = tuple(note.replace(uri, "") for note in data.catalog.notes)
    return data.catalog.format, len(data), data.classes, notes


@pytest.mark.slow
def test_the_format_is_the_same_with_a_daemon_and_in_a_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3_server: SeaweedFS, bucket: str, s3_env: None
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    client = s3_server.client()
    for name, files in SEVERAL.items():
        write_files(tmp_path / "d" / name, files)
        for key, body in files.items():
            client.put_object(Bucket=bucket, Key=f"{name}/{key}", Body=body)
    places = [f"{root}/{name}" for root in (f"file://{tmp_path}/d", f"s3://{bucket}") for name in SEVERAL]
    monkeypatch.setenv("CACHESVC", "off")
    direct = [told(uri) for uri in places]
    assert direct[: len(SEVERAL)] == direct[len(SEVERAL) :]
    allow = ["--allow", str(tmp_path), "--allow", f"s3://{bucket}/"]
    with Daemon(tmp_path / "node", ["--ram", "64MiB", *allow]) as daemon:
        monkeypatch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
        monkeypatch.setenv("CACHESVC", "require")
        assert [told(uri) for uri in places] == direct
        assert len(open_dataset(f"s3://{bucket}/splits", split="train")) == 1
