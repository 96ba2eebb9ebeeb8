"""Memory of the machine, the limits and use of the cgroups of this process, and its limit of open files."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cachesvc.core.errors import NotAllowed

MEMORY_SPARE = 0.05
"""The part of a machine's or a cgroup's memory left free for what trainers take between two measurements."""
PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of the machine or of a cgroup. File caches count as free, memfds do not."""

    total_bytes: int
    free_bytes: int

    @property
    def spare_bytes(self) -> int:
        """The bytes to be left free."""
        return int(self.total_bytes * MEMORY_SPARE)


@dataclass(frozen=True, slots=True)
class _Names:
    """File names of a memory cgroup, and keys of its `memory.stat`."""

    limit: str
    usage: str
    cache: str
    shared: str
    events: str


_V2 = _Names("memory.max", "memory.current", "file", "shmem", "memory.events")
_V1 = _Names(
    "memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache", "total_shmem", "memory.oom_control"
)


def check_memfd() -> None:
    """Raise NotAllowed where this process may not make memory files: extents in RAM, catalogs and plans are such files."""
    try:
        os.close(os.memfd_create("cachesvc-check", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    except OSError as error:
        raise NotAllowed(
            f"memfd_create is refused ({error.strerror}): allow it where the process runs (seccomp profile,"
            " SystemCallFilter=, firejail, vm.memfd_noexec below 2)"
        ) from None


def memories(proc: Path = PROC, cgroups: Path = CGROUPS) -> list[Memory]:
    """The machine's memory, then that of each cgroup above this process that has a limit."""
    machine = of_machine(proc)
    groups = (_memory_of(folder, names) for folder, names in _groups(proc, cgroups))
    return [machine, *(one for one in groups if one is not None and one.total_bytes < machine.total_bytes)]


def of_machine(proc: Path = PROC) -> Memory:
    """The machine's memory."""
    fields = _fields(proc / "meminfo")
    return Memory(fields["MemTotal:"] << 10, fields["MemAvailable:"] << 10)


def allowed_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """The most bytes that this process may use."""
    return min(one.total_bytes for one in memories(proc, cgroups))


def oom_kills(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """The number of processes of this cgroup that the kernel's OOM killer has ended, or of the machine where no cgroup
    counts them."""
    counters = [(folder / names.events, "oom_kill") for folder, names in _groups(proc, cgroups)]
    for path, name in [*counters, (proc / "vmstat", "oom_kill")]:
        with suppress(OSError, KeyError, ValueError):
            return _fields(path)[name]
    return 0


def _groups(proc: Path, cgroups: Path) -> Iterator[tuple[Path, _Names]]:
    """Yield the folders of this process's memory cgroups, from its own up to the root.

    The root is always among them, since a container sees its own cgroup there, whatever /proc/self/cgroup names.
    """
    own = proc / "self/cgroup"
    for line in own.read_text().splitlines() if own.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, names = (cgroups / "memory", _V1) if controllers else (cgroups, _V2)
        folder = root / path.lstrip("/")
        while folder != root:
            yield folder, names
            folder = folder.parent
        yield root, names


def _memory_of(folder: Path, names: _Names) -> Memory | None:
    """The memory of a cgroup, or None where it has no limit or does not exist."""
    with suppress(OSError, KeyError, ValueError):
        limit, usage = (int((folder / name).read_text()) for name in (names.limit, names.usage))
        stat = _fields(folder / "memory.stat")
        return Memory(limit, max(0, limit - usage + stat[names.cache] - stat[names.shared]))
    return None


def _fields(path: Path) -> dict[str, int]:
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}


def raise_open_files(wanted: int) -> int:
    """Raise the limit of open files to `wanted`, as far as the hard limit allows; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(soft, wanted)
