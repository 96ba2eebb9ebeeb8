"""The sources of a process's rank, and the comparison in which ranks find that they disagree."""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from cachesvc.core.errors import DeadlineExceeded, InvalidInput, StateMismatch
from loader.job import agreement
from loader.job import store as job_stores
from loader.job.agreement import agree, tell_failure
from loader.job.store import JobStore, job_store
from loader.job.topology import Topology, rank_hint, resolve
from testbed import WAIT_S

torch_distributed = pytest.importorskip("torch.distributed")


@dataclass(frozen=True)
class GridMesh:
    """A mesh without processes: names, sizes, and where we stand."""

    mesh_dim_names: tuple[str, ...] | None
    sizes: tuple[int, ...]
    coordinate: tuple[int, ...] | None
    ranks: tuple[int, ...] = ()

    @property
    def mesh(self) -> np.ndarray:
        return np.array(self.ranks)

    def get_coordinate(self) -> Sequence[int] | None:
        return self.coordinate

    def size(self, mesh_dim: int | None = None) -> int:
        return self.sizes[mesh_dim or 0]


def test_nothing_set_is_a_single_process() -> None:
    assert resolve(env={}) == Topology(0, 1, "single process")


def test_arguments_come_first() -> None:
    assert resolve(1, 2, env={}) == Topology(1, 2, "arguments", 1, 1, 2)


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (
            {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"},
            Topology(5, 8, "torchrun", 2, 5, 8),
        ),
        (
            {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2"},
            Topology(3, 4, "srun", 2, 3, 4),
        ),
        (  # nodes with one process and with three: as many nodes on all of them
            {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "3", "GROUP_WORLD_SIZE": "2"},
            Topology(1, 4, "torchrun", 2, 1, 4),
        ),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, Topology(0, 1, "single process")),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, Topology(0, 1, "single process")),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
            Topology(1, 2, "mpi", 2, 1, 2),
        ),
        ({"PMI_RANK": "2", "PMI_SIZE": "3"}, Topology(2, 3, "mpi", 1, 2, 3)),
        (  # mpirun, whose daemons srun started once a node
            {
                "OMPI_COMM_WORLD_RANK": "9",
                "OMPI_COMM_WORLD_SIZE": "16",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
                "SLURM_PROCID": "1",
                "SLURM_STEP_NUM_TASKS": "2",
            },
            Topology(9, 16, "mpi", 2, 9, 16),
        ),
        (  # torchrun, started once a node by srun
            {
                "RANK": "9",
                "WORLD_SIZE": "16",
                "LOCAL_WORLD_SIZE": "8",
                "SLURM_PROCID": "1",
                "SLURM_STEP_NUM_TASKS": "2",
            },
            Topology(9, 16, "torchrun", 2, 9, 16),
        ),
    ],
)
def test_launchers_are_understood(env: Mapping[str, str], expected: Topology) -> None:
    assert resolve(env=env) == expected


def test_only_data_parallel_dimensions_of_a_mesh_choose_data() -> None:
    mesh = GridMesh(("dp_replicate", "dp_shard", "tp"), (2, 3, 4), (1, 2, 3))
    found = resolve(mesh=mesh, dp_dims=("dp_replicate", "dp_shard"), env={})
    assert (found.rank, found.world_size, found.source) == (5, 6, "mesh dp_replicate, dp_shard")
    assert resolve(mesh=GridMesh(None, (4,), (2,)), env={}).rank == 2


@pytest.mark.parametrize(("shape", "place"), [((3, 2), (2, 1)), ((3, 1), (2, 0)), ((5, 1), (4, 0))])
def test_a_mesh_of_a_part_of_the_job_need_not_divide_it(
    shape: tuple[int, int], place: tuple[int, int]
) -> None:
    """The other processes evaluate, say, and build no loader."""
    members = math.prod(shape)
    mesh = GridMesh(("dp", "tp"), shape, place, tuple(range(2, 2 + members)))
    env = {"RANK": str(1 + members), "WORLD_SIZE": "8"}
    found = resolve(mesh=mesh, env=env)
    assert (found.rank, found.world_size) == (shape[0] - 1, shape[0])
    assert (found.process, found.processes) == (members - 1, members)


