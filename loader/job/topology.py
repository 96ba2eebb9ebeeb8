"""The rank and world size of this process, which define its part of a global batch.

Sources in order: arguments, a DeviceMesh, the process group, torchrun, MPI, an srun step of more than one task, and
else a single process. The first one present decides; a contradiction among the first four is an error. Launchers start
each other (mpirun its daemons by srun, srun torchrun once a node): the inner one counts.

Only data-parallel coordinates choose data, so processes and ranks are two counts: tensor-, context- and
pipeline-parallel peers are several processes of one rank.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cachesvc.catalog.columns import Ints
from cachesvc.core.arguments import whole_number
from cachesvc.core.errors import InvalidInput, StateMismatch

_LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    ("mpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("mpi", "PMI_RANK", "PMI_SIZE", ""),
    # After mpi: mpirun starts its daemons by srun, and in the variables that they inherit a task is a node.
    # Only srun sets the step's task count; SLURM_NTASKS is also set in a batch script, which is one process.
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", ""),
)
_MAX_RANKS = 1 << 31


class Mesh(Protocol):
    """The part of `torch.distributed.DeviceMesh` that is used here."""

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None: ...

    def get_coordinate(self) -> Sequence[int] | None: ...

    def size(self, mesh_dim: int | None = None) -> int: ...


@dataclass(frozen=True, slots=True)
class Topology:
    """Data-parallel `rank` of `world_size`; process `process` of `processes`.

    `source` names its origin, for the log line: `8 ranks (process group)`. `nodes`: the job's nodes, at most
    `world_size`; the order is divided into as many parts. Given a mesh of some of the job's processes (one pipeline
    stage, say), `process` and `processes` count those alone, and `group` names them.
    """

    rank: int
    world_size: int
    source: str
    nodes: int = 1
    process: int = 0
    processes: int = 1
    group: str = ""


ALONE = Topology(0, 1, "this rank alone")
"""The topology of a loader that runs on one rank alone."""


@dataclass(frozen=True, slots=True)
class RankShare:
    """A rank's part of every global batch: the slots [low, high), in `accumulate` micro-batches."""

    low: int
    high: int
    batch_size: int

    @property
    def accumulate(self) -> int:
        """Batches of this rank per step."""
        return (self.high - self.low) // self.batch_size


@dataclass(frozen=True, slots=True)
class _Rank:
    """A rank of `size`, as one source states it."""

    rank: int
    size: int
    source: str

    def check(self) -> _Rank:
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
    """The topology of this process. Raises `InvalidInput` for a contradiction, with the numbers."""
    group, launched, data = process_group(), _launched(env), from_arguments(rank, world_size)
    if group and launched and launched.source == "torchrun":
        _check_equal(group, launched)
    if not (group or data or mesh):
        _check_complete(env)
    processes = group or launched
    if mesh is not None:
        meshed = _mesh(mesh, dp_dims)
        if data:
            _check_equal(data, meshed)
        data = data or meshed
    members, within = _members(mesh, processes) if processes else (None, "")
    if data and members:
        _check_divides(data, members)
    chosen = data or processes or _Rank(0, 1, "single process")
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


def check_unchanged(before: Topology, now: Topology) -> None:
    """Raise `StateMismatch` if a process group was made, destroyed or replaced after the topology before was used: values
    derived from it (a length, a position in the data) are wrong now."""
    if (now.rank, now.world_size) != (before.rank, before.world_size):
        raise StateMismatch(
            f"this loader was used as rank {before.rank} of {before.world_size} ({before.source}), and is rank {now.rank}"
            f" of {now.world_size} ({now.source}) now: initialise the process group before its first use (len, too), and"
            " make another loader for another group"
        )


