"""Latency of a grant while fills run at full rate: one reader repeatedly asks for a resident extent.

Between grants the reader asks a bare echo process for a descriptor. The echo is the limit: the cost of two
processes and a socket on the same cores, beside the same fillers and S3 server.
"""

from __future__ import annotations

import array
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO

import numpy as np

from cachesvc.catalog.options import Options
from cachesvc.client.control import Control
from cachesvc.client.grants import DaemonGrants
from cachesvc.client.protocol import Granted
from cachesvc.core.model import DatasetId
from testbed.memory import settle

SAMPLES = 4_000
"""Least number of timed grants. With 1,000, ten grants decide the 99th percentile, and one stall of the machine
can hold them all."""
PAUSE_S = 0.0002

_ECHO = """
import array, os, socket, sys
channel = socket.socket(fileno=int(sys.argv[1]))
file = array.array("i", [os.open("/dev/null", os.O_RDONLY)])
while channel.recv(64):
    channel.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, file)])
"""

_FILL = """
import sys
from cachesvc.client.control import Control
with Control(sys.argv[1]) as control:
    for dataset in sys.stdin:
        replies = iter(control.prefetch(dataset.strip()))
        next(reply for reply in replies if reply.resident_extents)
        print("filling", flush=True)
        for _ in replies:
            pass
        print("filled", flush=True)
"""


@dataclass
class Latency:
    """Times of all grants and echoes, in seconds."""

    grants: list[float] = field(default_factory=list)
    echoes: list[float] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """True when the median is under 100 us and the 99th percentile under 1 ms."""
        return _at(self.grants, 0.5) < 100e-6 and _at(self.grants, 0.99) < 1e-3

    def rows(self, filled_from: str) -> list[tuple[str, ...]]:
        """Table rows: the grants, and the echo as their limit."""
        grants = f"one extent, granted and released; fills from {filled_from}"
        named = {grants: self.grants, "the limit: a bare echo": self.echoes}
        met = ("yes" if self.good else "NO", "")
        asked = ("< 100 us, < 1,000 us", "")
        return [
            (name, f"{_at(t, 0.5) * 1e6:.0f} us", f"{_at(t, 0.99) * 1e6:.0f} us", f"{len(t):,}", a, m)
            for (name, t), a, m in zip(named.items(), asked, met)
        ]


def measure(socket_dir: str, resident_uri: str, cold_uri: str, options: Options) -> Latency:
    """Time grants of one resident extent while the cold dataset is filled, evicted and filled again."""
    latency = Latency()
    with Control(socket_dir) as control, _echo() as echo, _filler(socket_dir) as filler:
        warm = control.open_dataset([resident_uri], options)
        for _ in control.prefetch(warm.id):
            pass
        cold = control.open_dataset([cold_uri], options)
        grants = DaemonGrants(socket_dir, warm.id)
        while len(latency.grants) < SAMPLES:
            _while_filling(filler, cold.id, grants, echo, latency)
            control.evict(cold.id)
        grants.close()
    return latency


def _while_filling(
    filler: subprocess.Popen[bytes],
    cold: DatasetId,
    grants: DaemonGrants,
    echo: socket.socket,
    found: Latency,
) -> None:
    assert filler.stdin is not None
    assert filler.stdout is not None
    settle()
    filler.stdin.write(f"{cold}\n".encode())
    _expect(filler.stdout, "filling")
    while not select.select([filler.stdout], [], [], 0)[0]:
        started = time.perf_counter()
        (answer,) = grants.acquire([0], 5.0)
        found.grants.append(time.perf_counter() - started)
        assert isinstance(answer, Granted)
        os.close(answer.fd)
        grants.release([0])
        time.sleep(PAUSE_S)  # a real reader asks now and then and does not compete for the core
        found.echoes.append(_ask(echo))
        time.sleep(PAUSE_S)
    _expect(filler.stdout, "filled")


def _expect(lines: IO[bytes], wanted: str) -> None:
    if (said := lines.readline().decode().strip()) != wanted:
        raise RuntimeError(f"the prefetching process printed {said!r} instead of {wanted!r}")


@contextmanager
def _filler(socket_dir: str) -> Iterator[subprocess.Popen[bytes]]:
    """A separate process that prefetches, as another job would: in this process it would share one interpreter with
    the reader. Its output is unbuffered, because `select` does not see lines that were read ahead."""
    command = [sys.executable, "-c", _FILL, socket_dir]
    with subprocess.Popen(command, 0, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process


@contextmanager
def _echo() -> Iterator[socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        command = [sys.executable, "-c", _ECHO, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=(theirs.fileno(),))
        theirs.close()
        yield ours
        ours.close()
        process.wait()


def _ask(echo: socket.socket) -> float:
    started = time.perf_counter()
    echo.send(b"x" * 32)
    _, ancillary, _, _ = echo.recvmsg(64, socket.CMSG_SPACE(4))
    took = time.perf_counter() - started
    for fd in array.array("i", ancillary[0][2]):
        os.close(fd)
    return took


def _at(times: list[float], share: float) -> float:
    return float(np.quantile(times, share))
