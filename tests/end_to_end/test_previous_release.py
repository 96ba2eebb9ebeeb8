"""The previous release beside this one: saved states, directories on disk, clients and nodes."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cachesvc.catalog.options import Options
from cachesvc.client.control import Control
from cachesvc.core.errors import InvalidInput, StateMismatch
from cachesvc.core.model import DatasetId
from testbed import ROOT, WAIT_S
from testbed.node import Daemon
from testbed.servers import two_ports
from tests.support.waiting import wait_until

PREVIOUS = "0666ad8238400025486b17a53e7db153294cef0a"
"""The commit of the previous release."""
EXTENT = 256 << 10
RECORD = 4096
OPTIONS = Options(format="records", record_bytes=RECORD)
SMALL = ["--ram", "8MiB", "--extent-bytes", str(EXTENT), "--fillers", "1"]

CLIENT = """
import hashlib, json, os, sys
import cachesvc
from cachesvc.catalog.options import Options
from cachesvc.client.control import Control
from cachesvc.client.grants import DaemonGrants

directory, uri = sys.argv[1:]
with Control(directory) as control:
    info = control.open_dataset([uri], Options(format="records", record_bytes=4096))
    *_, last = control.prefetch(info.id)
grants, digest = DaemonGrants(directory, info.id), hashlib.sha256()
for answer in grants.acquire(range(getattr(info, "dataset", info).extents), 60.0):
    digest.update(os.pread(answer.fd, answer.size_bytes, answer.offset))
grants.close()
print(json.dumps([cachesvc.__file__, digest.hexdigest(), last.resident_extents]))
"""
TRAINER = """
import json, sys
import cachesvc
from loader import DataLoader, mix, open_dataset, pack

def loaders(folder):
    one, two = (open_dataset(f"{folder}/{name}/", format="records", record_bytes=4096) for name in "ab")
    tokens = open_dataset(f"{folder}/a/", format="tokens", dtype="int32", seq_len=100)
    return {"shuffled": DataLoader(one, batch_size=16, shuffle=True, seed=3),
            "in order": DataLoader(one, batch_size=16),
            "mixed": DataLoader(mix({one: 0.5, two: 0.5}), batch_size=16, shuffle=True, seed=3),
            "packed": DataLoader(pack(tokens, 250, targets="shifted"), batch_size=16, shuffle=True, seed=3)}

def numbers(batch):
    if isinstance(batch, dict):
        return [hash(tuple(row)) for row in batch["targets"].tolist()]
    return batch[:, :8].contiguous().view(-1).numpy().view("<i8").tolist()

saved = {}
for name, batches in loaders(sys.argv[1]).items():
    reading = iter(batches)
    before = [number for _ in range(3) for number in numbers(next(reading))]
    state = batches.state_dict()
    saved[name] = [state, before, [number for batch in reading for number in numbers(batch)]]
resumed = {}
for name, batches in loaders(sys.argv[1]).items():
    try:
        batches.load_state_dict(json.loads(sys.argv[2])[name])
        resumed[name] = [number for batch in batches for number in numbers(batch)]
    except Exception as error:
        resumed[name] = f"{type(error).__name__}: {error}"
