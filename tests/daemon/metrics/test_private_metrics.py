"""Metrics are served to scrapers only while they ask, and do not name datasets that are restricted to some users, since
any user may reach the port."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachesvc.catalog.options import Options
from cachesvc.client.control import Control
from cachesvc.client.grants import DaemonGrants
from cachesvc.core.model import DatasetId
from cachesvc.core.stalls import CAUSES, QUANTILES, StallReport
from cachesvc.daemon.datasets import MAX_UNUSED
from testbed import WAIT_S
from testbed.node import Daemon
from testbed.servers import free_ports
from tests.support.waiting import wait_until

EXTENT = 64 << 10
SIZES = {"alice": 2 * EXTENT, "bob": 3 * EXTENT, "all": 4 * EXTENT}
NO_SUMS = {"cachesvc_hit_bound", "cachesvc_loader_wait_quantile_seconds"}
REPORT = StallReport(10, (1_000_000,) * len(CAUSES), (5,) * len(QUANTILES))


def scraped(port: int, path: str = "/metrics") -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=WAIT_S) as answer:
        return bytes(answer.read())


def values(port: int) -> dict[str, float]:
    """Scrape the metrics."""
    lines = re.findall(r"^(cachesvc_\S+) (\S+)$", scraped(port).decode(), re.M)
    return {name: float(value) for name, value in lines}


def test_private_datasets_share_one_label_in_the_metrics_and_have_their_own_status(tmp_path: Path) -> None:
    (port,), data = free_ports(1), tmp_path / "data"
    options = ["--ram", "1MiB", "--extent-bytes", str(EXTENT), "--fillers", "1"]
    options += ["--metrics", f"127.0.0.1:{port}", "--allow", f"{data}/all"]
    for name, size in SIZES.items():
        (data / name).mkdir(parents=True)
        (data / name / "0.bin").write_bytes(os.urandom(size))
        if name != "all":
            options += ["--allow", f"{data}/{name}/=uid:64001"]

    with Daemon(tmp_path / "node", options) as daemon, Control(daemon.socket_dir) as control:
        ids: dict[str, DatasetId] = {}
        readers: list[DaemonGrants] = []
        for name in SIZES:
            plain = Options(format="records", record_bytes=4096)
            ids[name] = control.open_dataset([f"{data}/{name}/"], plain).id
            assert list(control.prefetch(ids[name]))[-1].done
            readers.append(DaemonGrants(daemon.socket_dir, ids[name]))
            readers[-1].connect()
            readers[-1].waited(REPORT)
        batches = "cachesvc_loader_batches_total"
        wait_until(lambda: values(port).get(f'{batches}{{dataset="private"}}') == 20)
        wait_until(lambda: values(port).get(f'{batches}{{dataset="{ids["all"]}"}}') == 10)
        told = values(port)
        status = {each.dataset.id: each.resident_bytes for each in control.status().datasets}
        for reader in readers:
            reader.close()
    assert status == {ids[name]: size for name, size in SIZES.items()}
    for metric in ("resident_bytes", "source_bytes_total"):
        assert told[f'cachesvc_{metric}{{dataset="private"}}'] == SIZES["alice"] + SIZES["bob"]
        assert told[f'cachesvc_{metric}{{dataset="{ids["all"]}"}}'] == SIZES["all"]
    assert told['cachesvc_loader_wait_seconds_total{cause="disk",dataset="private"}'] == 2
    assert told[f'{batches}{{dataset="{ids["all"]}"}}'] == 10
    assert not [name for name in told if ids["alice"] in name or ids["bob"] in name]
    sums = {name.partition("{")[0] for name in told if "private" in name}
    whole = {name.partition("{")[0] for name in told if ids["all"] in name}
    assert whole - sums == NO_SUMS  # rates and quantiles do not add up


@pytest.mark.slow
def test_counters_of_forgotten_datasets_keep_their_value_and_label(tmp_path: Path) -> None:
    (port,), data = free_ports(1), tmp_path / "data"
    options = ["--ram", "4MiB", "--extent-bytes", str(EXTENT), "--fillers", "1"]
    options += ["--metrics", f"127.0.0.1:{port}", "--allow", f"{data}/", "--allow", f"{data}/0/=uid:64001"]
    batches, source = (
        f'cachesvc_{name}_total{{dataset="private"}}' for name in ("loader_batches", "source_bytes")
    )
    with Daemon(tmp_path / "node", options) as daemon, Control(daemon.socket_dir) as control:

        def use(number: int) -> DatasetId:
            (data / f"{number}").mkdir(parents=True)
            (data / f"{number}" / "0.bin").write_bytes(os.urandom(EXTENT))
            plain = Options(format="records", record_bytes=4096)
            dataset = control.open_dataset([f"{data}/{number}/"], plain).id
            assert list(control.prefetch(dataset))[-1].done
            return dataset

        used = [use(number) for number in (0, 1)]  # one restricted to a user, and one for all
        readers = [DaemonGrants(daemon.socket_dir, dataset) for dataset in used]
        for reader in readers:
            reader.connect()
            reader.waited(REPORT)
        wait_until(lambda: values(port).get(f'cachesvc_loader_batches_total{{dataset="{used[1]}"}}') == 10)
        before = values(port)
        for reader in readers:
            reader.close()
        for number in range(2, 2 + MAX_UNUSED + 2):
            control.evict(used[-1])
            used.append(use(number))
            if number == 2:
                control.evict(used[0])
                control.evict(used[1])
        known = {each.dataset.id for each in control.status().datasets}
        after = values(port)
    assert known.isdisjoint(used[:2]), "it has forgotten both"
    assert (before[batches], before[source]) == (after[batches], after[source]) == (10, EXTENT)


IDLE = 40


@pytest.fixture(scope="module")
def scrapes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, int]]:
    """A daemon, and the port of its metrics."""
    root = tmp_path_factory.mktemp("scrapes")
    (root / "data").mkdir()
    (port,) = free_ports(1)
    options = ["--ram", "64MiB", "--fillers", "1", "--allow", f"{root}/data"]
    with Daemon(root / "node", [*options, "--metrics", f"127.0.0.1:{port}"]) as found:
        yield found, port
    assert "Traceback" not in found.log


def test_only_the_metrics_path_is_answered_with_metrics(scrapes: tuple[Daemon, int]) -> None:
    _, port = scrapes
    for path in ("/metrics?by=scraper", "/metrics/"):
        assert b"cachesvc_fills" in scraped(port, path)
    with pytest.raises(urllib.error.HTTPError) as refused:
        scraped(port, "/healthz")
    assert (refused.value.code, refused.value.reason) == (
        404,
        "metrics are at /metrics, the status page is at /",
    )
    refused.value.close()


@pytest.mark.slow
def test_idle_connections_delay_no_scrape_and_are_closed(scrapes: tuple[Daemon, int]) -> None:
    daemon, port = scrapes
    pid = daemon.pid
    scraped(port)
    before = len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))
    with contextlib.ExitStack() as stack:
        for number in range(IDLE):
            idle = stack.enter_context(socket.create_connection(("127.0.0.1", port), 20))
            if number % 2:
                idle.sendall(b"GET /metrics HTTP/1.1\r\n")
        assert b"cachesvc_fills" in scraped(port)
        wait_until(lambda: len(os.listdir(f"/proc/{pid}/fd")) <= before[0])
    wait_until(lambda: len(os.listdir(f"/proc/{pid}/task")) <= before[1])
