"""Nodes that give each other blocks of one extent: copies in every state, and servers that lend them."""

from __future__ import annotations

import fcntl
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from math import inf
from types import TracebackType

import numpy as np

from cachesvc.config import Tls
from cachesvc.core.errors import NotFound
from cachesvc.core.model import ExtentId
from cachesvc.core.placement.place_search import Patience
from cachesvc.daemon.blocks.client import BlockClient
from cachesvc.daemon.blocks.replies import Lent
from cachesvc.daemon.blocks.server import MAX_CONNECTIONS, BlockServer, Lend
from cachesvc.daemon.blocks.wire import VERSIONS
from cachesvc.tiers.checksum import block_digest
from cachesvc.tiers.fill_progress import FillProgress
from cachesvc.tiers.tier import CHECKSUM_BLOCK_BYTES as BLOCK
from testbed import WAIT_S

EXTENT = ExtentId(bytes(range(16)))
BLOCKS = 40
SIZE = (BLOCKS - 1) * BLOCK + 1234
DATA = np.random.default_rng(7).bytes(SIZE)


def digests_of(data: bytes) -> bytes:
    """The digests of an extent's blocks."""
    return b"".join(block_digest(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK))


def memfd(size_bytes: int) -> int:
    """A target as the RAM tier reserves it."""
    fd = os.memfd_create("target", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return fd


class Copy:
    """A copy of the extent on one node, with its progress. `fd`: its file, by default a new memfd."""

    def __init__(self, fd: int = -1, data: bytes = DATA) -> None:
        self.data = data
        self.fd = memfd(len(data)) if fd < 0 else os.dup(fd)
        self.progress_fd = FillProgress.create(len(data))
        self.progress = FillProgress(self.progress_fd, len(data))

    def __enter__(self) -> Copy:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.progress.close()
        os.close(self.progress_fd)
        os.close(self.fd)

    def fill(self, first: int, count: int = 1) -> None:
        """Complete blocks, as a filler does."""
        part = self.data[first * BLOCK : (first + count) * BLOCK]
        os.pwrite(self.fd, part, first * BLOCK)
        self.progress.add(first, digests_of(part))

    def read_from(self, client: BlockClient, address: str, wait_s: float = WAIT_S) -> bytes:
        """Read the missing blocks from a peer; return all digests."""
        return client.read(address, EXTENT, len(self.data), self.fd, self.progress, Patience(wait_s))

    def bytes(self) -> bytes:
        """The bytes that lie there."""
        return os.pread(self.fd, len(self.data) + 1, 0)

    @contextmanager
    def lend(self, extent: ExtentId) -> Iterator[Lent]:
        """Lend this extent as one that is being filled."""
        if extent != EXTENT:
            raise NotFound("not here")
        yield Lent(self.fd, len(self.data), progress=self.progress)


@contextmanager
def resident(data: bytes = DATA, digests: bytes | None = None) -> Iterator[Lend]:
    """A resident extent, and how it is lent."""
    with Copy(data=data) as copy:
        os.pwrite(copy.fd, data, 0)

        @contextmanager
        def lend(extent: ExtentId) -> Iterator[Lent]:
            if extent != EXTENT:
                raise NotFound("not here")
            yield Lent(copy.fd, len(data), digests_of(data) if digests is None else digests)

        yield lend


@contextmanager
def serving(
    lend: Lend,
    tls: Tls | None = None,
    address: str = "127.0.0.1:0",
    on_sent: Callable[[int], None] = lambda _: None,
    bytes_per_s: float = inf,
    max_connections: int = MAX_CONNECTIONS,
    versions: range = VERSIONS,
) -> Iterator[str]:
    """A server in this process; yields its address."""
    server = BlockServer(lend, tls, bytes_per_s, on_sent, max_connections, versions)
    port = server.listen(address)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.close()
        thread.join(WAIT_S)
        assert not thread.is_alive()


def serve_until_the_parent_ends(bytes_per_s: str = "") -> None:
    """Serve a fill that stays half complete, or the whole extent at a rate. Print the address.

    `python -m tests.support.membership.blocks [RATE]`
    """
    with ExitStack() as stack:
        if bytes_per_s:
            lend = stack.enter_context(resident())
            address = stack.enter_context(serving(lend, bytes_per_s=float(bytes_per_s)))
        else:
            copy = stack.enter_context(Copy())
            copy.fill(0, BLOCKS // 2)
            address = stack.enter_context(serving(copy.lend))
        print(address, flush=True)
        sys.stdin.read()


@contextmanager
def client(
    tls: Tls | None = None, tls_name: str = "", silent_s: float = WAIT_S, versions: range = VERSIONS
) -> Iterator[BlockClient]:
    """A client that is closed afterwards."""
    found = BlockClient(tls, tls_name, silent_s, versions=versions)
    with ExitStack() as stack:
        stack.callback(found.close)
        yield found


if __name__ == "__main__":
    serve_until_the_parent_ends(*sys.argv[1:])
