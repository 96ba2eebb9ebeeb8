"""A daemon among clients that send anything, hoard, flood and do not read: it lives, others do not notice."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cachesvc.catalog.build import Options
from cachesvc.client.control import CODE_KEY, MAX_MESSAGE_BYTES, Control
from cachesvc.client.grants import DaemonGrants
from cachesvc.client.protocol import Granted
from cachesvc.core import wire
from cachesvc.core.errors import CacheError
from cachesvc.core.model import DatasetId
from cachesvc.core.wire import Message, Op
from cachesvc.daemon.control.server import CONTROL_THREADS
from cachesvc.daemon.control.statuses import STATUSES
from cachesvc.daemon.grants import deferred_close as disposal
from cachesvc.daemon.grants.deferred_close import A_USER, IN_ALL, THREADS, Disposal
from cachesvc.v1 import cachesvc_pb2 as pb
from testbed import WAIT_S
from testbed.node import Daemon
from tests.support.waiting import wait_until

EXTENT = 64 << 10
EXTENTS = 8
GROWTH_KB = 48 << 10
TYPED = set(STATUSES.values())


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    root = tmp_path_factory.mktemp("hostile")
    (root / "data").mkdir()
    (root / "data" / "0.bin").write_bytes(bytes(range(256)) * (EXTENTS * EXTENT // 256))
    options = ["--ram", "8MiB", "--extent-bytes", str(EXTENT), "--fillers", "1", "--allow", f"{root}/data"]
    with Daemon(root / "node", options) as found:
        yield found


@pytest.fixture(scope="module")
def dataset(daemon: Daemon) -> DatasetId:
    with Control(daemon.socket_dir) as control:
        wanted = Options(format="records", record_bytes=4096)
        return control.open_dataset([str(daemon.root.parent / "data")], wanted).id


@pytest.fixture
def lives(daemon: Daemon, dataset: DatasetId) -> Iterator[DaemonGrants]:
    """Another reader, connected all the time; afterwards it is served at once and the daemon holds no more."""
    assert daemon.process is not None
    reader = DaemonGrants(daemon.socket_dir, dataset)
    read_one(reader, 0)
    before = footprint(daemon.process.pid)
    yield reader
    assert daemon.process.poll() is None, daemon.log
    read_one(reader, 1)
    pid = daemon.process.pid
    wait_until(lambda: footprint(pid)[0] <= before[0] + 8)
    assert footprint(pid)[1] <= before[1] + GROWTH_KB
    assert "Traceback" not in daemon.log
    reader.close()


def read_one(reader: DaemonGrants, extent: int) -> None:
    (answer,) = reader.acquire([extent], 20.0)
    assert isinstance(answer, Granted)
    assert os.pread(answer.fd, 4, 0) == b"\0\1\2\3"
    os.close(answer.fd)
    reader.release([extent])


def footprint(pid: int) -> tuple[int, int]:
    """Open descriptors and resident KB."""
    status = Path(f"/proc/{pid}/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return len(os.listdir(f"/proc/{pid}/fd")), int(resident.split()[1])


@contextlib.contextmanager
def connected(daemon: Daemon, dataset: DatasetId | None = None) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
        channel.settimeout(WAIT_S)
        channel.connect(f"{daemon.socket_dir}/grants.sock")
        if dataset is not None:
            channel.send(wire.encode(Op.HELLO, wire.MAGIC, digest=bytes.fromhex(dataset)))
            assert wire.decode(channel.recv(4096)).op is Op.WELCOME
        yield channel


messages = st.builds(
    Message,
    st.sampled_from(list(Op)),
    st.sampled_from([0, 1, wire.MAGIC, 2**32 - 1]),
    st.sampled_from([0, 1, EXTENTS - 1, EXTENTS, 2**31, 2**63, 2**64 - 1]),
    st.sampled_from([0, 1, 2**64 - 1]),
    st.binary(min_size=16, max_size=16),
    st.text(max_size=20),
).map(lambda fields: wire.encode(*fields))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    greeted=st.booleans(),
    said=st.lists(st.tuples(messages | st.binary(min_size=1, max_size=5000), st.integers(0, 5)), max_size=8),
)
def test_any_messages_with_any_descriptors(
    daemon: Daemon, dataset: DatasetId, lives: DaemonGrants, greeted: bool, said: list[tuple[bytes, int]]
) -> None:
    with connected(daemon, dataset if greeted else None) as channel, contextlib.suppress(OSError):
        for data, descriptors in said:
            socket.send_fds(channel, [data], [channel.fileno()] * descriptors)


def test_memory_that_a_client_sends_is_closed_at_once(
    daemon: Daemon, dataset: DatasetId, lives: DaemonGrants
) -> None:
    with connected(daemon, dataset) as channel:
        memory = os.memfd_create("unasked")
        for _ in range(200):
            socket.send_fds(channel, [wire.encode(Op.PASSED, 0, 1)], [memory] * 100)
        os.close(memory)
        channel.send(wire.encode(Op.CATALOG))
        assert wire.decode(channel.recv(4096)).op is Op.CATALOG  # all before it has been taken


def test_memory_that_takes_long_to_free_is_closed_like_anything_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(disposal, "MEMORY_BYTES", 1 << 20)
    memory = os.memfd_create("plan")
    os.truncate(memory, 1 << 30)
    os.pwrite(memory, bytes(1 << 20), 0)
    assert disposal.harmless(memory), "what counts is what there is to free"
    os.pwrite(memory, b"x", 1 << 29)
    assert not disposal.harmless(memory)
    os.close(memory)


def test_who_sends_anything_else_is_dropped_and_it_is_closed(
    daemon: Daemon, dataset: DatasetId, lives: DaemonGrants
) -> None:
    ours, theirs = socket.socketpair()
    with ours, connected(daemon, dataset) as channel:
        with theirs, contextlib.suppress(OSError):
            for _ in range(200):
                socket.send_fds(channel, [wire.encode(Op.PASSED, 0, 1)], [theirs.fileno()] * 100)
        with contextlib.suppress(ConnectionResetError):
            assert channel.recv(4096) == b""
        ours.settimeout(WAIT_S)
        assert ours.recv(1) == b""  # nobody else has the other end


def lingering() -> tuple[socket.socket, socket.socket]:
    """A socket whose last close waits until the other one is closed."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    ours.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            ours.send(bytes(1 << 16))
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 600))
    return ours, other


