"""Several splits, or configurations, below one URI are an error that says how to choose; `split=` chooses one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from cachesvc.catalog.options import Options
from cachesvc.catalog.splits import split_of
from cachesvc.catalog.survey import Survey, survey
from cachesvc.core.errors import InvalidInput, NotFound
from cachesvc.core.model import ObjectVersion
from tests.support.catalog_reader import Folder, compiled
from tests.support.datasets import labelled_table, mds_shards, tar_shards, write_files
from tests.support.folders import opened

pytestmark = pytest.mark.pure


class Names(Folder):
    """A bucket of objects that have names alone."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self.names = list(names)

    def list(self, prefix: str) -> Iterator[ObjectVersion]:
        root = prefix.rstrip("/")
        for name in self.names:
            if name == root or name.startswith(f"{root}/"):
                yield ObjectVersion(name, 9, "1")


def surveyed(names: Sequence[str], *uris: str, **options: object) -> Survey:
    root = "s3://bucket/d"
    source = Names(f"{root}/{name}" for name in names)
    given = [f"{root}/{uri}".rstrip("/") for uri in uris] or [root]
    return survey(given, Options(**options), lambda uri: source)  # type: ignore[arg-type]


def chosen(names: Sequence[str], *uris: str, **options: object) -> list[str]:
    return [
        entry.object.uri.removeprefix("s3://bucket/d/") for entry in surveyed(names, *uris, **options).entries
    ]


