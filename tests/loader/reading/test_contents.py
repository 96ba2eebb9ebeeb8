"""Digests of granted bytes: noted once, learned where a holder has not read them, and never the same for other bytes."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from cachesvc.client.protocol import Granted, Refused
from cachesvc.core.errors import OutOfSpace
from loader.reading.contents import Contents, NotingGrants, learn
from tests.support.training.loader_fakes import MemoryGrants, wide_records

EXTENTS = np.arange(5)


@pytest.fixture
def grants(tmp_path: Path) -> MemoryGrants:
    """Five extents."""
    return MemoryGrants(wide_records(tmp_path, 20).catalog().extent, room=2)


def test_what_is_granted_is_noted_and_the_rest_is_learned(grants: MemoryGrants) -> None:
    noting, noted, learned = Contents(5), Contents(5), Contents(5)
    for answer in NotingGrants(grants, noted).acquire([1], 1.0):
        assert isinstance(answer, Granted)
        os.close(answer.fd)
    grants.release([1])
    assert noted.unknown(EXTENTS).tolist() == [0, 2, 3, 4]
    learn(grants, learned, EXTENTS)
    assert learned.unknown(EXTENTS).size == 0
    assert learned.of(EXTENTS[1:2]) == noted.of(EXTENTS[1:2])
    assert len({*learned.of(EXTENTS)}) == 5
    assert not any(grants.leases.values()), "all leases end"
    assert noting.take_unreported() == noted.take_unreported() == [], "only workers report"


def test_a_file_that_is_read_in_place_has_the_digest_of_a_copy(grants: MemoryGrants, tmp_path: Path) -> None:
    class InPlace(MemoryGrants):
        def acquire(self, extents: Sequence[int], timeout_s: float) -> list[Granted | Refused]:
            found: list[Granted | Refused] = []
            for answer in super().acquire(extents, timeout_s):
                assert isinstance(answer, Granted)
                os.close(answer.fd)
                fd = os.open(tmp_path / "r.bin", os.O_RDONLY)
                found.append(Granted(answer.extent, fd, answer.extent * 8192, 8192, "local"))
            return found

    copies, files = Contents(5), Contents(5)
    learn(grants, copies, EXTENTS)
    learn(InPlace(grants._extent_of), files, EXTENTS)
    assert files.of(EXTENTS) == copies.of(EXTENTS)


def test_other_bytes_of_one_version_are_logged_and_match_nothing(caplog: pytest.LogCaptureFixture) -> None:
    one, other = bytes([1]) * 16, bytes([2]) * 16
    contents = Contents(2)
    contents.note(0, one)
    contents.note(0, one)
    contents.note(1, b"")
    assert not caplog.records
    assert contents.unknown(np.arange(2)).tolist() == [1]
    with caplog.at_level(logging.ERROR, "cachesvc"):
        contents.note(0, other)
    assert "other bytes" in caplog.text
    assert contents.of(np.arange(1))[0] not in (one, other)


def test_an_extent_without_room_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(OutOfSpace, match="extent 3"):
        learn(MemoryGrants(wide_records(tmp_path, 20).catalog().extent, room=0), Contents(5), EXTENTS[3:4])
