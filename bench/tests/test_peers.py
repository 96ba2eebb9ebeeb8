"""The side-by-side bench: peers deliver each sample once, and the tables show results and failures."""

from __future__ import annotations

import importlib
import io
import os
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from bench import figures
from bench.compare import LIMIT, OTHERS, OURS, Results
from bench.grid import Grid
from bench.peers import corpus, pictures
from bench.peers.__main__ import MODULES, Passes, _ledger
from bench.peers.peer import UNTUNED, Job, Kind
from testbed.usage import anonymous_bytes, cpu_s, family

COUNTS: dict[Kind, int] = {
    "records": 150,
    "varied": 140,
    "tokens": 130,
    "blobs": 70,
    "images": 40,
    "rows": 300,
}
HERE = ("limit", "DataLoader, files", "DataLoader, memmap", UNTUNED, "DataLoader, LMDB")


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("corpus")
    corpus.write(root, COUNTS)
    return root


def job(peer: str, kind: Kind, raw: Path, folder: Path) -> Job:
    folder.mkdir(parents=True)
    return Job(
        peer, kind, str(raw), str(folder), COUNTS[kind], corpus.BATCH[kind], seconds=0.02, thorough=True
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", corpus.KINDS)
@pytest.mark.parametrize("name", HERE)
def test_every_peer_delivers_each_sample_once(name: str, kind: Kind, raw: Path, tmp_path: Path) -> None:
    peer = importlib.import_module(f"bench.peers.{MODULES[name]}")
    found = job(name, kind, raw, tmp_path / "data")
    assert Job.parsed(found.as_json()) == found
    peer.write(found)
    batches = peer.batches(found)
    assert _ledger(batches, found) == {"exact": True}
    run = Passes(batches).run(found.seconds, ())
    assert run["bytes_s"] > run["samples_s"] > 0


def test_a_repeated_sample_is_noticed(raw: Path, tmp_path: Path) -> None:
    found = job("DataLoader, memmap", "records", raw, tmp_path / "data")
    peer = importlib.import_module("bench.peers.memmap")
    peer.write(found)
    batches = list(peer.batches(found))
    assert _ledger(batches, found) == {"exact": True}
    assert _ledger([*batches, batches[0]], found) == {"exact": False}
    assert _ledger(batches, replace(found, samples=found.samples + 1)) == {"exact": False}


def test_usage_counts_this_process() -> None:
    me = os.getpid()
    assert family(me)[0] == me
    before, held = cpu_s([me]), anonymous_bytes([me])
    block = bytearray(64 << 20)
    while cpu_s([me]) == before:
        block[0] = 1
    assert anonymous_bytes([me]) - held > 60 << 20
    assert anonymous_bytes([2**22 + 1]) == 0


def test_a_child_that_has_ended_is_not_counted() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.pid in family(os.getpid())
        assert child.stdin is not None
        child.stdin.close()
        child.wait()
        assert child.pid not in family(os.getpid())
        assert family(child.pid) == [child.pid], "a process that has ended raises no error"


def test_tables_show_rates_and_failures() -> None:
    runs = [{"samples_s": rate, "bytes_s": rate * 3072, "cpu_s_gb": 0.1} for rate in (900.0, 1000.0, 1300.0)]
    measured = {"first_s": 0.01, "runs": runs, "memory_bytes": 2e8}
    broken = {"error": "NOT INSTALLED: no such interpreter"}
    results = Results(
        sizes=dict.fromkeys(corpus.KINDS, 10**6),
        warm={
            f"records/{OURS}/0": measured,
            f"records/{LIMIT}/0": {**measured, "runs": [{**run, "samples_s": 2000.0} for run in runs]},
            f"records/{OTHERS[0]}/0": {**measured, "exact": False},
            f"records/{OTHERS[1]}/0": broken,
        },
        cold={
            LIMIT: [{"epoch_s": 1.0, "first_s": 1.0, "source_bytes": 10**6}],
            OURS: [{"epoch_s": 1.1, "first_s": 0.2, "source_bytes": 10**6, "second_s": 0.1}],
            OTHERS[1]: [broken],
        },
        disk={OURS: {"warm": runs, "cold": runs[:1]}, OTHERS[1]: broken},
        shared_bytes={"records": 5 * 10**6},
    )
    warm, *_, disk, cold = [grid.markdown() for grid in figures.grids(results)]
    assert "| **cachesvc** | 0 | 1,000 (900-1,300) | 0.50 | 0.00 | 0.10 | 200 | 10 |" in warm
    assert f"{OTHERS[0]} (NOT EACH SAMPLE ONCE)" in warm
    assert all(f"| {OTHERS[1]} |" in table and "NOT INSTALLED" in table for table in (warm, disk, cold))
    assert (
        "| **cachesvc** | 1,000 (900-1,300) | 0.10 (0.10-0.10) | 900 (900-900) | 0.10 (0.10-0.10) |" in disk
    )
    assert "| **cachesvc** | 1.10 (1.10-1.10) | 1.10 | 0.20 (0.20-0.20) | 1.00 | 0.10 (0.10-0.10) |" in cold
    widths = {line.count("|") for line in warm.splitlines() if line.startswith("|")}
    assert len(widths) == 1


@pytest.mark.slow
def test_pictures_are_jpegs_of_the_stated_sizes() -> None:
    files, again = (list(pictures.jpegs(np.random.default_rng(7), 40)) for _ in range(2))
    assert files == again
    assert len(set(files)) == len(files)
    assert 100_000 < statistics.mean(map(len, files)) < 120_000
    assert {Image.open(io.BytesIO(one)).size for one in files} == {(500, 375), (375, 500)}
    assert pictures.decoded(files[0]).shape == (224, 224, 3)


def test_ratios_are_relative_to_the_fastest_run_of_the_limit() -> None:
    def answer(rate: float) -> dict[str, Any]:
        run = {"samples_s": rate, "bytes_s": rate, "cpu_s_gb": 0.1}
        return {"first_s": 0.01, "runs": [run], "memory_bytes": 10**6}

    results = Results(
        sizes=dict.fromkeys(corpus.KINDS, 10**6),
        warm={
            f"images/{OURS}/2": answer(95.0),
            f"images/{LIMIT}/2": answer(100.0),
            f"images/{LIMIT}/2 threads": answer(80.0),
        },
    )
    table = next(one.markdown() for one in figures.grids(results) if "JPEG" in one.title)
    assert "| **cachesvc** | 2 | 95 (95-95) | 0.95 |" in table
    assert "| *the decoder alone* | 2 threads | 80 (80-80) | 0.80 |" in table


def test_a_grid_fills_short_rows() -> None:
    assert Grid("t", ("a", "b", "c"), [("x", "y")]).markdown().splitlines()[-1] == "| x | y |  |"
