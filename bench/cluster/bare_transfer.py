"""A bare transfer: `sendfile` from a memfd, `recv_into` a fresh memfd in huge pages, and XXH3 of 64 KiB each.

python -m bench.cluster.bare_transfer serve HOST BYTES      # prints its port, sends to one client
python -m bench.cluster.bare_transfer read HOST PORT BYTES  # prints the bytes/s
"""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import time

from xxhash import xxh3_64_intdigest

from cachesvc.tiers.huge_pages import use_huge_pages
from testbed import ROOT, WAIT_S
from testbed.cluster import Cluster, Node

EXTENT_BYTES = 64 << 20
DIGESTED_BYTES = 64 << 10


def bare_rate(cluster: Cluster, size_bytes: int) -> float:
    """Bytes/s from the first node's place to the second node's."""
    first, second = cluster.nodes[:2]
    host = first.address.rsplit(":", 1)[0]
    with _start(first, "serve", host, str(size_bytes)) as serving:
        assert serving.stdout is not None
        port = serving.stdout.readline().strip()
        with _start(second, "read", host, port, str(size_bytes)) as reading:
            try:
                told, _ = reading.communicate(timeout=WAIT_S)
            finally:
                reading.kill()
                serving.kill()
    return float(told)


def _start(node: Node, *words: str) -> subprocess.Popen[str]:
    command = node.beside([sys.executable, "-m", "bench.cluster.bare_transfer", *words])
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def serve(host: str, size_bytes: int) -> None:
    """Send an extent again and again to one client, up to `size_bytes`."""
    extent = os.memfd_create("extent")
    os.truncate(extent, EXTENT_BYTES)
    os.pwrite(extent, os.urandom(EXTENT_BYTES), 0)
    with socket.create_server((host, 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        client, _ = listener.accept()
        with client:
            for _ in range(size_bytes // EXTENT_BYTES):
                sent = 0
                while sent < EXTENT_BYTES:
                    sent += os.sendfile(client.fileno(), extent, sent, EXTENT_BYTES - sent)


def read(host: str, port: int, size_bytes: int) -> float:
    """Receive extents into fresh memfds and digest them; return bytes/s."""
    with socket.create_connection((host, port), WAIT_S) as server:
        server.settimeout(None)  # MSG_WAITALL needs a blocking socket
        began = time.monotonic()
        for _ in range(size_bytes // EXTENT_BYTES):
            _receive(server)
        return size_bytes / (time.monotonic() - began)


def _receive(server: socket.socket) -> None:
    fd = os.memfd_create("received")
    try:
        os.truncate(fd, EXTENT_BYTES)
        use_huge_pages(fd, EXTENT_BYTES)
        with mmap.mmap(fd, EXTENT_BYTES) as mapped, memoryview(mapped) as into:
            for at in range(0, EXTENT_BYTES, DIGESTED_BYTES):
                part = into[at : at + DIGESTED_BYTES]
                got = server.recv_into(part, DIGESTED_BYTES, socket.MSG_WAITALL)
                assert got == DIGESTED_BYTES
                xxh3_64_intdigest(part)
                part.release()
    finally:
        os.close(fd)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], int(sys.argv[3]))
    else:
        print(read(sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
