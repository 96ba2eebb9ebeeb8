"""Fixtures that tests beside other projects share: reads are direct, and nothing of a user's is read or written."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def direct(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no daemon. Catalogs are kept beside the data of the test."""
    monkeypatch.setenv("CACHESVC", "off")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
