"""fio as the limit of reading: every pattern gives a rate, and without fio there is no pattern."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from bench.storage import fio

READ_BYTES = 27 * 4096
READS = 40


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Two files, one with a colon in its name, which fio takes for a separator."""
    found = [tmp_path / "first", tmp_path / "second:with a colon"]
    for path in found:
        np.random.default_rng(0).integers(0, 256, READS * READ_BYTES, np.uint8).tofile(path)
    return found


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_fio_gives_a_rate_for_each_pattern(files: list[Path]) -> None:
    rates = {name: rate() for name, rate in fio.limits(files, READ_BYTES, 64).items()}
    assert {"fio, one read at a time", "fio, two jobs"} <= rates.keys() <= fio.PATTERNS.keys()
    assert all(rate > 0 for rate in rates.values())


def test_without_fio_there_is_no_such_limit(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(files[0].parent))
    assert fio.limits(files, READ_BYTES, 64) == {}
