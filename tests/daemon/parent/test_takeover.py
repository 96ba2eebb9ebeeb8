"""`serve --takeover`: one daemon takes over from another, with its memory, under the same readers."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from cachesvc.client.control import Control
from cachesvc.client.grants import DaemonGrants
from cachesvc.config import CONTROL_SOCKET, GRANTS_SOCKET
from testbed import WAIT_S
from testbed.node import Daemon, open_files
from testbed.servers import Fault, Proxy, SeaweedFS, free_ports
from tests.support.processes import held_memory
from tests.support.takeover import (
    EXTENT,
    EXTENTS,
    LOADING,
    epochs,
    opened,
    read,
    reading,
    serving,
    stored,
    taken_over,
)
from tests.support.training.jobs import Node, Records, Trainer, fetched
from tests.support.waiting import wait_until

TAKEOVERS = 2
KILLS, START_S = 8, 2.0
"""Kills in one test, at even intervals over the time that a daemon takes to start and a bit more."""


def asks(directory: str, enough: threading.Event) -> int:
    """Ask for the status until `enough` is set; return the number of daemons that answered."""
    seen = set()
    with Control(directory) as control:
        while not enough.wait(0.01):
            seen.add(control.status().pid)
        seen.add(control.status().pid)
    return len(seen)


@pytest.mark.slow
def test_jobs_notice_nothing_of_takeovers_from_the_first_cold_epoch_on(
    tmp_path: Path, node: Node, records: Records
) -> None:
    env = node.s3.env(node.proxy.endpoint) | node.daemon.env | {"CACHESVC": "require"}
    enough = threading.Event()
    with (
        Trainer(tmp_path / "workers", records.uri, LOADING | {"num_workers": 2}, env) as workers,
        Trainer(tmp_path / "alone", records.uri, LOADING | {"num_workers": 0}, env) as alone,
        ThreadPoolExecutor(3) as pool,
    ):
        exactly = [pool.submit(epochs, one, records.rows, enough) for one in (workers, alone)]
        asking = pool.submit(asks, node.daemon.socket_dir, enough)
        try:
            wait_until(lambda: node.proxy.counts.bytes > 0)
            for _ in range(TAKEOVERS):
                taken_over(node)
        finally:
            enough.set()
        assert all(one.result(WAIT_S) for one in exactly)
        assert asking.result(WAIT_S) == 1 + TAKEOVERS
    assert fetched(node) == records.rows.nbytes


def test_memory_passes_to_the_new_daemon_and_readers_report_what_they_hold(
    node: Node, records: Records
) -> None:
    dataset = opened(node, records)
    grants = DaemonGrants(node.daemon.socket_dir, dataset)
    read(grants, records.rows)
    memory, used_bytes = memory_of(node), node.ram().used_bytes
    taken_over(node)
    assert set(memory_of(node)) == set(memory)
    assert (node.ram().used_bytes, node.ram().held_bytes) == (used_bytes, 0)
    grants.connect()
    os.close(grants.catalog())  # once it is answered, the daemon has handled the reports
    with Control(node.daemon.socket_dir) as control:
        assert control.evict(dataset).evicted_bytes == 0  # the reader holds all of it
        grants.release([0, 1, 2])
        wait_until(lambda: control.evict(dataset).busy_bytes == (EXTENTS - 3) * EXTENT)
    grants.close()
    wait_until(lambda: node.readers() == 0)


def memory_of(node: Node) -> list[str]:
    return sorted(held_memory(node.daemon.pid))


@pytest.mark.slow
def test_a_fill_under_way_ends_first_and_its_reader_has_it(node: Node, records: Records) -> None:
    grants = DaemonGrants(node.daemon.socket_dir, opened(node, records))
    node.proxy.reset()
    fault = Fault("hold", 2, ".bin")
    node.proxy.faults.append(fault)
    with ThreadPoolExecutor(2) as pool:
        reading = pool.submit(read, grants, records.rows, 0, 1)
        wait_until(lambda: node.proxy.counts.requests == 2)
        upgrade = pool.submit(taken_over, node)
        wait_until(lambda: "another daemon replaces this one" in node.daemon.log)
        fault.until.set()
        upgrade.result(WAIT_S)
        assert reading.result(WAIT_S) == {"ram"}
    assert fetched(node) == 2 * EXTENT
    grants.close()


@pytest.mark.slow
def test_pins_go_on(own: Node) -> None:
    node, records = own, stored(own)
    dataset = opened(node, records)
    grants = DaemonGrants(node.daemon.socket_dir, dataset)
    read(grants, records.rows)
    grants.close()
    with Control(node.daemon.socket_dir) as control:
        control.pin(dataset, True)
        taken_over(node)
    with Control(node.daemon.socket_dir) as control:
        (known,) = control.list()
        assert (known.pinned, known.resident_bytes) == (True, EXTENTS * EXTENT)
        assert control.evict(dataset).evicted_bytes == 0


@pytest.mark.slow
def test_a_smaller_budget_gives_up_what_it_cannot_hold(own: Node) -> None:
    node, records = own, stored(own)
    with reading(node, records):
        pass
    taken_over(node, "--ram", "4MiB")
    ram = node.ram()
    assert ram.used_bytes == 4 * EXTENT == ram.budget_bytes
    wait_until(lambda: len(memory_of(node)) == 4)
    assert node.daemon.process is not None
    assert len(held_memory(node.daemon.process.pid)) == 4, "the parent gave them up, too"


@pytest.mark.slow
def test_files_stay_locked_and_warm(tmp_path: Path, s3_server: SeaweedFS, proxy: Proxy) -> None:
    (tmp_path / "nvme").mkdir()
    node = serving(tmp_path, s3_server, proxy, "--ram", "0", "--nvme", f"{tmp_path / 'nvme'}=64MiB")
    with node.daemon:
        records = stored(node)
        grants = DaemonGrants(node.daemon.socket_dir, opened(node, records))
        assert read(grants, records.rows) == {"nvme"}
        for _ in range(2):
            taken_over(node)
            assert read(grants, records.rows) == {"nvme"}
        assert fetched(node) == records.rows.nbytes
        grants.close()


@pytest.mark.slow
def test_the_new_daemon_has_the_ports_of_the_old_one(own: Node) -> None:
    ports = dict(zip(("--metrics", "--listen", "--advertise"), free_ports(3)))
    more = [word for option, port in ports.items() for word in (option, f"127.0.0.1:{port}")]
    more += ["--cluster", f"static:127.0.0.1:{ports['--advertise']}"]
    taken_over(own, *more)
    taken_over(own, *more)
    wait_until(lambda: all(listens(port) for port in ports.values()))


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
def test_both_sockets_have_the_mode_of_the_new_daemon(node: Node) -> None:
    def modes() -> set[int]:
        here = Path(node.daemon.socket_dir)
        return {(here / name).stat().st_mode & 0o777 for name in (CONTROL_SOCKET, GRANTS_SOCKET)}

    taken_over(node, "--socket-mode", "666")
    assert modes() == {0o666}
    taken_over(node)
    assert modes() == {0o600}


@pytest.mark.slow
def test_without_a_service_a_new_one_starts_as_usual(own: Node) -> None:
    node, records = own, stored(own)
    node.daemon.stop()
    node.daemon.process = node.daemon.spawn("--takeover")
    node.daemon.wait_ready()
    assert "there is no service to upgrade" in node.daemon.log
    with reading(node, records):
        pass


def test_a_service_that_is_ending_is_waited_for(own: Node) -> None:
    """An ending service has closed its sockets and still holds the lock, which this test holds in its place."""
    own.daemon.stop()
    with open(f"{own.daemon.socket_dir}/lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        own.daemon.launch()
        wait_until(lambda: own.daemon.process is not None and waits_for(own.daemon.process.pid, lock.name))
    own.daemon.wait_ready()


def waits_for(pid: int, path: str) -> bool:
    return os.path.realpath(path) in open_files(pid)


def killed_in_an_upgrade(daemon: Daemon, victim: str, after_s: float) -> None:
    before = set(daemon.children())
    asking = daemon.spawn("--takeover")
    wait_until(lambda: asking.poll() is not None or set(daemon.children()) - before)
    time.sleep(after_s)
    for pid in before if victim == "the old daemon" else set(daemon.children()) - before:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    asking.wait(WAIT_S)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["the old daemon", "the new daemon"])
def test_a_daemon_killed_at_any_moment_of_an_upgrade_costs_nothing_in_ram(
    node: Node, records: Records, victim: str
) -> None:
    with reading(node, records) as grants:
        for number in range(KILLS):
            killed_in_an_upgrade(node.daemon, victim, number / KILLS * START_S)
            wait_until(node.daemon.ready)
            assert read(grants, records.rows) == {"ram"}
        assert fetched(node) == records.rows.nbytes
