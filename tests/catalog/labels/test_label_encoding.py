"""Numeric labels: regression targets where they are not all whole, class indices where they are."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.options import Options
from cachesvc.catalog.validation import check_catalog
from cachesvc.core.errors import InvalidInput
from loader import DataLoader, mix, open_dataset
from testbed.node import Daemon
from tests.support.catalog_reader import compiled
from tests.support.datasets import tar_bytes, write_files


def table(values: list[str]) -> bytes:
    return ("file,label\n" + "".join(f"{n}.dat,{value}\n" for n, value in enumerate(values))).encode()


def rows(values: list[Any]) -> bytes:
    return "".join(
        json.dumps({"file": f"{n}.dat", "label": value}) + "\n" for n, value in enumerate(values)
    ).encode()


def opened(root: Path, body: bytes, count: int, labels: str = "", name: str = "labels.csv") -> Catalog:
    files = {f"{n}.dat": bytes([n + 1]) * 9 for n in range(count)}
    write_files(root / "d", files | {name: body})
    return compiled(root / "d", Options(labels=labels))


def targets(catalog: Catalog) -> list[float]:
    """Return the labels in the order of the files' names."""
    assert catalog.labels is not None
    found = {int(catalog.key(n)[:-4]): catalog.labels[n].item() for n in range(catalog.samples)}
    return [found[n] for n in sorted(found)]


@pytest.mark.parametrize(
    ("cells", "numbers"),
    [
        (["3.5", "-1.25", "100"], [3.5, -1.25, 100.0]),
        (["1e-3", "2E4", "-0"], [1e-3, 2e4, 0.0]),
        (['"0.5"', " 7 ", "+1.5"], [0.5, 7.0, 1.5]),
        ([".5", "-.5", "5."], [0.5, -0.5, 5.0]),
        (["inf", "-Infinity", "1"], [math.inf, -math.inf, 1.0]),
        (["1234567890123456789", "0.1", "2"], [float(1234567890123456789), 0.1, 2.0]),
    ],
)
def test_numbers_that_are_not_all_whole_are_targets(
    tmp_path: Path, cells: list[str], numbers: list[float]
) -> None:
    catalog = opened(tmp_path, table(cells), 3)
    assert targets(catalog) == numbers
    assert catalog.labels is not None
    assert catalog.labels.dtype == "float64"
    assert catalog.classes == ()
    check_catalog(catalog)


@pytest.mark.parametrize(
    ("cells", "classes", "indices"),
    [
        (["2", "0", "10"], tuple(map(str, range(11))), [2, 0, 10]),
        (["2.0", "0.0", "10.0"], tuple(map(str, range(11))), [2, 0, 10]),
        (["10", "-1", "9"], ("-1", "9", "10"), [2, 0, 1]),
        (["+1", "-1", "1"], ("-1", "1"), [1, 0, 1]),
        (["cat", "dog", "1"], ("1", "cat", "dog"), [1, 2, 0]),
        (["007", "7", "3"], ("007", "3", "7"), [0, 2, 1]),
        (['"1,000"', '"2,000"', "1"], ("1", "1,000", "2,000"), [1, 2, 0]),
        (["1_0", "2", "3"], ("1_0", "2", "3"), [0, 1, 2]),
    ],
)
def test_whole_numbers_and_names_are_classes(
    tmp_path: Path, cells: list[str], classes: tuple[str, ...], indices: list[int]
) -> None:
    catalog = opened(tmp_path, table(cells), 3)
    assert (catalog.classes, targets(catalog)) == (classes, indices)
    assert catalog.labels is not None
    assert catalog.labels.dtype == "int32"


@pytest.mark.parametrize("cell", ["", "nan", "NaN"])
def test_a_cell_without_a_number_is_a_missing_label(tmp_path: Path, cell: str) -> None:
    numbers = opened(tmp_path / "numbers", table(["0.5", cell, "2"]), 3)
    assert str(targets(numbers)) == "[0.5, nan, 2.0]"
    assert any("1 of 3 samples have no label" in note and "nan" in note for note in numbers.notes)
    assert {numbers.key(int(n)) for n in numbers.find("label != ''")} == {"0.dat", "2.dat"}
    whole = opened(tmp_path / "whole", table(["1", cell, "2"]), 3)
    assert (whole.classes, targets(whole)) == (("0", "1", "2"), [1, -1, 2])


def test_json_numbers_are_numbers_also_as_text(tmp_path: Path) -> None:
    catalog = opened(tmp_path, rows([3.5, "-1.25", 100, math.nan, math.inf]), 5, name="labels.jsonl")
    assert str(targets(catalog)) == "[3.5, -1.25, 100.0, nan, inf]"
    whole = opened(tmp_path / "whole", rows([1, "0", 2.0]), 3, name="labels.jsonl")
    assert (whole.classes, targets(whole)) == (("0", "1", "2"), [1, 0, 2])
    truths = opened(tmp_path / "truths", rows([True, False, 1]), 3, name="labels.jsonl")
    assert (truths.classes, targets(truths)) == (("1", "False", "True"), [2, 1, 0])


def test_the_kind_of_labels_can_be_given(tmp_path: Path) -> None:
    whole = opened(tmp_path / "whole", table(["20", "31", "7"]), 3, labels="float")
    assert (whole.classes, targets(whole)) == ((), [20.0, 31.0, 7.0])
    named = opened(tmp_path / "named", table(["1.5", "0.5", "10"]), 3, labels="labels.csv:class")
    assert (named.classes, targets(named)) == (("0.5", "1.5", "10"), [1, 0, 2])
    named = opened(tmp_path / "table", table(["1", "0", "2"]), 3, labels="labels.csv:float")
    assert targets(named) == [1.0, 0.0, 2.0]


