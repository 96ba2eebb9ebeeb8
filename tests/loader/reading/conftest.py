"""Datasets that several tests of reading share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cachesvc.catalog.catalog import Catalog
from tests.support import datasets
from tests.support.training.loader_fakes import MemoryLink, compiled


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture(scope="module")
def sequences(tmp_path_factory: pytest.TempPathFactory) -> tuple[MemoryLink, np.ndarray]:
    """Overlapping token sequences in extents that cut them."""
    root = tmp_path_factory.mktemp("tokens")
    stream = datasets.tokens(root / "t.bin", 40_000)
    wanted = np.lib.stride_tricks.sliding_window_view(stream, 101)[::100]
    options = {"format": "tokens", "dtype": "uint16", "seq_len": 100, "overlap": 1, "extent_bytes": 8192}
    return compiled(root / "t.bin", root, **options), wanted


@pytest.fixture
def catalog(sequences: tuple[MemoryLink, np.ndarray]) -> Catalog:
    """The catalog of the sequences."""
    return sequences[0].catalog()
