"""The file of pins survives power cuts: a confirmed pin stays, and no other pin is lost."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from cachesvc.core.model import DatasetId
from cachesvc.daemon.control.pins import PinFile
from tests.support.faults.power_cuts import Cut, Durable


def pinned_through_a_cut(
    before: Path, after: Path, seed: int, sync: Callable[[Durable, int], None], patch: pytest.MonkeyPatch
) -> tuple[list[dict[DatasetId, int]], dict[DatasetId, int]]:
    """Cut the power during one of several rewrites. Return the states that may be left, and the one that is."""
    chance, durable = random.Random(seed), Durable()
    left = chance.randrange(1, 20)

    def sync_until_the_cut(fd: int) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            durable.cut(chance, before, after)
            raise Cut
        sync(durable, fd)

    (before / "state").mkdir(parents=True)
    pins = PinFile(f"{before}/state/pins.json")
    known: dict[DatasetId, int] = {}
    allowed = [known]
    with patch.context() as patched, suppress(Cut):
        patched.setattr(os, "fsync", sync_until_the_cut)
        while True:
            dataset, user = DatasetId(f"{chance.randrange(5):032x}"), chance.choice([None, os.geteuid()])
            wanted = {other: whose for other, whose in known.items() if other != dataset}
            wanted |= {} if user is None else {dataset: user}
            allowed = [known, wanted]
            pins.store(dataset, user)
            known = wanted
    durable.close()
    return allowed, PinFile(f"{after}/state/pins.json").stored()


@pytest.mark.parametrize("seed", range(25))
def test_a_power_cut_loses_no_pin(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    allowed, found = pinned_through_a_cut(before, after, seed, Durable.sync, monkeypatch)
    assert found in allowed


def test_without_syncs_pins_would_be_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows that the test can fail."""
    lost = 0
    for seed in range(25):
        before, after = tmp_path / f"before{seed}", tmp_path / f"after{seed}"
        allowed, found = pinned_through_a_cut(before, after, seed, lambda _, __: None, monkeypatch)
        lost += found not in allowed
    assert lost > 5