def test_folders_named_by_numbers_are_classes_unless_float_is_given(tmp_path: Path) -> None:
    write_files(tmp_path / "d", {"0.5/a.dat": b"a", "10/b.dat": b"b", "2/c.dat": b"c"})
    assert compiled(tmp_path / "d").classes == ("0.5", "10", "2")
    numbers = compiled(tmp_path / "d", Options(labels="folder:float"))
    assert numbers.labels is not None
    assert {numbers.key(n): numbers.labels[n].item() for n in range(3)} == {
        "0.5/a.dat": 0.5,
        "10/b.dat": 10.0,
        "2/c.dat": 2.0,
    }


@pytest.mark.parametrize(
    ("cells", "labels", "says"),
    [
        (["0.5", "n/a", "1"], "float", "'n/a', which is no number"),
        (["cat", "dog", "cat"], "labels.csv:float", "'cat', which is no number"),
        (["", "", ""], "float", "no labels"),
    ],
)
def test_float_labels_that_are_not_numbers_are_refused(
    tmp_path: Path, cells: list[str], labels: str, says: str
) -> None:
    with pytest.raises(InvalidInput, match=says) as caught:
        opened(tmp_path, table(cells), 3, labels=labels)
    assert "\n" not in str(caught.value)


def test_a_word_among_numbers_makes_them_classes_with_a_note(tmp_path: Path) -> None:
    mixture = opened(tmp_path / "mixed", table(["0.5", "n/a", "1"]), 3)
    assert mixture.classes == ("0.5", "1", "n/a")
    assert any("'n/a' is no number" in note for note in mixture.notes)
    for labels, cells in (("class", ["0.5", "n/a", "1"]), ("", ["1", "n/a", "2"]), ("", ["a", "b", "c"])):
        silent = opened(tmp_path / f"{labels}{cells[0]}", table(cells), 3, labels=labels)
        assert not any("no number" in note for note in silent.notes)


def test_tables_of_several_folders_make_one_kind_of_label(tmp_path: Path) -> None:
    for folder, cells in (("a", ["1", "2"]), ("b", ["0.5", "3"])):
        write_files(tmp_path / folder, {"0.dat": b"x", "1.dat": b"y", "labels.csv": table(cells)})
    catalog = compiled([str(tmp_path / "a"), str(tmp_path / "b")])
    assert catalog.labels is not None
    assert sorted(catalog.labels.tolist()) == [0.5, 1.0, 2.0, 3.0]


def test_sidecars_in_tars_are_numbers_too(tmp_path: Path) -> None:
    members = {f"{n}": {"dat": b"x", "cls": f"{n}.5".encode()} for n in range(3)}
    write_files(tmp_path / "d", {"0.tar": tar_bytes(members)})
    catalog = compiled(tmp_path / "d")
    assert catalog.labels is not None
    assert catalog.labels.tolist() == [0.5, 1.5, 2.5]
    assert compiled(tmp_path / "d", Options(labels="class")).classes == ("0.5", "1.5", "2.5")
    with pytest.raises(InvalidInput, match=r"no label file 'labels\.csv'"):
        compiled(tmp_path / "d", Options(labels="labels.csv:float"))


def test_a_search_compares_numbers(tmp_path: Path) -> None:
    catalog = opened(tmp_path, table(["3.5", "-1.25", "100", "20"]), 4)
    found = {
        text: {catalog.key(int(n))[0] for n in catalog.find(text)}
        for text in ("label > 3", "label < 0", "label == 100", "label in (3.5, 20)", "label != 3.5")
    }
    assert list(found.values()) == [{"0", "2", "3"}, {"1"}, {"2"}, {"0", "3"}, {"1", "2", "3"}]


@pytest.fixture
def regression(tmp_path: Path) -> Path:
    values = [f"{n * 0.5 - 3}" for n in range(12)]
    write_files(
        tmp_path / "d", {f"{n}.dat": bytes([n]) * 4 for n in range(12)} | {"labels.csv": table(values)}
    )
    return tmp_path / "d"


@pytest.mark.parametrize("way", ["direct", "daemon"])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_targets_are_collated_as_a_hand_written_dataset_has_them(
    regression: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, workers: int
) -> None:
    monkeypatch.setenv("CACHESVC", "require" if way == "daemon" else "off")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with Daemon(tmp_path / "node", ["--ram", "64MiB", "--fillers", "1"], {}) as daemon:
        monkeypatch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
        dataset = open_dataset(regression, transform=_first_byte)
        assert (dataset.classes, len(dataset)) == ((), 12)
        for numbers, labels in DataLoader(dataset, batch_size=4, shuffle=True, num_workers=workers):
            assert labels.dtype == torch.float64
            assert labels.tolist() == [n * 0.5 - 3 for n in numbers.tolist()]
        dataset.close()


def _first_byte(sample: tuple[bytes, float]) -> tuple[int, float]:
    return sample[0][0], sample[1]


def test_targets_keep_their_place_in_subsets_and_are_not_classes(regression: Path, direct: None) -> None:
    dataset = open_dataset(regression, fields=("label", "dat"), decode=None)
    low = dataset.where("label < 0")
    assert sorted(low[n][0] for n in range(len(low))) == [-3.0, -2.5, -2.0, -1.5, -1.0, -0.5]
    parts = dataset.split({"train": 0.5, "val": 0.5})
    assert sorted(part[n][0] for part in parts.values() for n in range(6)) == [n * 0.5 - 3 for n in range(12)]
    classes = open_dataset(regression, fields=("label", "dat"), decode=None, labels="class")
    with pytest.raises(InvalidInput, match="as a number"):
        mix({dataset: 1, classes: 1})
