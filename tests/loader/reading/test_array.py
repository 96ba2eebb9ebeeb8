"""`Dataset.array()`: the whole dataset as one mapped array."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from cachesvc.client.protocol import Granted, Refused
from cachesvc.core.errors import (
    InvalidInput,
    OutOfSpace,
)
from loader.reading.reader import ExtentReader
from tests.support import datasets
from tests.support.training.loader_fakes import MemoryGrants, MemoryLink, compiled, in_memory

Records = tuple[MemoryLink, np.ndarray]


@pytest.fixture
def records(tmp_path: Path) -> Records:
    """100 records of a page, one to an extent."""
    rows = datasets.records(tmp_path / "r.bin", 100, 4096)
    form = {"format": "records", "record_bytes": 4096, "extent_bytes": 4096}
    return compiled(tmp_path / "r.bin", tmp_path, **form), rows


def test_array_is_the_whole_dataset_without_a_copy_and_stays_mapped(records: Records) -> None:
    link, rows = records
    whole = in_memory(link)
    found = whole.array()
    whole.opened.reader().release_unused_mappings()  # as while memory is short
    assert np.array_equal(found, rows)
    assert not found.flags.writeable
    assert np.shares_memory(found, whole.array())


class Streaming(MemoryGrants):
    """Room of streaming extents: others wait for it."""

    def acquire(self, extents: Sequence[int], timeout_s: float) -> list[Granted | Refused]:
        answers = super().acquire(extents, timeout_s)
        return [each._replace(brief=True) if isinstance(each, Granted) else each for each in answers]


def test_an_array_stays_mapped_whatever_is_read_later(records: Records) -> None:
    catalog = records[0].catalog()
    grants = Streaming(catalog.extent)
    reader = ExtentReader(catalog, grants)
    reader.array()
    reader.read(np.asarray([0]), np.asarray([8]))
    assert grants.leases == dict.fromkeys(range(100), 1), "a touch of what is gone would end the process"
    reader.close()


def test_a_forked_child_can_read_its_parents_array(records: Records) -> None:
    link, rows = records
    whole = in_memory(link)
    found = whole.array()
    child = os.fork()
    if child == 0:
        right = bool((found == rows).all() and (whole[7].numpy() == rows[7]).all())
        os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_array_that_does_not_fit_leases_nothing(records: Records) -> None:
    catalog = records[0].catalog()
    grants = MemoryGrants(catalog.extent, room=90)
    reader = ExtentReader(catalog, grants)
    with pytest.raises(OutOfSpace, match="not all in a daemon's memory: start one whose --ram"):
        reader.array()
    assert not any(grants.leases.values())
    reader.close()


@pytest.mark.parametrize("record_bytes", [48, 3000, 4096])
def test_array_has_the_samples_in_their_order_and_nothing_else(tmp_path: Path, record_bytes: int) -> None:
    (tmp_path / "data").mkdir()
    parts = [datasets.records(tmp_path / "data" / f"{n}.npy", 50 + n, record_bytes) for n in range(3)]
    link = compiled(tmp_path / "data", tmp_path, format="records", extent_bytes=16384)
    whole, rows = in_memory(link), np.concatenate(parts)
    assert np.array_equal(whole.array(), rows)
    chosen = [140, 3, 3, 77]
    assert np.array_equal(whole.select(chosen).array(), rows[chosen])
    assert whole.take(0).array().shape == rows[:0].shape
    assert not whole.select(chosen).array().flags.writeable


def test_array_of_overlapping_sequences_has_each_of_them(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.arange(1000, dtype=np.uint16))
    link = compiled(tmp_path / "t.npy", tmp_path, format="tokens", seq_len=16, overlap=1)
    whole = in_memory(link)
    found = whole.array()
    assert len(found) == len(whole)
    assert all((row == whole[n].numpy()).all() for n, row in enumerate(found))


def test_array_of_samples_of_several_sizes_is_refused(blobs: tuple[MemoryLink, dict[str, bytes]]) -> None:
    with pytest.raises(InvalidInput, match="one size"):
        in_memory(blobs[0]).array()
