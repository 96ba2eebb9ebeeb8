"""Bytes between each two addresses of a network of namespaces, counted at its bridge.

python -m testbed.traffic       # counts in its namespace until its input ends, then prints the counts as JSON
"""

from __future__ import annotations

import json
import selectors
import socket
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from types import TracebackType

from testbed import ROOT, WAIT_S
from testbed.namespaces import Network, inside

_ALL, _IPV4 = 3, 0x0800
_OUTGOING = 4
"""`PACKET_OUTGOING` of linux/if_packet.h: the copy of a packet that leaves by another port."""
_RCVBUFFORCE = 33
"""`SO_RCVBUFFORCE` of asm-generic/socket.h: a buffer beyond the limit of the system."""
HEAD_BYTES = 34
"""The headers of Ethernet and IP."""
BUFFER_BYTES = 64 << 20


class Traffic:
    """Counts the bytes of IP packets between each two addresses. Context manager; `between` is known after it."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self.between: Counter[tuple[str, str]] = Counter()

    def __enter__(self) -> Traffic:
        command = inside(self._network.hub, sys.executable, "-m", "testbed.traffic")
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT)
        assert self._process.stdout is not None
        self._process.stdout.readline()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        told, _ = self._process.communicate(timeout=WAIT_S)
        self.between = Counter({(a, b): count for a, b, count in json.loads(told)})


def _count() -> Counter[tuple[str, str]]:
    counts: Counter[tuple[str, str]] = Counter()
    with (
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL)) as packets,
        selectors.DefaultSelector() as ready,
    ):
        packets.setsockopt(socket.SOL_SOCKET, _RCVBUFFORCE, BUFFER_BYTES)
        packets.setblocking(False)
        ready.register(packets, selectors.EVENT_READ)
        ready.register(sys.stdin, selectors.EVENT_READ)
        print("counting", flush=True)
        while all(key.fileobj is packets for key, _ in ready.select()):
            _drain(packets, counts)
        _drain(packets, counts)
    return counts


def _drain(packets: socket.socket, found: Counter[tuple[str, str]]) -> None:
    with suppress(BlockingIOError):
        while True:
            _add(packets, found)


def _add(packets: socket.socket, found: Counter[tuple[str, str]]) -> None:
    """Count one packet, once: where it enters the bridge. Its length is that of its IP header."""
    head, (_, protocol, kind, *_) = packets.recvfrom(HEAD_BYTES)
    if kind != _OUTGOING and protocol == _IPV4 and len(head) == HEAD_BYTES:
        source, target = (socket.inet_ntoa(head[at : at + 4]) for at in (26, 30))
        found[source, target] += int.from_bytes(head[16:18], "big")


if __name__ == "__main__":
    print(json.dumps([(*pair, count) for pair, count in _count().items()]))