def refusal(names: Sequence[str], *uris: str, **options: object) -> str:
    with pytest.raises(InvalidInput) as caught:
        surveyed(names, *uris, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def numbered(*patterns: str, count: int = 3) -> list[str]:
    return [pattern.format(number) for pattern in patterns for number in range(count)]


TOKENS = {"dtype": "uint16", "seq_len": 8}
LAYOUTS: dict[str, tuple[list[str], dict[str, object]]] = {
    "hub": (numbered("data/train-{:05}-of-00003.parquet", "data/test-{:05}-of-00003.parquet"), {}),
    "hub, flat": (numbered("train-{:05}-of-00003.parquet", "test-{:05}-of-00003-0a1b.parquet"), {}),
    "csv": (["train.csv", "test.csv"], {}),
    "jsonl": (["train.jsonl", "val.jsonl", "README.md"], {}),
    "json": (["train.json", "dev.json"], {}),
    "compressed": (numbered("c4-train.{:05}-of-01024.json.gz", "c4-validation.{:05}-of-00008.json.gz"), {}),
    "arrow": (numbered("train/{}.arrow", "test/{}.arrow"), {}),
    "npy": (["x_train.npy", "x_test.npy"], {}),
    "tars": (numbered("imagenet-train-{:06}.tar", "imagenet-val-{:06}.tar"), {}),
    "nanoGPT": (["train.bin", "val.bin", "meta.pkl"], TOKENS),
    "llm.c": (numbered("fineweb_train_{:06}.bin", "fineweb_val_{:06}.bin"), TOKENS),
    "megatron": ([f"c4_{s}.{x}" for s in ("training", "valid") for x in ("bin", "idx")], TOKENS),
    "tfds": (numbered("m-train.tfrecord-{:05}-of-00010", "m-test.tfrecord-{:05}-of-00010"), {}),
    "mds": ([f"{s}/{n}" for s in ("train", "val") for n in ("index.json", "shard.00000.mds")], {}),
    "litdata": ([f"{s}/{n}" for s in ("train", "val") for n in ("index.json", "chunk-0-0.bin")], {}),
    "class folders": (numbered("train/cat/{}.jpg", "train/dog/{}.jpg", "Val/cat/{}.jpg"), {}),
    "ImageFolder": (numbered("train/cat/{}.jpg", "val/cat/{}.jpg"), {"format": "images"}),
    "splits in classes": (numbered("cat/train/{}.jpg", "cat/test/{}.jpg", "dog/train/{}.jpg"), {}),
    "COCO": ([*numbered("train2017/{}.jpg", "val2017/{}.jpg"), "annotations/captions_train2017.json"], {}),
    "LibriSpeech": (numbered("train-clean-100/19/{}.flac", "dev-clean/20/{}.flac", "test-clean/{}.flac"), {}),
    "Kaggle": ([*numbered("train/{}.jpg", "test/{}.jpg"), "train.csv", "sample_submission.csv"], {}),
    "GLUE": (numbered("train-{:05}-of-00003.parquet", "validation_matched-{:05}-of-00003.parquet"), {}),
    "file and folder": (["train.jsonl", "validation/0.jsonl"], {}),
    "a column more": (["train.csv", "test.csv", "sample_submission.csv"], {}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_several_splits_are_an_error_that_says_how_to_choose(layout: str) -> None:
    names, options = LAYOUTS[layout]
    error = refusal(names, **options)
    assert "splits, " in error
    assert 'choose one by split="train" (--split train); split="all" reads all of them' in error
    train = chosen(names, split="train", **options)
    assert train
    assert [name for name in train if any(word in name.lower() for word in ("test", "val", "dev"))] == []
    assert len(chosen(names, split="all", **options)) > len(train)


@pytest.mark.parametrize(
    ("names", "options"),
    [
        (numbered("bus/{}.jpg", "car/{}.jpg", "train/{}.jpg"), {}),
        (numbered("bus_stop/{}.jpg", "train_station/{}.jpg"), {}),
        (numbered("train/{}.parquet"), {}),
        (numbered("train/{}.parquet", "extra/{}.parquet"), {}),
        (["test_1.jpg", "train_2.jpg"], {}),
        (["test_1.txt", "train_2.txt"], {"format": "documents"}),
        (["train.csv", "sample_submission.csv"], {}),
        (["pretrain-0.jsonl", "contest/0.jsonl", "latest.jsonl"], {}),
        ([*numbered("shard-{}.tar", count=9), "train.tar", "test.tar"], {}),
        (["data_batch_1", "data_batch_2", "test_batch"], {}),
    ],
)
def test_names_that_only_look_like_splits_are_one_dataset(
    names: list[str], options: dict[str, object]
) -> None:
    assert chosen(names, **options) == names


def test_only_names_below_the_uri_count_and_not_those_that_the_user_wrote() -> None:
    names = ["test/run1/a.parquet", "test/run1/b.parquet", "train/c.parquet"]
    assert chosen(names, "test/run1") == names[:2]
    assert chosen(names, *names) == names
    assert chosen(names, "test", "train") == names
    below = numbered("en/train-{}.parquet", "en/test-{}.parquet")
    assert "holds 2 splits, train (3 files), test (3 files)" in refusal([*below, "x/a.parquet"], "en", "x")
    assert chosen([*below, "x/train.parquet"], "en", "x", split="train") == [*below[:3], "x/train.parquet"]


@pytest.mark.parametrize("split", ["validation", "val", "dev", "valid"])
def test_any_keyword_of_a_split_chooses_it(split: str) -> None:
    names = ["train.csv", "val.csv", "test.csv"]
    assert chosen(names, split=split) == ["val.csv"]
    assert surveyed(names, split=split).id == surveyed(names, split="validation").id
    assert surveyed(names, split="all").id == surveyed(names, *names).id != surveyed(names, split="val").id


@pytest.mark.parametrize(
    ("split", "says"),
    [("val", "there are train, test"), ("train[:9]", "one split"), ("train+test", "one split")],
)
def test_an_unknown_split_is_an_error_that_names_those_there_are(split: str, says: str) -> None:
    assert says in refusal(["train.csv", "test.csv"], split=split)
    assert "leave split= out" in refusal(["a.csv", "b.csv"], split="train")


def test_splits_may_be_chosen_by_their_own_names() -> None:
    speech = numbered("train-clean-100/{}.flac", "train-other-500/{}.flac", "dev-clean/{}.flac")
    assert chosen(speech, split="train") == speech[:6]
    assert chosen(speech, split="train-other-500") == speech[3:6]
    glue = [
        f"{name}-00000-of-00001.parquet" for name in ("train", "validation_matched", "validation_mismatched")
    ]
    assert chosen(glue, split="validation") == glue[1:]
    assert chosen(glue, split="validation_mismatched") == glue[2:]


def test_any_name_is_a_split_in_the_data_folder_of_the_hub() -> None:
    names = [f"data/{name}-00000-of-00001.parquet" for name in ("train_sft", "train_gen", "test_sft")]
    assert "3 splits, train_sft (1 file), train_gen (1 file), test_sft (1 file): choose" in refusal(names)
    assert chosen(names, split="train_gen") == names[1:2]
    assert "there are train_sft, train_gen, test_sft" in refusal(names, split="train")
    one = [f"data/part-{n:05}-of-00002.parquet" for n in range(2)]
    assert chosen(one) == one


CONFIGURATIONS = {
    "splits": numbered("en/train-{:05}-of-00003.parquet", "fr/train-{:05}-of-00003.parquet"),
    "converted": numbered("en/train/{:04}.parquet", "fr/partial-train/{:04}.parquet"),
}


@pytest.mark.parametrize("layout", CONFIGURATIONS)
def test_configurations_of_a_dataset_are_datasets_of_their_own(layout: str) -> None:
    names = CONFIGURATIONS[layout]
    for options in ({}, {"split": "train"}):
        error = refusal(names, **options)
        assert "2 configurations, en, fr, which are datasets of their own: open one" in error
        assert "(s3://bucket/d/en)" in error
    assert chosen(names, "en") == names[:3]
    assert chosen(names, split="all") == chosen(names, "en", "fr") == names
    dumps = numbered("data/2020/train-{:05}-of-00003.parquet", "data/2021/train-{:05}-of-00003.parquet")
    assert chosen(dumps) == dumps


def test_data_without_a_split_is_left_out_with_a_note() -> None:
    names = ["README.md", "extra.parquet", "train/0.parquet", "train/1.parquet", "test/0.parquet"]
    found = surveyed(names, split="train")
    (note,) = found.notes
    assert note.startswith("1 of 4 objects belong to no split and were left out, the first is ")
    assert (note.endswith("/d/extra.parquet"), found.left_out) == (True, 0)


def test_a_file_of_another_split_beside_the_folders_is_neither_chosen_nor_noted() -> None:
    names = ["train.csv", "test.csv", *numbered("train/{}.jpg", "test/{}.jpg")]
    found = surveyed(names, split="train")
    assert ([entry.path for entry in found.entries], found.notes) == (
        ["train.csv", "0.jpg", "1.jpg", "2.jpg"],
        (),
    )


def test_a_split_opens_as_its_folder_does(tmp_path: Path) -> None:
    pictures = {
        f"{split}/{kind}/{n}.jpg": b"1" for split in ("train", "val") for kind in ("cat", "dog") for n in "12"
    }
    write_files(tmp_path / "d", pictures)
    folder, split = compiled(tmp_path / "d" / "val"), compiled(tmp_path / "d", Options(split="val"))
    keys = [[each.key(n) for n in range(each.samples)] for each in (folder, split)]
    assert (keys[0], folder.classes, folder.samples) == (keys[1], split.classes, split.samples)
    assert folder.classes == ("cat", "dog")


def test_a_table_beside_the_folder_of_a_split_labels_it(tmp_path: Path) -> None:
    write_files(tmp_path / "d", {f"{split}/{n}.jpg": b"1" for split in ("train", "test") for n in range(3)})
    labelled_table(tmp_path / "d", "train.csv", [{"id": f"{n}.jpg", "label": "ab"[n % 2]} for n in range(3)])
    write_files(tmp_path / "d", {"sample_submission.csv": b"id,label\n0.jpg,b\n1.jpg,b\n2.jpg,b\n"})
    catalog = compiled(tmp_path / "d", Options(split="train", labels="train.csv"))
    assert (catalog.samples, catalog.classes) == (3, ("a", "b"))
    assert len(catalog.find("label == 'a'")) == 2


def test_splits_of_several_formats_are_each_of_their_own(tmp_path: Path) -> None:
    tar_shards(tmp_path / "d" / "train", 3, 2, 300)
    mds_shards(tmp_path / "d" / "val", {"x": "bytes"}, [{"x": b"1"}] * 4, 2)
    assert compiled(tmp_path / "d", Options(split="train")).format == "webdataset"
    assert compiled(tmp_path / "d", Options(split="val")).format == "mds"


def test_a_single_file_that_the_user_names_needs_no_split(tmp_path: Path) -> None:
    write_files(tmp_path, {"train.jsonl": b'{"a": 1}\n'})
    assert compiled(tmp_path / "train.jsonl").samples == 1
    assert compiled(tmp_path / "train.jsonl", Options(split="train")).samples == 1
    with pytest.raises(NotFound):
        compiled(tmp_path / "absent", Options(split="train"))


@pytest.mark.parametrize(
    ("folders", "classes"),
    [
        (("00", "0a", "ff"), ()),
        (("00", "01", "10"), ("00", "01", "10")),
        (("de", "fa"), ("de", "fa")),
        (("1a", "1b", "2a"), ("1a", "1b", "2a")),
        (("0b1c", "a3f0"), ()),
    ],
)
def test_folders_of_hash_names_are_no_classes(
    tmp_path: Path, folders: Sequence[str], classes: Sequence[str]
) -> None:
    assert opened(tmp_path / "d", {f"{name}/{name}9.jpg": b"1" for name in folders}).classes == classes
    assert compiled(tmp_path / "d", Options(labels="folder")).classes == folders


@pytest.mark.parametrize(
    "name", ["pretrain", "contest", "latest", "devices", "trainer", "00", "", "of", "my-train-data"]
)
def test_words_must_be_whole_and_at_an_end_of_a_name(name: str) -> None:
    assert split_of(name) == ""
