"""`serve --takeover`: one daemon takes over from another under the same readers."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from cachesvc.client.control import Control
from cachesvc.client.grants import DaemonGrants
from cachesvc.config import CONTROL_SOCKET, GRANTS_SOCKET
from cachesvc.core.order.epoch_order import Plan
from testbed import WAIT_S
from testbed.servers import Fault, Proxy, SeaweedFS, free_ports
from tests.support.faults.disks import mounted
from tests.support.processes import held_memory
from tests.support.takeover import (
    EXTENT,
    EXTENTS,
    LOADING,
    epochs,
    opened,
    read,
    serving,
    stored,
    taken_over,
)
from tests.support.training.jobs import Node, Records, Trainer, fetched
from tests.support.waiting import wait_until

PROBED_S = 8.0
"""A lost tier is probed every 5 s."""
TAKEOVERS = 2


def asks(directory: str, enough: threading.Event) -> int:
    """Ask for the status until `enough` is set; return the number of daemons that answered."""
    seen = set()
    with Control(directory) as control:
        while not enough.wait(0.01):
            seen.add(control.status().pid)
        seen.add(control.status().pid)
    return len(seen)


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
        assert "daemon" not in workers.log.replace("via daemon", "") + alone.log.replace("via daemon", "")
    assert fetched(node) == records.rows.nbytes


def test_leases_connections_and_memory_pass_to_the_new_daemon(node: Node, records: Records) -> None:
    dataset = opened(node, records)
    grants = DaemonGrants(node.daemon.socket_dir, dataset)
    read(grants, records.rows)
    token, memory, used_bytes = grants.token, memory_of(node), node.ram().used_bytes
    taken_over(node)
    assert set(memory_of(node)) == set(memory)
    wait_until(
        lambda: len(memory_of(node)) == len(set(memory))
    )  # one descriptor each, once no grant is in flight
    assert (node.ram().used_bytes, node.ram().held_bytes) == (used_bytes, 0)
    with Control(node.daemon.socket_dir) as control:
        assert control.evict(dataset).evicted_bytes == 0  # all of it is leased
        grants.release([0, 1, 2])
        wait_until(lambda: control.evict(dataset).busy_bytes == (EXTENTS - 3) * EXTENT)
    assert not grants.connect()
    assert grants.token == token
    grants.close()
    wait_until(lambda: node.readers() == 0)


def test_ranks_of_one_job_have_one_epoch_across_a_takeover(node: Node, records: Records) -> None:
    dataset, steps = opened(node, records), np.arange(EXTENTS)

    def touched() -> list[int]:
        with Control(node.daemon.socket_dir) as control:
            (found,) = [each for each in control.list() if each.dataset.id == dataset]
        return [epoch.touched for epoch in found.epochs]

    ranks = [DaemonGrants(node.daemon.socket_dir, dataset, job) for job in (7, 7, 8)]
    ranks[0].submit(Plan(steps, steps, steps))
    read(ranks[0], records.rows, 0)
    ranks[0].passed(2)
    wait_until(lambda: touched() == [2])
    taken_over(node)
    for rank in ranks[1:]:  # a rank of the same job, and one of another
        rank.submit(Plan(steps, steps, steps))
        rank.passed(EXTENTS)
    ranks[0].passed(EXTENTS)
    wait_until(lambda: touched() == [2 * EXTENTS - 2, EXTENTS])  # the new daemon counts from its start
    for rank in ranks:
        rank.close()
    wait_until(lambda: node.readers() == 0)


def memory_of(node: Node) -> list[str]:
    assert node.daemon.process is not None
    return sorted(held_memory(node.daemon.process.pid))


def test_a_fill_under_way_ends_first_and_its_reader_has_it(node: Node, records: Records) -> None:
    grants = DaemonGrants(node.daemon.socket_dir, opened(node, records))
    node.proxy.reset()
    node.proxy.faults.append(Fault("slow", 1, ".bin", after_s=1.0))
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read, grants, records.rows)
        wait_until(lambda: node.proxy.counts.requests > 0)
        taken_over(node)
        assert reading.result(WAIT_S) == {"ram"}
    assert fetched(node) == records.rows.nbytes
    grants.close()


@pytest.mark.slow
def test_a_prefetch_goes_on_in_the_new_daemon(own: Node) -> None:
    node, records = own, stored(own)
    dataset = opened(node, records)
    node.proxy.faults.append(Fault("slow", EXTENTS, ".bin", after_s=0.5))
    with Control(node.daemon.socket_dir) as control, ThreadPoolExecutor(1) as pool:
        replies = control.prefetch(dataset)
        next(replies)
        filling = pool.submit(list, replies)
        taken_over(node)
        last = filling.result(WAIT_S)[-1]
    assert (last.done, last.resident_extents) == (True, EXTENTS)
    assert fetched(node) == records.rows.nbytes


@pytest.mark.slow
def test_pins_and_readers_that_only_identify_themselves_go_on(own: Node) -> None:
    node, records = own, stored(own)
    dataset = opened(node, records)
    grants = DaemonGrants(node.daemon.socket_dir, dataset)
    read(grants, records.rows)
    grants.close()
    with Control(node.daemon.socket_dir) as control:
        control.pin(dataset, True)
        taken_over(node)
        (known,) = control.list()
        assert (known.pinned, known.resident_bytes) == (True, EXTENTS * EXTENT)
        assert control.evict(dataset).evicted_bytes == 0


@pytest.mark.slow
def test_a_smaller_budget_gives_up_what_it_cannot_hold(own: Node) -> None:
    node, records = own, stored(own)
    grants = DaemonGrants(node.daemon.socket_dir, opened(node, records))
    read(grants, records.rows)
    grants.release(range(2, EXTENTS))
    os.close(grants.catalog())  # once it is answered, the daemon has handled the releases
    taken_over(node, "--ram", "4MiB")
    ram = node.ram()
    assert ram.used_bytes == 4 * EXTENT == ram.budget_bytes
    assert len(memory_of(node)) == 4
    node.proxy.reset()
    assert read(grants, records.rows, 0, 1) == {"ram"}
    assert fetched(node) == 0
    grants.close()


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.slow
def test_a_new_daemon_keeps_nothing_below_an_unmounted_disk(
    tmp_path: Path, s3_server: SeaweedFS, proxy: Proxy, known: bool
) -> None:
    """The new daemon does not start, unless the old one has lost the tier; then it is handed over as lost."""

    def lost() -> bool:
        with Control(node.daemon.socket_dir) as control:
            return any(tier.lost for tier in control.status().tiers)

    with mounted(tmp_path / "nvme", "size=16m") as path:
        node = serving(tmp_path, s3_server, proxy, "--ram", "8MiB", "--nvme", f"{path}=8MiB")
        with node.daemon:
            subprocess.run(["umount", "-l", str(path)], check=True)
            try:
                if known:
                    wait_until(lost)
                old, new = node.daemon.process, node.daemon.spawn("--takeover")
                assert old is not None
                wait_until(lambda: old.poll() is not None or new.poll() is not None)
                if old.poll() is None:
                    assert not known
                    assert "no disk is mounted there any more" in node.daemon.log
                else:
                    node.daemon.process = new
                    time.sleep(PROBED_S)
                    assert lost()
                assert list(path.iterdir()) == []
            finally:
                subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(path)], check=True)
            taken_over(node)


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


def test_both_sockets_have_the_mode_of_the_new_daemon(node: Node) -> None:
    def modes() -> set[int]:
        here = Path(node.daemon.socket_dir)
        return {(here / name).stat().st_mode & 0o777 for name in (CONTROL_SOCKET, GRANTS_SOCKET)}

    taken_over(node, "--socket-mode", "666")
    assert modes() == {0o666}
    taken_over(node)
    assert modes() == {0o600}


def test_without_an_old_daemon_a_new_one_starts_as_usual(own: Node) -> None:
    node, records = own, stored(own)
    node.daemon.stop()
    node.daemon.process = node.daemon.spawn("--takeover")
    wait_until(lambda: "there is no daemon to take over from" in node.daemon.log)
    wait_until(lambda: os.path.exists(f"{node.daemon.socket_dir}/cachesvc.sock"))
    grants = DaemonGrants(node.daemon.socket_dir, opened(node, records))
    read(grants, records.rows)
    grants.close()


def test_a_daemon_that_is_ending_is_waited_for(own: Node) -> None:
    """An ending daemon has closed its sockets and still holds the lock, which this test holds in its place."""
    own.daemon.stop()
    with open(f"{own.daemon.socket_dir}/lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        own.daemon.process = own.daemon.spawn("--takeover")
        wait_until(lambda: "waiting for a daemon that is ending" in own.daemon.log)
    wait_until(own.daemon.ready)