def test_what_never_closes_keeps_nobody_waiting_nor_the_end(tmp_path: Path) -> None:
    passed, garbage, memory = wire.encode(Op.PASSED, 0, 1), b"garbage", os.memfd_create("plan")
    options = ["--ram", "1MiB", "--extent-bytes", "4096", "--allow", str(tmp_path)]
    (tmp_path / "0.bin").write_bytes(bytes(8 * 4096))
    with contextlib.ExitStack() as stack, Daemon(tmp_path / "node", options) as daemon:
        with Control(daemon.socket_dir) as control:
            uris = [str(tmp_path / "0.bin")]
            dataset = control.open_dataset(uris, Options(format="records", record_bytes=1024)).id

        assert daemon.process is not None
        stop = daemon.process.send_signal

        def send(greeted: bool, *said: tuple[bytes, list[int]]) -> None:
            """The last descriptor is a lingering one. Others are served afterwards."""
            ours, other = lingering()
            stack.enter_context(other)
            with connected(daemon, dataset if greeted else None) as channel, ours:
                stop(signal.SIGSTOP)  # all of it is there when the first is read
                for data, descriptors in said[:-1]:
                    socket.send_fds(channel, [data], descriptors)
                data, descriptors = said[-1]
                socket.send_fds(channel, [data], [*descriptors, ours.fileno()])
                stop(signal.SIGCONT)
            with connected(daemon, dataset):
                pass

        send(True, (passed, []))
        send(True, (wire.encode(Op.PLAN, 1), []))
        send(True, (wire.encode(Op.PLAN, 1000), []))
        send(True, (passed, [memory]))  # beside one that is closed at once
        send(True, (b"", []))
        send(True, (garbage, []), (b"", []), (passed, []))  # unread when the connection is dropped
        send(False, (passed, []))
        os.close(memory)
        daemon.process.terminate()
        assert daemon.process.wait(WAIT_S) == 0, daemon.log
        assert "or what clients sent" in daemon.log, "it holds nothing else, however long that takes"


def test_what_never_closes_takes_a_bounded_number_of_threads_and_no_other_users() -> None:
    threads, others = Disposal(), []
    before = threading.active_count()
    for user in range(THREADS - 1):
        for _ in range(3):
            ours, other = lingering()
            others.append(other)
            threads.take(user, [ours.detach()])
    wait_until(lambda: threads.count() == 3 * (THREADS - 1))
    ours, theirs = socket.socketpair()
    threads.take(THREADS, [theirs.detach()])
    ours.settimeout(WAIT_S)
    assert ours.recv(1) == b""
    wait_until(lambda: threading.active_count() == before + THREADS - 1)
    for user in (THREADS + 1, THREADS + 2):
        lasting, other = lingering()
        others.append(other)
        threads.take(user, [lasting.detach()])
    assert threading.active_count() == before + THREADS
    assert not threads.full(0)
    threads.take(0, [os.open("/dev/null", os.O_RDONLY) for _ in range(A_USER - 3)])
    assert threads.full(0)
    assert not threads.full(1)
    threads.take(1, [os.open("/dev/null", os.O_RDONLY) for _ in range(IN_ALL)])
    assert threads.full(THREADS)
    for other in others:
        other.close()
    wait_until(lambda: not threads.count() and threading.active_count() == before)
    ours.close()


