"""`python -m bench prepared [IMAGES]`: JPEGs of 500 x 375, resized to 256 once, beside programs that decode them each time.

Pillow alone decodes and resizes the same files in as many processes as the loaders have workers, in the same run, and so do
torch's DataLoader and MosaicML Streaming; FFCV, where it is installed, resizes when its file is written. The first job
prepares; the second is another process, and reads what is prepared, from RAM and, the page cache dropped before, from NVMe.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from bench.compare import PEERS_PYTHON
from bench.grid import Grid
from bench.peers.pictures import jpegs
from bench.prepared_jobs import BATCH, SIDE, resized_file
from bench.storage import fio
from testbed import ROOT
from testbed.memory import drop_page_cache
from testbed.node import Daemon

IMAGES, WORKERS, EPOCHS, NVME_RUNS = 20_000, 2, 3, 3
IMAGE_BYTES = SIDE * SIDE * 3
FIRST_EPOCH, FROM_RAM, CPU_PART, OF_FIO, TOGETHER = 1.1, 10.0, 0.05, 0.8, 0.55
"""Asked: the time of the first epoch to Pillow's, the rate from RAM to Pillow's, the CPU of a sample to Pillow's, the rate
from NVMe to fio's, and the time of two jobs to that of two jobs that decode."""
HEAD = ("", "samples/s", "ratio", "to", "asked", "met")
Job = dict[str, float]


