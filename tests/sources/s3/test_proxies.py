"""S3 through a real forward proxy that the environment names and that requires a password."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trustme

from cachesvc.core.errors import InvalidInput, NotAllowed, SourceUnavailable
from cachesvc.sources.s3.proxies import Proxy, proxy_of
from cachesvc.sources.s3.s3 import open_s3
from testbed import WAIT_S
from testbed.servers import SeaweedFS, free_ports
from tests.support.faults.tls import Relay, terminating

BODY = np.random.default_rng(1).bytes(3_000_000)
Environment = Callable[..., None]


@pytest.fixture(scope="module")
def forward(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Run a forward proxy for user "me" with password "se@cret"; return its port."""
    file = tmp_path_factory.mktemp("forward") / "port"
    command = [sys.executable, "-m", "proxy", "--hostname", "127.0.0.1", "--port", "0", "--num-workers", "1"]
    command += ["--num-acceptors", "1", "--basic-auth", "me:se@cret", "--log-level", "e"]
    with subprocess.Popen([*command, "--port-file", str(file)]) as process:
        until = time.monotonic() + WAIT_S
        while not (file.exists() and file.read_text().strip()):
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        yield int(file.read_text())
        process.terminate()


@pytest.fixture
def environment(s3_server: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """Return a function that sets the server's AWS_* variables for an endpoint, and the given proxies alone."""

    def set_to(endpoint: str, **others: str) -> None:
        for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
            monkeypatch.delenv(name, raising=False)
            monkeypatch.delenv(name.upper(), raising=False)
        for name, value in (s3_server.env(endpoint) | others).items():
            monkeypatch.setenv(name, value)

    return set_to


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Record the ports of all connections of the HTTP client."""
    found, connect = set(), socket.create_connection

    def noted(address: tuple[str, int], *arguments: Any, **options: Any) -> socket.socket:
        found.add(address[1])
        return connect(address, *arguments, **options)

    monkeypatch.setattr(socket, "create_connection", noted)
    return found


def read(bucket: str) -> None:
    """List one object, and read it whole and by ranges."""
    source = open_s3()
    (version,) = source.list(f"s3://{bucket}/a/")
    for offset, size in ((0, len(BODY)), (1, 100_000), (len(BODY) - 1, 1)):
        into = bytearray(size)
        source.read_into(version, offset, memoryview(into))
        assert into == BODY[offset : offset + size]
    source.close()


@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
def test_objects_are_read_through_the_proxy_or_not_at_all(
    tls: bool,
    s3_server: SeaweedFS,
    bucket: str,
    forward: int,
    environment: Environment,
    reached: set[int],
    tmp_path: Path,
) -> None:
    s3_server.client().put_object(Bucket=bucket, Key="a/b", Body=BODY)
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    port = int(s3_server.endpoint.rpartition(":")[2])
    with Relay(port, terminating(authority) if tls else None) as front:
        scheme = "https" if tls else "http"
        endpoint, name = f"{scheme}://127.0.0.1:{front.port}", f"{scheme}_proxy"
        trusted = {"AWS_CA_BUNDLE": str(tmp_path / "ca.pem")}
        environment(endpoint, **trusted, **{name: f"http://me:se%40cret@127.0.0.1:{forward}"})
        reached.clear()
        read(bucket)
        assert reached & {forward, front.port} == {forward}
        environment(endpoint, **trusted, **{name: "http://127.0.0.1:1"}, no_proxy="127.0.0.1")
        reached.clear()
        read(bucket)
        assert reached & {1, front.port} == {front.port}
        environment(endpoint, **trusted)
        source = open_s3()
        (version,) = source.list(f"s3://{bucket}/a/")
        environment(endpoint, **trusted, **{name: f"http://me:wrong@127.0.0.1:{forward}"})
        with pytest.raises(NotAllowed, match=rf"407.*{name.upper()}") as refused:
            open_s3().read_into(version, 0, memoryview(bytearray(10)))
        assert "wrong" not in str(refused.value)
        with pytest.raises(NotAllowed, match=rf"407.*{name.upper()}"):
            list(open_s3().list(f"s3://{bucket}/a/"))
        (closed_port,) = free_ports(1)
        environment(endpoint, **trusted, **{name: f"127.0.0.1:{closed_port}"})
        with pytest.raises(SourceUnavailable, match=f"through the proxy 127.0.0.1:{closed_port}"):
            open_s3().read_into(version, 0, memoryview(bytearray(10)))


@pytest.mark.parametrize(
    "named", ["https://127.0.0.1:1", "socks5://127.0.0.1:1", "http://:1", "http://a:99999"]
)
def test_a_proxy_of_another_kind_is_a_clear_error(named: str, environment: Environment) -> None:
    environment("http://s3.invalid", http_proxy=named)
    with pytest.raises(InvalidInput, match="HTTP_PROXY names no HTTP proxy"):
        proxy_of("http://s3.invalid")


def test_a_proxy_without_a_port_listens_at_80_and_ipv6_is_written_in_brackets(
    environment: Environment,
) -> None:
    environment("http://s3.invalid", http_proxy="[::1]")
    assert proxy_of("http://s3.invalid") == Proxy("::1", 80)
    assert proxy_of("https://s3.invalid") is None
    assert (
        Proxy("::1", 80)
        .tunnel("::2", 443)
        .startswith(b"CONNECT [::2]:443 HTTP/1.1\r\nHost: [::2]:443\r\n\r\n")
    )
