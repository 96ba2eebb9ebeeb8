"""Records of TFRecord are samples: Examples are decoded, others stay bytes. Every checksum is compared at opening."""

from __future__ import annotations

import gzip
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cachesvc.catalog.options import Options
from cachesvc.catalog.parsing.tf_example import features_of
from cachesvc.core.errors import CacheError, CorruptData, InvalidInput
from loader import DataLoader, open_dataset
from tests.support.catalog_reader import compiled, samples_of
from tests.support.datasets import write_files
from tests.support.formats.tfrecords import Values, example, framed

ROWS: list[dict[str, Values]] = [
    {
        "image": bytes([number]) * (number * 700),
        "label": number - 20,
        "name": f"n{number}".encode(),
        "scores": [number / 2, -1.5],
        "ids": list(range(number % 4)),
        "words": [b"a", b"b"][: number % 3],
    }
    for number in range(60)
]


def written(root: Path, ending: str = ".tfrecord", pack: Callable[[bytes], bytes] = bytes) -> Path:
    """Write 60 Examples in three files."""
    bodies = [framed(map(example, ROWS[at : at + 20])) for at in (0, 20, 40)]
    write_files(root, {f"x-{n:05}-of-00003{ending}": pack(body) for n, body in enumerate(bodies)})
    return root


@pytest.mark.parametrize(
    ("ending", "pack"), [(".tfrecord", bytes), (".tfrec", bytes), (".tfrecord.gz", gzip.compress)]
)
def test_examples_come_back(tmp_path: Path, ending: str, pack: Callable[[bytes], bytes]) -> None:
    rows = open_dataset(written(tmp_path / "d", ending, pack), extent_bytes=8192)
    assert [(field.name, field.encoding) for field in rows.catalog.fields] == [
        ("ids", "int64[]"),
        ("image", "bytes"),
        ("label", "int64"),
        ("name", "bytes"),
        ("scores", "float32[]"),
        ("words", "bytes[]"),
    ]
    for row, wanted in zip(rows, ROWS, strict=True):
        assert {name: row[name] for name in ("image", "label", "name", "words")} == {
            name: wanted[name] for name in ("image", "label", "name", "words")
        }
        assert (row["ids"].dtype, row["ids"].tolist()) == (np.int64, wanted["ids"])
        assert (row["scores"].dtype, row["scores"].tolist()) == (np.float32, wanted["scores"])


def test_the_shards_of_tensorflow_datasets_are_found_by_their_names(tmp_path: Path) -> None:
    body = framed([example({"x": 1})])
    names = [f"d-train.tfrecord-0000{n}-of-00002" for n in range(2)]
    aside = {"dataset_info.json": b"{}", "features.json": b"{}"}
    write_files(tmp_path / "d", dict.fromkeys(names, body) | aside)
    assert list(open_dataset(tmp_path / "d")) == [{"x": 1}, {"x": 1}]


def test_indices_of_other_tools_are_left_out(tmp_path: Path) -> None:
    root = written(tmp_path / "d")
    for path in sorted(root.iterdir()):
        (root / f"{path.stem}.index").write_text("0 40\n")
        (root / f"{path.name}.idx").write_text("0 40\n")
    assert len(open_dataset(root)) == 60


def test_files_without_an_extension_are_read_by_format(tmp_path: Path) -> None:
    write_files(tmp_path / "d", {"train-00000-of-00001": framed([example({"x": 7})])})
    with pytest.raises(InvalidInput, match=r"is TFRecord, which needs .*\.tfrecord, or format='tfrecord'"):
        open_dataset(tmp_path / "d")
    assert list(open_dataset(tmp_path / "d", format="tfrecord")) == [{"x": 7}]


def test_fields_tags_and_batches(tmp_path: Path) -> None:
    rows = open_dataset(written(tmp_path / "d"), fields=("label", "scores"))
    batch = next(iter(DataLoader(rows, 8)))
    assert (batch[0].tolist(), batch[1].shape) == (list(range(-20, -12)), (8, 2))
    found = rows.catalog.find("label > 37 and name != 'n59'")
    assert found.tolist() == [58]


def test_a_feature_that_some_samples_lack_is_none_or_empty(tmp_path: Path) -> None:
    write_files(
        tmp_path / "d",
        {"a.tfrecord": framed([example({"a": 1, "b": [1.0, 2.0]}), example({"c": b"x"}), b""])},
    )
    rows = [(row["a"], row["b"].tolist(), row["c"]) for row in open_dataset(tmp_path / "d")]
    assert rows == [(1, [1.0, 2.0], None), (None, [], b"x"), (None, [], None)]


def test_records_that_are_no_examples_are_bytes(tmp_path: Path) -> None:
    records = [b"", b"hello", bytes(1000), example({"x": 1})]
    write_files(tmp_path / "d", {"a.tfrecord": framed(records)})
    assert list(open_dataset(tmp_path / "d")) == records
    assert [row[0] for row in samples_of(compiled(tmp_path / "d"))] == records


