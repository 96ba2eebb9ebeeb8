"""Members are looked for more often than in production, so that tests of changes are quick."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachesvc.cluster.polled.POLL_S", 0.05)
    monkeypatch.setattr("cachesvc.cluster.dns_service.MIN_WAIT_S", 0.2)