def test_model_parallel_peers_share_a_rank_and_are_several_processes() -> None:
    env = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    assert resolve(0, 2, env=env) == Topology(0, 2, "arguments", 2, 5, 8)


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda: resolve(2, 2, env={}), "rank 2 of 2"),
        (lambda: resolve(0, 0, env={}), "rank 0 of 0"),
        (lambda: resolve(1, env={}), "give both"),
        (lambda: resolve(mesh=3, env={}), "mesh=3 is no DeviceMesh"),  # type: ignore[arg-type]
        (lambda: resolve(env={"RANK": "1"}), "RANK=1 is set without WORLD_SIZE"),
        (lambda: resolve(env={"WORLD_SIZE": "4"}), "WORLD_SIZE=4 is set without RANK"),
        (lambda: resolve(env={"RANK": "one", "WORLD_SIZE": "2"}), "RANK='one'"),
        (lambda: resolve(env={"RANK": "4", "WORLD_SIZE": "4"}), "rank 4 of 4"),
        (lambda: resolve(0, 3, env={"RANK": "0", "WORLD_SIZE": "4"}), "3 .*do not divide 4"),
        (lambda: resolve(0, 4, env={"RANK": "1", "WORLD_SIZE": "4"}), "contradicts rank 1 of 4"),
        (lambda: resolve(mesh=GridMesh(("data", "tp"), (2, 2), (0, 0)), env={}), "dimension dp: .* data, tp"),
        (lambda: resolve(mesh=GridMesh(None, (2, 2), (0, 0)), env={}), "2 without names"),
        (lambda: resolve(mesh=GridMesh(("dp",), (2,), None), env={}), "not in the mesh"),
        (lambda: resolve(0, 2, mesh=GridMesh(("dp",), (2,), (1,)), env={}), "contradicts rank 1 of 2"),
    ],
)
def test_a_contradiction_is_one_line_with_the_numbers(ask: Callable[[], Topology], words: str) -> None:
    with pytest.raises(InvalidInput, match=words) as caught:
        ask()
    assert "\n" not in str(caught.value)


def test_without_a_process_group_there_is_no_store() -> None:
    assert job_store() is None


def _loaders(rank: int, data: str) -> dict[str, str]:
    """The errors of loaders at their first iteration where the ranks differ in an argument that chooses samples."""
    from loader import DataLoader, open_dataset

    records = open_dataset(data)
    made = {
        "shuffle": DataLoader(records, 4, shuffle=bool(rank), last="pad"),
        "batch_size": DataLoader(records, 4 + 4 * rank, global_batch_size=16, last="pad"),
        "epoch": DataLoader(records, 4, last="pad"),
        "batches already consumed": DataLoader(records, 4, last="pad"),
    }
    made["epoch"].set_epoch(rank)
    if rank == 0:
        ahead = DataLoader(records, 4, last="pad")
        ahead.skip(2)
        made["batches already consumed"].load_state_dict(ahead.state_dict())
    found = {}
    for name, loader in made.items():
        try:
            next(iter(loader))
        except StateMismatch as error:
            found[name] = str(error)
    return found


