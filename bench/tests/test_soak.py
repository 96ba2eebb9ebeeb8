"""The short form of `make soak`."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.soak import soak

SECONDS, READERS = 20.0, 64


@pytest.mark.slow
@pytest.mark.alone
def test_a_crowd_of_readers_makes_the_daemon_hold_no_more(tmp_path: Path) -> None:
    table, good = soak(tmp_path, SECONDS, READERS)
    assert good, table.caption
