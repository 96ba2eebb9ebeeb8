"""`cachesvc run --job-cluster`: the daemons of a job's nodes are one cluster, of which nothing is left afterwards."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import pytest

from cachesvc.cli import job_cluster
from cachesvc.cli.job_cluster import Job, await_members, leave, take_certificate, this_job
from cachesvc.core.errors import InvalidInput, NotAllowed
from testbed import ROOT, WAIT_S
from tests.support.faults.fake_s3 import FakeS3, fake_s3
from tests.support.keyed_cluster import CONTENTS, EXTENT, EXTENTS, RECORD, URI, bucket
from tests.support.waiting import wait_until

READ = f"""
import os, sys
from hashlib import sha256
from cachesvc.catalog.options import Options
from cachesvc.client.control import Control
from cachesvc.client.grants import DaemonGrants
place = os.environ["CACHESVC_SOCKET"]
with Control(place) as control:
    dataset = control.open_dataset([{URI!r}], Options(format="records", record_bytes={RECORD})).id
grants, digest = DaemonGrants(place, dataset), sha256()
for extent in range({EXTENTS}):
    (granted,) = grants.acquire([extent], {WAIT_S})
    digest.update(os.pread(granted.fd, granted.size_bytes, granted.offset))
    os.close(granted.fd)
    grants.release([extent])
grants.close()
print(digest.hexdigest())
"""


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The environment of job 4711 on two nodes, and a home directory with a short path."""
    with tempfile.TemporaryDirectory(prefix="cs-") as home:
        for name in [each for each in os.environ if each.startswith(("SLURM", "CACHESVC_", "JOB_"))]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("HOME", home)
        monkeypatch.setenv("XDG_RUNTIME_DIR", home)
        monkeypatch.setenv("SLURM_JOB_ID", "4711")
        monkeypatch.setenv("SLURM_JOB_NODELIST", "127.0.0.[1-2]")
        monkeypatch.setenv("SLURMD_NODENAME", "127.0.0.1")
        yield Path(home)


class Step:
    """deploy/slurm/job.sh, with an `srun` that starts one task: once for each task, and `nodes` names theirs."""

    def __init__(self, server: FakeS3, job: int, nodes: Sequence[str], script: str = READ) -> None:
        programs = Path(os.environ["HOME"], "bin")
        programs.mkdir(exist_ok=True)
        for name, text in {
            "srun": 'exec "$@"',
            "cachesvc": f'exec {sys.executable} -m cachesvc "$@"',
        }.items():
            (programs / name).write_text(f"#!/bin/sh\n{text}\n")
            (programs / name).chmod(0o755)
        environment = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "SLURM_JOB_ID": str(job),
            "CACHESVC_EXTENT_BYTES": str(EXTENT),
            "CACHESVC_FILLERS": "1",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_ENDPOINT_URL": server.endpoint,
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        self._tasks = [
            subprocess.Popen(
                ["bash", str(ROOT / "deploy/slurm/job.sh"), sys.executable, "-c", script],
                env=os.environ | environment | {"SLURMD_NODENAME": node},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for node in nodes
        ]

    def ended(self, code: int = 0) -> list[str]:
        """The output of each task, after all have ended with this code."""
        found = [task.communicate(timeout=WAIT_S) for task in self._tasks]
        assert [task.returncode for task in self._tasks] == [code] * len(found), found
        return [out.strip() for out, _ in found]


READ_ALL = sha256(CONTENTS).hexdigest()


def left(home: Path) -> list[str]:
    """The files that jobs have left in this user's directories."""
    return [
        path.name
        for path in (*home.iterdir(), *(home / ".cachesvc-jobs").iterdir())
        if path.name not in KNOWN
    ]


KNOWN = ("bin", ".cachesvc-jobs")


@pytest.mark.slow
def test_the_nodes_of_a_job_fetch_once_and_leave_nothing(job: Path) -> None:
    with fake_s3() as server:
        bucket(server)
        step = Step(server, 4711, ["127.0.0.1", "127.0.0.2", "127.0.0.2"])
        assert step.ended() == [READ_ALL] * 3
        assert server.sent_bytes == len(CONTENTS)
    assert left(job) == []


@pytest.mark.slow
def test_two_jobs_share_nodes(job: Path) -> None:
    with fake_s3() as server:
        bucket(server)
        steps = [Step(server, number, ["127.0.0.1", "127.0.0.2"]) for number in (4711, 4712)]
        assert [step.ended() for step in steps] == [[READ_ALL] * 2] * 2
        assert server.sent_bytes == 2 * len(CONTENTS)
    assert left(job) == []


@pytest.mark.slow
def test_a_command_that_fails_is_reported_and_leaves_nothing(job: Path) -> None:
    with fake_s3() as server:
        Step(server, 4711, ["127.0.0.1", "127.0.0.2"], "import sys; sys.exit(3)").ended(3)
    assert left(job) == []


def test_members_and_ports_follow_from_the_job(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = this_job()
    assert [each.rpartition(":")[0] for each in found.members] == ["127.0.0.1", "127.0.0.2"]
    assert found.address == found.members[0]
    monkeypatch.setenv("SLURM_JOB_ID", "4712")
    ports = {int(each.members[0].rpartition(":")[2]) for each in (found, this_job())}
    assert max(ports) - min(ports) == 2  # each daemon takes two
    assert all(job_cluster.FIRST_PORT <= each < job_cluster.FIRST_PORT + job_cluster.PORTS for each in ports)


def test_pods_of_an_indexed_job_are_known_by_their_names(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID")
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    monkeypatch.setenv("NNODES", "3")
    monkeypatch.setattr(socket, "getfqdn", lambda: "train-1.nodes.team.svc.cluster.local")
    found = this_job()
    assert [each.partition(".")[0] for each in found.members] == ["train-0", "train-1", "train-2"]
    assert found.address == found.members[1] == "train-1.nodes.team.svc.cluster.local:20000"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"SLURM_JOB_ID": ""}, "needs a job of Slurm"),
        ({"SLURM_JOB_NODELIST": ""}, "is missing"),
        ({"SLURM_JOB_NODELIST": "n[2-1]"}, "not a range of hosts"),
        ({"SLURMD_NODENAME": "n7"}, "'n7', is not one of the job's"),
        ({"SLURM_JOB_ID": "", "JOB_COMPLETION_INDEX": "0"}, "set NNODES"),
    ],
)
def test_what_the_scheduler_does_not_tell_is_said(
    job: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, str], said: str
) -> None:
    for name, value in changed.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidInput, match=said):
        this_job()


