"""Links of network namespaces: rates, cuts one way and both ways, and what a dead process leaves."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing

import psutil
import pytest

from testbed.namespaces import Link, Network, Unavailable, Way, inside, run, sweep
from testbed.traffic import Traffic

PORT = 7
SERVER = """
import contextlib, socket
listener = socket.create_server(("", 7))
print("listening", flush=True)
while True:
    client, _ = listener.accept()
    with client, contextlib.suppress(ConnectionError):
        while data := client.recv(1 << 20):
            client.sendall(data[-1:])
"""
LEFT = """
import sys
from testbed.namespaces import Network, inside
import subprocess
network = Network().__enter__()
link = network.add("n0")
process = subprocess.Popen(inside(link.namespace, "sleep", "600"))
print(link.namespace, process.pid, flush=True)
sys.stdin.read()
"""
SHORT_S = 1.0
LONG_S = 60.0


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    try:
        with Network() as found:
            yield found
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def server(network: Network) -> Iterator[Link]:
    """The link of a namespace with an echo of each last byte."""
    link = network.add("n0")
    command = inside(link.namespace, sys.executable, "-c", SERVER)
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield link
        process.kill()


@pytest.fixture
def link(server: Link) -> Iterator[Link]:
    yield server
    server.heal()


def connected(link: Link) -> socket.socket:
    return socket.create_connection((link.address, PORT), timeout=LONG_S)


def echoed(sock: socket.socket, limit_s: float) -> bool:
    """Whether one more byte comes back within a time."""
    sock.settimeout(limit_s)
    try:
        sock.sendall(b"x")
        return sock.recv(1) == b"x"
    except TimeoutError:
        return False


def send(link: Link, size: int) -> None:
    """Send bytes to the namespace, and wait until it has them."""
    with closing(connected(link)) as sock:
        sock.sendall(bytes(size))
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(1 << 16):
            pass


@pytest.mark.parametrize("way", ["in", "out", "both"])
def test_a_cut_link_passes_nothing_until_it_is_healed(link: Link, way: Way) -> None:
    with closing(connected(link)) as sock:
        assert echoed(sock, LONG_S)
        link.cut(way)
        assert not echoed(sock, SHORT_S)
        link.heal()
        sock.settimeout(LONG_S)
        assert sock.recv(1) == b"x"


def test_a_link_cut_one_way_still_passes_the_other_way(link: Link) -> None:
    with closing(connected(link)) as sock:
        assert echoed(sock, LONG_S)
        link.cut("out")
        (into, out) = link.passed_bytes()
        assert not echoed(sock, SHORT_S)
        (into_later, out_later) = link.passed_bytes()
    assert into_later > into
    assert out_later == out


def test_a_slow_link_takes_at_least_its_time(link: Link) -> None:
    rate, size = 1e6, 1 << 20
    link.shape(rate)
    began = time.monotonic()
    send(link, size)
    took_s = time.monotonic() - began
    assert took_s > 0.8 * size / rate
    assert link.passed_bytes()[0] > size


def test_the_bytes_between_two_addresses_are_counted(network: Network, link: Link) -> None:
    size = 4 << 20
    with Traffic(network) as traffic:
        send(link, size)
    there, back = (network.own.address, link.address), (link.address, network.own.address)
    assert size <= traffic.between[there] < 1.1 * size
    assert 0 < traffic.between[back] < size / 10


def test_what_a_dead_process_left_is_removed(network: Network) -> None:
    command = [sys.executable, "-c", LEFT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        namespace, pid = process.stdout.readline().split()
        process.kill()
    left = psutil.Process(int(pid))
    assert namespace in run("ip", "netns", "list")
    sweep()
    left.wait(LONG_S)
    assert namespace not in run("ip", "netns", "list")
