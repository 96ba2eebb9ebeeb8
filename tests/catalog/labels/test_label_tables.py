"""Labels from a table: a file that `labels` names is the table, or one line says why it cannot be."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.labels.file_tables import FILE_COLUMNS, LABEL_COLUMNS
from cachesvc.catalog.options import Options
from cachesvc.core.errors import CacheError, CorruptData, InvalidInput, NotFound
from cachesvc.core.model import ObjectVersion
from cachesvc.sources.source import OnReceived, ignore_received
from loader import open_dataset
from testbed import ROOT
from tests.support.catalog_reader import Folder, compiled
from tests.support.datasets import mds_shards, tar_bytes, write_files

FILES = {f"{n}.dat": bytes([n]) * 9 for n in range(4)}
KINDS = ["cat", "dog", "cat", "dog"]


def opened(root: Path, table: str | bytes, name: str = "labels.csv", labels: str | None = None) -> Catalog:
    """Compile four files with a table beside them, which `labels` names by default."""
    body = table if isinstance(table, bytes) else table.encode()
    write_files(root / "d", FILES | {name: body})
    return compiled(root / "d", Options(labels=name if labels is None else labels))


def separated(file: str, label: str, separator: str = ",", end: str = "\n") -> str:
    rows = [(file, label), *((f"{n}.dat", kind) for n, kind in enumerate(KINDS))]
    return "".join(separator.join(row) + end for row in rows)


def is_labelled(catalog: Catalog) -> bool:
    assert catalog.classes == ("cat", "dog")
    assert catalog.labels is not None
    found = {catalog.key(n): catalog.classes[catalog.labels[n]] for n in range(catalog.samples)}
    return found == dict(zip(FILES, KINDS, strict=True))


@pytest.mark.parametrize("file", [*FILE_COLUMNS, "File_Name", "IMAGE"])
@pytest.mark.parametrize("label", [*LABEL_COLUMNS, "Label"])
def test_columns_have_their_usual_names_in_upper_and_lower_case(
    tmp_path: Path, file: str, label: str
) -> None:
    assert is_labelled(opened(tmp_path, separated(file, label)))


def test_the_columns_are_documented() -> None:
    page = (ROOT / "docs" / "data.md").read_text()
    assert [name for name in FILE_COLUMNS + LABEL_COLUMNS if f"`{name}`" not in page] == []


@pytest.mark.parametrize("separator", [",", ";", "\t", ", "])
@pytest.mark.parametrize("name", ["labels.csv", "labels.tsv", "folds.txt"])
def test_the_first_line_decides_the_separator(tmp_path: Path, separator: str, name: str) -> None:
    assert is_labelled(opened(tmp_path, separated("file_name", "label", separator, "\r\n"), name))


@pytest.mark.parametrize("name", ["labels.csv", "labels.tsv"])
def test_a_table_of_tabs_or_semicolons_is_found_without_being_named(tmp_path: Path, name: str) -> None:
    separator = "\t" if name.endswith("tsv") else ";"
    assert is_labelled(opened(tmp_path, "\n" + separated("image", "target", separator), name, labels=""))


def test_byte_order_marks_quotes_and_line_separators_in_json_are_read(tmp_path: Path) -> None:
    quoted = '"file";"a;b";"label"\n' + "".join(f'"{n}.dat";"x,y";"{k}"\n' for n, k in enumerate(KINDS))
    assert is_labelled(opened(tmp_path / "csv", b"\xef\xbb\xbf" + quoted.encode()))
    assert is_labelled(opened(tmp_path / "cut", quoted.removesuffix("\n")))
    rows = [{"file": f"{n}.dat", "said": "a\u2028b", "label": kind} for n, kind in enumerate(KINDS)]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    assert is_labelled(opened(tmp_path / "jsonl", lines, "labels.jsonl"))


@pytest.mark.parametrize("named", ["{root}/{file}", "file://{root}/{file}", "./{file}", "{stem}"])
def test_files_are_named_by_path_uri_or_stem(tmp_path: Path, named: str, direct: None) -> None:
    root = tmp_path / "d"
    lines = [
        f"{named.format(root=root, file=file, stem=file[:-4])},{kind}\n"
        for file, kind in zip(FILES, KINDS, strict=True)
    ]
    write_files(root, FILES | {"labels.csv": ("path,class\n" + "".join(lines)).encode()})
    assert is_labelled(open_dataset(root, labels="labels.csv").catalog)


@pytest.mark.parametrize(
    ("table", "name", "error", "says"),
    [
        ("", "labels.csv", InvalidInput, "the columns nothing"),
        (
            "0.dat,cat\n1.dat,dog\n",
            "labels.csv",
            InvalidInput,
            "'0.dat', 'cat': none is known as the file.*file_name",
        ),
        (
            "file_name;size\n0.dat;3\n",
            "labels.csv",
            InvalidInput,
            '\'size\': none is known as the label.*"target": "size"',
        ),
        ("id|label\n0.dat|cat\n", "labels.csv", InvalidInput, r"'id\|label'"),
        ("file,label\n", "labels.csv", InvalidInput, "no rows"),
        ("file,label\n0.jpg,cat\n", "labels.csv", InvalidInput, r"'0.jpg' where the data has '\d.dat'"),
        ("file,label\n/elsewhere/0.dat,cat\n", "labels.csv", InvalidInput, "'/elsewhere/0.dat'"),
        ("file,label\n0.dat,\n", "labels.csv", InvalidInput, "no row of a file has a label"),
        ('{"file": "0.dat", "label": {"a": 1}}\n', "l.jsonl", InvalidInput, "no row of a file has a label"),
        ('{"image": "0.dat"}\n', "l.jsonl", InvalidInput, "'image'"),
        ("file,label\n0.dat,cat\n", "l.jsonl", CorruptData, "line 1 is no JSON"),
        ('[{"file": "0.dat", "label": 1}]', "l.json", CorruptData, "one a line"),
        ('{"file": "0.dat", "label": ' + "[]," * 400_000, "l.jsonl", CorruptData, "more than any row"),
        ("file,label\n0.dat,kätzchen\n".encode("latin-1"), "labels.csv", CorruptData, "UTF-8"),
        (
            'file,label\n0.dat,cat\n1.dat,"dog\n2.dat,cat\n3.dat,dog\n',
            "labels.csv",
            CorruptData,
            "line 3: a quote",
        ),
        ('file,"label\n0.dat,cat\n', "labels.csv", CorruptData, "line 1: a quote"),
        ("file,label\n0.dat," + "x" * 200_000, "labels.csv", CorruptData, "line 2: field larger"),
    ],
)
def test_a_named_table_that_labels_nothing_is_refused_in_one_line(
    tmp_path: Path, table: str | bytes, name: str, error: type[CacheError], says: str
) -> None:
    with pytest.raises(error, match=says) as caught:
        opened(tmp_path, table, name)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_named_table_is_never_a_sample_and_the_only_one_that_labels(tmp_path: Path) -> None:
    wrong = "file,label\n" + "".join(f"{name},wrong\n" for name in FILES)
    tables = {"meta/truth.csv": separated("file", "label").encode(), "labels.csv": wrong.encode()}
    sidecars = {f"{n}.cls": b"7" for n in range(4)}
    write_files(tmp_path / "d", FILES | tables | sidecars | {"notes.md": b"read me"})
    found = dict(_labels(compiled(tmp_path / "d", Options(labels="meta/truth.csv"))))
    assert found == {"0": "cat", "1": "dog", "2": "cat", "3": "dog", "notes": "none"}


def _labels(catalog: Catalog) -> list[tuple[str, str]]:
    assert catalog.labels is not None
    names = [*catalog.classes, "none"]
    return [(catalog.key(n), names[catalog.labels[n]]) for n in range(catalog.samples)]


def test_a_table_alone_is_not_a_dataset(tmp_path: Path) -> None:
    write_files(tmp_path / "d", {"labels.csv": separated("file", "label").encode()})
    with pytest.raises(NotFound, match=r"nothing but 'labels\.csv'"):
        compiled(tmp_path / "d", Options(labels="labels.csv"))


def test_files_without_a_row_and_rows_without_a_file_are_noted_at_each_opening(
    tmp_path: Path, direct: None, caplog: pytest.LogCaptureFixture
) -> None:
    table = "file,label\n0.dat,cat\n1.dat,dog\n2.dat,\n8.dat,dog\n9.dat,dog\n"
    write_files(tmp_path / "d", FILES | {"labels.csv": table.encode()})
    for _ in range(2):  # once compiled, once found compiled
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            found = open_dataset(tmp_path / "d", labels="labels.csv", decode=None)
        strangers, without = (record.getMessage() for record in caplog.records)
        assert "2 of 5 rows name no file here, '8.dat'" in strangers
        assert "2 of 4 samples have no label" in without
        assert sorted(found[n][1] for n in range(4)) == [-1, -1, 0, 1]
        assert sorted(label for _, label in found.where("label >= 0")) == [0, 1]


def test_the_first_rows_of_jsonl_may_lack_a_label_and_the_last_of_two_counts(tmp_path: Path) -> None:
    rows = [{"file": f"{n}.dat"} for n in range(4)]
    rows += [{"file": "0.dat", "label": "ox"}]
    rows += [{"file": f"{n}.dat", "label": kind} for n, kind in enumerate(KINDS)]
    catalog = opened(tmp_path, "".join(json.dumps(row) + "\n" for row in rows), "labels.jsonl")
    assert dict(_labels(catalog)) == dict(zip(FILES, KINDS, strict=True))
    assert [note.partition(":")[0] for note in catalog.notes] == [
        "1 rows give a file another label than before"
    ]


def test_a_file_called_labels_that_is_not_a_table_is_noted(tmp_path: Path) -> None:
    catalog = opened(tmp_path, "id|what\n0|cat\n", labels="")
    assert catalog.samples == 4
    left_out, why = catalog.notes
    assert left_out.startswith("1 of 5 objects are no files and were left out, the first is ")
    assert "labels.csv is no table of labels: its first line would name columns" in why


def test_requested_folders_give_classes_or_an_error_that_names_the_file_outside(tmp_path: Path) -> None:
    write_files(tmp_path / "d", {"cat/0.dat": b"x", "cat/1.dat": b"y"})
    assert compiled(tmp_path / "d").classes == ()
    assert compiled(tmp_path / "d", Options(labels="folder")).classes == ("cat",)
    write_files(tmp_path / "d", {"top.dat": b"z"})
    with pytest.raises(InvalidInput, match=r"'top\.dat' lies in no folder"):
        compiled(tmp_path / "d", Options(labels="folder"))


def test_one_file_beside_class_folders_is_noted_where_it_costs_all_labels(tmp_path: Path) -> None:
    write_files(tmp_path / "d", {"cat/0.dat": b"x", "dog/1.dat": b"y", "top.dat": b"z"})
    catalog = compiled(tmp_path / "d")
    assert (catalog.classes, catalog.samples) == ((), 3)
    assert [note for note in catalog.notes if "'top.dat'" in note and "no folder names a class" in note]
    write_files(tmp_path / "d", {"more.dat": b"z"})
    assert compiled(tmp_path / "d").notes == (), "as many files as folders: no folder of classes"


def test_split_folders_that_become_classes_are_noted(tmp_path: Path) -> None:
    write_files(
        tmp_path / "d", {f"{split}/{kind}/0.dat": b"x" for split in ("train", "val") for kind in "ab"}
    )
    catalog = compiled(tmp_path / "d", Options(split="all"))
    assert catalog.classes == ("train", "val")
    assert [note for note in catalog.notes if "train, val" in note]
    assert compiled(tmp_path / "d", Options(labels="folder", split="all")).notes == ()
    for opened in (compiled(tmp_path / "d" / "train"), compiled(tmp_path / "d", Options(split="train"))):
        assert (opened.classes, opened.notes) == (("a", "b"), ())


def test_classes_in_the_only_split_folder_are_noted(tmp_path: Path) -> None:
    write_files(tmp_path / "d", {f"train/{kind}/0.dat": b"x" for kind in "ab"})
    catalog = compiled(tmp_path / "d")
    assert catalog.classes == ()
    assert [
        note for note in catalog.notes if "have the folders in train, open it, or say split='train'" in note
    ]
    write_files(tmp_path / "e", {"train/0.dat": b"x", "train/1.dat": b"x"})
    assert compiled(tmp_path / "e").notes == ()


def test_a_format_that_takes_no_labels_refuses_them(tmp_path: Path) -> None:
    mds_shards(tmp_path / "d", {"x": "bytes"}, [{"x": b"1"}], 1)
    write_files(tmp_path / "d", {"labels.csv": b"file,label\n000-00000,cat\n"})
    with pytest.raises(InvalidInput, match="read as mds"):
        compiled(tmp_path / "d", Options(labels="labels.csv"))
    assert compiled(tmp_path / "d", Options(labels="none")).classes == ()


def test_an_index_without_its_shards_is_corrupt_as_if_its_format_were_given(tmp_path: Path) -> None:
    source = Path(__file__).parents[1] / "formats/data" / "mds-plain" / "index.json"
    write_files(tmp_path / "d", {"index.json": source.read_bytes()})
    told = []
    for format in ("", "mds"):
        with pytest.raises(CorruptData, match="which does not exist") as caught:
            compiled(tmp_path / "d", Options(format=format))
        told.append(str(caught.value))
    assert told[0] == told[1]


def test_each_of_two_tables_labels_the_files_of_its_own_folder(tmp_path: Path) -> None:
    """Both folders hold files of the same names."""
    for name, kinds in (("a", ["cat", "dog"]), ("b", ["dog", "cat"])):
        rows = "".join(f"{n}.dat,{kind}\n" for n, kind in enumerate(kinds))
        files = {f"{n}.dat": kind.encode() for n, kind in enumerate(kinds)}
        write_files(tmp_path / name, files | {"labels.csv": b"file,label\n" + rows.encode()})
    data = open_dataset([tmp_path / "a", tmp_path / "b"], labels="labels.csv", decode=None)  # type: ignore[list-item]
    samples = [data[n] for n in range(len(data))]
    assert [data.classes[label].encode() for _, label in samples] == [body for body, _ in samples]
    assert sorted(body for body, _ in samples) == [b"cat", b"cat", b"dog", b"dog"]


def test_a_table_in_the_folder_above_names_files_from_there(tmp_path: Path) -> None:
    rows = b"path,class\ntrain/0.dat,cat\ntrain/1.dat,dog\n"
    write_files(tmp_path, {"train/0.dat": b"x", "train/1.dat": b"y", "all.csv": rows})
    catalog = compiled([str(tmp_path / "train"), str(tmp_path / "all.csv")], Options(labels="all.csv"))
    assert catalog.classes == ("cat", "dog")


@pytest.mark.parametrize("bom", ["", "\ufeff"])
def test_jsonl_of_any_name_whose_first_object_names_a_file_is_the_table(tmp_path: Path, bom: str) -> None:
    rows = [{"file_name": f"{n}.dat", "label": kind} for n, kind in enumerate(KINDS)]
    body = bom + "\n" + "\n".join(map(json.dumps, rows))
    catalog = opened(tmp_path, body, "train.jsonl", labels="")
    assert catalog.samples == 4
    assert is_labelled(catalog)


@pytest.mark.parametrize(
    "body",
    [
        '{"text": "0.dat"}\n{"file_name": "0.dat", "label": "cat"}\n',
        '{"file_name": {"nested": 1}}\n',
        '["file_name"]\n',
        "file_name\n",
        '{"pad": "' + "x" * (64 << 10) + '", "file_name": "0.dat"}\n',
        "",
        b"\xff\xfe\n",
    ],
)
def test_jsonl_that_does_not_begin_as_a_table_is_left_out(tmp_path: Path, body: str | bytes) -> None:
    catalog = opened(tmp_path, body, "train.jsonl", labels="")
    assert catalog.samples == 4
    (said,) = catalog.notes
    assert said.startswith("1 of 5 objects are no files and were left out")


def test_only_the_first_line_of_other_jsonl_is_read(tmp_path: Path) -> None:
    reads: list[int] = []

    class Counted(Folder):
        def read_into(
            self,
            version: ObjectVersion,
            offset: int,
            into: memoryview,
            received: OnReceived = ignore_received,
        ) -> None:
            reads.append(len(into))
            super().read_into(version, offset, into)

    write_files(tmp_path / "d", FILES | {"train.jsonl": b'{"text": "x"}\n' * 100_000})
    assert compiled(tmp_path / "d", folder=Counted()).samples == 4
    assert [size for size in reads if size > 512] == [64 << 10]


def test_many_jsonl_files_are_data_and_a_table_is_still_found(tmp_path: Path) -> None:
    many = {f"{n}.jsonl": b'{"key": "0"}\n' for n in range(10, 30)}
    write_files(tmp_path / "d", FILES | many | {"labels.csv": separated("file", "label").encode()})
    catalog = compiled(tmp_path / "d", Options(format="files"))
    assert catalog.samples == 24
    assert catalog.classes == ("cat", "dog")


def test_a_row_labels_only_the_file_that_it_names(tmp_path: Path) -> None:
    files = {"bare": b"1", "v1.jpg": b"2", "v1.0/x": b"3", "b.jpg": b"4"}
    write_files(
        tmp_path / "d", files | {"labels.csv": b"file,label\n,none\nv1,cat\nv1.0/x,dog\nb.jpg, cat \n"}
    )
    catalog = compiled(tmp_path / "d")
    assert catalog.labels is not None
    classes = {catalog.key(i): (*catalog.classes, "")[catalog.labels[i]] for i in range(catalog.samples)}
    assert classes == {"bare": "", "v1.jpg": "cat", "v1.0/x": "dog", "b.jpg": "cat"}
    assert catalog.classes == ("cat", "dog")


def test_an_ambiguous_stem_labels_only_a_file_of_that_exact_name(tmp_path: Path) -> None:
    files = {f"{i}.e{i}": b"1" for i in range(20)} | {"x.jpg": b"1", "x.png": b"2", "y": b"3", "y.jpg": b"4"}
    table = b"file,label\nx,cat\ny,dog\n0,eel\n"
    write_files(tmp_path / "d", files | {"labels.csv": table})
    catalog = compiled(tmp_path / "d")
    assert catalog.labels is not None
    labelled = {catalog.key(i): catalog.classes[catalog.labels[i]] for i in catalog.find("label >= 0")}
    assert labelled == {"y": "dog", "0.e0": "eel"}
    assert any("1 of 3 rows name no file here, 'x'" in note for note in catalog.notes)


def test_labels_of_json_yield_to_tables_and_cls(tmp_path: Path) -> None:
    said = {f"{n}.json": json.dumps({"label": "wrong"}).encode() for n in range(4)}
    table = {"labels.csv": separated("file", "label").encode()}
    write_files(tmp_path / "d", FILES | table | said)
    for labels in ("", "labels.csv"):
        found = compiled(tmp_path / "d", Options(labels=labels))
        assert found.classes == ("cat", "dog")
        assert dict(_labels(found)) == dict(zip("0123", KINDS, strict=True))
        assert len(found.find("_label == 'wrong'")) == 4
    members = {str(n): {"cls": str(n).encode(), "jpg": b"x", "json": b'{"label": "wrong"}'} for n in range(4)}
    write_files(tmp_path / "w", {"a.tar": tar_bytes(members)})
    assert _labels(compiled(tmp_path / "w")) == [(str(n), str(n)) for n in range(4)]
    write_files(tmp_path / "j", FILES | said)
    assert compiled(tmp_path / "j").classes == ("wrong",)
