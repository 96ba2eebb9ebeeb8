"""Two nodes of a cluster read extents from each other: before they ask the source, and to repair corrupt copies."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack, suppress
from pathlib import Path

import grpc
import numpy as np
import pytest
import trustme

from cachesvc.client.control import Control
from cachesvc.config import Tls
from cachesvc.core.errors import InvalidInput
from cachesvc.daemon.access.tls import Certificates
from cachesvc.daemon.peers.peer_calls import PeerCalls
from cachesvc.v1 import cachesvc_pb2 as pb
from cachesvc.v1 import services
from loader import DataLoader, open_dataset
from testbed import WAIT_S
from testbed.node import Daemon
from testbed.servers import free_ports
from tests.support.faults.disks import flip
from tests.support.membership.nodes import (
    EXTENT,
    EXTENTS,
    OPTIONS,
    RECORD,
    Nodes,
    agent_of,
    authority,
    certified,
    fill,
    meet,
    metric,
    pair,
    rows,
    states,
)
from tests.support.waiting import wait_until


def read(daemon: Daemon, data: Path) -> tuple[bytes, dict[str, float]]:
    """Read every record in order through the loader; return the bytes and the waiting times of its steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
        dataset = open_dataset(f"{data}/", format="records", record_bytes=RECORD)
        batches = DataLoader(dataset, batch_size=16)
        found = b"".join(np.asarray(batch).tobytes() for batch in batches)
        waited = batches.stats().wait_by_cause_s
        dataset.close()
    return found, waited


def copies(node: Path) -> list[Path]:
    """Files of the extents on a node's disk."""
    return sorted(path for path in (node / "nvme").rglob("?" * 32 + ".*"))


@pytest.mark.slow
def test_extents_of_a_peer_are_not_read_from_the_source(tmp_path: Path) -> None:
    nodes, (metrics, own) = Nodes(tmp_path), (f"127.0.0.1:{port}" for port in free_ports(2))
    with nodes.node("a", "--metrics", metrics) as other, nodes.node("b", "--metrics", own) as node:
        meet(other, node)
        _, there = fill(other, nodes.data)
        found, waited = read(node, nodes.data)
        _, here = fill(node, nodes.data)
        with Control(node.socket_dir) as control:
            reply = control.status()
            (status,) = reply.datasets
        wait_until(lambda: metric(metrics, "cachesvc_peer_sent_bytes_total") == nodes.size)
        assert metric(metrics, 'cachesvc_nodes{state="present"}') == 2
        assert metric(own, 'cachesvc_peer_gave_bytes_total{node="a"}') == nodes.size
    assert found == nodes.contents
    assert (there.source_bytes, there.peer_bytes) == (nodes.size, 0)
    assert (here.source_bytes, here.peer_bytes, here.resident_extents) == (0, nodes.size, EXTENTS)
    assert (status.source_bytes, status.peer_bytes) == (0, nodes.size)
    assert (reply.cluster.present, reply.cluster.away, reply.cluster.received_bytes) == (2, 0, nodes.size)
    assert waited["peer"] > 0
    assert waited["source"] == 0


@pytest.mark.slow
def test_a_corrupt_copy_is_repaired_from_a_peer_where_the_source_is_gone(tmp_path: Path) -> None:
    nodes, nvme = Nodes(tmp_path), tmp_path / "b" / "nvme"
    nvme.mkdir(parents=True)
    with nodes.node("a") as other, nodes.node("b", "--nvme", f"{nvme}=64MiB", ram="0") as node:
        meet(other, node)
        fill(other, nodes.data)
        dataset, _ = fill(node, nodes.data)
        flip(copies(tmp_path / "b")[3], 1000)
        (nodes.data / "0.bin").rename(tmp_path / "away")
        with Control(node.socket_dir) as control:
            report = list(control.verify(dataset))[-1]
            assert report.corrupt_extents == 1
            list(control.prefetch(dataset))
            (status,) = control.status().datasets
        (tmp_path / "away").rename(nodes.data / "0.bin")  # the loader stats the files that it opens
        found, _ = read(node, nodes.data)
    assert found == nodes.contents
    assert status.resident_bytes == nodes.size


