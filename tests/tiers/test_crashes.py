"""The NVMe tier after `kill -9` at random moments, and after power cuts that lose unsynced writes."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from cachesvc.tiers.nvme import open_nvme
from tests.support.faults.power_cuts import Cut, Durable
from tests.support.numbered_extents import BUDGET, NAME, SIZE, content, extent, put, sound

# Fills, commits and evicts for ever; prints what it is about to evict and what it has committed.
CHILD = """
import sys
from pathlib import Path
from cachesvc.tiers.nvme import open_nvme
from tests.support.numbered_extents import BUDGET, NAME, extent, put, sound
tier = open_nvme(NAME, Path(sys.argv[1]))
held = sorted(sound(tier))
number = int(sys.argv[2])
print("r", len(held), flush=True)
while True:
    while len(held) >= BUDGET:
        print("-", held[0], flush=True)
        tier.evict(extent(held.pop(0)))
    put(tier, number)
    print("+", number, flush=True)
    held.append(number)
    number += 1
"""


def killed_at_random(directory: Path, points: int, seed: int) -> Counter[str]:
    """Kill a child at random moments, and count in which operation each kill came."""
    chance, met = random.Random(seed), Counter[str]()
    committed: set[int] = set()
    first, kept, lost = 0, 0, 0
    for point in range(points):
        command = [sys.executable, "-c", CHILD, str(directory), str(first)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            assert child.stdout.readline().startswith("r")  # random kills come after recovery
            time.sleep(chance.uniform(0.0, 0.05))  # the random moment itself
            child.kill()
            said = [
                line.split() for line in child.stdout.read().splitlines(keepends=True) if line[-1] == "\n"
            ]
        for sign, text in said:
            committed.symmetric_difference_update({int(text)})
            first = max(first, int(text) + 1) if sign == "+" else first
        first += 1  # its last fill may have been committed and not printed
        in_fill = os.listdir(directory / "cachesvc-nvme/v1/tmp")
        started = time.monotonic()
        tier = open_nvme(NAME, directory)
        found = sound(tier)
        assert time.monotonic() - started < 10, "start takes 10 s at most"
        assert os.listdir(directory / "cachesvc-nvme/v1/tmp") == []
        tier.close()
        kept, lost = kept + len(committed & found), lost + len(committed - found)
        assert not committed - found, f"seed {seed}, point {point}: committed extents are gone"
        met["fill, or commit before its rename"] += bool(in_fill)
        evicting = {int(said[-1][1])} if said and said[-1][0] == "-" and not in_fill else set()
        met["eviction"] += bool(evicting)
        met["commit after its rename"] += bool(found - committed - evicting)
        committed = found
    assert kept > points
    return met


def test_kill_9_at_random_moments_keeps_what_was_committed(tmp_path: Path) -> None:
    killed_at_random(tmp_path, 10, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kill_9_at_200_random_moments_keeps_what_was_committed(tmp_path: Path) -> None:
    met = killed_at_random(tmp_path, 200, seed=2)
    assert min(met.values()) > 0, met


def power_cut(directory: Path, seed: int, at_sync: bool) -> None:
    """Cut the power between two operations, or `at_sync`: during a commit, before one of its syncs takes effect."""
    chance = random.Random(seed)
    durable = Durable()
    (directory / "before").mkdir(parents=True)
    committed: list[int] = []
    perhaps: set[int] = set()
    left = chance.randrange(1, 40) if at_sync else -1

    def sync(fd: int) -> None:
        nonlocal left
        left -= committed != [] or perhaps != set()  # not while the tier creates its folders
        if left == 0:
            durable.cut(chance, directory / "before", directory / "after")
            raise Cut
        durable.sync(fd)

    tier = open_nvme(NAME, directory / "before", sync)
    with contextlib.suppress(Cut):
        for number in range(60 if at_sync else chance.randrange(1, 30)):
            perhaps.add(number)
            put(tier, number)
            perhaps.discard(number)
            committed.append(number)
            if len(committed) > BUDGET or chance.random() < 0.2:
                victim = committed.pop(chance.randrange(len(committed)))
                perhaps.add(victim)
                tier.evict(extent(victim))
        half = tier.reserve(extent(1000), SIZE)
        os.pwrite(half, content(1000), 0)
        os.close(half)
        durable.cut(chance, directory / "before", directory / "after")
    assert not at_sync or left == 0
    tier.close()
    durable.close()
    after = open_nvme(NAME, directory / "after")
    found = sound(after)
    after.close()
    assert set(committed) <= found <= set(committed) | perhaps, f"seed {seed}"
    shutil.rmtree(directory)


@pytest.mark.parametrize("at_sync", [False, True], ids=["between operations", "in a commit"])
@pytest.mark.parametrize(
    "seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 40))]
)
def test_a_power_cut_keeps_what_was_committed_and_no_wrong_byte(
    tmp_path: Path, seed: int, at_sync: bool
) -> None:
    power_cut(tmp_path / "disk", seed, at_sync)


def test_the_simulated_power_cut_loses_unsynced_bytes(tmp_path: Path) -> None:
    """A control: a tier without fsync loses extents, and still serves no wrong byte."""
    durable, chance = Durable(), random.Random(3)
    (tmp_path / "before").mkdir()
    tier = open_nvme(NAME, tmp_path / "before", lambda _: None)
    for number in range(40):
        put(tier, number)
    durable.cut(chance, tmp_path / "before", tmp_path / "after")
    tier.close()
    after = open_nvme(NAME, tmp_path / "after")
    assert len(sound(after)) < 40
    after.close()
