"""`cachesvc where`: which nodes hold a dataset, from real daemons of one cluster; host lists and affinities."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from cachesvc.__main__ import run
from cachesvc.cli.where import host_list, node_affinity
from cachesvc.client.control import Control
from cachesvc.client.grants import DaemonGrants
from cachesvc.core.errors import InvalidInput
from cachesvc.v1 import cachesvc_pb2 as pb
from testbed import ROOT, WAIT_S
from tests.support.membership.nodes import EXTENT, EXTENTS, OPTIONS, Nodes, fill, states
from tests.support.reading import contents
from tests.support.waiting import wait_until


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["n7"], "n7"),
        (["n10", "n8", "n9", "n12"], "n[10,12],n[8-9]"),
        (["gpu-003", "gpu-001", "gpu-002", "login"], "gpu-[001-003],login"),
        (["rack1-node2.site", "rack1-node3.site"], "rack1-node[2-3].site"),
    ],
)
def test_a_host_list_is_what_slurm_reads(names: list[str], expected: str) -> None:
    assert host_list(names) == expected


def test_a_name_that_slurm_would_take_for_a_list_is_an_error() -> None:
    with pytest.raises(InvalidInput, match="--node-name"):
        host_list(["n[1-2]"])


def test_an_affinity_is_valid_kubernetes_and_prefers_who_holds_most() -> None:
    nodes = [
        pb.NodeHolding(name=name, resident_bytes=held) for name, held in (("a", 10), ("b", 10), ("c", 1))
    ]
    affinity = yaml.safe_load(node_affinity(nodes, 10))["affinity"]
    job = yaml.safe_load((ROOT / "deploy" / "kubernetes" / "jobs" / "train.yaml").read_text())
    job["spec"]["template"]["spec"]["affinity"] = affinity
    kubernetes_validate.validate(job, "1.37", strict=True)
    (terms,) = affinity["nodeAffinity"].values()
    assert [(term["weight"], term["preference"]["matchExpressions"][0]["values"]) for term in terms] == [
        (100, ["a", "b"]),
        (10, ["c"]),
    ]


@pytest.mark.slow
def test_nodes_are_ranked_by_what_they_hold_and_the_dead_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = Nodes(tmp_path, "abc")  # c never starts
    with nodes.node("a") as full, nodes.node("b") as part:
        wait_until(lambda: states(full).get("b") == states(part).get("a") == "present")
        dataset, _ = fill(full, nodes.data)
        with Control(part.socket_dir) as control:
            assert control.open_dataset([f"{nodes.data}/"], OPTIONS).id == dataset
        with closing(DaemonGrants(part.socket_dir, dataset)) as grants:
            for answer in grants.acquire(range(2), WAIT_S):
                contents(answer)
        where = ["where", str(nodes.data), "--format", "records", "--record-bytes", "4096"]
        where += ["--socket", part.socket_dir]

        def held() -> list[tuple[str, int, float]]:
            assert run([*where, "--json"]) == 0
            out, err = capsys.readouterr()
            assert nodes.addresses["c"] in err
            rows = map(json.loads, out.splitlines())
            return [(row["name"], int(row["resident_bytes"]), row["share"]) for row in rows]

        wait_until(lambda: held() == [("a", EXTENTS * EXTENT, 1.0), ("b", 2 * EXTENT, 0.25)])
        for option, printed in (("--slurm", "a,b\n"), ("--nodes=1", "100 %"), ("--affinity", "weight: 25")):
            assert run([*where, option]) == 0
            assert printed in capsys.readouterr().out
        assert run([*where, "--slurm", "--affinity"]) == 2
        full.kill()
        assert run([*where, "--slurm"]) == 0
        out, err = capsys.readouterr()
        assert (out, "a: " in err) == ("b\n", True), "a node that died is named at once"