@pytest.mark.slow
def test_a_node_checks_copies_from_before_its_start_before_it_lends_them(tmp_path: Path) -> None:
    nodes, nvme = Nodes(tmp_path), tmp_path / "a" / "nvme"
    nvme.mkdir(parents=True)
    with nodes.node("a", "--nvme", f"{nvme}=64MiB", ram="0") as other, nodes.node("b") as node:
        fill(other, nodes.data)
        other.stop()
        flip(copies(tmp_path / "a")[0], 1000)
        other.start()  # and no job opens the dataset there again
        meet(other, node)
        _, here = fill(node, nodes.data)
        found, _ = read(node, nodes.data)
        with Control(other.socket_dir) as control:
            corrupt = sum(tier.corrupt_extents for tier in control.status().tiers)
    assert found == nodes.contents
    assert (here.peer_bytes, here.source_bytes) == (nodes.size - EXTENT, EXTENT)
    assert corrupt == 1


@pytest.mark.slow
def test_a_dataset_of_some_users_is_shared_between_members(tmp_path: Path) -> None:
    """Which users may read it is for each node to enforce."""
    nodes = Nodes(tmp_path)
    rule = ["--allow", f"{nodes.data}/=uid:64001"]
    with pair(nodes, *rule) as (_, node):
        _, here = fill(node, nodes.data)
    assert (here.peer_bytes, here.source_bytes) == (nodes.size, 0)


