"""`python -m bench.endpoint`: the S3 endpoint, warm in the RAM tier, beside SeaweedFS, which is its source.

One process of several threads is the client of both. Its requests are signed beforehand.
"""

from __future__ import annotations

import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import psutil
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from cachesvc.core.errors import DaemonUnavailable
from cachesvc.gateway.s3.keys import ask_for_keys
from cachesvc.system.deadline import Deadline
from testbed import WAIT_S
from testbed.node import Daemon
from testbed.servers import SeaweedFS, free_ports

LARGE_BYTES, RANGE_BYTES = 256 << 20, 8 << 20
SMALL, SMALL_BYTES = 1000, 100_000
CONNECTIONS = 8
SECONDS, RUNS = 3.0, 5
GETS_A_CORE = 1500
"""What is asked of one core of the endpoint. Latency is measured at half of it."""


@dataclass(frozen=True)
class Server:
    """A server with its requests, and the processes whose CPU time is its own."""

    address: tuple[str, int]
    ranges: list[bytes]
    objects: list[bytes]
    pids: tuple[int, ...]

    def cpu_s(self) -> float:
        """CPU seconds that it has used."""
        return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in self.pids)


def server(keys: Mapping[str, Any], bucket: str, pids: tuple[int, ...]) -> Server:
    """Sign the requests that a bench repeats, which are good for a quarter of an hour."""
    endpoint = urlsplit(keys["Endpoint"])
    given = Credentials(keys["AccessKeyId"], keys["SecretAccessKey"], keys.get("SessionToken"))

    def signed(key: str, **headers: str) -> bytes:
        request = AWSRequest("GET", f"{keys['Endpoint']}/{bucket}/{key}", headers=headers)
        S3SigV4Auth(given, "s3", "us-east-1").add_auth(request)
        lines = [f"GET /{bucket}/{key} HTTP/1.1", f"Host: {endpoint.netloc}"]
        return "\r\n".join(
            [*lines, *(f"{name}: {text}" for name, text in request.headers.items()), "", ""]
        ).encode()

    places = range(0, LARGE_BYTES, RANGE_BYTES)
    ranges = [signed("large", Range=f"bytes={at}-{at + RANGE_BYTES - 1}") for at in places]
    objects = [signed(f"small/{n}") for n in range(SMALL)]
    assert endpoint.hostname is not None
    assert endpoint.port is not None
    return Server((endpoint.hostname, endpoint.port), ranges, objects, pids)