def _rank(
    rank: int, rendezvous: str, data: str, answers: multiprocessing.Queue[tuple[int, dict[str, str]]]
) -> None:
    """One real rank: joins the group, resolves, and tries every kind of agreement."""
    os.environ.update(GLOO_SOCKET_IFNAME="lo", MASTER_ADDR="127.0.0.1")
    import torch.distributed as distributed
    from torch.distributed.device_mesh import init_device_mesh

    from loader import DataLoader, open_dataset

    early = DataLoader(open_dataset(data), 4)
    assert len(early) == 25
    distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    found = {}
    try:
        found["early"] = f"goes on as if alone: {next(iter(early))}"
    except StateMismatch as error:
        found["early"] = str(error)
    topology = resolve(env={})
    found["group"] = str(topology)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    flat = mesh["dp", "tp"]._flatten("all")
    for name, of, dims in (
        ("mesh", mesh, ("dp",)),
        ("flattened", flat, ("all",)),
        ("its parts", mesh, ("dp", "tp")),
        ("its name", mesh, ("all",)),
    ):
        try:
            meshed = resolve(mesh=of, dp_dims=dims, env={})
            found[name] = f"{meshed.rank} of {meshed.world_size} ({meshed.source})"
        except InvalidInput as error:
            found[name] = str(error)
    try:
        resolve(env={"RANK": str(1 - rank), "WORLD_SIZE": "2"})
    except InvalidInput as error:
        found["contradiction"] = str(error)
    store = job_store()
    assert store is not None
    agree(topology, {"seed": 0, "version": "3f2a"}, store.below("same"), 20)
    try:
        agree(topology, {"seed": rank, "version": "3f2a"}, store.below("seeds"), 20)
    except StateMismatch as error:
        found["mismatch"] = str(error)
    if rank == 0:
        try:
            agree(topology, {"seed": 0}, store.below("alone"), 0.2)
        except DeadlineExceeded as error:
            found["late"] = str(error)
    found |= _loaders(rank, data)
    try:
        agree(Topology(0, 2, "arguments", process=rank, processes=2), {"seed": 0}, store.below("ranks"), 20)
    except StateMismatch as error:
        found["ranks"] = str(error)
    kept = DataLoader(open_dataset(data), 4)
    next(iter(kept))
    state = kept.state_dict()
    for name, step in (("same", 7), ("different", 7 + rank)):
        kept.load_state_dict(state | {"step": step})
        try:
            found[f"loaded {name}"] = str(len(list(kept)))
        except StateMismatch as error:
            found[f"loaded {name}"] = str(error)
    kept.load_state_dict(state)
    next(iter(kept))
    answers.put((rank, found))
    distributed.barrier()
    distributed.destroy_process_group()
    distributed.init_process_group("gloo", init_method=f"file://{rendezvous}-2", rank=1 - rank, world_size=2)
    with pytest.raises(StateMismatch, match=f"as rank {rank} of 2 .* and is rank {1 - rank} of 2"):
        next(iter(kept))
    distributed.barrier()  # the first to end would leave while the other still connects
    distributed.destroy_process_group()


