"""What tests of datasets share: reads are direct, unless a test names a daemon."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.training.mixtures import mixture_data


@pytest.fixture(autouse=True)
def home(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for data. There is no daemon, and catalogs are kept elsewhere."""
    monkeypatch.setenv("CACHESVC", "off")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    return tmp_path


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data of `mixture_data`, for tests that have no data of their own."""
    return mixture_data(tmp_path_factory.mktemp("mixtures"))
