"""S3 over TLS: certificates are checked, and bits that flip on the way never reach a reader."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import trustme

from cachesvc.core.errors import NotAllowed, SourceUnavailable
from cachesvc.core.model import ObjectVersion
from cachesvc.sources.resilient import Resilient
from cachesvc.sources.s3 import http
from cachesvc.sources.s3.http import ConnectionPool
from cachesvc.sources.s3.s3 import open_s3
from loader import DataLoader, open_dataset
from testbed import WAIT_S
from testbed.node import Daemon
from testbed.servers import SeaweedFS
from tests.support.faults.tls import FlipsBits, Relay, terminating

RECORD_BYTES = 4096
RECORDS = 8192


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def front(s3_server: SeaweedFS, authority: trustme.CA) -> Iterator[Relay]:
    with Relay(int(s3_server.endpoint.rpartition(":")[2]), terminating(authority)) as found:
        yield found


@pytest.fixture
def bundle(authority: trustme.CA, tmp_path: Path) -> str:
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    return str(tmp_path / "ca.pem")


def set_env(monkeypatch: pytest.MonkeyPatch, env: dict[str, str]) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("variable", ["AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE"])
def test_listings_heads_and_ranges(
    s3_server: SeaweedFS,
    bucket: str,
    front: Relay,
    bundle: str,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
) -> None:
    body = np.random.default_rng(1).bytes(3_000_000)
    s3_server.client().put_object(Bucket=bucket, Key="a/b", Body=body)
    monkeypatch.delenv("AWS_CA_BUNDLE", raising=False)
    set_env(monkeypatch, s3_server.env(f"https://127.0.0.1:{front.port}") | {variable: bundle})
    source = open_s3()
    (version,) = source.list(f"s3://{bucket}/a/")
    assert source.head(f"s3://{bucket}/a/b") == version
    for offset, size in ((0, len(body)), (1, 100_000), (len(body) - 1, 1), (17, 2_000_000)):
        into = bytearray(size)
        source.read_into(version, offset, memoryview(into))
        assert into == body[offset : offset + size]
    source.close()


@pytest.mark.parametrize("wrong", ["authority", "host"])
def test_a_certificate_that_is_not_the_servers_is_refused_in_words(
    s3_server: SeaweedFS,
    bucket: str,
    authority: trustme.CA,
    bundle: str,
    monkeypatch: pytest.MonkeyPatch,
    wrong: str,
) -> None:
    signed_by = trustme.CA() if wrong == "authority" else authority
    context = terminating(signed_by, "127.0.0.1" if wrong == "authority" else "elsewhere.example")
    with Relay(int(s3_server.endpoint.rpartition(":")[2]), context) as front:
        set_env(monkeypatch, s3_server.env(f"https://127.0.0.1:{front.port}") | {"AWS_CA_BUNDLE": bundle})
        source = Resilient(open_s3())
        for ask in (
            lambda: list(source.list(f"s3://{bucket}/")),
            lambda: source.read_into(ObjectVersion(f"s3://{bucket}/a", 9, "e"), 0, memoryview(bytearray(9))),
        ):
            with pytest.raises(NotAllowed, match="a certificate that is not trusted"):
                ask()
        source.close()


@pytest.mark.slow
def test_bits_that_flip_in_ranges_are_seen_and_read_again(
    s3_server: SeaweedFS,
    bucket: str,
    front: Relay,
    bundle: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = np.random.default_rng(2).integers(0, 256, (RECORDS, RECORD_BYTES), np.uint8)
    s3_server.client().put_object(Bucket=bucket, Key="rows.bin", Body=rows.tobytes())
    flips, uri = FlipsBits(3, 1_500_000), f"s3://{bucket}/rows.bin"
    options = ["--ram", "64MiB", "--allow", f"s3://{bucket}/", "--extent-bytes", str(1 << 20)]
    with Relay(front.port, spoil=flips) as way:
        env = s3_server.env(f"https://127.0.0.1:{way.port}") | {"AWS_CA_BUNDLE": bundle}
        with Daemon(tmp_path / "node", options, env) as daemon:
            set_env(monkeypatch, {"CACHESVC_SOCKET": daemon.socket_dir, "CACHESVC": "require"})
            data = open_dataset(uri, format="records", record_bytes=RECORD_BYTES)
            batches = DataLoader(data, 64, shuffle=True)
            for batch in batches:
                assert np.array_equal(batch.numpy(), rows[batches.indices])
            data.close()
            assert "Traceback" not in daemon.log
    assert flips.count >= 10


def test_a_read_that_is_interrupted_takes_nothing_encrypted_for_the_body(authority: trustme.CA) -> None:
    size = 64 << 20
    into, ended = bytearray(b"-" * size), list[Exception]()

    def serve(listener: socket.socket) -> None:
        context = terminating(authority)
        with (
            contextlib.suppress(OSError),
            context.wrap_socket(listener.accept()[0], server_side=True) as server,
        ):
            server.settimeout(WAIT_S)  # the client disconnects after it has read everything
            server.recv(1 << 10)
            server.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
            for _ in range(size >> 16):
                server.sendall(b"+" * (1 << 16))

    def read() -> None:
        connection.request(b"GET / HTTP/1.1\r\n\r\n")
        try:
            connection.read_into(memoryview(into))
        except SourceUnavailable as error:
            ended.append(error)

    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threads = [threading.Thread(target=serve, args=(listener,))]
        threads[0].start()
        connection = ConnectionPool(trusting).connect("127.0.0.1", listener.getsockname()[1])
        threads.append(threading.Thread(target=read))
        threads[1].start()
        while into[1 << 20] != ord("+"):
            assert threads[1].is_alive()
            time.sleep(0.001)
        connection.interrupt()
        for thread in threads[::-1]:
            thread.join(WAIT_S)
            connection.close()
    assert ended
    assert set(into) <= set(b"+-")


@pytest.mark.parametrize("tls", [True, False])
@pytest.mark.parametrize(
    "said", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nxx"], ids=["head", "body"]
)
def test_a_server_that_falls_silent_is_given_up(authority: trustme.CA, tls: bool, said: bytes) -> None:
    """Python's `ssl` retries after the kernel's timeout, so this read once waited for ever."""
    context = ssl.create_default_context()
    authority.configure_trust(context)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        Relay(silent.getsockname()[1], terminating(authority) if tls else None) as front,
    ):
        connection = http.ConnectionPool(
            context if tls else None, timeouts=http.Timeouts(silence_s=1.0, receive_s=1.0)
        ).connect("127.0.0.1", front.port)
        server, _ = silent.accept()
        with server:
            server.sendall(said)

            def ask() -> None:
                connection.request(b"GET / HTTP/1.1\r\n\r\n")
                connection.read_into(memoryview(bytearray(9)))

            with pytest.raises(SourceUnavailable, match="sent nothing for 1 s"):
                ask()
        connection.close()