@pytest.mark.parametrize("op", [Op.GET, Op.HOLD, Op.RELEASE, Op.PASSED, Op.CATALOG])
def test_floods_from_clients_that_never_read(
    daemon: Daemon, dataset: DatasetId, lives: DaemonGrants, op: Op
) -> None:
    """Each is dropped when its answers fill its buffer, or served message by message, in turn with others."""
    with contextlib.ExitStack() as stack:
        flooders = [stack.enter_context(connected(daemon, dataset)) for _ in range(4)]
        slowest = 0.0
        for number in range(3000):
            for channel in flooders:
                channel.setblocking(False)
                with contextlib.suppress(OSError):
                    channel.send(wire.encode(op, number, number % EXTENTS, text="ram"))
            if number % 500 == 0:
                before = time.monotonic()
                read_one(lives, 2)
                slowest = max(slowest, time.monotonic() - before)
        assert slowest < 5.0


def test_greeting_twice_or_with_garbage_ends_that_connection_only(
    daemon: Daemon, dataset: DatasetId, lives: DaemonGrants
) -> None:
    hello = wire.encode(Op.HELLO, wire.MAGIC, digest=bytes.fromhex(dataset))
    for said in ([hello, hello], [hello[:-1]], [hello + b"x" * 5000], [struct.pack("<B", 255) * 37]):
        with connected(daemon) as channel:
            for each in said:
                with contextlib.suppress(OSError):
                    channel.send(each)
            answers = [channel.recv(wire.MAX_MESSAGE_BYTES) for _ in range(len(said))]
            assert answers[-1] == b""


METHODS = (
    "OpenDataset",
    "Prefetch",
    "Status",
    "List",
    "Pin",
    "Evict",
    "Verify",
    "Read",
    "None",
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(method=st.sampled_from(METHODS), body=st.binary(max_size=300))
def test_any_bytes_as_a_grpc_request(daemon: Daemon, lives: DaemonGrants, method: str, body: bytes) -> None:
    with grpc.insecure_channel(f"unix:{daemon.socket_dir}/cachesvc.sock") as channel:
        call = channel.unary_stream(f"/cachesvc.v1.Cache/{method}")
        with contextlib.suppress(grpc.RpcError):
            list(call(body, timeout=20))


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.binary(min_size=1, max_size=3000), preface=st.booleans())
def test_any_bytes_as_http2(daemon: Daemon, lives: DaemonGrants, body: bytes, preface: bool) -> None:
    with socket.socket(socket.AF_UNIX) as channel, contextlib.suppress(OSError):
        channel.connect(f"{daemon.socket_dir}/cachesvc.sock")
        channel.send((b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" if preface else b"") + body)


def test_a_message_above_the_limit_is_refused(daemon: Daemon, lives: DaemonGrants) -> None:
    with grpc.insecure_channel(
        f"unix:{daemon.socket_dir}/cachesvc.sock", [("grpc.max_send_message_length", -1)]
    ) as channel:
        call = channel.unary_unary("/cachesvc.v1.Cache/Status")
        with pytest.raises(grpc.RpcError) as caught:
            call(bytes(MAX_MESSAGE_BYTES + 1), timeout=60)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


CALLERS = 32
GROWTH_AT_ONCE_KB = CALLERS * (MAX_MESSAGE_BYTES >> 10) * 3
"""What arrived, the message put together of it, and its parsed form."""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["OpenDataset", "Prefetch", "Status"])
def test_many_callers_with_the_largest_messages_cost_bounded_memory(daemon: Daemon, method: str) -> None:
    """The C library keeps some of what is freed, and takes it for the next."""
    assert daemon.process is not None
    pid, before = daemon.process.pid, footprint(daemon.process.pid)[1]
    length = MAX_MESSAGE_BYTES - 64
    unknown = [
        0xFA,
        0x7F,
        length & 127 | 128,
        length >> 7 & 127 | 128,
        length >> 14 & 127 | 128,
        length >> 21,
    ]
    body = bytes(unknown) + bytes(length)  # a field that no message has: parsed, and kept with its message

    def call(_: int) -> bool:
        options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(f"unix:{daemon.socket_dir}/cachesvc.sock", options) as channel:
            try:
                list(channel.unary_stream(f"/cachesvc.v1.Cache/{method}")(body, timeout=100))
            except grpc.RpcError as error:
                return bool(error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND))
        return method == "Status"

    most = before
    with futures.ThreadPoolExecutor(CALLERS) as callers:
        calls = [callers.submit(call, number) for number in range(CALLERS * 4)]
        while futures.wait(calls, 0.02).not_done:
            most = max(most, footprint(pid)[1])
    assert all(each.result() for each in calls)
    assert most - before < GROWTH_AT_ONCE_KB
    assert "Traceback" not in daemon.log