def test_two_real_ranks_resolve_agree_and_disagree(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    answers: multiprocessing.Queue[tuple[int, dict[str, str]]] = fork.Queue()
    np.save(tmp_path / "data.npy", np.arange(400).reshape(100, 4))
    data = str(tmp_path / "data.npy")
    ranks = [
        fork.Process(target=_rank, args=(rank, str(tmp_path / "rendezvous"), data, answers), daemon=True)
        for rank in range(2)
    ]
    gc.collect()  # a store that is garbage here would be collected in a fork, which lacks its thread
    for process in ranks:
        process.start()
    found = dict(answers.get(timeout=WAIT_S) for _ in ranks)
    for process in ranks:
        process.join(timeout=WAIT_S)
        assert process.exitcode == 0
    for rank in range(2):
        assert found[rank]["group"] == str(Topology(rank, 2, "process group", 1, rank, 2))
        assert found[rank]["mesh"] == f"{rank} of 2 (mesh dp)"
        assert found[rank]["flattened"] == f"{rank} of 2 (mesh all)"
        assert found[rank]["its parts"] == f"{rank} of 2 (mesh dp, tp)"
        assert "no mesh dimension all: the mesh has dp, tp" in found[rank]["its name"]
        assert "and for one made by _flatten its parts" in found[rank]["its name"]
        assert "contradicts" in found[rank]["contradiction"]
        assert "seed is 0 on process 0 and 1 on process 1" in found[rank]["mismatch"]
        assert "version" not in found[rank]["mismatch"]
        assert f"as rank 0 of 1 (single process), and is rank {rank} of 2" in found[rank]["early"]
        assert "0 of 2 are rank 1 of 2, not 1" in found[rank]["ranks"]
        assert found[rank]["loaded same"] == "6"
        assert "consumed is 7 on process 0 and 8 on process 1" in found[rank]["loaded different"]
        for fact in ("shuffle", "batch_size", "epoch", "batches already consumed"):
            assert f"{fact} is " in found[rank][fact]
    assert "process 1 of 2 did not report" in found[0]["late"]


@pytest.mark.parametrize(
    "before", ["nobody", "both", "both, killed", "process 0, which gave up", "process 0, killed"]
)
def test_a_job_that_is_started_again_over_the_same_store_agrees(before: str) -> None:
    import torch.distributed as distributed

    store = JobStore(distributed.TCPStore("127.0.0.1", 0, None, True))
    rounds = store.below("agree/loader")

    def stating(process: int) -> str:
        place = Topology(process, 2, "torchrun", process=process, processes=2)
        return agree(place, {"seed": 0}, store.connected_anew(), timeout_s=20)

    with ThreadPoolExecutor(2) as processes:
        if before == "both":
            assert set(processes.map(stating, range(2))) == {"loader-1"}
        elif before == "process 0, which gave up":
            with pytest.raises(DeadlineExceeded):
                agree(Topology(0, 2, "torchrun", processes=2), {"seed": 1}, store, timeout_s=0.1)
        elif "killed" in before:
            rounds.put(f"{rounds.count('opened', 1)}/0", [0, {}])
            if before == "both, killed":  # process 1 had begun to state its facts, too
                rounds.arrive("1/here", 1)
        other = processes.submit(stating, 1)
        while before == "process 0, killed" and not rounds.read("1/1"):
            time.sleep(0.01)  # until process 1 has stated its facts in that round
        name = processes.submit(stating, 0).result()
        # The next loader's round opens at once: a process that polls late must not take it for this loader's.
        following = processes.submit(stating, 0)
        assert other.result() == name == ("loader-1" if before == "nobody" else "loader-2")
        assert stating(1) == following.result() != name


@pytest.mark.parametrize(
    ("kept", "says"),
    [
        (("b a", "c b a"), "version='b' opens on all"),
        (("b", "c b"), "version='b' opens on all"),
        (("", "c b a"), "version='a' opens on all"),
        (("b", "c"), "no version opens on all nodes: wait for the source"),
        (("", ""), "start all of them alike"),
    ],
)
def test_ranks_whose_nodes_remember_different_versions_name_one_for_all(
    kept: tuple[str, str], says: str
) -> None:
    """The first rank opened version a or b, the second c; the source is down where versions are kept."""
    store = JobStore(torch_distributed.TCPStore("127.0.0.1", 0, None, True))
    versions = ((kept[0] or "a").split()[0], "c")

    def agreed(rank: int) -> str:
        place = Topology(rank, 2, "torchrun", process=rank, processes=2)
        facts = {"version": versions[rank], agreement.KEPT: kept[rank]}
        with pytest.raises(StateMismatch) as caught:
            agree(place, facts, store if rank == 0 else store.connected_anew(), timeout_s=20)
        return str(caught.value)

    with ThreadPoolExecutor(2) as threads:
        for said in threads.map(agreed, range(2)):
            assert "version is " in said
            assert said.endswith(says)


def test_a_process_that_gave_up_leaves_its_failure_for_the_next_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = JobStore(torch_distributed.TCPStore("127.0.0.1", 0, None, True))
    first, second = (Topology(process, 2, "torchrun", process=process, processes=2) for process in range(2))
    monkeypatch.setattr(agreement, "TELL_FAILURE_S", 0.1)
    tell_failure(second, "NotFound: no such file", store)
    with pytest.raises(StateMismatch, match="process 1 cannot go on: NotFound: no such file"):
        agree(first, {"seed": 0}, store, timeout_s=20)
    tell_failure(second, "NotFound: of the time before a restart", store)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with ThreadPoolExecutor(1) as other:
        again = other.submit(agree, second, {"seed": 0}, store.connected_anew(), timeout_s=20)
        assert agree(first, {"seed": 0}, store, timeout_s=20) == again.result()


def test_a_long_wait_for_another_process_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = JobStore(torch_distributed.TCPStore("127.0.0.1", 0, None, True))
    monkeypatch.setattr(job_stores, "WARN_AFTER_S", 0.1)
    for process, awaited in ((0, "process 1 of 2"), (1, "process 0 to compare")):
        caplog.clear()
        place = Topology(process, 2, "torchrun", process=process, processes=2)
        with pytest.raises(DeadlineExceeded):
            agree(place, {"seed": 0}, store.below(awaited), timeout_s=1.0)
        (line,) = caplog.messages
        assert f"waiting for {awaited}, up to " in line


def test_rank_hint_accepts_an_incomplete_launcher() -> None:
    assert rank_hint({"WORLD_SIZE": "4", "LOCAL_RANK": "1", "NODE_RANK": "0"}) == (0, 4)
    assert rank_hint({"RANK": "3", "WORLD_SIZE": "4"}) == (3, 4)
    assert rank_hint({}) == (0, 1)
    with pytest.raises(InvalidInput, match="WORLD_SIZE='many'"):
        rank_hint({"WORLD_SIZE": "many"})
