"""Thousands of connections that say nothing: control and scrapes go on, and their descriptors come back."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from cachesvc.client.control import Control
from cachesvc.config import CALLERS
from cachesvc.daemon.control import connection_quota as crowds
from cachesvc.daemon.metrics import http as scrapes
from testbed import WAIT_S
from testbed.node import Daemon
from testbed.servers import free_ports
from tests.support.users import ALICE, BOB, as_root, being
from tests.support.waiting import wait_until

IDLE = 3000
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5)  # and empty settings


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    root = tmp_path_factory.mktemp("idle")
    (root / "data").mkdir()
    (port,) = free_ports(1)
    (root / "port").write_text(str(port))
    options = ["--ram", "64MiB", "--fillers", "1", "--socket-mode", "666", "--allow", f"{root}/data"]
    with Daemon(root / "node", [*options, "--metrics", f"127.0.0.1:{port}"]) as found:
        os.chmod(found.socket_dir, 0o755)
        yield found
    assert "Traceback" not in found.log


def scraped(daemon: Daemon) -> bytes:
    port = (daemon.root.parent / "port").read_text()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_S) as answer:
        return bytes(answer.read())


def test_nothing_but_the_metrics_is_answered_with_them(daemon: Daemon) -> None:
    port = (daemon.root.parent / "port").read_text()
    for path in ("/metrics?by=scraper", "/"):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=WAIT_S) as answer:
            assert b"cachesvc_fills" in answer.read()
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=WAIT_S)
    assert (refused.value.code, refused.value.reason) == (404, "metrics are at /metrics")
    refused.value.close()


def descriptors(daemon: Daemon) -> int:
    assert daemon.process is not None
    return len(os.listdir(f"/proc/{daemon.process.pid}/fd"))


def threads(daemon: Daemon) -> int:
    assert daemon.process is not None
    return len(os.listdir(f"/proc/{daemon.process.pid}/task"))


def test_idle_connections_to_the_metrics_keep_no_scraper_out(daemon: Daemon) -> None:
    port = int((daemon.root.parent / "port").read_text())
    scraped(daemon)
    fds, tasks = descriptors(daemon), threads(daemon)
    with contextlib.ExitStack() as stack:
        for number in range(IDLE):
            idle = stack.enter_context(socket.create_connection(("127.0.0.1", port), 20))
            if number % 2:
                with contextlib.suppress(ConnectionError):  # it has given way already
                    idle.sendall(b"GET /metrics HTTP/1.1\r\n")
            if number % 500 == 499:
                assert b"cachesvc_fills" in scraped(daemon)
        assert descriptors(daemon) <= fds + scrapes.MAX_CONNECTIONS + 8
        assert threads(daemon) <= tasks + scrapes.MAX_CONNECTIONS + 8
        wait_until(lambda: descriptors(daemon) <= fds)  # their time is over, though they are still there
    wait_until(lambda: threads(daemon) <= tasks)  # each closes its connection, and then ends


def pid_seen(daemon: Daemon, uid: int) -> int:
    with being(uid), Control(daemon.socket_dir) as control:
        return control.status().pid


def knock(daemon: Daemon, number: int) -> socket.socket:
    """A connection that says nothing, or no more than that it speaks HTTP/2."""
    held = socket.socket(socket.AF_UNIX)
    held.settimeout(1.0)
    held.connect(f"{daemon.socket_dir}/cachesvc.sock")
    if number % 2:
        held.sendall(PREFACE)
    return held


@as_root
def test_idle_control_connections_of_one_user_keep_nobody_else_out(daemon: Daemon) -> None:
    assert daemon.process is not None
    pid = pid_seen(daemon, ALICE)
    fds, held = descriptors(daemon), list[socket.socket]()
    with being(BOB):
        for number in range(IDLE):
            with contextlib.suppress(OSError):  # turned away at the door
                held.append(knock(daemon, number))
    # While it looks whose they are, the daemon has each of them twice.
    wait_until(lambda: descriptors(daemon) <= fds + CALLERS + 8)
    assert pid_seen(daemon, ALICE) == pid_seen(daemon, 0) == pid
    for each in held:
        each.close()
    wait_until(lambda: descriptors(daemon) <= fds)


@as_root
def test_nor_does_one_that_keeps_coming_back(daemon: Daemon) -> None:
    """Whoever is turned away asks again, and finds a gap: each second the one that crowds loses half of all places."""
    assert daemon.process is not None
    crowd = os.fork()  # it speaks no gRPC
    if crowd == 0:
        with contextlib.suppress(BaseException):
            os.setuid(BOB)
            held: list[socket.socket] = []
            while True:
                with contextlib.suppress(OSError):
                    held.append(knock(daemon, 1))
                if len(held) > IDLE:
                    held.pop(0).close()
        os._exit(0)
    try:
        wait_until(lambda: "too many control connections" in daemon.log)
        for uid in (ALICE, 0):
            assert pid_seen(daemon, uid) == daemon.process.pid
    finally:
        os.kill(crowd, signal.SIGKILL)
        os.waitpid(crowd, 0)


def test_a_connection_without_calls_ends_and_the_next_call_makes_another() -> None:
    """The daemon's own limits, with less patience."""
    limits = [(name, min(value, 300)) for name, value in crowds.crowd_limits(300)]
    with tempfile.TemporaryDirectory(prefix="cs-") as folder, futures.ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool, options=limits)
        health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
        server.add_insecure_port(f"unix:{folder}/s")
        server.start()
        with grpc.insecure_channel(f"unix:{folder}/s") as channel:
            ask = health_pb2_grpc.HealthStub(channel).Check
            gone = threading.Semaphore(0)
            channel.subscribe(lambda state: state is grpc.ChannelConnectivity.IDLE and gone.release())
            gone.acquire()  # as it began
            for _ in range(2):
                ask(health_pb2.HealthCheckRequest(), timeout=20)
                assert gone.acquire(timeout=20)
            ask(health_pb2.HealthCheckRequest(), timeout=20)
            for said in (b"", PREFACE):
                with socket.socket(socket.AF_UNIX) as idle:
                    idle.settimeout(WAIT_S)
                    idle.connect(f"{folder}/s")
                    idle.sendall(said)
                    while idle.recv(4096):
                        pass  # its settings, and then its end
        server.stop(None)