def test_a_node_that_dies_loses_no_byte(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    with pair(nodes) as (other, node):
        other.kill()
        found, _ = read(node, nodes.data)
        _, here = fill(node, nodes.data)
        wait_until(lambda: states(node)["a"] == "away")
    assert found == nodes.contents
    assert (here.peer_bytes, here.source_bytes) == (0, nodes.size)


def test_nodes_that_prefetch_at_once_fetch_each_extent_once(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "abc")
    with nodes.node("a") as first, nodes.node("b") as second, nodes.node("c") as third, ExitStack() as stack:
        daemons = (first, second, third)
        meet(*daemons)
        controls = [stack.enter_context(Control(daemon.socket_dir)) for daemon in daemons]
        datasets = [control.open_dataset([f"{nodes.data}/"], OPTIONS).id for control in controls]
        streams = [control.prefetch(dataset) for control, dataset in zip(controls, datasets, strict=True)]
        replies = [list(stream)[-1] for stream in streams]
    assert [reply.resident_extents for reply in replies] == [EXTENTS] * 3
    assert sum(reply.source_bytes for reply in replies) == nodes.size
    assert sum(reply.peer_bytes for reply in replies) == 2 * nodes.size


def test_nodes_authenticate_by_certificates(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "abc")
    ca, strangers = authority(tmp_path), trustme.CA()
    of_strangers = certified(tmp_path, "c", strangers)
    with (
        nodes.node("a", *certified(tmp_path, "a", ca)) as other,
        nodes.node("b", *certified(tmp_path, "b", ca)) as node,
        nodes.node("c", *of_strangers) as stranger,
    ):
        wait_until(lambda: states(node).get("a") == "present")
        wait_until(lambda: set(states(stranger).values()) == {"present", "unknown"})
        fill(other, nodes.data)
        _, here = fill(node, nodes.data)
        _, strange = fill(stranger, nodes.data)
    assert (here.peer_bytes, here.source_bytes) == (nodes.size, 0)
    assert (strange.peer_bytes, strange.source_bytes) == (0, nodes.size)


@pytest.mark.slow
def test_one_certificate_serves_all_nodes(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    one = [
        *certified(tmp_path, "all", authority(tmp_path), "cachesvc.example"),
        "--tls-name",
        "cachesvc.example",
    ]
    with pair(nodes, *one) as (_, node):
        _, here = fill(node, nodes.data)
    assert (here.peer_bytes, here.source_bytes) == (nodes.size, 0)


def test_old_certificates_are_used_while_the_new_ones_do_not_match(tmp_path: Path) -> None:
    ca = authority(tmp_path)
    certified(tmp_path, "node", ca)
    key, certificate = tmp_path / "node.key", tmp_path / "node.pem"
    found = Certificates(Tls(str(certificate), str(key), str(tmp_path / "ca.pem")))
    renewed = ca.issue_cert("127.0.0.1")
    renewed.private_key_pem.write_to_path(str(key))
    assert not found.renewed(), "the certificate is not there yet"
    certificate.unlink()
    assert not found.renewed()
    renewed.cert_chain_pems[0].write_to_path(str(certificate))
    assert found.renewed()
    assert not found.renewed()


@pytest.mark.slow
def test_the_agent_has_no_credentials_keeps_no_descriptors_and_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # must not apply to peers
    secret = {"AWS_SECRET_ACCESS_KEY": "hush-hush"}
    with nodes.node("a", credentials=secret) as other, nodes.node("b") as node:
        meet(other, node)
        fill(other, nodes.data)
        first = agent_of(other)
        assert b"hush-hush" not in Path(f"/proc/{first}/environ").read_bytes()
        dataset, here = fill(node, nodes.data)
        assert here.peer_bytes == nodes.size

        def lent() -> list[str]:
            names = []
            for fd in os.listdir(f"/proc/{first}/fd"):
                with suppress(FileNotFoundError):
                    names.append(os.readlink(f"/proc/{first}/fd/{fd}"))
            return [name for name in names if "memfd" in name]

        wait_until(lambda: not lent())
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: agent_of(other) not in (0, first))
        with Control(node.socket_dir) as control:
            control.evict(dataset)
            again = list(control.prefetch(dataset))[-1]
            assert again.resident_extents == EXTENTS
            assert again.peer_bytes + again.source_bytes == 2 * nodes.size
            before = again.peer_bytes
            control.evict(dataset)
            meet(other, node)
            again = list(control.prefetch(dataset))[-1]
    assert again.peer_bytes == before + nodes.size


@pytest.mark.slow
def test_fills_do_not_wait_for_an_agent_that_stands_still(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    with nodes.node("a") as other, nodes.node("b") as node:
        meet(other, node)
        os.kill(agent_of(node), signal.SIGSTOP)
        found, _ = read(node, nodes.data)
    assert found == nodes.contents


def test_an_invalid_request_is_a_typed_error(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "a")
    question = pb.ExtentQuestion(extent=b"x" * 15)
    with nodes.node("a") as node, grpc.insecure_channel(nodes.addresses["a"]) as channel:
        meet(node)
        stub = services.Stub(channel, "Peers")
        for call, request in (
            (stub.Lookup, pb.LookupRequest(protocol=1, questions=[question])),
            (stub.Report, pb.ReportRequest(protocol=1, filled=b"x" * 17)),
            (stub.Report, pb.ReportRequest(protocol=1, progressing=b"x" * 17)),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                call(request, timeout=WAIT_S)
            assert refused.value.code().name == "INVALID_ARGUMENT"


@pytest.mark.slow
def test_a_takeover_and_a_restart_go_on_sharing(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    with pair(nodes) as (other, node):
        first = agent_of(other)
        other.take_over()
        wait_until(lambda: agent_of(other) not in (0, first))
        meet(other, node)
        _, here = fill(node, nodes.data)
        other.kill()
        other.start()  # at once, while the killed one's agent may still have the addresses
        meet(other, node)
    assert (here.peer_bytes, here.source_bytes) == (nodes.size, 0)


@pytest.mark.slow
def test_the_second_node_of_a_name_is_refused_by_name(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "abc")
    with nodes.node("a") as first, nodes.node("b") as second, nodes.node("b", at="c") as third:
        wait_until(lambda: sorted(states(first)) == ["a", "b"])
        wait_until(lambda: any(each.state == "refused" for each in rows(first)))
        refused = [each for each in rows(first) if each.state == "refused"]
        assert [each.name for each in refused] == ["b"]
        assert "--node-name" in refused[0].why
        replies = [fill(daemon, nodes.data)[1] for daemon in (first, second, third)]
    assert [reply.resident_extents for reply in replies] == [EXTENTS] * 3
    assert sum(reply.source_bytes for reply in replies) <= 2 * nodes.size


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--advertise", "10.1.2.3:7000"], "is open to others"),
        (["--node-name", "two words"], "a name is one word"),
        (["--cluster", "carrier-pigeon://loft"], "is not understood"),
    ],
)
def test_options_that_cannot_work_end_the_start(tmp_path: Path, options: list[str], message: str) -> None:
    given = ["--ram", "64MiB", "--cluster", "static:127.0.0.1:7070", "--advertise", "127.0.0.1:7070"]
    with ExitStack() as stack, pytest.raises(RuntimeError, match=message):
        stack.enter_context(Daemon(tmp_path / "node", [*given, *options]))


def test_unusable_certificates_are_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="nowhere"):
        PeerCalls(Tls("nowhere.pem", "nowhere.key", "nowhere.ca"), "")