def rank_hint(env: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """The rank and the number of processes, as far as they are known before the job is set up: for log lines and for
    whether a daemon is required, never for the choice of data. Lightning starts its ranks with a WORLD_SIZE alone."""
    found = process_group() or _launched(env)
    if found is not None:
        return found.rank, found.size
    return 0, _number(env, "WORLD_SIZE") if "WORLD_SIZE" in env else 1


def in_turns(extents: Ints) -> list[int]:
    """Return extents as this process goes through them: processes that share a folder of results begin at different ones,
    and make each about once."""
    rank, processes = rank_hint()
    turned: list[int] = np.roll(extents, -(len(extents) * rank // processes)).tolist()
    return turned


def from_arguments(rank: int | None, world_size: int | None) -> _Rank | None:
    """The rank that arguments state, None without them. Raises `InvalidInput`."""
    if rank is None and world_size is None:
        return None
    if rank is None or world_size is None:
        raise InvalidInput(f"rank={rank}, world_size={world_size}: give both or neither")
    numbers = [
        whole_number(name, given, -_MAX_RANKS, _MAX_RANKS)
        for name, given in (("rank", rank), ("world_size", world_size))
    ]
    return _Rank(numbers[0], numbers[1], "arguments").check()


def _mesh(mesh: Mesh, dp_dims: Sequence[str]) -> _Rank:
    """The rank in the data-parallel dimensions, flattened in the mesh's order; a mesh of one unnamed dimension is
    data-parallel."""
    if not hasattr(mesh, "get_coordinate"):
        raise InvalidInput(f"mesh={mesh!r} is no DeviceMesh; give one, or rank and world_size")
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise InvalidInput("this process is not in the mesh: give the mesh that it belongs to")
    names = mesh.mesh_dim_names
    if names is None and len(coordinate) == 1:
        return _Rank(coordinate[0], mesh.size(0), "mesh").check()
    missing = [dim for dim in dp_dims if dim not in (names or ())]
    if missing or not dp_dims:
        raise InvalidInput(
            f"no mesh dimension {', '.join(missing) or 'named in dp_dims'}: the mesh has"
            f" {', '.join(names) if names else f'{len(coordinate)} without names'}; name the data-parallel"
            " ones in dp_dims, and for one made by _flatten its parts"
        )
    rank, size = 0, 1
    for dim, name in enumerate(names or ()):
        if name in dp_dims:
            rank, size = rank * mesh.size(dim) + coordinate[dim], size * mesh.size(dim)
    return _Rank(rank, size, "mesh " + ", ".join(dp_dims)).check()


def _members(mesh: Mesh | None, job: _Rank) -> tuple[_Rank, str]:
    """The processes that compare with each other, and their name: those of the mesh, since others may not read at all."""
    ranks: Sequence[int] = getattr(mesh, "mesh").flatten().tolist() if hasattr(mesh, "mesh") else ()  # noqa: B009
    if job.rank not in ranks or len(ranks) == job.size:
        return job, ""
    name = hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()
    return _Rank(ranks.index(job.rank), len(ranks), "mesh"), f"{name}/"


def process_group() -> _Rank | None:
    """The rank in the default process group; None without one, which does not import torch."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return _Rank(distributed.get_rank(), distributed.get_world_size(), "process group")


def _launched(env: Mapping[str, str]) -> _Rank | None:
    """The rank that the launcher wrote to the environment."""
    for source, rank, size, _ in _LAUNCHERS:
        if rank not in env or size not in env:
            continue
        found = _Rank(_number(env, rank), _number(env, size), source).check()
        if source == "torchrun" or found.size > 1:
            return found
    return None


def _check_complete(env: Mapping[str, str]) -> None:
    """Raise `InvalidInput` for one of torchrun's two variables without the other, where no other source decides."""
    for there, absent in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if there in env and absent not in env:
            raise InvalidInput(f"{there}={env[there]} is set without {absent}: set both or neither")


def _nodes(processes: int, env: Mapping[str, str]) -> int:
    """The job's nodes, equal on all processes: processes divided by processes per node, where the launcher states it."""
    if env.get("WORLD_SIZE") == str(processes) and "GROUP_WORLD_SIZE" in env:
        return max(
            1, _number(env, "GROUP_WORLD_SIZE")
        )  # torchrun's agents: nodes may run unequal numbers of processes
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


def _check_equal(one: _Rank, other: _Rank) -> None:
    if (one.rank, one.size) != (other.rank, other.size):
        raise InvalidInput(
            f"rank {one.rank} of {one.size} ({one.source}) contradicts rank {other.rank} of {other.size}"
            f" ({other.source}): give one of them, or make them agree"
        )


def _check_divides(data: _Rank, processes: _Rank) -> None:
    """Raise `InvalidInput` where data-parallel ranks do not divide the processes; with model parallelism they are fewer."""
    if data.size == processes.size and data.source == "arguments":
        _check_equal(data, processes)
    if processes.size % data.size:
        raise InvalidInput(
            f"{data.size} data-parallel ranks ({data.source}) do not divide {processes.size} processes"
            f" ({processes.source}): give the data-parallel rank and size of this process"
        )
