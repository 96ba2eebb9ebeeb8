"""`make soak`: many readers for a long time; the daemon's resources must not grow.

    python -m bench.soak SECONDS [READERS]

Readers connect, take random extents, and release them or just disconnect; the main thread plans, asks for status
and evicts. RAM and NVMe together hold half of the data, so fills and evictions never end. The first third warms up.
Over the rest the daemon's memory must always stay within 5 %, its descriptors and threads and its fillers' memory
must end as they began, and its memfds must not exceed the extents of the RAM tier and a few more.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from cachesvc.catalog.options import Options
from cachesvc.client.control import Control
from cachesvc.client.grants import DaemonGrants
from cachesvc.client.protocol import Granted
from cachesvc.core.errors import CacheError
from cachesvc.core.model import DatasetId
from cachesvc.core.order.epoch_order import Plan
from testbed.held import Held, held
from testbed.node import Daemon

EXTENT = 256 << 10
EXTENTS = 256
GROWTH = 0.05
SAMPLES = 60
MOST_MEMFDS = EXTENTS // 4 + 16
"""Extents in the RAM tier, plus running fills and catalogs."""
RECONNECT = 0.02
"""Share of the steps after which a reader reconnects, half of the time without releasing anything."""


class Readers:
    """Threads that read until `stop`, each with its own connection."""

    def __init__(self, directory: str, dataset: DatasetId, count: int) -> None:
        self._directory, self._dataset = directory, dataset
        self._ended = threading.Event()
        self.reads = self.reconnects = 0
        self.errors: list[str] = []
        """Each error ended its reader."""
        self._threads = [threading.Thread(target=self._run, args=(seed,)) for seed in range(count)]

    def start(self) -> None:
        """Start reading."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End every reader and its connection."""
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _run(self, seed: int) -> None:
        draw = random.Random(seed)
        while not self._ended.is_set():
            grants = DaemonGrants(self._directory, self._dataset)
            try:
                while not self._ended.is_set() and draw.random() >= RECONNECT:
                    self._step(draw, grants)
                self._step(draw, grants, releases=draw.random() < 0.5)
            except CacheError as error:
                self.errors.append(str(error))
                return
            finally:
                grants.close()
            self.reconnects += 1

    def _step(self, draw: random.Random, grants: DaemonGrants, releases: bool = True) -> None:
        wanted = draw.sample(range(EXTENTS), draw.randint(1, 4))
        answers = [answer for answer in grants.acquire(wanted, 60.0) if isinstance(answer, Granted)]
        for answer in answers:
            assert os.pread(answer.fd, 2, 0) == answer.extent.to_bytes(2, "little")
            os.close(answer.fd)
        self.reads += len(answers)
        if releases:
            grants.release([answer.extent for answer in answers])


def soak(root: Path, seconds: float, readers: int) -> tuple[Table, bool]:
    """Run, and judge by the last two thirds of the run; return the table and whether it passed."""
    data, nvme = root / "data", root / "nvme"
    for folder in (data, nvme):
        folder.mkdir()
    with open(data / "0.bin", "wb") as file:
        for extent in range(EXTENTS):
            file.write(extent.to_bytes(2, "little").ljust(EXTENT, b"\0"))
    half = EXTENT * EXTENTS // 4
    options = ["--ram", str(half), "--nvme", f"{nvme}={half}", "--extent-bytes", str(EXTENT)]
    with Daemon(root / "node", [*options, "--allow", str(data), "--fillers", "2"]) as daemon:
        assert daemon.process is not None
        with Control(daemon.socket_dir) as control:
            wanted = Options(format="records", record_bytes=4096)
            dataset = control.open_dataset([str(data)], wanted).id
            crowd = Readers(daemon.socket_dir, dataset, readers)
            crowd.start()
            try:
                points = _watch(control, dataset, daemon.process.pid, seconds)
            finally:
                crowd.stop()
            end = held(daemon.process.pid)
    return _judged(points[len(points) // 3 :], end, crowd)


def _watch(control: Control, dataset: DatasetId, pid: int, seconds: float) -> list[Held]:
    points = []
    for _ in range(SAMPLES):
        time.sleep(seconds / SAMPLES)
        steps = np.arange(EXTENTS)
        control.status()
        control.evict(dataset)
        planning = DaemonGrants(control.directory, dataset)
        planning.submit(Plan(steps, steps, steps))
        planning.close()
        points.append(held(pid))
    return points


def _judged(found: Sequence[Held], end: Held, crowd: Readers) -> tuple[Table, bool]:
    table = Table("held by the daemon", "first", "last", "least", "most", "at the end", "asked", "met")
    good = True
    for name in Held.__slots__:
        values = [getattr(each, name) for each in found]
        first, last = (sorted(part)[len(part) // 2] for part in (values[:10], values[-10:]))
        if name == "memfds":  # one per extent in the RAM tier, so the number varies
            asked, met = f"at most {MOST_MEMFDS}", max(values) <= MOST_MEMFDS
        elif name == "rss_kb":
            middle = sorted(values)[len(values) // 2]
            asked, met = "all +- 5 %", max(abs(each - middle) for each in values) <= GROWTH * middle
        else:
            asked, met = "last = first +- 5 %", abs(last - first) <= max(GROWTH * first, 2)
        good = good and met
        row = (first, last, min(values), max(values), getattr(end, name))
        table.add_row(name, *(f"{value:,}" for value in row), asked, "yes" if met else "NO")
    said = f"{len(crowd.errors)} errors {crowd.errors[:1]}" if crowd.errors else "no error"
    table.caption = f"{crowd.reads:,} reads, {crowd.reconnects:,} reconnects, {said}\nrss_kb one by one: "
    table.caption += " ".join(f"{each.rss_kb:,}" for each in found)
    return table, good and not crowd.errors


def main() -> int:
    """Print the table; return 1 when something grew."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 1800.0
    readers = int(sys.argv[2]) if len(sys.argv) > 2 else 64
    with tempfile.TemporaryDirectory() as folder:
        table, good = soak(Path(folder), seconds, readers)
    Console(width=140).print(f"{seconds:.0f} s, {readers} readers", table)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
