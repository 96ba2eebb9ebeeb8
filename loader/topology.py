"""Which part of a global batch this process takes: rank and world size, as the job was started. Design, D6.

Sources in order: arguments, a DeviceMesh, the process group, torchrun, MPI, an srun step of more than one task, and
else a single process. The first that is there decides; of the first four one that contradicts it is an error. Launchers
start each other (mpirun its daemons by srun, srun torchrun once a node): the inner one's word counts.

Only data-parallel coordinates choose data, so processes and ranks are two counts: tensor-, context- and
pipeline-parallel peers are several processes of one rank.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from cachesvc.core.arguments import whole_number
from cachesvc.core.errors import DeadlineExceeded, InvalidInput, StateMismatch

AGREE_TIMEOUT_S = 300.0
"""Ranks reach their first batch minutes apart when models load from a slow disk."""
LOOK_S = 0.5
"""How often a process that waits for process 0 looks: two requests of 50 us; more often in the first second."""

_LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    ("mpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("mpi", "PMI_RANK", "PMI_SIZE", ""),
    # after mpi, whose mpirun starts its daemons by srun: what they inherit counts nodes
    # only srun sets the step's task count; SLURM_NTASKS alone also stands in a batch script, where one runs
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", ""),
)
_NAMED_MOST = 8
_MAX_RANKS = 1 << 31


class Mesh(Protocol):
    """What we use of `torch.distributed.DeviceMesh`."""

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None: ...

    def get_coordinate(self) -> Sequence[int] | None: ...

    def size(self, mesh_dim: int | None = None) -> int: ...


class Store(Protocol):
    """What we use of `torch.distributed.Store`."""

    def set(self, key: str, value: str, /) -> Any: ...

    def get(self, key: str, /) -> bytes: ...

    def wait(self, keys: list[str], timeout: timedelta, /) -> Any: ...

    def add(self, key: str, amount: int, /) -> int: ...

    def check(self, keys: list[str], /) -> bool: ...


@dataclass(frozen=True, slots=True)
class Topology:
    """Data-parallel `rank` of `world_size`; process `process` of `processes`.

    `source` says where it was found, for the log line: `8 ranks (process group)`. `nodes`: how many the job has, but
    never more than `world_size`; the order is dealt into as many parts. Given a mesh of some of the
    job's processes (one pipeline stage, say), `process` and `processes` count those alone, and `group` names them.
    """

    rank: int
    world_size: int
    source: str
    nodes: int = 1
    process: int = 0
    processes: int = 1
    group: str = ""


@dataclass(frozen=True, slots=True)
class _Place:
    rank: int
    size: int
    source: str

    def check(self) -> _Place:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise InvalidInput(f"{self.source}: rank {self.rank} of {self.size}: give 0 <= rank < world size")
        return self


def resolve(
    rank: int | None = None,
    world_size: int | None = None,
    mesh: Mesh | None = None,
    dp_dims: Sequence[str] = ("dp",),
    env: Mapping[str, str] = os.environ,
) -> Topology:
    """This process's place in the job. Raises `InvalidInput` for a contradiction, with the numbers."""
    group, launched, data = _process_group(), _launched(env), stated(rank, world_size)
    if group and launched and launched.source == "torchrun":
        _must_equal(group, launched)
    if not (group or data or mesh):
        _must_be_whole(env)
    processes = group or launched
    if mesh is not None:
        meshed = _mesh(mesh, dp_dims)
        if data:
            _must_equal(data, meshed)
        data = data or meshed
    members, within = _members(mesh, processes) if processes else (None, "")
    if data and members:
        _must_divide(data, members)
    chosen = data or processes or _Place(0, 1, "single process")
    nodes = min(_nodes((processes or chosen).size, env), chosen.size)
    processes = members or chosen
    return Topology(
        chosen.rank,
        chosen.size,
        chosen.source,
        nodes,
        processes.rank,
        processes.size,
        within,
    )


