"""Extents from one node to another, against a bare loop of sendfile and recv_into over the same link.

Each node is a process. They talk over loopback, and as root over a veth pair between two network namespaces as well. Both
loops receive into a fresh memfd that is mapped by huge pages, and compute the xxh3 of every 64 KiB. With a plain mapping,
page by page, the bare loop is slower than ours. Ours also makes requests and frames, compares the digests, marks blocks
for further peers and compares the digest of digests.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import trustme

from cachesvc.config import Tls
from cachesvc.core.model import ExtentId
from cachesvc.core.placement.place_search import Patience
from cachesvc.daemon.blocks.client import BlockClient
from cachesvc.daemon.blocks.replies import Lent
from cachesvc.daemon.blocks.server import BlockServer
from cachesvc.system.buffers import Buffers
from cachesvc.system.fill_target import CACHED_BYTES, open_target
from cachesvc.system.huge_pages import use_huge_pages
from cachesvc.tiers.checksum import StreamedChecksums, block_digest
from cachesvc.tiers.fill_progress import FillProgress
from cachesvc.tiers.ram import RamTier
from cachesvc.tiers.tier import CHECKSUM_BLOCK_BYTES

EXTENT_BYTES = 64 << 20
EXTENTS = 16
RUNS = 7
ASKED = 0.8
PORT = 7471
NAME = "peers.cachesvc.bench"
SERVER, READER = "198.18.255.1", "198.18.255.2"
"""Addresses for benchmarks of networks (RFC 2544)."""


@dataclass(frozen=True)
class Rates:
    """Bytes per second of alternating runs over one link."""

    link: str
    ours: list[float]
    tls: list[float]
    bare: list[float]

    @property
    def ratio(self) -> float:
        """Median of the ratios of paired runs."""
        return statistics.median(a / b for a, b in zip(self.ours, self.bare))

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Cells of the table rows: without TLS, which has a goal, and with it."""
        for name, rates in ((self.link, self.ours), (f"{self.link}, TLS", self.tls)):
            ratios = [a / b for a, b in zip(rates, self.bare)]
            yield (
                name,
                f"{statistics.median(rates) / 1e9:.2f} GB/s",
                f"{statistics.median(self.bare) / 1e9:.2f} GB/s",
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
                f">= {ASKED:.2f}" if rates is self.ours else "",
                "" if rates is self.tls else "yes" if self.ratio >= ASKED else "NO",
            )


def measure(root: Path) -> list[Rates]:
    """Measure each link that this process may make. `root`: an empty folder for certificates."""
    ca = trustme.CA()
    issued = ca.issue_cert(NAME)
    ca.cert_pem.write_to_path(str(root / "ca.pem"))
    issued.private_key_pem.write_to_path(str(root / "key.pem"))
    issued.cert_chain_pems[0].write_to_path(str(root / "cert.pem"))
    results = [_measure("loopback", root, "127.0.0.1", [], [])]
    if os.geteuid() == 0:
        with _veth() as (server, reader):
            inside = [["ip", "netns", "exec", name] for name in (server, reader)]
            results.append(_measure("a veth pair", root, SERVER, *inside))
    return results