def test_calls_beyond_the_limits_are_refused_and_go_with_their_callers(
    daemon: Daemon, lives: DaemonGrants
) -> None:
    """640 calls that never end, from 16 connections."""
    address, local = f"unix:{daemon.socket_dir}/cachesvc.sock", [("grpc.use_local_subchannel_pool", 1)]
    refused, over = threading.Semaphore(0), threading.Event()

    def said_nothing() -> Iterator[bytes]:
        over.wait()
        yield from ()

    def ended(call: grpc.Call) -> None:
        if call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
            refused.release()

    with contextlib.ExitStack() as stack:
        stack.callback(over.set)
        channels = [stack.enter_context(grpc.insecure_channel(address, local)) for _ in range(16)]
        for number in range(2 * CONTROL_THREADS + 128):
            method = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
            call = channels[number % 16].stream_stream(method)(said_nothing())
            call.add_done_callback(ended)
        for _ in range(128):
            assert refused.acquire(timeout=60)
        read_one(lives, 3)
    wait_until(lambda: answers(daemon))


def answers(daemon: Daemon) -> bool:
    try:
        with Control(daemon.socket_dir) as control:
            return bool(control.status().pid)
    except CacheError:
        return False


sizes = st.sampled_from([0, 1, 4095, 4096, 2**31, 2**63 - 1, 2**64 - 1])
words = st.sampled_from(
    [
        "",
        ".",
        "../..",
        "/",
        "records",
        "tokens",
        "files",
        "mds",
        "uint16",
        "\0",
        "%s",
        "é\n\x1b[2J",
        "x" * 9000,
    ]
) | st.text(max_size=20)
options = st.builds(
    pb.DatasetOptions,
    format=words,
    extent_bytes=sizes,
    dtype=words,
    seq_len=sizes,
    overlap=sizes,
    record_bytes=sizes,
    labels=words,
)
ids = words | st.sampled_from(["0" * 32, "../" * 9 + "etc/passwd", "0" * 31 + "/", "A" * 32])


@st.composite
def calls(draw: st.DrawFn, root: str, dataset: str) -> tuple[str, bytes]:
    """A method and a message that is one, with anything in its fields."""
    wanted = draw(ids | st.just(dataset))
    uris = draw(
        st.lists(words | st.sampled_from([root, f"{root}/0.bin", f"{root}/{{0..9}}.bin"]), max_size=3)
    )
    message = draw(
        st.sampled_from(
            [
                pb.OpenDatasetRequest(
                    uris=uris, options=draw(options), version=wanted, refresh=draw(st.booleans())
                ),
                pb.PrefetchRequest(dataset=wanted, dry_run=draw(st.booleans())),
                pb.PinRequest(dataset=wanted, pinned=draw(st.booleans())),
                pb.EvictRequest(dataset=wanted),
                pb.VerifyRequest(dataset=wanted),
            ]
        )
    )
    return type(message).__name__.removesuffix("Request"), message.SerializeToString()


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_values_in_a_grpc_request_are_answered_or_a_typed_error(
    daemon: Daemon, dataset: DatasetId, lives: DaemonGrants, data: st.DataObject
) -> None:
    method, body = data.draw(calls(str(daemon.root.parent / "data"), dataset))
    with grpc.insecure_channel(f"unix:{daemon.socket_dir}/cachesvc.sock") as channel:
        call = channel.unary_stream(f"/cachesvc.v1.Cache/{method}")(body, timeout=20)
        with contextlib.suppress(grpc.RpcError):
            list(call)
        if call.code() is not grpc.StatusCode.OK:
            assert call.code() in TYPED, (call.code(), call.details())
            assert dict(call.trailing_metadata())[CODE_KEY].isdigit()
            assert "\n" not in call.details()