JOB = Job("slurm--1", "a", ("a:1", "b:1", "c:1", "d:1"), "a:1")
NODES = [Job(JOB.name, name, JOB.members, f"{name}:1") for name in "abcd"]


def test_nodes_that_start_at_once_have_one_certificate_which_the_last_removes(tmp_path: Path) -> None:
    shared = tmp_path / "jobs"
    shared.mkdir()
    with ThreadPoolExecutor(len(NODES)) as pool:
        list(pool.map(lambda each: take_certificate(each, str(shared), f"{tmp_path}/{each.node}"), NODES))
    keys = {(tmp_path / each.node / "node.key").read_bytes() for each in NODES}
    assert len(keys) == 1
    assert {path.stat().st_mode & 0o077 for path in tmp_path.rglob("*.key")} == {0}
    assert not list(shared.rglob("ca.key"))
    for each in NODES[:-1]:
        leave(each, str(shared))
        assert [path.name for path in shared.iterdir()] == [JOB.name]
    leave(NODES[-1], str(shared))
    assert list(shared.iterdir()) == []


def test_a_node_waits_for_the_others_at_the_end(tmp_path: Path) -> None:
    for each in NODES[:2]:
        take_certificate(each, str(tmp_path), str(tmp_path / "tls" / each.node))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(leave, NODES[0], str(tmp_path), wait=True)
        wait_until(lambda: [path.name for path in (tmp_path / JOB.name / "nodes").iterdir()] == ["b"])
        assert not first.done()
        leave(NODES[1], str(tmp_path), wait=True)
        first.result(WAIT_S)
    assert not (tmp_path / JOB.name).exists()


def test_a_node_that_comes_after_the_end_makes_a_new_one(tmp_path: Path) -> None:
    keys = []
    for _ in range(2):
        take_certificate(JOB, str(tmp_path), str(tmp_path / "tls"))
        keys.append((tmp_path / "tls" / "node.key").read_bytes())
        leave(JOB, str(tmp_path))
    assert len(set(keys)) == 2


def test_a_folder_of_a_job_that_was_killed_is_removed_a_month_later(tmp_path: Path) -> None:
    old = tmp_path / "slurm--0"
    old.mkdir()
    os.utime(old, (0, 0))
    take_certificate(JOB, str(tmp_path), str(tmp_path / "tls"))
    assert not old.exists()
    leave(JOB, str(tmp_path))


def test_a_folder_that_was_half_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_cluster, "MAKE_S", 0.0)
    (tmp_path / JOB.name).mkdir()
    (tmp_path / JOB.name / "ca.pem").touch()
    with pytest.raises(NotAllowed, match="is half removed"):
        take_certificate(JOB, str(tmp_path), str(tmp_path / "tls"))


def test_the_command_begins_without_nodes_that_do_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_cluster, "MEMBERS_S", 0.0)
    absent: list[Sequence[str]] = []
    await_members(JOB, str(tmp_path), absent.append)
    assert absent == [list(JOB.members)]