def must_stand(before: Topology, now: Topology) -> None:
    """Raises `StateMismatch` where the process group came, went, or became another one after the place before it had
    been used: what was told from there (a length, a place in the data) is another's."""
    if (now.rank, now.world_size) != (before.rank, before.world_size):
        raise StateMismatch(
            f"this loader was used as rank {before.rank} of {before.world_size} ({before.source}), and is rank {now.rank}"
            f" of {now.world_size} ({now.source}) now: initialise the process group before its first use (len, too), and"
            " make another loader for another group"
        )


def foreseen(env: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Rank and number of processes as far as they show before the job is set up: for log lines and for whether a
    daemon must be there, never for who reads what. Lightning starts its ranks with a WORLD_SIZE alone."""
    place = _process_group() or _launched(env)
    if place is not None:
        return place.rank, place.size
    return 0, _number(env, "WORLD_SIZE") if "WORLD_SIZE" in env else 1


def stated(rank: int | None, world_size: int | None) -> _Place | None:
    """The place that arguments say, None where they say none. Raises `InvalidInput`."""
    if rank is None and world_size is None:
        return None
    if rank is None or world_size is None:
        raise InvalidInput(f"rank={rank}, world_size={world_size}: give both or neither")
    numbers = [
        whole_number(name, given, -_MAX_RANKS, _MAX_RANKS)
        for name, given in (("rank", rank), ("world_size", world_size))
    ]
    return _Place(numbers[0], numbers[1], "arguments").check()


def job_store() -> Store | None:
    """The process group's key-value store; None where no group is initialised."""
    if _process_group() is None:
        return None
    store: Store = sys.modules["torch.distributed"].distributed_c10d._get_default_store()
    return store


def agree(
    topology: Topology,
    facts: Mapping[str, str | int],
    store: Store,
    name: str = "loader",
    timeout_s: float = AGREE_TIMEOUT_S,
) -> str:
    """Return once every process of the job has stated the same facts; what returns is the same on all, and was never
    returned before in this store.

    Every process calls this with the same `name`. Process 0 opens a round and compares, so the store sees a few
    requests a process. Raises `StateMismatch` on all of them when a fact differs or a rank is not on as many processes
    as each other one, and `DeadlineExceeded` when a process has not stated its own within `timeout_s`.
    """
    rounds = f"cachesvc/agree/{topology.group}{name}"
    told = json.dumps([topology.rank, dict(facts) | {"world size": topology.world_size}], sort_keys=True)
    if topology.process == 0:
        number = store.add(rounds, 1)
        store.set(f"{rounds}/{number}/0", told)
        kind, message = _verdict(topology, f"{rounds}/{number}", store, timeout_s)
        store.set(f"{rounds}/{number}/verdict", json.dumps([kind, message]))
    else:
        # the comparer's own deadline may have started as late as ours ends
        number = _heard(topology.process, rounds, told, store, 2 * timeout_s)
        kind, message = json.loads(store.get(f"{rounds}/{number}/verdict"))
    if kind == "mismatch":
        raise StateMismatch(message)
    if kind == "late":
        raise DeadlineExceeded(message)
    return f"{topology.group}{name}-{number}"


def _heard(process: int, rounds: str, told: str, store: Store, timeout_s: float) -> int:
    """State what is `told` in process 0's newest round, and return that once it has its verdict."""
    deadline, at, pause_s = time.monotonic() + timeout_s, 0, 0.01
    try:
        while time.monotonic() < deadline:
            at = _stated(process, rounds, told, store, at)
            if at and store.check([f"{rounds}/{at}/verdict"]):
                return at
            time.sleep(pause_s)  # the store's own wait would see no new round, and warns of each time-out
            pause_s = min(2 * pause_s, LOOK_S)
    except RuntimeError as gone:  # torch's DistError: the store's host, which is process 0 as often as not
        raise DeadlineExceeded("the job's store does not answer: look for process 0's own error") from gone
    raise DeadlineExceeded(f"process 0 gave no verdict within {timeout_s:.0f} s: look for its own error")


def _stated(process: int, rounds: str, told: str, store: Store, at: int) -> int:
    """The round in which this process has stated what is `told`: the newest, unless that is of another time. torchrun
    keeps the store when it starts processes again: a round that has a verdict, or a word of this process's former
    self, is over; one without may be, so a newer one is looked for until the verdict comes."""
    newest = store.add(rounds, 0)
    mine = f"{rounds}/{newest}/{process}"
    # Its own first: process 0 opens no round before the one before it has its verdict.
    over = any(store.check([f"{rounds}/{each}/verdict"]) for each in (at, newest))
    if newest == at or over or store.add(f"{mine}/here", 1) > 1:
        return at
    store.set(mine, told)
    return newest


def _verdict(topology: Topology, prefix: str, store: Store, timeout_s: float) -> tuple[str, str]:
    """What process 0 found: ("", "") where all agree."""
    deadline, processes = time.monotonic() + timeout_s, topology.processes
    ranks: list[int] = []
    stated: list[dict[str, str | int]] = []
    for process in range(processes):
        left_s = max(0.001, deadline - time.monotonic())
        try:
            _wait(store, f"{prefix}/{process}", left_s, f"process {process} of {processes} did not report")
        except DeadlineExceeded as late:
            return "late", str(late)
        rank, facts = json.loads(store.get(f"{prefix}/{process}"))
        ranks.append(rank)
        stated.append(facts)
    for process, facts in enumerate(stated):
        if "failure" in facts:
            return "mismatch", f"process {process} cannot go on: {facts['failure']}"
    differing = [_told(fact, stated) for fact in sorted(set().union(*stated))]
    found = "; ".join(filter(None, differing)) or _unequal(ranks, topology.world_size)
    return (
        ("mismatch", f"the job's processes disagree: {found}; start all of them alike") if found else ("", "")
    )


def _unequal(ranks: Sequence[int], size: int) -> str:
    """The first rank that others outnumber, or nothing: its samples would be nobody's, or count for less."""
    each, counts = len(ranks) // size, Counter(ranks)
    wrong = [rank for rank in range(size) if counts[rank] < each]
    if not wrong:
        return ""
    return f"{counts[wrong[0]]} of {len(ranks)} are rank {wrong[0]} of {size}, not {each}"


def _told(fact: str, stated: Sequence[Mapping[str, str | int]]) -> str:
    """`seed is 0 on 0, 1, 2 and 1 on 3`, or nothing where all say the same."""
    holders: defaultdict[str, list[str]] = defaultdict(list)
    for process, facts in enumerate(stated):
        holders[str(facts.get(fact, "not given"))].append(str(process))
    if len(holders) == 1:
        return ""
    shown = [f"{value} on {_listed(where)}" for value, where in list(holders.items())[:_NAMED_MOST]]
    return f"{fact} is " + " and ".join(shown)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED_MOST} more" if len(names) > _NAMED_MOST else ""
    return ("process " if len(names) == 1 else "processes ") + ", ".join(names[:_NAMED_MOST]) + more


