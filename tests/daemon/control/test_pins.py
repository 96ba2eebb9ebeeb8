"""The file of pins through power cuts: what was said to be pinned is, and nothing else is lost."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import cast

import pytest

from cachesvc.core.model import DatasetId
from cachesvc.daemon.control.pins import Pins
from cachesvc.daemon.runner import Runner
from tests.support.faults.power_cuts import Cut, Durable

UNUSED = cast(Runner, None)
"""The file alone is written and read here."""


def pinned_through_a_cut(
    before: Path, after: Path, seed: int, sync: Callable[[Durable, int], None], patch: pytest.MonkeyPatch
) -> tuple[list[dict[DatasetId, int]], dict[DatasetId, int]]:
    """What a power cut in the middle of one of several rewrites may leave, and what it left."""
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
    pins = Pins(f"{before}/state/pins.json", UNUSED)
    known: dict[DatasetId, int] = {}
    may_be = [known]
    with patch.context() as patched, suppress(Cut):
        patched.setattr(os, "fsync", sync_until_the_cut)
        while True:
            dataset, user = DatasetId(f"{chance.randrange(5):032x}"), chance.choice([None, os.geteuid()])
            wanted = {other: whose for other, whose in known.items() if other != dataset}
            wanted |= {} if user is None else {dataset: user}
            may_be = [known, wanted]
            pins._store(dataset, user)
            known = wanted
    durable.close()
    return may_be, Pins(f"{after}/state/pins.json", UNUSED).stored()


@pytest.mark.parametrize("seed", range(25))
def test_a_power_cut_loses_no_pin(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    may_be, found = pinned_through_a_cut(before, after, seed, Durable.sync, monkeypatch)
    assert found in may_be


def test_without_syncs_pins_would_be_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    lost = 0
    for seed in range(25):
        before, after = tmp_path / f"before{seed}", tmp_path / f"after{seed}"
        may_be, found = pinned_through_a_cut(before, after, seed, lambda _, __: None, monkeypatch)
        lost += found not in may_be
    assert lost > 5
