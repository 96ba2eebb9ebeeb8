"""The metrics are served over HTTP, to scrapers only while they ask."""

from __future__ import annotations

import contextlib
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from testbed import WAIT_S
from testbed.node import Daemon
from testbed.servers import free_ports
from tests.support.waiting import wait_until

IDLE = 40


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    root = tmp_path_factory.mktemp("scrapes")
    (root / "data").mkdir()
    (port,) = free_ports(1)
    (root / "port").write_text(str(port))
    options = ["--ram", "64MiB", "--fillers", "1", "--allow", f"{root}/data"]
    with Daemon(root / "node", [*options, "--metrics", f"127.0.0.1:{port}"]) as found:
        yield found
    assert "Traceback" not in found.log


def port_of(daemon: Daemon) -> int:
    return int((daemon.root.parent / "port").read_text())


def scraped(daemon: Daemon, path: str = "/metrics") -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port_of(daemon)}{path}", timeout=WAIT_S) as answer:
        return bytes(answer.read())


def test_only_the_metrics_path_is_answered_with_metrics(daemon: Daemon) -> None:
    for path in ("/metrics?by=scraper", "/"):
        assert b"cachesvc_fills" in scraped(daemon, path)
    with pytest.raises(urllib.error.HTTPError) as refused:
        scraped(daemon, "/healthz")
    assert (refused.value.code, refused.value.reason) == (404, "metrics are at /metrics")
    refused.value.close()


@pytest.mark.slow
def test_idle_connections_delay_no_scrape_and_are_closed(daemon: Daemon) -> None:
    assert daemon.process is not None
    pid = daemon.pid
    scraped(daemon)
    before = len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))
    with contextlib.ExitStack() as stack:
        for number in range(IDLE):
            idle = stack.enter_context(socket.create_connection(("127.0.0.1", port_of(daemon)), 20))
            if number % 2:
                idle.sendall(b"GET /metrics HTTP/1.1\r\n")
        assert b"cachesvc_fills" in scraped(daemon)
        wait_until(lambda: len(os.listdir(f"/proc/{pid}/fd")) <= before[0])
    wait_until(lambda: len(os.listdir(f"/proc/{pid}/task")) <= before[1])