print(json.dumps([cachesvc.__file__, saved, resumed]))
"""


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages of the previous release, out of the repository's history."""
    folder = tmp_path_factory.mktemp("previous")
    archive = ["git", "-C", str(ROOT), "archive", PREVIOUS, "cachesvc", "loader"]
    try:
        packed = subprocess.run(archive, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", b"").decode().strip() or str(error)
        pytest.skip(
            f"THE PREVIOUS RELEASE IS NOT TESTED: fetch commit {PREVIOUS} (git fetch --unshallow): {why}"
        )
    subprocess.run(["tar", "-x", "-C", str(folder)], input=packed.stdout, check=True)
    return folder


def of_previous(previous: Path, *arguments: str) -> list[str]:
    """The command line of a Python of the previous release."""
    compiled = ["-u", "PYTHONDONTWRITEBYTECODE"]  # once
    return ["env", *compiled, "-C", str(previous), f"PYTHONPATH={previous}", sys.executable, *arguments]


def ran(command: list[str], **env: str) -> Any:
    """Run a script; return what it printed as JSON."""
    done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


class OlderDaemon(Daemon):
    """A daemon of the previous release."""

    def __init__(self, previous: Path, root: Path, options: list[str]) -> None:
        super().__init__(root, options)
        self._previous = previous

    def command(self) -> list[str]:
        """Its command line."""
        return of_previous(self._previous, *super().command()[1:])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two folders of records that begin with their numbers."""
    folder = tmp_path_factory.mktemp("data")
    for part, first in (("a", 0), ("b", 1000)):
        rows = np.random.default_rng(first).integers(0, 256, (4 * EXTENT // RECORD, RECORD), np.uint8)
        rows[:, :8] = np.arange(first, first + len(rows), dtype="<i8")[:, None].view(np.uint8)
        (folder / part).mkdir()
        (folder / part / "0.bin").write_bytes(rows.tobytes())
    return folder


@pytest.fixture
def sha256(data: Path) -> str:
    """The digest of the first folder's bytes."""
    return hashlib.sha256((data / "a/0.bin").read_bytes()).hexdigest()


def filled(daemon: Daemon, uri: str) -> tuple[DatasetId, Any]:
    """Fill a daemon; return the version and the last progress."""
    with Control(daemon.socket_dir) as control:
        dataset = control.open_dataset([uri], OPTIONS).id
        return dataset, list(control.prefetch(dataset))[-1]


@pytest.mark.slow
def test_states_of_the_previous_release_are_finished_and_the_other_way_is_right_or_an_error(
    previous: Path, data: Path
) -> None:
    def run(states: dict[str, Any], *older: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        """States in mid-epoch with the numbers before and after them, and what follows the given states."""
        arguments = ["-c", TRAINER, str(data), json.dumps(states)]
        command = of_previous(older[0], *arguments) if older else [sys.executable, *arguments]
        where, saved, resumed = ran(command, CACHESVC="off")
        assert Path(where).is_relative_to(previous) == bool(older)
        return saved, resumed

    theirs, _ = run({}, previous)
    ours, finished = run({name: state for name, (state, _, _) in theirs.items()})
    _, resumed = run({name: state for name, (state, _, _) in ours.items()}, previous)
    for name, (_, before, rest) in theirs.items():
        assert len({*before, *rest}) == len(before) + len(rest)
        assert finished[name] == rest, name
        assert resumed[name] == ours[name][2] or resumed[name].startswith(f"{StateMismatch.__name__}: "), name


@pytest.mark.slow
def test_a_directory_of_the_previous_release_is_adopted_without_a_read_of_the_source(
    previous: Path, data: Path, tmp_path: Path
) -> None:
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    options = ["--nvme", f"{nvme}=8MiB", "--extent-bytes", str(EXTENT), "--fillers", "1", "--ram", "0"]
    with OlderDaemon(previous, tmp_path / "node", options) as old:
        pinned, reply = filled(old, str(data / "a"))
        assert reply.resident_extents == 4
        with Control(old.socket_dir) as control:
            control.pin(pinned, True)
    with Daemon(tmp_path / "node", options) as new:
        with Control(new.socket_dir) as control:
            pins = {row.dataset.id for row in control.list() if row.pinned}
        assert pins == {pinned}  # while catalogs have the same version
        _, reply = filled(new, str(data / "a"))
        assert (reply.resident_extents, reply.source_bytes) == (4, 0)


def test_an_older_client_reads_through_a_newer_daemon(
    previous: Path, data: Path, tmp_path: Path, sha256: str
) -> None:
    with Daemon(tmp_path, SMALL) as new:
        where, digest, extents = ran(of_previous(previous, "-c", CLIENT, new.socket_dir, str(data / "a")))
    assert Path(where).is_relative_to(previous)
    assert (digest, extents) == (sha256, 4)


@pytest.mark.slow
def test_a_newer_client_reads_through_an_older_daemon_which_is_restarted(
    previous: Path, data: Path, tmp_path: Path, sha256: str
) -> None:
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    with OlderDaemon(previous, tmp_path / "node", [*SMALL, "--nvme", f"{nvme}=8MiB"]) as daemon:
        client = [sys.executable, "-c", CLIENT, daemon.socket_dir, str(data / "a")]
        _, digest, extents = ran(client)
        assert (digest, extents) == (sha256, 4)
        new = Daemon(tmp_path / "node", [*SMALL, "--nvme", f"{nvme}=8MiB"])
        new._options[new._options.index("--socket") + 1] = new.socket_dir = daemon.socket_dir
        assert new.spawn("--takeover").wait(WAIT_S) == InvalidInput.code
        assert "a daemon already serves" in daemon.log
        assert daemon.stop() == 0
        with new:
            _, digest, extents = ran(client)
            assert (digest, extents) == (sha256, 4)


@pytest.fixture
def pair(previous: Path, tmp_path: Path) -> Iterator[tuple[Daemon, Daemon]]:
    """An older and a newer node of one cluster."""
    addresses = [f"127.0.0.1:{two_ports()}" for _ in range(2)]
    members = ["--cluster", f"static:{','.join(addresses)}"]
    options = [[*SMALL, *members, "--advertise", each, "--node-name", each] for each in addresses]
    with (
        OlderDaemon(previous, tmp_path / "old", options[0]) as old,
        Daemon(tmp_path / "new", options[1]) as new,
    ):
        yield old, new


def states(daemon: Daemon) -> set[str]:
    with Control(daemon.socket_dir) as control:
        return {node.state for node in control.nodes().nodes}


@pytest.mark.slow
def test_blocks_travel_between_nodes_of_the_two_releases(data: Path, pair: tuple[Daemon, Daemon]) -> None:
    wait_until(lambda: all(states(each) == {"present"} for each in pair))
    old, new = pair
    for part, first, second in (("a", old, new), ("b", new, old)):
        _, reply = filled(first, str(data / part))
        assert (reply.resident_extents, reply.peer_bytes) == (4, 0)
        _, reply = filled(second, str(data / part))
        assert (reply.resident_extents, reply.source_bytes, reply.peer_bytes) == (4, 0, 4 * EXTENT)
    warnings = [line for each in pair for line in each.log.splitlines() if " INFO " not in line]
    assert not [line for line in warnings if "few open files" not in line]
