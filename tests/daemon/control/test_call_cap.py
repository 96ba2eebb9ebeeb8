"""One user's endless control calls leave room for others, and idle connections end. As root: users are real."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from cachesvc.catalog.options import Options
from cachesvc.client.caller_token import CallerIdentity
from cachesvc.client.control import CODE_KEY, Control
from cachesvc.core.errors import Busy
from cachesvc.daemon.control.server import CALLS_PER_USER, connection_limits
from testbed import WAIT_S
from testbed.node import Daemon
from tests.support.users import ALICE, BOB, as_root, effective_user
from tests.support.waiting import wait_until

CALLS = 2 * CALLS_PER_USER
CONNECTIONS = 4
"""Each of them with fewer calls than gRPC allows on one."""
SILENT = ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "/cachesvc.v1.Cache/Status")
"""A stream, and a call that waits for its one message."""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    root = tmp_path_factory.mktemp("calls")
    (root / "data").mkdir()
    (root / "data" / "0.bin").write_bytes(bytes(1 << 16))
    options = ["--ram", "1MiB", "--extent-bytes", str(1 << 16), "--fillers", "1", "--socket-mode", "666"]
    with Daemon(root / "node", [*options, "--allow", f"{root}/data"]) as found:
        os.chmod(found.socket_dir, 0o755)
        yield found
    assert "Traceback" not in found.log


def identified(daemon: Daemon, uid: int) -> CallerIdentity:
    """A user's connection, for calls of this process."""
    found = CallerIdentity(daemon.socket_dir)
    with effective_user(uid):
        assert found.metadata()
    return found


@contextlib.contextmanager
def hoarded(daemon: Daemon, method: str, who: CallerIdentity | None) -> Iterator[list[grpc.Call]]:
    """Make calls that never end, as many as are admitted, and yield those that are refused."""
    over, refused, counted = threading.Event(), list[grpc.Call](), threading.Semaphore(0)
    metadata = who.metadata() if who else ()

    def nothing() -> Iterator[bytes]:
        over.wait()
        yield from ()

    def ended(call: grpc.Call) -> None:
        refused.append(call)
        counted.release()

    with contextlib.ExitStack() as stack:
        stack.callback(over.set)
        options = [("grpc.use_local_subchannel_pool", 1)]
        address = f"unix:{daemon.socket_dir}/cachesvc.sock"
        channels = [stack.enter_context(grpc.insecure_channel(address, options)) for _ in range(CONNECTIONS)]
        for number in range(CALLS):
            open_one = channels[number % CONNECTIONS].stream_stream(method, None, None)
            call: Any = open_one(nothing(), metadata=metadata)
            call.add_done_callback(ended)
        for _ in range(CALLS - CALLS_PER_USER):
            assert counted.acquire(timeout=60)
        yield refused


def pid_seen(daemon: Daemon, uid: int) -> int:
    with effective_user(uid), Control(daemon.socket_dir) as control:
        return control.status().pid


@pytest.mark.slow
@as_root
@pytest.mark.parametrize("method", SILENT)
def test_endless_calls_of_one_user_leave_room_for_others(daemon: Daemon, method: str) -> None:
    assert daemon.process is not None
    pid, bob = daemon.pid, identified(daemon, BOB)
    with hoarded(daemon, method, bob) as refused:
        assert pid_seen(daemon, ALICE) == pid
        with hoarded(daemon, method, None):  # also without its token
            assert pid_seen(daemon, ALICE) == pid
            assert pid_seen(daemon, 0) == pid
        for call in refused[:10]:
            assert call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert (CODE_KEY, str(Busy.code)) in call.trailing_metadata()
            assert f"user {BOB} holds a full share" in call.details()
    wait_until(lambda: answered(daemon, bob))  # calls that have ended count no more
    bob.close()


def answered(daemon: Daemon, who: CallerIdentity) -> bool:
    """Tell whether as many calls at once as one user may have are answered."""

    def ask(_: int) -> bool:
        call = channel.unary_unary("/cachesvc.v1.Cache/Status", None, None)
        try:
            return bool(call(b"", metadata=who.metadata(), timeout=20))
        except grpc.RpcError:
            return False

    with (
        grpc.insecure_channel(f"unix:{daemon.socket_dir}/cachesvc.sock") as channel,
        futures.ThreadPoolExecutor(64) as callers,
    ):
        return all(callers.map(ask, range(CALLS_PER_USER)))


@as_root
def test_more_openings_at_once_than_one_users_cap_all_succeed(daemon: Daemon) -> None:
    """A client retries a refused call until others of its user have ended."""
    data, bob = str(daemon.root.parent / "data"), identified(daemon, BOB)

    def opened(_: int) -> str:
        with Control(daemon.socket_dir) as control:
            return control.open_dataset([data], Options(format="records", record_bytes=4096)).id

    with hoarded(daemon, SILENT[0], bob), effective_user(ALICE), futures.ThreadPoolExecutor(160) as callers:
        assert len(set(callers.map(opened, range(160)))) == 1
    bob.close()


@pytest.mark.parametrize("body", [None, b"\xff"])
def test_a_call_without_its_message_is_a_typed_error(daemon: Daemon, body: bytes | None) -> None:
    with grpc.insecure_channel(f"unix:{daemon.socket_dir}/cachesvc.sock") as channel:
        for method in ("Status", "Prefetch"):
            call = channel.stream_stream(f"/cachesvc.v1.Cache/{method}", None, None)
            with pytest.raises(grpc.RpcError) as caught:
                list(call(iter([] if body is None else [body]), timeout=20))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5)  # and empty settings


def test_a_connection_without_calls_is_closed_and_the_next_call_connects_again() -> None:
    """Uses the daemon's own options with shorter timeouts."""
    options = [(name, min(value, 300)) for name, value in connection_limits(300)]
    with tempfile.TemporaryDirectory(prefix="cs-") as folder, futures.ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool, options=options)
        health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
        server.add_insecure_port(f"unix:{folder}/s")
        server.start()
        with grpc.insecure_channel(f"unix:{folder}/s") as channel:
            ask = health_pb2_grpc.HealthStub(channel).Check
            gone = threading.Semaphore(0)

            def changed(state: grpc.ChannelConnectivity) -> None:
                if state is grpc.ChannelConnectivity.IDLE:
                    gone.release()

            channel.subscribe(changed)
            gone.acquire()  # the initial state
            for _ in range(2):
                ask(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
                assert gone.acquire(timeout=WAIT_S)
            ask(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
            for sent in (b"", PREFACE):
                with socket.socket(socket.AF_UNIX) as idle:
                    idle.settimeout(WAIT_S)
                    idle.connect(f"{folder}/s")
                    idle.sendall(sent)
                    while idle.recv(4096):
                        pass  # gRPC's settings, then the end
        server.stop(None)
