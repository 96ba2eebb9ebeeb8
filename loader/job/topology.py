"""Which part of a global batch this process takes: rank and world size, as the job was started. Design, D6.

Sources in order: arguments, a DeviceMesh, the process group, torchrun, MPI, an srun step of more than one task, and
else a single process. The first that is there decides; of the first four one that contradicts it is an error. Launchers
start each other (mpirun its daemons by srun, srun torchrun once a node): the inner one's word counts.

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

from cachesvc.core.arguments import whole_number
from cachesvc.core.errors import InvalidInput, StateMismatch

_LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    ("mpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("mpi", "PMI_RANK", "PMI_SIZE", ""),
    # after mpi, whose mpirun starts its daemons by srun: what they inherit counts nodes
    # only srun sets the step's task count; SLURM_NTASKS alone also stands in a batch script, where one runs
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", ""),
)
_MAX_RANKS = 1 << 31


class Mesh(Protocol):
    """What we use of `torch.distributed.DeviceMesh`."""

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None: ...

    def get_coordinate(self) -> Sequence[int] | None: ...

    def size(self, mesh_dim: int | None = None) -> int: ...


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


ALONE = Topology(0, 1, "this rank alone")
"""The place of a loader that runs on one rank alone."""


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
    group, launched, data = process_group(), _launched(env), stated(rank, world_size)
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
    place = process_group() or _launched(env)
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


def process_group() -> _Place | None:
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