def _measure(link: str, root: Path, host: str, server: list[str], reader: list[str]) -> Rates:
    command = [sys.executable, "-m", "bench.transfer"]
    serving = [*server, *command, "serve", host, str(root)]
    with subprocess.Popen(serving, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        said = subprocess.run(
            [*reader, *command, "read", host, str(root)], stdout=subprocess.PIPE, check=True
        )
        assert process.stdin is not None
        process.stdin.close()
    return Rates(link, **json.loads(said.stdout))


@contextmanager
def _veth() -> Iterator[tuple[str, str]]:
    """Two network namespaces that are joined by a veth pair."""

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    names = (f"csbench{os.getpid()}a", f"csbench{os.getpid()}b")
    with ExitStack() as stack:
        for name in names:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "delete", name)
        ip(
            "link",
            "add",
            "eth0",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            names[1],
        )
        for name, address in zip(names, (SERVER, READER)):
            ip("-n", name, "address", "add", f"{address}/30", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        yield names


def _files(root: str) -> Tls:
    return Tls(*(os.path.join(root, name) for name in ("cert.pem", "key.pem", "ca.pem")))


def serve(host: str, root: str) -> None:
    """Serve the extents by our server, by ours with TLS, and by the bare one, until standard input ends."""
    tier, rng = RamTier(), np.random.default_rng(1)
    lent: dict[ExtentId, Lent] = {}
    for extent in _extents():
        fd = tier.reserve(extent, EXTENT_BYTES)
        use_huge_pages(fd, EXTENT_BYTES)
        os.pwrite(fd, rng.bytes(EXTENT_BYTES), 0)
        lent[extent] = Lent(fd, EXTENT_BYTES, StreamedChecksums(EXTENT_BYTES).checksums(fd).digests)

    @contextmanager
    def lend(extent: ExtentId) -> Iterator[Lent]:
        yield lent[extent]

    for port, tls in ((PORT, None), (PORT + 1, _files(root))):
        server = BlockServer(lend, tls)
        server.listen(f"{host}:{port}")
        threading.Thread(target=server.serve, daemon=True).start()
    bare = socket.create_server((host, PORT + 2))
    threading.Thread(
        target=_serve_bare, args=(bare, [each.fd for each in lent.values()]), daemon=True
    ).start()
    print("listening", flush=True)
    sys.stdin.read()


def _serve_bare(listener: socket.socket, fds: list[int]) -> None:
    while True:
        connection, _ = listener.accept()
        with connection:
            for fd in fds:
                offset = 0
                while offset < EXTENT_BYTES:
                    offset += os.sendfile(connection.fileno(), fd, offset, EXTENT_BYTES - offset)


def read(host: str, root: str) -> dict[str, list[float]]:
    """Alternate runs over all extents; return the rates of each loop."""
    with ExitStack() as stack:
        plain, with_tls = BlockClient(), BlockClient(_files(root), NAME)
        for client in (plain, with_tls):
            stack.callback(client.close)
        loops: dict[str, Callable[[], None]] = {
            "ours": lambda: _read_ours(plain, f"{host}:{PORT}"),
            "tls": lambda: _read_ours(with_tls, f"{host}:{PORT + 1}"),
            "bare": lambda: _read_bare(host),
        }
        rates: dict[str, list[float]] = {name: [] for name in loops}
        for run in range(RUNS + 1):
            for name, loop in loops.items():
                started = time.perf_counter()
                loop()
                if run:  # the first of each warms up
                    rates[name].append(EXTENTS * EXTENT_BYTES / (time.perf_counter() - started))
    return rates


def _read_ours(client: BlockClient, address: str) -> None:
    for extent, fd in _targets():
        at = FillProgress.create(EXTENT_BYTES)
        progress = FillProgress(at, EXTENT_BYTES)
        os.close(at)
        client.read(address, extent, EXTENT_BYTES, fd, progress, Patience())
        progress.finish()
        progress.close()


def _read_bare(host: str) -> None:
    with socket.create_connection((host, PORT + 2)) as connection:
        for _, fd in _targets():
            with open_target(fd, EXTENT_BYTES, Buffers(CACHED_BYTES)) as target:
                for at in range(0, EXTENT_BYTES, CACHED_BYTES):
                    with target.room(at, CACHED_BYTES) as view:
                        got = connection.recv_into(view, 0, socket.MSG_WAITALL)
                        assert got == CACHED_BYTES
                        for begin in range(0, got, CHECKSUM_BLOCK_BYTES):
                            block_digest(view[begin : begin + CHECKSUM_BLOCK_BYTES])


def _targets() -> Iterator[tuple[ExtentId, int]]:
    """A fresh memfd of huge pages for each extent, as fillers get it."""
    tier = RamTier()
    for extent in _extents():
        fd = tier.reserve(extent, EXTENT_BYTES)
        yield extent, fd
        os.close(fd)
        tier.abort(extent)


def _extents() -> Iterator[ExtentId]:
    for number in range(EXTENTS):
        yield ExtentId(number.to_bytes(16, "little"))


if __name__ == "__main__":
    role, *given = sys.argv[1:]
    if role == "serve":
        serve(*given)
    else:
        print(json.dumps(read(*given)))