def _wait(store: Store, key: str, timeout_s: float, otherwise: str) -> None:
    try:
        store.wait([key], timedelta(seconds=timeout_s))
    except RuntimeError as error:  # torch's DistError: a time-out, or the store's host is gone
        raise DeadlineExceeded(
            f"{otherwise} within {timeout_s:.0f} s: look for its own error; a loader of one rank alone wants shard=False,"
            " one of some ranks the mesh of those"
        ) from error


def _mesh(mesh: Mesh, dp_dims: Sequence[str]) -> _Place:
    """The data-parallel dimensions flattened in the mesh's order; a mesh of one unnamed dimension is that."""
    if not hasattr(mesh, "get_coordinate"):
        raise InvalidInput(f"mesh={mesh!r} is no DeviceMesh; give one, or rank and world_size")
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise InvalidInput("this process is not in the mesh: give the mesh that it belongs to")
    names = mesh.mesh_dim_names
    if names is None and len(coordinate) == 1:
        return _Place(coordinate[0], mesh.size(0), "mesh").check()
    missing = [dim for dim in dp_dims if dim not in (names or ())]
    if missing or not dp_dims:
        raise InvalidInput(
            f"no mesh dimension {', '.join(missing) or 'named in dp_dims'}: the mesh has"
            f" {', '.join(names) if names else f'{len(coordinate)} without names'}; name the data-parallel"
            " ones in dp_dims, of one that _flatten made its parts"
        )
    rank, size = 0, 1
    for dim, name in enumerate(names or ()):
        if name in dp_dims:
            rank, size = rank * mesh.size(dim) + coordinate[dim], size * mesh.size(dim)
    return _Place(rank, size, "mesh " + ", ".join(dp_dims)).check()


