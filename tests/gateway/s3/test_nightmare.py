"""Clients that ask too much, all at once, at the endpoint of a real daemon: refused or bounded, while others are served."""

from __future__ import annotations

import resource
import socket
import struct
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from botocore import auth

from cachesvc.daemon.access.tenants import Peer
from cachesvc.gateway.s3.__main__ import OPEN_FILES, SECRET_FILE
from cachesvc.gateway.s3.keys import Keys, ask_for_keys
from testbed import WAIT_S
from testbed.node import Daemon
from testbed.servers import SeaweedFS
from tests.support import s3_endpoint
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow
MIB = 1 << 20
TEAM = 4_000_000
"""A uid of nobody."""
LARGE_BYTES = 32 * MIB
KEPT, SLOW, HALF, FLOOD = 1000, 40, 100, 2000
MOST_BYTES = 400 * MIB
"""The most memory of the endpoint's process."""


@pytest.fixture(scope="module")
def bucket(s3_server: SeaweedFS) -> str:
    bucket, client = s3_server.create_bucket(f"n-{uuid.uuid4().hex[:12]}"), s3_server.client()
    client.put_object(Bucket=bucket, Key="data/large", Body=b"x" * LARGE_BYTES)
    client.put_object(Bucket=bucket, Key="data/small", Body=b"small")
    client.put_object(Bucket=bucket, Key="data/team/x", Body=b"secret")
    return bucket


@pytest.fixture(scope="module")
def daemon(s3_server: SeaweedFS, bucket: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    options = ["--ram", "96MiB", "--extent-bytes", "1MiB", "--allow", f"s3://{bucket}/data/"]
    options += ["--allow", f"s3://{bucket}/data/team/=uid:{TEAM}"]
    with s3_endpoint.served(tmp_path_factory.mktemp("node"), options, s3_server.env()) as found:
        yield found


class Clients:
    """Connections to the endpoint, which are closed at the end."""

    def __init__(self, daemon: Daemon, bucket: str, held: ExitStack) -> None:
        where = urlsplit(ask_for_keys(daemon.socket_dir)["Endpoint"])
        self.address = (where.hostname, where.port)
        self.bucket, self._held = bucket, held
        self._signing = s3_endpoint.client_of(daemon)

    def request(self, key: str, *headers: str) -> bytes:
        """A signed GET."""
        url = urlsplit(
            self._signing.generate_presigned_url("get_object", Params={"Bucket": self.bucket, "Key": key})
        )
        lines = [f"GET {url.path}?{url.query} HTTP/1.1", f"Host: {url.netloc}", *headers, "", ""]
        return "\r\n".join(lines).encode()

    def connect(self, buffer_bytes: int = 0) -> socket.socket:
        found = socket.socket()
        self._held.callback(found.close)
        if buffer_bytes:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        found.settimeout(WAIT_S)
        found.connect(self.address)
        return found


@contextmanager
def many(daemon: Daemon, bucket: str) -> Iterator[Clients]:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limit[1], 2 * OPEN_FILES), limit[1]))
    with ExitStack() as held:
        yield Clients(daemon, bucket, held)
    resource.setrlimit(resource.RLIMIT_NOFILE, limit)


def answered(connection: socket.socket) -> bytes:
    """The head of an answer."""
    got = b""
    while b"\r\n\r\n" not in got and (data := connection.recv(4096)):
        got += data
    return got


def code_of(connection: socket.socket) -> str:
    got = answered(connection)
    while b"</Error>" not in got and (data := connection.recv(4096)):
        got += data
    return got.partition(b"<Code>")[2].partition(b"</Code>")[0].decode()


def test_others_are_served_beside_connections_slow_readers_half_requests_and_floods(
    daemon: Daemon, bucket: str
) -> None:
    small = {"Bucket": bucket, "Key": "data/small"}
    client: Any = s3_endpoint.client_of(daemon)
    process = psutil.Process(s3_endpoint.endpoint_process(daemon))
    with many(daemon, bucket) as clients:

        def others_are_served() -> None:
            assert client.get_object(**small)["Body"].read() == b"small"
            large = client.get_object(Bucket=bucket, Key="data/large", Range="bytes=5-5000004")
            assert large["Body"].read() == b"x" * 5_000_000
            assert process.memory_info().rss < MOST_BYTES

        wanted = clients.request("data/small")
        kept = [clients.connect() for _ in range(KEPT)]
        for one in kept:
            one.sendall(wanted)
        assert {answered(one)[:12] for one in kept} == {b"HTTP/1.1 200"}
        others_are_served()
        for _ in range(SLOW):
            clients.connect(4096).sendall(clients.request("data/large"))
        others_are_served()
        for at in range(HALF):
            clients.connect().sendall(wanted[: at + 1])
        others_are_served()
        wrong = wanted.replace(b"X-Amz-Signature=", b"X-Amz-Signature=0")
        for one in kept[:FLOOD]:
            one.sendall(wrong)
        assert {code_of(one) for one in kept} == {"SignatureDoesNotMatch"}
        ranged = clients.request("data/large", "Range: bytes=1-1")
        flood = clients.connect()
        flood.sendall(ranged * FLOOD)
        ranges = clients.request("data/small", f"Range: bytes={','.join(['0-0'] * 3000)}")
        several = clients.connect()
        several.sendall(ranges)
        assert answered(several).startswith(b"HTTP/1.1 200"), "several ranges are the whole, as at AWS"
        others_are_served()
        got = 0
        while got < FLOOD:
            got += flood.recv(1 << 16).count(b"HTTP/1.1 206")
        assert got == FLOOD
        kept[0].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        kept[0].close()  # by a reset
        others_are_served()
    wait_until(lambda: len(process.net_connections("tcp")) < 10)


def test_wrong_clocks_tenants_and_dots_are_refused_and_bodies_of_refused_writes_not_read(
    daemon: Daemon, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Keys((daemon.root / "state" / SECRET_FILE).read_bytes())
    made = node.issue(Peer(TEAM + 1, frozenset()), 60, time.time())
    names = {"AccessKeyId": made.access_key, "SecretAccessKey": made.secret_key, "SessionToken": made.token}
    client: Any = s3_endpoint.client_of(daemon, names)
    for key in ("data/team/x", "data/../x", "data/./small", "data/..", "data/team/../team/x"):
        with pytest.raises(client.exceptions.ClientError, match="AccessDenied"):
            client.get_object(Bucket=bucket, Key=key)
    with many(daemon, bucket) as clients:
        for path in (f"/{bucket}/data/%2e%2e/x", f"/{bucket}/../{bucket}/data/small", "//data/small"):
            one = clients.connect()
            one.sendall(f"GET {path} HTTP/1.1\r\nHost: {clients.address[0]}\r\n\r\n".encode())
            assert code_of(one) == "AccessDenied"
        one = clients.connect()
        put = clients.request("data/small").replace(b"GET", b"PUT", 1)[:-2]
        one.sendall(put + b"Content-Length: 1000000000000\r\nExpect: 100-continue\r\n\r\n")
        assert code_of(one) == "SignatureDoesNotMatch"
        assert one.recv(1) == b"", "and the connection ends"
    real: Any = vars(auth)["get_current_datetime"]

    def late(*given: Any, **named: Any) -> Any:
        return real(*given, **named) - timedelta(minutes=20)

    monkeypatch.setattr(auth, "get_current_datetime", late)
    with pytest.raises(client.exceptions.ClientError, match="RequestTimeTooSkewed"):
        client.get_object(Bucket=bucket, Key="data/small")
