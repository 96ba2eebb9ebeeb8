"""Real daemons tell an operator of their cluster by `nodes`, `status`, the log and the metrics."""

from __future__ import annotations

import io
import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import trustme

from cachesvc.__main__ import run
from cachesvc.client.control import Control
from cachesvc.v1 import cachesvc_pb2 as pb
from testbed import WAIT_S
from testbed.node import Daemon
from testbed.servers import free_ports
from tests.support.membership.nodes import Nodes, authority, certified, fill, meet, rows, states
from tests.support.waiting import wait_until

LINE = re.compile(r"\d\d:\d\d:\d\d (DEBUG|INFO|WARNING|ERROR) ")


def cli(daemon: Daemon, *words: str) -> tuple[int, str]:
    """Run a verb of the command line; return its exit code and what it printed."""
    printed = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(printed):
        code = run([*words, "--socket", daemon.socket_dir])
    return code, printed.getvalue()


def scraped(address: str) -> dict[str, float]:
    """All metrics of a daemon, by name and labels."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=WAIT_S) as answer:
        found = re.findall(r"^(cachesvc_\S+) (\S+)$", answer.read().decode(), re.M)
    return {name: float(value) for name, value in found}


def row(daemon: Daemon, name: str) -> pb.NodeStatus:
    """A node as another one sees it."""
    return next(each for each in rows(daemon) if each.name == name)


def days(count: float) -> datetime:
    return datetime.now(timezone.utc) + timedelta(days=count)


@pytest.mark.slow
def test_differing_settings_and_bad_certificates_are_told_everywhere(tmp_path: Path) -> None:
    nodes, metrics = Nodes(tmp_path, "abcd"), f"127.0.0.1:{free_ports(1)[0]}"
    ca = authority(tmp_path)
    other = ["--zone", "x", "--domain", "none", "--extent-bytes", str(512 << 10), "--allow", "/srv/"]
    with (
        nodes.node("a", *certified(tmp_path, "a", ca, ends=days(5)), "--metrics", metrics) as first,
        nodes.node("b", *certified(tmp_path, "b", ca), *other) as second,
        nodes.node("c", *certified(tmp_path, "c", ca, ends=days(-1))) as expired,
        nodes.node("d", *certified(tmp_path, "d", trustme.CA())) as foreign,
    ):
        wait_until(lambda: states(first).get("b") == "present")
        wait_until(lambda: "the zones are" in first.log)

        code, printed = cli(first, "nodes")
        assert code == 1, "two nodes are refused"
        warnings = [line for line in printed.splitlines() if line.startswith("warning: ")]
        for part in (
            "--extent-bytes of b is 512 KiB, of this node 256 KiB",
            "--domain of b is none, of this node zone",
            "--allow of b differs from this node's (but file:///srv)",
            "--zone is missing at a, and others have one",
            "the certificate of a ends in 7 days or sooner",
        ):
            assert any(part in line for line in warnings), (part, printed)
        assert warnings == [
            line for line in cli(first, "status")[1].splitlines() if line.startswith("warning: ")
        ]
        for part in (
            "--extent-bytes of b is 512 KiB",
            "--domain of b is none",
            "--allow of b differs",
            "--zone is missing at a",
        ):
            assert first.log.count(part) == 1
        assert "this node's certificate ends at" in first.log

        found = scraped(metrics)
        for kind in ("extent_size", "zone", "domain", "allow", "certificate"):
            assert found[f'cachesvc_cluster_warnings{{kind="{kind}"}}'] == 1
        assert found['cachesvc_cluster_warnings{kind="list"}'] == 0
        assert found["cachesvc_cluster_list_read"] == 1
        assert found['cachesvc_peer_present{node="b"}'] == 1
        ends = datetime.now(timezone.utc).timestamp() + 5 * 86_400
        assert abs(found["cachesvc_certificate_not_after_timestamp_seconds"] - ends) < 3600

        def whys(daemon: Daemon) -> dict[str, str]:
            return {each.address: each.why for each in rows(daemon)}

        at = nodes.addresses
        foreign_text = "its certificate is of another authority than this node's --tls-ca"
        wait_until(lambda: whys(first)[at["c"]] == "its certificate has expired; renew it")
        wait_until(lambda: whys(first)[at["d"]] == foreign_text)
        wait_until(lambda: "it refuses this node's certificate, which has expired" in whys(expired)[at["a"]])
        wait_until(lambda: "which is of another authority than its --tls-ca" in whys(foreign)[at["a"]])
        said(first, "a listed node does not answer", at["c"], "its certificate has expired; renew it")
        assert "this node's certificate has expired at" in expired.log
        for daemon in (first, second, expired, foreign):
            strange = [line for line in daemon.log.splitlines() if not LINE.match(line)]
            assert strange == [], "gRPC's own lines"


@pytest.mark.slow
def test_members_that_come_and_go_are_named(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "abc")
    with nodes.node("a") as first, nodes.node("b") as second, nodes.node("c") as third:
        meet(first, second, third)
        fill(first, nodes.data)
        wait_until(lambda: (row(first, "a").extents, row(first, "a").free_bytes) == (8, 6 << 20))
        wait_until(lambda: row(first, "a").source == "works")
        assert row(first, "a").me is True
        wait_until(lambda: row(second, "a").free_bytes == 6 << 20)

        assert third.stop() == 0
        wait_until(lambda: states(first)["c"] == "left")
        code, printed = cli(first, "nodes")
        assert code == 0, printed
        assert "left for" in printed
        said(first, "a node said goodbye", "node=c")
        third.start()
        meet(first, second, third)
        said(first, "a node is present", "node=c")

        third.kill()
        fill(second, nodes.data)
        wait_until(lambda: states(first)["c"] == states(second)["c"] == "away")
        said(first, "a node is away", "node=c", "why=")
        code, printed = cli(first, "nodes")
        assert code == 1, printed
        code, printed = cli(first, "nodes", "--remove", "b")
        assert (code, "stop it first" in printed) == (2, True)
        code, printed = cli(first, "nodes", "--remove", "nobody")
        assert (code, "no member 'nobody'" in printed) == (4, True)
        code, printed = cli(first, "nodes", "--remove", "c")
        assert (code, printed) == (
            0,
            "c is removed; it is still in the list of members, and joins again when it answers\n",
        )
        wait_until(lambda: "c" not in states(first) and "c" not in states(second))
        assert cli(second, "nodes")[0] == 0
        said(second, "a node left the cluster", "node=c")
        third.start()
        meet(first, second, third)


def said(daemon: Daemon, *parts: str) -> str:
    """The last log line with some texts, once there is one."""

    def lines() -> list[str]:
        return [line for line in daemon.log.splitlines() if all(part in line for part in parts)]

    wait_until(lines)
    return lines()[-1]


@pytest.mark.slow
def test_a_node_that_never_read_a_list_says_so(tmp_path: Path) -> None:
    nodes, metrics = Nodes(tmp_path, "a"), f"127.0.0.1:{free_ports(1)[0]}"
    missing = f"file://{tmp_path}/members"
    with nodes.node("a", "--cluster", missing, "--cluster-wait", "1", "--metrics", metrics) as node:
        said(node, "no list of members was read in time; this node works alone", "waited_s=1", "No such file")
        assert "reason=[Errno 2] No such file" in said(node, "cannot be read yet; this node is alone")
        wait_until(lambda: "list of members cannot be read, and this node is alone" in cli(node, "nodes")[1])
        code, printed = cli(node, "nodes")
        assert code == 1
        assert "this node has not read a list of members yet" in printed
        assert "this node has not read a list of members yet" in cli(node, "status")[1]
        assert scraped(metrics)["cachesvc_cluster_list_read"] == 0
        assert scraped(metrics)['cachesvc_cluster_warnings{kind="list"}'] == 1
        wait_until(lambda: "cluster_warning" in kinds(node))
        (tmp_path / "members").write_text(f"{nodes.addresses['a']}\n")
        wait_until(lambda: cli(node, "nodes")[0] == 0)
        wait_until(lambda: "cluster_mended" in kinds(node))
        assert scraped(metrics)["cachesvc_cluster_list_read"] == 1


@pytest.mark.slow
def test_nodes_that_start_before_their_list_fetch_each_extent_once(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    late = f"file://{tmp_path}/members"
    with (
        nodes.node("a", "--cluster", late) as first,
        nodes.node("b", "--cluster", late) as second,
        ThreadPoolExecutor() as pool,
    ):
        filling = [pool.submit(fill, daemon, nodes.data) for daemon in (first, second)]
        for daemon in (first, second):
            wait_until(lambda at=daemon: status(at).fills_running)
        assert [status(daemon).sources.bytes for daemon in (first, second)] == [0, 0]
        (tmp_path / "members").write_text("\n".join(nodes.addresses.values()))
        replies = [each.result(WAIT_S)[1] for each in filling]
    fetched = sum(reply.source_bytes for reply in replies)
    assert nodes.size <= fetched < 1.5 * nodes.size, (
        "twice the size without the list; a busy node may be helped out"
    )
    assert sum(reply.peer_bytes for reply in replies) == nodes.size


def status(daemon: Daemon) -> pb.StatusReply:
    with Control(daemon.socket_dir) as control:
        return control.status()


def kinds(daemon: Daemon) -> list[str]:
    """The kinds of the daemon's events."""
    with Control(daemon.socket_dir) as control:
        return [each.kind for each in control.events(0.0)]
