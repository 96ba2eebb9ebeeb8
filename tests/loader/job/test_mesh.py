"""A job of DP2 x TP2 x CP2 x PP2 on 16 processes in any order: the bytes that each process sees, and the processes that
read none.

Sixteen real processes with a real store between them; their process group moves no tensors (torch's own `fake`
backend), since a loader uses it for names and agreement only.
"""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loader import DataLoader
from testbed import WAIT_S
from tests.support import datasets
from tests.support.training.loader_fakes import MemoryLink, compiled, in_memory

torch = pytest.importorskip("torch")
pytest.importorskip("torch.testing._internal.distributed.fake_pg")

NAMES = ("pp", "dp", "cp", "tp")
SIZES = (2, 2, 2, 2)
PROCESSES = 16
COUNT = 240
LAYOUTS = [list(range(PROCESSES)), np.random.default_rng(4).permutation(PROCESSES).tolist()]
Answer = dict[str, Any]


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> MemoryLink:
    root = tmp_path_factory.mktemp("records")
    rows = np.arange(COUNT, dtype="<i8").repeat(64).reshape(COUNT, 64)
    datasets.array_file(root / "r.bin", rows)
    return compiled(root / "r.bin", root, format="records", dtype="(64,)i8", extent_bytes=8192)


def _process(
    rank: int, layout: list[int], link: MemoryLink, store: str, state: Any, needed: bool, out: Connection
) -> None:
    """One process of the job. Every stage has a loader of its own; with `needed` False only the first stage reads."""
    import torch.distributed as distributed
    from torch.distributed.device_mesh import DeviceMesh

    torch.set_num_threads(1)
    distributed.init_process_group(
        "fake", store=distributed.FileStore(store, PROCESSES), rank=rank, world_size=PROCESSES
    )
    mesh = DeviceMesh("cpu", torch.tensor(layout).reshape(SIZES), mesh_dim_names=NAMES)
    at = mesh.get_coordinate()
    assert at is not None
    coordinate = dict(zip(NAMES, at, strict=True))
    answer: Answer = {"rank": rank, "at": coordinate, "digest": "", "samples": [], "read": 0}
    if needed or coordinate["pp"] == 0:
        given = mesh if needed else mesh["dp", "cp", "tp"]
        answer |= _epoch(DataLoader(in_memory(link), 6, shuffle=True, mesh=given, seed=9), state)
    out.send(answer)
    out.close()


def _epoch(loader: DataLoader, state: Any) -> Answer:
    """Read four batches from the beginning, or from a state."""
    if state is not None:
        loader.load_state_dict(state)
    digest, samples = hashlib.sha256(), []
    for batch in itertools.islice(loader, 4):
        digest.update(batch.numpy().tobytes())
        samples += batch[:, 0].tolist()
    read = sum(loader.stats().bytes_by_origin.values())
    return {"digest": digest.hexdigest(), "samples": samples, "read": read, "state": loader.state_dict()}


def job(
    link: MemoryLink, folder: Path, layout: list[int], state: Any = None, needed: bool = True
) -> Iterator[Answer]:
    """Fork all sixteen processes, since torch is imported already; yields their answers."""
    fork = multiprocessing.get_context("fork")
    folder.mkdir()
    ends = []
    for rank in range(PROCESSES):
        receiving, sending = fork.Pipe(duplex=False)
        process = fork.Process(
            target=_process,
            args=(rank, layout, link, str(folder / "store"), state, needed, sending),
            daemon=True,
        )
        process.start()
        sending.close()
        ends.append((process, receiving))
    for process, receiving in ends:
        assert receiving.poll(90), "a process did not answer"
        yield receiving.recv()
        process.join(WAIT_S)
        assert process.exitcode == 0


def check(answers: list[Answer]) -> dict[int, list[int]]:
    """Check that samples are equal within a data-parallel rank and disjoint across ranks; returns those of each rank."""
    digests: dict[int, set[str]] = {0: set(), 1: set()}
    samples: dict[int, list[int]] = {}
    for answer in answers:
        digests[answer["at"]["dp"]].add(answer["digest"])
        samples[answer["at"]["dp"]] = answer["samples"]
    assert [len(found) for found in digests.values()] == [1, 1]
    assert digests[0].isdisjoint(digests[1])
    assert set(samples[0]).isdisjoint(samples[1])
    assert all(len(set(found)) == len(found) == 24 for found in samples.values())
    return samples


@pytest.mark.parametrize(
    "layout",
    [pytest.param(LAYOUTS[0], id="plain", marks=pytest.mark.slow), pytest.param(LAYOUTS[1], id="shuffled")],
)
def test_peers_of_one_data_parallel_rank_see_identical_bytes_again_after_resume(
    link: MemoryLink, tmp_path: Path, layout: list[int]
) -> None:
    first = list(job(link, tmp_path / "first", layout))
    head = check(first)
    states = [answer["state"] for answer in first]
    assert all(state == states[0] for state in states)
    again = check(list(job(link, tmp_path / "again", layout[::-1], states[0])))
    for rank in (0, 1):
        assert set(head[rank]).isdisjoint(again[rank])
    everything = head[0] + head[1] + again[0] + again[1]
    assert len(set(everything)) == len(everything) == 96


def test_a_stage_without_data_reads_nothing_and_delays_no_rank(link: MemoryLink, tmp_path: Path) -> None:
    answers = list(job(link, tmp_path / "job", LAYOUTS[1], needed=False))
    idle = [answer for answer in answers if answer["at"]["pp"] == 1]
    busy = [answer for answer in answers if answer["at"]["pp"] == 0]
    assert (len(idle), len(busy)) == (8, 8)
    assert all(answer["read"] == 0 and not answer["samples"] for answer in idle)
    assert all(answer["read"] > 0 for answer in busy)
    check(busy)
