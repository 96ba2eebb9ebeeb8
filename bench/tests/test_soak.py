"""The short form of `make soak`."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.soak import soak

SECONDS, READERS = 20.0, 64


@pytest.mark.slow
@pytest.mark.alone
def test_many_readers_do_not_make_the_daemon_grow(tmp_path: Path) -> None:
    table, good = soak(tmp_path, SECONDS, READERS)
    assert good, table.caption