def _members(mesh: Mesh | None, job: _Place) -> tuple[_Place, str]:
    """The processes that agree with each other: those of the mesh, for others may not read at all; and their name."""
    ranks: Sequence[int] = getattr(mesh, "mesh").flatten().tolist() if hasattr(mesh, "mesh") else ()  # noqa: B009
    if job.rank not in ranks or len(ranks) == job.size:
        return job, ""
    name = hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()
    return _Place(ranks.index(job.rank), len(ranks), "mesh"), f"{name}/"


def _process_group() -> _Place | None:
    """The default process group; where torch was never imported there is none."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return _Place(distributed.get_rank(), distributed.get_world_size(), "process group")


def _launched(env: Mapping[str, str]) -> _Place | None:
    """What the launcher wrote into the environment."""
    for source, rank, size, _ in _LAUNCHERS:
        if rank not in env or size not in env:
            continue
        place = _Place(_number(env, rank), _number(env, size), source).check()
        if source == "torchrun" or place.size > 1:
            return place
    return None


def _must_be_whole(env: Mapping[str, str]) -> None:
    """Where nothing else says the place, half of what torchrun says is an error."""
    for there, absent in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if there in env and absent not in env:
            raise InvalidInput(f"{there}={env[there]} is set without {absent}: set both or neither")


def _nodes(processes: int, env: Mapping[str, str]) -> int:
    """Nodes of the job: processes over processes per node, as far as the launcher tells; the same on all of them."""
    if env.get("WORLD_SIZE") == str(processes) and "GROUP_WORLD_SIZE" in env:
        return max(1, _number(env, "GROUP_WORLD_SIZE"))  # torchrun's agents: nodes may run unequal numbers
    for _, _, size, local in _LAUNCHERS:
        if local in env and env.get(size) == str(processes):
            each = _number(env, local)
            return processes // each if 0 < each <= processes and processes % each == 0 else 1
    if env.get("SLURM_STEP_NUM_TASKS") == str(processes) and "SLURM_STEP_NUM_NODES" in env:
        return max(1, _number(env, "SLURM_STEP_NUM_NODES"))
    return 1


def _number(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise InvalidInput(f"{name}={env[name]!r} in the environment is no whole number") from None


def _must_equal(one: _Place, other: _Place) -> None:
    if (one.rank, one.size) != (other.rank, other.size):
        raise InvalidInput(
            f"rank {one.rank} of {one.size} ({one.source}) contradicts rank {other.rank} of {other.size}"
            f" ({other.source}): give one of them, or make them agree"
        )


def _must_divide(data: _Place, processes: _Place) -> None:
    """Data-parallel ranks may be fewer than processes (model parallelism), in whole groups."""
    if data.size == processes.size and data.source == "arguments":
        _must_equal(data, processes)
    if processes.size % data.size:
        raise InvalidInput(
            f"{data.size} data-parallel ranks ({data.source}) do not divide {processes.size} processes"
            f" ({processes.source}): give the data-parallel rank and size of this process"
        )