def test_a_sequence_example_stays_bytes_with_a_note(tmp_path: Path) -> None:
    record = example({"x": 1}) + b"\x12\x00" + b"\x12\x02\x0a\x00"
    write_files(tmp_path / "d", {"a.tfrecord": framed([record])})
    rows = open_dataset(tmp_path / "d")
    assert list(rows) == [record]
    assert any("SequenceExample is not decoded" in note for note in rows.catalog.notes)


def test_without_decoding_samples_are_the_records(tmp_path: Path) -> None:
    assert list(open_dataset(written(tmp_path / "d"), decode=None)) == [example(row) for row in ROWS]


def test_a_record_that_is_no_example_among_others_is_an_error_when_it_is_read(tmp_path: Path) -> None:
    write_files(tmp_path / "d", {"a.tfrecord": framed([example({"x": 1}), b"\xff\xff", example({"x": 3})])})
    rows = open_dataset(tmp_path / "d")
    assert any("1 of 3 rows do not parse" in note for note in rows.catalog.notes)
    with pytest.raises(CorruptData, match=r"a\.tfrecord record 2: it is no tf.train.Example"):
        rows[1]
    assert rows[2] == {"x": 3}


def test_a_feature_of_two_types_is_refused(tmp_path: Path) -> None:
    write_files(tmp_path / "d", {"a.tfrecord": framed([example({"x": 1}), example({"x": 1.5})])})
    with pytest.raises(InvalidInput, match=r"record 2: feature 'x' is float32, and int64 in the records"):
        compiled(tmp_path / "d")


BODY = framed([example({"x": number, "pad": b"-" * 400}) for number in range(20)])


@pytest.mark.parametrize("ending", ["tfrecord", "tfrecord.gz"])
@pytest.mark.parametrize("at", [3, 9, 30, len(BODY) // 2, len(BODY) - 1])
def test_a_flipped_byte_is_found_at_opening(tmp_path: Path, at: int, ending: str) -> None:
    body = bytearray(BODY)
    body[at] ^= 4
    write_files(
        tmp_path / "d", {f"a.{ending}": gzip.compress(body) if ending.endswith("gz") else bytes(body)}
    )
    with pytest.raises(
        CorruptData, match=rf"a\.{ending} record \d+ at byte .* checksum; write the file anew"
    ):
        compiled(tmp_path / "d")


@pytest.mark.parametrize("size", [1, 11, 12, 100, len(BODY) - 4, len(BODY) - 1])
def test_a_truncated_file_is_named(tmp_path: Path, size: int) -> None:
    write_files(tmp_path / "d", {"a.tfrecord": BODY[:size]})
    with pytest.raises(CorruptData, match=r"a\.tfrecord is truncated in record \d+"):
        compiled(tmp_path / "d")


def test_another_format_under_this_name_is_named(tmp_path: Path) -> None:
    write_files(tmp_path / "d", {"a.tfrecord": gzip.compress(BODY)})
    with pytest.raises(InvalidInput, match=r"compressed by gzip: give it a name .*\.tfrecord\.gz"):
        compiled(tmp_path / "d")
    write_files(tmp_path / "d", {"a.tfrecord": b"PAR1" * 100})
    with pytest.raises(CorruptData, match="record 1 at byte 0"):
        compiled(tmp_path / "d")
    write_files(tmp_path / "e", {"a.tfrecord": b""})
    with pytest.raises(CacheError, match="empty"):
        compiled(tmp_path / "e")


def test_a_length_of_a_hundred_gigabytes_costs_no_memory(tmp_path: Path) -> None:
    head = _claimed(100 << 30)
    write_files(tmp_path / "d", {"a.tfrecord": head + bytes(100)})
    tracemalloc.start()
    try:
        with pytest.raises(CorruptData, match="256 MiB at most are read"):
            compiled(tmp_path / "d", Options(format="tfrecord"))
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def _claimed(length: int) -> bytes:
    """Return the head of a record of this length, with its right checksum."""
    as_record = framed([struct.pack("<Q", length)])
    return struct.pack("<Q", length) + as_record[-4:]


@pytest.mark.pure
def test_features_are_parsed_by_their_kinds() -> None:
    found = features_of(example({"a": [1, -(2**63)], "b": 0.5, "c": [b"", b"x"], "d": []}))
    assert {name: (kind, list(values)) for name, (kind, values) in found.items()} == {
        "a": ("int64", [1, -(2**63)]),
        "b": ("float32", [0.5]),
        "c": ("bytes", [b"", b"x"]),
        "d": ("", []),
    }
    for wrong in (b"\xff", b"\x0a\x05ab", b"hello"):
        with pytest.raises(ValueError, match=r"no tf\.train\.Example"):
            features_of(wrong)


@pytest.mark.parametrize("ending", [".tfrecord", ""])
@pytest.mark.parametrize(
    "index", ["{0}.idx", "{0}.index", "{1}.idx", "{1}.index", "{1}.tfindex", "idx/{1}.idx"]
)
def test_an_index_beside_a_file_is_never_data(tmp_path: Path, ending: str, index: str) -> None:
    root = tmp_path / "d"
    for number in range(3):
        name = f"x{number}{ending}"
        write_files(root, {name: framed([b"record"]), index.format(name, f"x{number}"): b"0 22\n22 99\n"})
    assert compiled(root, Options(format="" if ending else "tfrecord")).samples == 3
