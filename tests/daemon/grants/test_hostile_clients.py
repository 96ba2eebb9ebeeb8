"""The daemon and its other clients are not disturbed by clients that send anything, flood, or do not read."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cachesvc.catalog.options import Options
from cachesvc.client.control import CODE_KEY, MAX_MESSAGE_BYTES, Control
from cachesvc.client.grants import DaemonGrants
from cachesvc.core import wire
from cachesvc.core.errors import CacheError
from cachesvc.core.model import DatasetId
from cachesvc.core.wire import Message, Op
from cachesvc.daemon.control.server import CONTROL_THREADS
from cachesvc.daemon.statuses import STATUSES
from cachesvc.v1 import cachesvc_pb2 as pb
from testbed.node import Daemon
from tests.support.greetings import connected, greeted
from tests.support.reading import read_extent
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
def undisturbed(daemon: Daemon, dataset: DatasetId) -> Iterator[DaemonGrants]:
    """Another reader, connected all the time. At the end it is still served, and the daemon holds no more than before."""
    assert daemon.process is not None
    reader = DaemonGrants(daemon.socket_dir, dataset)
    read_one(reader, 0)
    before = footprint(daemon.pid)
    yield reader
    assert daemon.process.poll() is None, daemon.log
    read_one(reader, 1)
    pid = daemon.pid
    wait_until(lambda: footprint(pid)[0] <= before[0] + 8)
    assert footprint(pid)[1] <= before[1] + GROWTH_KB
    assert "Traceback" not in daemon.log
    reader.close()


def read_one(reader: DaemonGrants, extent: int) -> None:
    assert read_extent(reader, extent)[:4] == b"\0\1\2\3"


def footprint(pid: int) -> tuple[int, int]:
    """Open descriptors and resident KB."""
    status = Path(f"/proc/{pid}/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return len(os.listdir(f"/proc/{pid}/fd")), int(resident.split()[1])


messages = st.builds(
    Message,
    st.sampled_from(list(Op)),
    st.sampled_from([0, 1, wire.MAGIC, 2**32 - 1]),
    st.sampled_from([0, 1, EXTENTS - 1, EXTENTS, 2**31, 2**63, 2**64 - 1]),
    st.sampled_from([0, 1, 2**64 - 1]),
    st.binary(min_size=16, max_size=16),
    st.text(max_size=20),
).map(lambda fields: wire.encode(*fields))


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    greets=st.booleans(),
    said=st.lists(st.tuples(messages | st.binary(min_size=1, max_size=5000), st.integers(0, 5)), max_size=8),
)
def test_any_messages_with_any_descriptors(
    daemon: Daemon,
    dataset: DatasetId,
    undisturbed: DaemonGrants,
    greets: bool,
    said: list[tuple[bytes, int]],
) -> None:
    channel = greeted(daemon, dataset) if greets else connected(daemon)
    with channel, contextlib.suppress(OSError):
        for data, descriptors in said:
            socket.send_fds(channel, [data], [channel.fileno()] * descriptors)


def test_descriptors_that_belong_to_no_message_are_closed_at_once(
    daemon: Daemon, dataset: DatasetId, undisturbed: DaemonGrants
) -> None:
    with greeted(daemon, dataset) as channel:
        for _ in range(200):
            socket.send_fds(channel, [wire.encode(Op.PASSED, 0, 1)], [channel.fileno()] * 100)
        channel.send(wire.encode(Op.CATALOG))
        assert wire.decode(channel.recv(4096)).op is Op.CATALOG  # so all messages before it were received


@pytest.mark.parametrize("op", [Op.GET, Op.HOLD, Op.SUSPECT, Op.RELEASE, Op.PASSED, Op.CATALOG])
def test_floods_from_clients_that_never_read(
    daemon: Daemon, dataset: DatasetId, undisturbed: DaemonGrants, op: Op
) -> None:
    """Each is dropped when its replies fill its buffer, or is served message by message in turn with others."""
    with contextlib.ExitStack() as stack:
        flooders = [stack.enter_context(greeted(daemon, dataset)) for _ in range(4)]
        slowest = 0.0
        for number in range(3000):
            for channel in flooders:
                channel.setblocking(False)
                with contextlib.suppress(OSError):
                    channel.send(wire.encode(op, number, number % EXTENTS, text="ram"))
            if number % 500 == 0:
                before = time.monotonic()
                read_one(undisturbed, 2)
                slowest = max(slowest, time.monotonic() - before)
        assert slowest < 5.0


def test_a_second_greeting_or_garbage_ends_that_connection_only(
    daemon: Daemon, dataset: DatasetId, undisturbed: DaemonGrants
) -> None:
    hello = wire.encode(Op.HELLO, wire.MAGIC, digest=bytes.fromhex(dataset))
    for said in ([hello, hello], [hello[:-1]], [hello + b"x" * 5000], [struct.pack("<B", 255) * 37]):
        with connected(daemon) as channel:
            for each in said:
                with contextlib.suppress(OSError):
                    channel.send(each)
            answers = [channel.recv(wire.MAX_MESSAGE_BYTES) for _ in range(len(said))]
            assert answers[-1] == b""


METHODS = ["OpenDataset", "Prefetch", "Status", "List", "Pin", "Evict", "Verify", "Read", "None"]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(method=st.sampled_from(METHODS), body=st.binary(max_size=300))
def test_any_bytes_as_a_grpc_request(
    daemon: Daemon, undisturbed: DaemonGrants, method: str, body: bytes
) -> None:
    with grpc.insecure_channel(f"unix:{daemon.socket_dir}/cachesvc.sock") as channel:
        call = channel.unary_stream(f"/cachesvc.v1.Cache/{method}", None, None)
        with contextlib.suppress(grpc.RpcError):
            list(call(body, timeout=20))


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.binary(min_size=1, max_size=3000), preface=st.booleans())
def test_any_bytes_as_http2(daemon: Daemon, undisturbed: DaemonGrants, body: bytes, preface: bool) -> None:
    with socket.socket(socket.AF_UNIX) as channel, contextlib.suppress(OSError):
        channel.connect(f"{daemon.socket_dir}/cachesvc.sock")
        channel.send((b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" if preface else b"") + body)


def test_a_message_above_the_limit_is_refused(daemon: Daemon, undisturbed: DaemonGrants) -> None:
    with grpc.insecure_channel(
        f"unix:{daemon.socket_dir}/cachesvc.sock", [("grpc.max_send_message_length", -1)]
    ) as channel:
        call = channel.unary_unary("/cachesvc.v1.Cache/Status", None, None)
        with pytest.raises(grpc.RpcError) as caught:
            call(bytes(MAX_MESSAGE_BYTES + 1), timeout=60)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


CALLERS = 32
GROWTH_AT_ONCE_KB = CALLERS * (MAX_MESSAGE_BYTES >> 10) * 3
"""Each message three times: as received, assembled and parsed."""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["OpenDataset", "Prefetch", "Status"])
def test_many_callers_with_the_largest_messages_cost_bounded_memory(daemon: Daemon, method: str) -> None:
    """The bound allows for freed memory that the C library keeps for later use."""
    assert daemon.process is not None
    pid, before = daemon.pid, footprint(daemon.pid)[1]
    length = MAX_MESSAGE_BYTES - 64
    varint = [*(length >> shift & 127 | 128 for shift in (0, 7, 14)), length >> 21]
    body = bytes([0xFA, 0x7F, *varint]) + bytes(
        length
    )  # an unknown field, which is kept with its parsed message

    def call(_: int) -> bool:
        options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(f"unix:{daemon.socket_dir}/cachesvc.sock", options) as channel:
            try:
                list(channel.unary_stream(f"/cachesvc.v1.Cache/{method}", None, None)(body, timeout=100))
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


def test_calls_beyond_the_limits_are_refused_and_end_with_their_callers(
    daemon: Daemon, undisturbed: DaemonGrants
) -> None:
    """Makes 656 calls that never end, from 16 connections."""
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
            call: Any = channels[number % 16].stream_stream(method, None, None)(said_nothing())
            call.add_done_callback(ended)
        for _ in range(128):
            assert refused.acquire(timeout=60)
        read_one(undisturbed, 3)
    wait_until(lambda: answers(daemon))


def answers(daemon: Daemon) -> bool:
    try:
        with Control(daemon.socket_dir) as control:
            return bool(control.status().pid)
    except CacheError:
        return False


sizes = st.sampled_from([0, 1, 4095, 4096, 2**31, 2**63 - 1, 2**64 - 1])
KNOWN = [".", "../..", "/", "records", "tokens", "files", "mds", "uint16", "%s"]
words = st.sampled_from(["", "\0", "é\n\x1b[2J", "x" * 9000, *KNOWN]) | st.text(max_size=20)
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
    """Draw a method and a valid message with any values in its fields."""
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
    daemon: Daemon, dataset: DatasetId, undisturbed: DaemonGrants, data: st.DataObject
) -> None:
    method, body = data.draw(calls(str(daemon.root.parent / "data"), dataset))
    with grpc.insecure_channel(f"unix:{daemon.socket_dir}/cachesvc.sock") as channel:
        call = channel.unary_stream(f"/cachesvc.v1.Cache/{method}", None, None)(body, timeout=20)
        with contextlib.suppress(grpc.RpcError):
            list(call)
        if call.code() is not grpc.StatusCode.OK:
            assert call.code() in TYPED, (call.code(), call.details())
            assert dict(call.trailing_metadata())[CODE_KEY].isdigit()
            assert "\n" not in call.details()