class Connection:
    """A connection that is kept."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._socket = socket.create_connection(address)
        self._buffer = memoryview(bytearray(RANGE_BYTES + (64 << 10)))

    def get(self, request: bytes, size_bytes: int) -> None:
        """Send a request, and read its answer, whose body has this size."""
        self._socket.sendall(request)
        got = self._socket.recv_into(self._buffer)
        while (end := bytes(self._buffer[: min(got, 4096)]).find(b"\r\n\r\n")) < 0:
            got += self._socket.recv_into(self._buffer[got:])
        assert bytes(self._buffer[9:11]) == b"20", bytes(self._buffer[:got])
        left = end + 4 + size_bytes - got
        assert left >= 0, "an answer of another size"
        while left:
            left -= self._socket.recv_into(self._buffer, left, socket.MSG_WAITALL)

    def close(self) -> None:
        """End it."""
        self._socket.close()


def at_full_rate(to: Server, requests: Sequence[bytes], size_bytes: int) -> tuple[float, float]:
    """Repeat requests on all connections; return answers a second, and answers a CPU second of the server."""
    numbers = count()

    def work(connection: Connection) -> int:
        done = 0
        while time.perf_counter() < ends_at:
            connection.get(requests[next(numbers) % len(requests)], size_bytes)
            done += 1
        return done

    before, began = to.cpu_s(), time.perf_counter()
    ends_at = began + SECONDS
    done = sum(_on_all(to, work))
    took_s, cpu_s = time.perf_counter() - began, to.cpu_s() - before
    return done / took_s, done / cpu_s


def latencies_ms(to: Server, requests: Sequence[bytes], size_bytes: int, rate: float) -> list[float]:
    """Send requests at a steady rate; return the time of each, from when it was due until its last byte."""
    numbers = count()

    def work(connection: Connection) -> list[float]:
        took = []
        while (number := next(numbers)) < rate * SECONDS:
            due = began + number / rate
            time.sleep(max(0.0, due - time.perf_counter()))
            connection.get(requests[number % len(requests)], size_bytes)
            took.append((time.perf_counter() - due) * 1e3)
        return took

    began = time.perf_counter() + 0.1
    return [each for found in _on_all(to, work) for each in found]


def _on_all(to: Server, work: Callable[[Connection], Any]) -> list[Any]:
    connections = [Connection(to.address) for _ in range(CONNECTIONS)]
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        found = list(pool.map(work, connections))
    for each in connections:
        each.close()
    return found


def measured(to: Server) -> dict[str, float]:
    """Measure a server once."""
    ranges, range_rate = at_full_rate(to, to.ranges, RANGE_BYTES)
    objects, object_rate = at_full_rate(to, to.objects, SMALL_BYTES)
    took = latencies_ms(to, to.objects, SMALL_BYTES, GETS_A_CORE / 2)
    p50, p99 = np.percentile(took, [50, 99])
    return {
        "ranges of 8 MiB, GB/s": ranges * RANGE_BYTES / 1e9,
        "the same, GB a CPU second": range_rate * RANGE_BYTES / 1e9,
        "objects of 100 KB, GETs/s": objects,
        "the same, GETs a CPU second": object_rate,
        f"{GETS_A_CORE // 2} GETs/s: p50, ms": float(p50),
        f"{GETS_A_CORE // 2} GETs/s: p99, ms": float(p99),
    }


def main() -> None:
    """Print the medians of each server, measured in turn, and their ranges."""
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory() as folder, SeaweedFS(Path(folder) / "s3") as s3:
        bucket = s3.create_bucket("bench")
        own = {"Endpoint": s3.endpoint, "AccessKeyId": s3.access_key, "SecretAccessKey": s3.secret_key}
        client = s3.client()
        client.put_object(Bucket=bucket, Key="large", Body=os.urandom(LARGE_BYTES))
        for number in range(SMALL):
            client.put_object(Bucket=bucket, Key=f"small/{number}", Body=os.urandom(SMALL_BYTES))
        options = ["--ram", "768MiB", "--allow", f"s3://{bucket}/"]
        options += ["--s3", f"127.0.0.1:{port}", "--s3-fresh", "600s"]
        with Daemon(Path(folder) / "node", options, s3.env()) as daemon:
            keys = endpoint_keys(daemon)
            weed = [each.pid for each in psutil.Process().children() if each.name().startswith("weed")]
            of_node = [int(pid) for pid in daemon.children()]
            endpoint = next(pid for pid in of_node if "cachesvc.gateway.s3" in psutil.Process(pid).cmdline())
            servers = {
                "endpoint": server(keys, bucket, (endpoint,)),
                "SeaweedFS": server(own, bucket, tuple(weed)),
            }
            for each in servers.values():
                measured(each)  # warm
            runs = [{name: measured(each) for name, each in servers.items()} for _ in range(RUNS)]
    print(f"load of the machine before: {os.getloadavg()[2]:.1f} (15 minutes)")
    for figure in runs[0]["endpoint"]:
        print(f"{figure:32}", *(_row(name, [run[name][figure] for run in runs]) for name in servers))


def _row(name: str, figures: list[float]) -> str:
    return f"  {name} {statistics.median(figures):9,.2f} ({min(figures):,.2f} to {max(figures):,.2f})"


def endpoint_keys(daemon: Daemon) -> dict[str, Any]:
    """Return the endpoint's address and this user's keys, once it answers."""
    deadline = Deadline(WAIT_S)
    while True:
        try:
            return ask_for_keys(daemon.socket_dir)
        except DaemonUnavailable:
            if not deadline.pause(0.1):
                raise


if __name__ == "__main__":
    main()
