"""Bytes of unknown origin give a typed error or a valid result, with little memory and never a crash."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachesvc.catalog.labels.tags import Tags
from cachesvc.core.errors import CorruptData
from tests.fuzz.hostile import CORPUS, MAX_READ_BYTES, TARGETS, megatron_index, seeds, small_tar
from tests.support.catalog_reader import compiled
from tests.support.datasets import write_files

SEEDED = sorted(TARGETS)
_MDS: dict[str, Any] = {
    "version": 2,
    "shards": [
        {
            "format": "mds", "samples": 2, "column_names": ["x"], "column_encodings": ["bytes"],
            "column_sizes": [None], "compression": None, "zip_data": None,
            "raw_data": {"basename": "shard.0.mds", "bytes": 64, "hashes": {}},
        }
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_bytes_found_by_fuzzing_are_still_handled(name: str) -> None:
    assert (CORPUS / name).is_dir()
    for body in seeds(name):
        TARGETS[name](body)


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_any_bytes(name: str) -> None:
    @settings(max_examples=60, deadline=None, database=None)
    @given(st.binary(max_size=2000))
    def run(data: bytes) -> None:
        TARGETS[name](data)

    run()


@pytest.mark.parametrize("name", SEEDED)
def test_valid_bytes_with_some_changed_cut_or_doubled(name: str) -> None:
    bodies = seeds(name)

    @settings(max_examples=60, deadline=None, database=None)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        raw = bytearray(data.draw(st.sampled_from(bodies)))
        for _ in range(data.draw(st.integers(1, 6))):
            at = data.draw(st.integers(0, max(0, len(raw) - 1)))
            kind = data.draw(st.sampled_from(["set", "cut", "double", "number"]))
            if kind == "set" and raw:
                raw[at] = data.draw(st.integers(0, 255))
            elif kind == "cut":
                del raw[at : at + data.draw(st.integers(1, 600))]
            elif kind == "double":
                raw[at:at] = raw[at : at + 512]
            else:
                edge = data.draw(st.sampled_from([0, 1, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1]))
                raw[at : at + 8] = struct.pack("<Q", edge)
        TARGETS[name](bytes(raw))

    run()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=100, deadline=None, database=None)
@given(
    st.sampled_from([("version",), ("shards",), *(("shards", 0, key) for key in _MDS["shards"][0])]),
    json_values,
)
def test_an_mds_index_with_any_value_anywhere(path: tuple[str | int, ...], value: object) -> None:
    index = json.loads(json.dumps(_MDS))
    place = index
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    TARGETS["mds"](json.dumps(index).encode())


BOMBS = {
    "a pax size far beyond the archive": ("tar", lambda: _pax(b"30 size=999999999999999999999\n")),
    "a pax record of length zero": ("tar", lambda: _pax(b"0 size=1\n")),
    "a pax record longer than itself": ("tar", lambda: _pax(b"99999999999 path=x\n")),
    "a pax size below zero": ("tar", lambda: _pax(b"12 size=-512\n")),
    "a size below zero in base 256": ("tar", lambda: _sized(b"\xff" * 12)),
    "a size of 2**88 in base 256": ("tar", lambda: _sized(b"\x80" + b"\xff" * 11)),
    "a long name of 8 GiB": ("tar", lambda: _sized(b"77777777777\0", b"L")),
    "an endless run of empty headers": ("tar", lambda: _sized(b"00000000000\0") * 4000),
    "a megatron index of 2**60 sequences": ("megatron", lambda: megatron_index(2**60, 2)),
    "a megatron index of 2**63 documents": ("megatron", lambda: megatron_index(2, 2**63)),
    "sequences below zero": ("megatron", lambda: megatron_index(2, 2, (-1024, 3072))),
    "an .npy of 10**30 rows": ("npy", lambda: _npy("(1" + "0" * 30 + ",)")),
    "an .npy with sides below zero": ("npy", lambda: _npy("(-1, -8)")),
    "an .npy whose sides multiply to zero": ("npy", lambda: _npy("(1" + "0" * 30 + ", 0)")),
    "an .npy of sides of 4,000 digits": ("npy", lambda: _npy("(" + "1" * 4000 + ", " + "1" * 4000 + ")")),
    "an .npy of no rows of 2**70 bytes": ("npy", lambda: _npy("(0, 1180591620717411303424)")),
    "an .npy of deep brackets": ("npy", lambda: _npy("(" * 5000)),
    "an .npy of objects": ("npy", lambda: _npy("(1,)", "|O")),
    "an MDS index of deep brackets": ("mds", lambda: b"[" * 200_000),
    "an MDS index with a number of 10,000 digits": ("mds", lambda: b'{"version": ' + b"9" * 10_000 + b"}"),
    "an MDS index of a million brackets": (
        "mds",
        lambda: b'{"version": 2, "shards": [' + b"[]," * 1_000_000 + b"[]]}",
    ),
    "a litData index of deep brackets": ("litdata", lambda: b"[" * 200_000),
    "litData frames of 2**32 items": (
        "litdata",
        lambda: struct.pack("<8sHHIII", b"LDFZ01", 1, 0, 2**32 - 1, 3, 9) * 40,
    ),
    "a TFRecord of 2**63 bytes": ("tfrecord", lambda: b"\xff" * 7 + b"\x7f" + bytes(100)),
    "an Example of deep nesting": ("tfrecord", lambda: b"\x0a" * 20_000),
    "an MDS shard outside its folder": ("mds", lambda: _shard("../../etc/passwd")),
    "an MDS shard that unfolds to 10**30 bytes": ("mds", lambda: _packed(10**30)),
    "an MDS row count beyond its bytes": ("mds", lambda: _shard("shard.0.mds", 2**62)),
}


@pytest.mark.parametrize("bomb", sorted(BOMBS))
def test_bombs_cost_little_memory(bomb: str) -> None:
    name, make = BOMBS[bomb]
    data = make()
    tracemalloc.start()
    try:
        TARGETS[name](data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * MAX_READ_BYTES


def test_endless_tag_names_cost_little_memory() -> None:
    tags = Tags()
    tracemalloc.start()
    try:
        for sample in range(40):
            row = {f"{'n' * 90}{sample}.{number}": 1 for number in range(500)}
            tags.add_sidecar(sample, "json", json.dumps(row).encode())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20
    assert tags.notes() == ["1000 or more tags beyond the first ones are not searchable"]


@pytest.mark.parametrize(
    "shape",
    [
        "(2, -1, -3)",
        "(-2, -3)",
        "(-6,)",
        f"({'1, ' * 33})",
        f"(0x{'f' * 8000}, 2)",
        "(0, 9223372036854775808)",
    ],
)
def test_array_shapes_that_cannot_exist_are_corrupt(tmp_path: Path, shape: str) -> None:
    write_files(tmp_path / "d", {"a.npy": _npy(shape)})
    with pytest.raises(CorruptData, match=r"a\.npy.*shape"):
        compiled(tmp_path / "d")


def _checked(header: bytearray) -> bytes:
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def _sized(size: bytes, kind: bytes = b"0") -> bytes:
    header = bytearray(small_tar()[:512])
    header[124:136], header[156:157] = size, kind
    return _checked(header)


def _pax(records: bytes) -> bytes:
    head = _sized(b"%011o\0" % len(records), b"x") + records.ljust(512, b"\0")
    return head + _sized(b"%011o\0" % 3) + bytes(512 * 3)


def _npy(shape: str, dtype: str = "|u1") -> bytes:
    text = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return np.lib.format.magic(1, 0) + struct.pack("<H", len(text)) + text + bytes(64)


def _packed(raw_bytes: int) -> bytes:
    index = json.loads(json.dumps(_MDS))
    shard = index["shards"][0]
    raw = {"basename": "x", "bytes": raw_bytes}
    shard |= {"compression": "zstd", "zip_data": shard["raw_data"], "raw_data": raw}
    return json.dumps(index).encode()


def _shard(name: str, samples: int = 2) -> bytes:
    index = json.loads(json.dumps(_MDS))
    index["shards"][0]["raw_data"]["basename"] = name
    index["shards"][0]["samples"] = samples
    return json.dumps(index).encode()
