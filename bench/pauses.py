"""Longest pause of a reader while the node's daemon is killed, and while it is upgraded, with all data in RAM.

A thread leases and releases extents in random order through `DaemonGrants`, as loaders do, each lease timed. Meanwhile
the daemon is killed, or replaced by `serve --takeover`. No extent may be fetched again.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cachesvc.catalog.options import Options
from cachesvc.client.control import Control
from cachesvc.client.failover import FailoverGrants
from cachesvc.client.grants import DaemonGrants
from cachesvc.client.protocol import Granted
from cachesvc.core.model import DatasetId
from testbed import WAIT_S
from testbed.node import Daemon

ASKED_S = 2.0
"""The longest pause that is promised."""
EVENTS = 3
"""Kills and upgrades of one row."""
CALM_S = 1.0
SHAPES = ((10_000, 128 << 10), (128, 64 << 20))
"""Numbers of extents, and their bytes. Extents of up to 64 KiB end with their daemon."""
RECORD = 4096


@dataclass(frozen=True, slots=True)
class Row:
    """The reader's pause and fetches under one kind of event."""

    extents: int
    extent_bytes: int
    event: str
    longest_s: float
    leases: int
    fetched_bytes: int

    @property
    def met(self) -> bool:
        """True when the pause was short and nothing was fetched again."""
        return self.longest_s <= ASKED_S and not self.fetched_bytes

    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        data = f"{self.extents:,} of {self.extent_bytes >> 10:,} KiB"
        times = f"{self.longest_s:.2f} s", f"<= {ASKED_S:.0f} s"
        return (
            data,
            self.event,
            *times,
            f"{self.leases:,}",
            f"{self.fetched_bytes:,}",
            "yes" if self.met else "NO",
        )


def measure(root: Path) -> list[Row]:
    """Measure all shapes. Each source is one sparse file."""
    rows = []
    for extents, extent_bytes in SHAPES:
        data = root / f"pauses-{extents}" / "records.bin"
        data.parent.mkdir()
        data.touch()
        os.truncate(data, extents * extent_bytes)
        room = extents * extent_bytes + (64 << 20)
        flags = ["--ram", str(room), "--allow", f"{data.parent}/", "--extent-bytes", str(extent_bytes)]
        with Daemon(root / f"pauses-node-{extents}", flags) as daemon:
            dataset = _filled(daemon, data)
            kinds: dict[str, Callable[[], None]] = {"killed": daemon.crash, "upgraded": daemon.take_over}
            rows += [_measured(daemon, dataset, extents, extent_bytes, *kind) for kind in kinds.items()]
    return rows


def _filled(daemon: Daemon, data: Path) -> DatasetId:
    with Control(daemon.socket_dir) as control:
        found = control.open_dataset([str(data.parent)], Options(format="records", record_bytes=RECORD)).id
        for _ in control.prefetch(found):
            pass
    return found


def _measured(
    daemon: Daemon, dataset: DatasetId, extents: int, extent_bytes: int, event: str, cause: Callable[[], None]
) -> Row:
    fetched_bytes, ended = 0, threading.Event()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(_read, daemon.socket_dir, dataset, extents, ended)
        try:
            time.sleep(CALM_S)
            for _ in range(EVENTS):
                first = daemon.pid
                cause()
                while daemon.children()[:1] in ([], [first]) or not daemon.ready():
                    time.sleep(0.01)
                time.sleep(CALM_S)
                fetched_bytes += _fetched(daemon)
        finally:
            ended.set()
        longest_s, leases = reading.result()
    return Row(extents, extent_bytes, event, longest_s, leases, fetched_bytes)


def _read(directory: str, dataset: DatasetId, extents: int, ended: threading.Event) -> tuple[float, int]:
    """Lease random extents; return the longest time of one lease, and their number."""
    grants = FailoverGrants(DaemonGrants(directory, dataset), None)
    draw, longest_s, leases = random.Random(1), 0.0, 0
    while not ended.is_set():
        wanted = draw.randrange(extents)
        began = time.perf_counter()
        (answer,) = grants.acquire([wanted], WAIT_S)
        longest_s = max(longest_s, time.perf_counter() - began)
        assert isinstance(answer, Granted), answer
        os.close(answer.fd)
        grants.release([wanted])
        leases += 1
    grants.close()
    return longest_s, leases


def _fetched(daemon: Daemon) -> int:
    """Bytes that the running daemon has fetched since its start."""
    with Control(daemon.socket_dir) as control:
        return sum(row.source_bytes for row in control.list())
