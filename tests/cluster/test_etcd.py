"""This node's own entry in etcd: it is there while the node runs, comes back after outages, and has one owner."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import trustme

from cachesvc.cluster.open import open_membership
from cachesvc.cluster.polled import Registration
from cachesvc.config import Tls
from cachesvc.core.errors import InvalidInput
from cachesvc.core.placement.roster import Endpoint
from testbed import WAIT_S
from testbed.servers import free_ports
from tests.support.membership.sources import EtcdSource
from tests.support.membership.watching import Watching
from tests.support.waiting import wait_until

ME = Registration("node-0", "10.0.0.9:7070", "zone-a")
OTHER = Registration("node-1", "10.0.0.1:7070", "zone-b")
MINE = Endpoint(ME.address, ME.name, ME.zone)
THEIRS = Endpoint(OTHER.address, OTHER.name, OTHER.zone)


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdSource]:
    made = EtcdSource(tmp_path)
    made.start()
    yield made
    made.stop()


@pytest.fixture(autouse=True)
def warnings_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="cachesvc.cluster")


def watching(etcd: EtcdSource, me: Registration = ME) -> Watching:
    return Watching(open_membership(etcd.spec, me))


def register(spec: str, me: Registration) -> None:
    open_membership(spec, me).watch(lambda _: None)


def entry(etcd: EtcdSource, name: str) -> object:
    found = etcd.control("get", "--print-value-only", f"{etcd.prefix}/{name}")
    return json.loads(found) if found.strip() else None


def test_a_member_is_listed_with_its_name_and_zone_until_it_leaves(etcd: EtcdSource) -> None:
    with watching(etcd) as seen:
        assert seen.next() == {MINE}
        with watching(etcd, OTHER) as others:
            assert seen.next() == {MINE, THEIRS}
            assert others.until([ME.address, OTHER.address]) == {MINE, THEIRS}
        assert seen.next() == {MINE}
    assert entry(etcd, ME.name) is None


def test_an_etcd_with_users_is_read_with_name_and_password(
    etcd: EtcdSource, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    etcd.put(OTHER.name, OTHER.address, OTHER.zone)
    for command in ("user add root:hush", "user grant-role root root", "auth enable"):
        etcd.control(*command.split())
    with watching(etcd):
        wait_until(lambda: any("user name is empty" in str(vars(each)) for each in caplog.records))
    monkeypatch.setenv("CACHESVC_ETCD_USER", "root:wrong")
    with watching(etcd):
        wait_until(lambda: any("authentication failed" in str(vars(each)) for each in caplog.records))
    monkeypatch.setenv("CACHESVC_ETCD_USER", "root:hush")
    with watching(etcd) as seen:
        assert seen.next() == {MINE, THEIRS}, "etcd is read before it is written"
    monkeypatch.setenv("CACHESVC_ETCD_USER", "root")
    with pytest.raises(InvalidInput, match="NAME:PASSWORD"):
        watching(etcd)


def test_the_entry_has_a_version_for_other_programs(etcd: EtcdSource) -> None:
    with watching(etcd) as seen:
        seen.next()
        found = entry(etcd, ME.name)
    assert found == {"address": ME.address, "name": ME.name, "zone": ME.zone, "version": 1}


@pytest.mark.slow
@pytest.mark.parametrize("ended", [signal.SIGKILL, signal.SIGSTOP])
def test_a_member_that_ends_leaves_with_its_lease_and_a_stopped_one_registers_again(
    etcd: EtcdSource, ended: signal.Signals
) -> None:
    process = multiprocessing.get_context("spawn").Process(target=register, args=(etcd.spec, OTHER))
    process.start()
    try:
        with watching(etcd) as seen:
            seen.until([ME.address, OTHER.address])
            assert process.pid is not None
            os.kill(process.pid, ended)
            seen.until([ME.address])
            if ended is signal.SIGSTOP:
                os.kill(process.pid, signal.SIGCONT)
                seen.until([ME.address, OTHER.address])
    finally:
        process.kill()
        process.join(WAIT_S)


def test_an_entry_that_is_deleted_is_written_again(etcd: EtcdSource) -> None:
    with watching(etcd) as seen:
        assert seen.next() == {MINE}
        etcd.control("del", f"{etcd.prefix}/{ME.name}")
        wait_until(lambda: entry(etcd, ME.name))


@pytest.mark.slow
def test_an_etcd_that_comes_back_empty_gives_members_time_to_register(
    etcd: EtcdSource, caplog: pytest.LogCaptureFixture
) -> None:
    with watching(etcd) as seen:
        etcd.put(OTHER.name, OTHER.address, OTHER.zone)
        seen.until([ME.address, OTHER.address])
        etcd.lose()
        wait_until(lambda: caplog.records)
        etcd.forget()
        etcd.start()
        wait_until(lambda: entry(etcd, ME.name))
        assert seen.told == 0
        seen.until([ME.address])


def test_members_of_another_prefix_and_strange_entries_are_not_seen(
    etcd: EtcdSource, caplog: pytest.LogCaptureFixture
) -> None:
    etcd.control("put", f"{etcd.prefix}b/node-2", json.dumps({"address": "a:1"}))
    etcd.control("put", f"{etcd.prefix}/strange", "{}")
    with watching(etcd) as seen:
        assert seen.next() == {MINE}
    assert ["is not understood" in record.message for record in caplog.records] == [True]


def test_of_two_nodes_with_one_name_the_last_is_seen_and_the_first_warns(
    etcd: EtcdSource, caplog: pytest.LogCaptureFixture
) -> None:
    twin = Registration(ME.name, "10.0.0.8:7070")
    with watching(etcd) as seen:
        assert seen.next() == {MINE}
        with watching(etcd, twin):
            seen.until([twin.address])
            wait_until(lambda: caplog.records)
        seen.until([ME.address])
    assert ["this node's name" in record.message for record in caplog.records] == [True]


def test_changes_that_etcd_has_compacted_are_no_outage(
    etcd: EtcdSource, caplog: pytest.LogCaptureFixture
) -> None:
    with watching(etcd) as seen:
        assert seen.next() == {MINE}
        for number in range(3):
            etcd.control("put", f"/elsewhere/{number}", "")
        revision = json.loads(etcd.control("get", "--write-out=json", "/elsewhere/0"))["header"]["revision"]
        etcd.control("compact", str(revision))
        with watching(etcd, OTHER):
            seen.until([ME.address, OTHER.address])
        seen.until([ME.address])
    assert caplog.records == []


def test_another_server_is_asked_where_the_first_is_down(etcd: EtcdSource) -> None:
    (down,) = free_ports(1)
    hosts = f"127.0.0.1:{down},{etcd.address}"
    with ExitStack() as stack:
        spec = f"etcd://{hosts}{etcd.prefix}"
        seen = [
            stack.enter_context(Watching(open_membership(spec, Registration(name, f"{name}:7070"))))
            for name in ("a", "b", "c", "d")
        ]
        for each in seen:
            each.until([f"{name}:7070" for name in ("a", "b", "c", "d")])


def test_etcds_shows_a_certificate_and_checks_the_servers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    tls = certificates(tmp_path, authority, authority)
    etcd = EtcdSource(tmp_path, tls)
    try:
        etcd.start()
        with Watching(open_membership(etcd.spec, ME, tls)) as seen:
            assert seen.next() == {MINE}
        mistrusts = certificates(tmp_path / "other", authority, stranger)
        with Watching(open_membership(etcd.spec, ME, mistrusts)) as seen:
            wait_until(lambda: caplog.records)
            assert seen.told == 0
    finally:
        etcd.stop()


def certificates(folder: Path, own: trustme.CA, trusted: trustme.CA) -> Tls:
    folder.mkdir(exist_ok=True)
    made = own.issue_cert("127.0.0.1", "localhost")
    tls = Tls(*(str(folder / name) for name in ("cert.pem", "key.pem", "ca.pem")))
    made.cert_chain_pems[0].write_to_path(tls.certificate)
    made.private_key_pem.write_to_path(tls.key)
    trusted.cert_pem.write_to_path(tls.ca)
    return tls