def grid(images: int = IMAGES) -> tuple[Grid, bool]:
    """Measure all on this machine's cores. The second value: all ratios are as asked."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        paths = _written(root / "data", images)
        pillow, pillow_cpu_s = _pillow(paths)
        rows = [
            (
                "Pillow alone, two processes",
                f"{pillow:,.0f}",
                "",
                "",
                f"CPU {pillow_cpu_s * 1e6:,.0f} us each",
            ),
            *_in_ram(root, paths, pillow, pillow_cpu_s),
            *_on_nvme(root, images),
            *_together(root, images),
            *_others(root, images, pillow),
        ]
    title = f"{images:,} JPEGs of 500 x 375 resized to {SIDE}, shuffled, batches of {BATCH}"
    return Grid(title, HEAD, rows), not any(row[-1] == "NO" for row in rows)


def _written(folder: Path, images: int) -> list[str]:
    folder.mkdir()
    paths = [str(folder / f"{number:05d}.jpg") for number in range(images)]
    for path, raw in zip(paths, jpegs(np.random.default_rng(0), images), strict=True):
        Path(path).write_bytes(raw)
    return paths


def _pillow(paths: Sequence[str]) -> tuple[float, float]:
    """Return the pictures a second of two processes, and the CPU seconds of one picture."""
    begun = time.process_time()
    for path in paths[:200]:
        resized_file(path)
    cpu_s = (time.process_time() - begun) / min(200, len(paths))
    with ProcessPoolExecutor(WORKERS) as pool:
        list(pool.map(_size_of, paths[:64]))  # untimed: the processes start
        begun = time.perf_counter()
        list(pool.map(_size_of, paths, chunksize=BATCH))
        return len(paths) / (time.perf_counter() - begun), cpu_s


def _size_of(path: str) -> int:
    return resized_file(path).nbytes


def _in_ram(root: Path, paths: Sequence[str], pillow: float, pillow_cpu_s: float) -> list[tuple[str, ...]]:
    """Run jobs of a node with RAM for all. The first one is compared with Pillow before and after it: a virtual machine's
    cores change their speed within a minute."""
    images = len(paths)
    room = f"{images * IMAGE_BYTES * 5 // 4 + (512 << 20)}"
    with Daemon(root / "ram", ["--ram", room, "--allow", f"{root}/"]) as daemon:
        first = _job("prepared", root / "data", WORKERS, 1, daemon.env)
        beside = statistics.harmonic_mean((pillow, _pillow(paths)[0]))
        second = _job("prepared", root / "data", WORKERS, EPOCHS, daemon.env)
        in_process = _job("prepared", root / "data", 0, EPOCHS, daemon.env)
    cpu_part = in_process["cpu_s"] / images / EPOCHS / pillow_cpu_s
    rate = _rate(in_process)
    return [
        _row("first job, which prepares", _rate(first), beside, "Pillow beside it", 1 / FIRST_EPOCH),
        _row("second job from RAM, two workers", _rate(second), pillow, "Pillow", FROM_RAM),
        _row("second job from RAM, in the trainer", rate, pillow, "Pillow"),
        (
            "its CPU for a sample",
            "",
            f"{cpu_part:.1%}",
            "Pillow",
            f"<= {CPU_PART:.0%}",
            "yes" if cpu_part <= CPU_PART else "NO",
        ),
    ]


def _on_nvme(root: Path, images: int) -> list[tuple[str, ...]]:
    """Read prepared pictures of a node that has RAM for hardly any, beside fio over the same files."""
    tier, room = root / "tier", images * IMAGE_BYTES * 5 // 4 + (1 << 30)
    tier.mkdir()
    options = ["--ram", "1MiB", "--nvme", f"{tier}={room}", "--allow", f"{root}/"]
    rates: dict[int, list[float]] = {0: [], WORKERS: []}
    limits: list[float] = []
    with Daemon(root / "nvme", options) as daemon:
        _job("prepared", root / "data", WORKERS, 1, daemon.env)
        extents = [path for path in tier.glob("**/extents/**/*") if path.is_file()]
        sequential = fio.sequential(extents)
        if sequential is None:
            return [("from NVMe: fio is not installed",)]
        for _ in range(NVME_RUNS):
            drop_page_cache(extents)
            limits.append(sequential() / IMAGE_BYTES)
            for workers, found in rates.items():
                drop_page_cache(extents)
                found.append(_rate(_job("prepared", root / "data", workers, 1, daemon.env)))
    limit = statistics.median(limits)
    return [
        _row(f"second job from NVMe, {how}", statistics.median(rates[workers]), limit, "fio", asked)
        for workers, how, asked in ((0, "in the trainer", OF_FIO), (WORKERS, "two workers", 0.0))
    ]


def _together(root: Path, images: int) -> list[tuple[str, ...]]:
    """Time two jobs that start together, with and without preparing, and count how often they prepare a picture."""
    called, took = root / "calls", dict[str, float]()
    for way in ("prepared", "plain"):
        room = f"{images * IMAGE_BYTES * 5 // 4 + (512 << 20)}"
        with Daemon(root / f"two-{way}", ["--ram", room, "--allow", f"{root}/"]) as daemon:
            environment = daemon.env | ({"CALLS": str(called)} if way == "prepared" else {})
            jobs = [_started(way, root / "data", WORKERS, 1, environment) for _ in range(2)]
            found = [_ended(job) for job in jobs]
            took[way] = max(job["ended"] for job in found) - min(job["begun"] for job in found)
    calls = called.stat().st_size / images
    called.unlink()
    part = took["prepared"] / took["plain"]
    met = "yes" if part <= TOGETHER else "NO"
    rate = f"{2 * images / took['prepared']:,.0f}"
    return [
        ("two jobs together, time", rate, f"{part:.2f}", "two that decode", f"<= {TOGETHER}", met),
        ("how often they prepared a picture", "", f"{calls:.3f}", "once each", "", ""),
    ]


def _others(root: Path, images: int, pillow: float) -> list[tuple[str, ...]]:
    rows = [
        _row(
            "torch's DataLoader, two workers",
            _rate(_job("torch", root / "data", WORKERS, 1)),
            pillow,
            "Pillow",
        )
    ]
    for way, name in (("streaming", "MosaicML Streaming, two workers"), ("ffcv", "FFCV, two threads")):
        written = root / way
        written.mkdir()
        try:
            _run(PEERS_PYTHON, f"{way}-write", str(root / "data"), str(written))
            job = _job(way, written, WORKERS, EPOCHS, python=PEERS_PYTHON)
        except (OSError, subprocess.CalledProcessError):
            rows.append((name, "does not run here"))
            continue
        rows.append(_row(name, _rate(job), pillow, "Pillow"))
    return rows


def _row(name: str, rate: float, limit: float, to: str, asked: float = 0.0) -> tuple[str, ...]:
    met = ("yes" if rate >= asked * limit else "NO") if asked else ""
    return name, f"{rate:,.0f}", f"{rate / limit:.2f}", to, f">= {asked:.2f}" if asked else "", met


def _rate(job: Job) -> float:
    return job["samples"] / (job["ended"] - job["begun"])


def _started(
    way: str,
    folder: Path,
    workers: int,
    epochs: int,
    environment: dict[str, str],
    python: str = sys.executable,
) -> subprocess.Popen[str]:
    command = [python, "-m", "bench.prepared_jobs", way, str(folder), str(workers), str(epochs)]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", **environment}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def _ended(job: subprocess.Popen[str]) -> Job:
    out, _ = job.communicate()
    if job.returncode:
        raise subprocess.CalledProcessError(job.returncode, job.args)
    found: Job = json.loads(out.splitlines()[-1])
    return found


def _job(
    way: str,
    folder: Path,
    workers: int,
    epochs: int,
    environment: dict[str, str] | None = None,
    python: str = sys.executable,
) -> Job:
    """Run a job in a process of its own; return when its epochs began and ended, their CPU and samples."""
    return _ended(_started(way, folder, workers, epochs, environment or {}, python))


def _run(python: str, *arguments: str) -> None:
    command = [python, "-m", "bench.prepared_jobs", *arguments]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True, cwd=ROOT)
