"""`labels=` names the columns of a table; a header that is not known gives the words to write."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cachesvc.catalog.options import LabelSource, Options, labels_text, parse_labels
from cachesvc.core.errors import InvalidInput
from loader import open_dataset
from testbed.node import Daemon
from tests.support.catalog_reader import compiled
from tests.support.datasets import tar_bytes, write_files

pytestmark = pytest.mark.usefixtures("direct")
FILES = {f"{n}.jpg": bytes([n]) * 9 for n in range(4)}
BREEDS = ["husky", "beagle", "husky", "akita"]
ODD = "photo,breed,weight\n" + "".join(f"{n},{breed},{n}.5\n" for n, breed in enumerate(BREEDS))
WORDS = {"file": "photo", "target": "breed"}


def labelled(data: Any) -> dict[str, str]:
    return {data.catalog.key(n): data.classes[data[n][1]] for n in range(len(data))}


def test_a_header_that_is_not_known_is_an_error_with_the_words_that_mend_it(tmp_path: Path) -> None:
    write_files(tmp_path, FILES | {"train.csv": ODD.encode()})
    with pytest.raises(InvalidInput, match="'photo' names the files") as caught:
        open_dataset(tmp_path)
    (words,) = re.findall(r"labels=(\{.*?\})", str(caught.value))
    assert json.loads(words) == WORDS
    data = open_dataset(tmp_path, labels=json.loads(words), decode=None)
    assert labelled(data) == {f"{n}.jpg": breed for n, breed in enumerate(BREEDS)}
    assert data.version == open_dataset(tmp_path, labels=words).version, "as the command line gives it"
    assert open_dataset(tmp_path, labels="none").classes == ()


def test_a_known_file_column_without_a_known_label_is_noted_with_the_words(tmp_path: Path) -> None:
    write_files(tmp_path, FILES | {"train.csv": ODD.replace("photo", "image_id").encode()})
    data = open_dataset(tmp_path, fields=("jpg", "breed"), decode=None)
    assert {data.catalog.key(n): data[n][1] for n in range(4)} == {
        f"{n}.jpg": b for n, b in enumerate(BREEDS)
    }
    (note,) = data.catalog.notes
    assert note.endswith('labels={"file": "image_id", "target": "breed"} makes one')


@pytest.mark.parametrize("header", ["id,y", "image_id,category", "img_name,class_name", "__key__,labels"])
def test_usual_headers_are_known(tmp_path: Path, header: str) -> None:
    table = f"{header}\n" + "".join(f"{n},{breed}\n" for n, breed in enumerate(BREEDS))
    write_files(tmp_path, FILES | {"train.csv": table.encode()})
    assert labelled(open_dataset(tmp_path, decode=None))["3.jpg"] == "akita"


def test_a_table_of_other_things_with_an_id_is_left_out(tmp_path: Path) -> None:
    write_files(tmp_path, FILES | {"people.csv": b"id,label\nann,1\nbob,1\n"})
    catalog = open_dataset(tmp_path, decode=None).catalog
    assert (catalog.samples, catalog.labels) == (4, None)
    assert "1 of 5 objects are no files and were left out" in catalog.notes[0]


def test_rows_may_name_files_of_any_folder_by_their_name(tmp_path: Path) -> None:
    files = {f"train/{n // 2}/{n}.jpg": b"x" for n in range(4)} | {
        "train/a/same.jpg": b"1",
        "train/b/same.jpg": b"2",
    }
    rows = "".join(f"{n},{breed}\n" for n, breed in enumerate(BREEDS))
    write_files(tmp_path, files | {"train.csv": f"image_id,label\n{rows}same,husky\n".encode()})
    catalog = open_dataset(tmp_path).catalog
    found = [int(each) for each in catalog.find("label >= 0")]
    assert sorted(catalog.key(each) for each in found) == sorted(files)[:4]
    assert any("1 of 5 rows name no file here, 'same'" in note for note in catalog.notes)


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        ({"file": "foto", "target": "breed"}, r"has the columns 'photo', 'breed', 'weight', which labels="),
        ({"file": "photo", "target": "kind"}, "which labels="),
        ({"files": "photo"}, "labels= has no 'files'; it has file, target, table"),
        ({"file": 3}, "names of columns as text"),
        ({"kind": "words"}, "give one of class, float"),
        ({"target": ["a", "b"], "separator": " "}, "leave out separator and kind"),
        ({"table": "absent.csv"}, "no label file 'absent.csv'"),
        ("{nonsense", "is no JSON"),
        ({"file": {1}}, "names of columns as text"),
    ],
)
def test_columns_that_do_not_exist_are_named(tmp_path: Path, labels: Any, says: str) -> None:
    write_files(tmp_path, FILES | {"train.csv": ODD.encode()})
    with pytest.raises(InvalidInput, match=says) as caught:
        open_dataset(tmp_path, labels=labels)
    assert "\n" not in str(caught.value)


def test_labels_are_parsed() -> None:
    assert parse_labels(labels_text(WORDS)) == LabelSource(file="photo", targets=("breed",))
    assert parse_labels("truth.csv:float") == LabelSource(table="truth.csv", kind="float")
    assert parse_labels("C:x.csv") == LabelSource(table="C:x.csv")


TARS = {f"{n:04d}": {"jpg": bytes([n])} for n in range(4)}


@pytest.mark.parametrize("form", ["{:04d}", "{:04d}.jpg"])
def test_a_table_beside_tars_labels_their_samples(tmp_path: Path, form: str) -> None:
    rows = "".join(f"{form.format(n)},{breed},a {n}\n" for n, breed in enumerate(BREEDS))
    write_files(tmp_path / "d", {"0.tar": tar_bytes(TARS), "t.csv": f"key,label,caption\n{rows}".encode()})
    with Daemon(tmp_path / "node", ["--ram", "64MiB", "--allow", str(tmp_path)]) as daemon:
        for environment in (
            {"CACHESVC": "off"},
            {"CACHESVC": "require", "CACHESVC_SOCKET": daemon.socket_dir},
        ):
            with pytest.MonkeyPatch.context() as patch:
                for name, value in environment.items():
                    patch.setenv(name, value)
                data = open_dataset(tmp_path / "d", fields=("key", "jpg", "label", "caption"), decode=None)
                assert [data[n] for n in range(4)] == [
                    (f"{n:04d}", bytes([n]), sorted(set(BREEDS)).index(breed), f"a {n}")
                    for n, breed in enumerate(BREEDS)
                ]
                assert len(data.where("label == 'husky'")) == 2
                data.close()


def test_a_table_beside_tars_replaces_their_cls(tmp_path: Path) -> None:
    tars = {key: {**fields, "cls": b"7"} for key, fields in TARS.items()}
    table = b"key,label\n" + b"".join(b"%04d,%s\n" % (n, breed.encode()) for n, breed in enumerate(BREEDS))
    more = tar_bytes({"9999": {"jpg": b"9", "cls": b"3"}})
    write_files(
        tmp_path, {"0.tar": tar_bytes(tars), "1.tar": more, "t.csv": table, "other.csv": b"a,b\n1,2\n"}
    )
    catalog = compiled(tmp_path)
    assert catalog.classes == ("akita", "beagle", "husky")
    assert any("1 of 4 objects are no webdataset and were left out" in note for note in catalog.notes)
    with pytest.raises(InvalidInput, match="labels='folder' is for files"):
        compiled(tmp_path, Options(labels="folder"))
