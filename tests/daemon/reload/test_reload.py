"""A running daemon takes changed settings, from its file, by a signal or a call. It keeps the old ones where they are
wrong."""

from __future__ import annotations

import os
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from cachesvc.__main__ import run
from cachesvc.cli import config_file
from cachesvc.cli.serve import serve
from cachesvc.client.control import Control
from cachesvc.client.grants import DaemonGrants
from cachesvc.config import ClusterSettings, NvmeSpec, QuotaSpec, Rule, Settings, SourceSection, Tls
from cachesvc.core.errors import InvalidInput, NotAllowed, NotFound
from cachesvc.core.model import DatasetId
from cachesvc.daemon.reload.reloader import compare
from cachesvc.v1 import cachesvc_pb2 as pb
from testbed import WAIT_S
from testbed.node import Daemon
from testbed.servers import free_ports
from tests.support.reading import contents
from tests.support.records import EXTENT, EXTENTS, RECORDS
from tests.support.users import ALICE, as_root, as_user
from tests.support.waiting import wait_until

SIZE = EXTENTS * EXTENT
SUCCESSFUL = "cachesvc_config_last_reload_successful"
TIME = "cachesvc_config_last_reload_success_timestamp_seconds"


class Configured(Daemon):
    """A daemon that a file configures. Its data lie in two folders, of which the file allows the first."""

    def __init__(self, root: Path) -> None:
        (self.port,) = free_ports(1)
        self.file = root / "config.toml"
        self.data = [root / "one", root / "two"]
        self.bodies = []
        for folder in self.data:
            folder.mkdir()
            self.bodies.append(os.urandom(SIZE))
            (folder / "0.bin").write_bytes(self.bodies[-1])
        super().__init__(root / "node", ["--config", str(self.file)])
        self.write()

    def write(self, *lines: str, folders: int = 1, ram: str = "32MiB") -> None:
        """Write the file as an editor does, by renaming another one."""
        allow = ", ".join(f'"{each}/"' for each in self.data[:folders])
        given = [f'ram = "{ram}"', f'extent-bytes = "{EXTENT}"', f"allow = [{allow}]", "fillers = 1"]
        given += [f'metrics = "127.0.0.1:{self.port}"', 'socket-mode = "666"', *lines]
        new = self.file.with_suffix(".new")
        new.write_text("\n".join(given))
        new.replace(self.file)

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as answer:
            rows = [line.split() for line in answer.read().decode().splitlines()]
        return next(float(row[1]) for row in rows if row[0] == name)

    def events(self, kind: str) -> list[pb.Event]:
        with Control(self.socket_dir) as control:
            return [event for event in control.events(0) if event.kind == kind]

    def reloaded(self, kind: str = "reloaded") -> str:
        """Wait for one more reload by itself; return what it says."""
        before = len(self.events(kind))
        wait_until(lambda: len(self.events(kind)) > before)
        return self.events(kind)[-1].why

    def open(self, folder: int) -> DatasetId:
        with Control(self.socket_dir) as control:
            return control.open_dataset([f"{self.data[folder]}/"], RECORDS).id

    def dataset(self, wanted: DatasetId) -> pb.DatasetStatus:
        with Control(self.socket_dir) as control:
            return next(each for each in control.list() if each.dataset.id == wanted)

    def ram(self) -> pb.TierStatus:
        with Control(self.socket_dir) as control:
            return control.status().tiers[0]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Configured]:
    with Configured(tmp_path) as found:
        yield found
    assert "Traceback" not in found.log, found.log


def reads(daemon: Daemon, dataset: DatasetId) -> bytes:
    with closing(DaemonGrants(daemon.socket_dir, dataset)) as grants:
        return b"".join(map(contents, grants.acquire(range(EXTENTS), WAIT_S)))


def test_a_changed_file_changes_allowlist_quota_and_budget_under_readers(daemon: Configured) -> None:
    dataset = daemon.open(0)
    with pytest.raises(NotAllowed):
        daemon.open(1)
    with Control(daemon.socket_dir) as control:
        list(control.prefetch(dataset))
    with closing(DaemonGrants(daemon.socket_dir, dataset)) as grants:
        (first,) = grants.acquire([0], WAIT_S)
        wait_until(lambda: daemon.dataset(dataset).kept_bytes == SIZE)
        daemon.write(f'quota = ["{daemon.data[0]}/={2 * EXTENT}"]', folders=2, ram="24MiB")
        assert daemon.reloaded() == "allow, quota, ram changed"
        wait_until(lambda: daemon.ram().budget_bytes == 24 << 20)
        wait_until(lambda: daemon.dataset(dataset).kept_bytes <= 2 * EXTENT)
        assert reads(daemon, daemon.open(1)) == daemon.bodies[1], "the new fillers read below the new prefix"
        assert contents(first) == daemon.bodies[0][:EXTENT]
    daemon.write(ram="32MiB")
    assert daemon.reloaded() == "allow, quota, ram changed"
    with Control(daemon.socket_dir) as control:
        list(control.prefetch(dataset))
    wait_until(lambda: daemon.dataset(dataset).kept_bytes in (0, SIZE))


@pytest.mark.slow
def test_a_dataset_that_is_not_allowed_any_more_has_no_new_readers(daemon: Configured) -> None:
    daemon.write(folders=2)
    daemon.reloaded()
    dataset = daemon.open(1)
    with closing(DaemonGrants(daemon.socket_dir, dataset)) as grants, Control(daemon.socket_dir) as control:
        list(control.prefetch(dataset))
        (first,) = grants.acquire([0], WAIT_S)
        daemon.write(folders=1)
        daemon.reloaded()
        with pytest.raises(NotAllowed):
            daemon.open(1)
        with pytest.raises(NotFound):
            reads(daemon, dataset)
        (second,) = grants.acquire([1], WAIT_S)
        assert contents(first) + contents(second) == daemon.bodies[1][: 2 * EXTENT]
    daemon.write(folders=2)
    daemon.reloaded()
    assert reads(daemon, dataset) == daemon.bodies[1]


def test_a_wrong_file_changes_nothing_and_says_so(
    daemon: Configured, capsys: pytest.CaptureFixture[str]
) -> None:
    assert daemon.metric(SUCCESSFUL) == 1
    before = daemon.metric(TIME)
    daemon.write('rma = "1GiB"', folders=2)
    why = daemon.reloaded("reload_failed")
    assert why == f"{daemon.file}: rma is no setting; is it ram?"
    assert (daemon.metric(SUCCESSFUL), daemon.metric(TIME)) == (0, before)
    with pytest.raises(NotAllowed):
        daemon.open(1)
    assert run(["reload", "--socket", daemon.socket_dir]) == InvalidInput.code
    assert capsys.readouterr().err == f"cachesvc: {why}\n"
    daemon.write("scrub-rate = 0", folders=2)
    assert daemon.reloaded() == "allow changed; scrub-rate will change when the service is started again"
    assert daemon.metric(SUCCESSFUL) == 1
    assert before < daemon.metric(TIME) <= time.time()
    daemon.open(1)


@pytest.mark.slow
def test_a_signal_to_the_service_and_the_verb_reload_at_once(
    daemon: Configured, capsys: pytest.CaptureFixture[str]
) -> None:
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGHUP)
    assert daemon.reloaded() == "nothing changed"
    assert run(["reload", "--socket", daemon.socket_dir]) == 0
    assert capsys.readouterr().out == "nothing changed\n"
    daemon.write('log = "DEBUG"')
    changed: Callable[[], bool] = lambda: daemon.events("reloaded")[-1].why == "log changed"  # noqa: E731
    wait_until(changed)
    daemon.open(0)
    wait_until(lambda: "DEBUG reader connected" in daemon.log)


@pytest.mark.slow
def test_a_daemon_that_is_started_again_after_a_crash_has_the_file_of_now(daemon: Configured) -> None:
    daemon.write(folders=2)
    daemon.reloaded()
    before = daemon.pid
    daemon.crash()
    wait_until(lambda: daemon.ready() and daemon.pid != before)
    wait_until(lambda: len(daemon.events("reloaded")) == 2)
    daemon.open(1)


@as_root
def test_only_the_daemons_own_user_reloads(daemon: Configured) -> None:
    os.chmod(daemon.socket_dir, 0o755)
    directory = daemon.socket_dir

    def asks() -> None:
        with Control(directory) as control:
            control.reload()

    kind, message = as_user(ALICE, asks)
    assert (kind, message) == ("NotAllowed", "only user 0, who runs the daemon, may reload its settings")


RUNNING = Settings(1 << 30, (NvmeSpec("/a", 5), NvmeSpec("/b", share=0.5)), ("s3://b/",), "/run/x", "/state")
OTHERS: dict[str, Any] = {
    "tls": Tls("c", "k", "a"),
    "cluster": ClusterSettings("static:a:1", "a", "a:1"),
    "log_format": "json",
    "s3_writes": ("s3://b/",),
}


def other(name: str) -> Any:
    """A value of another setting than the running one."""
    now = getattr(RUNNING, name)
    return OTHERS.get(name) or (f"{now}x" if isinstance(now, str) else now + 1)


@pytest.mark.parametrize(
    ("change", "option"),
    [
        ({"ram_bytes": 2 << 30}, "ram"),
        ({"nvme": (NvmeSpec("/a", share=0.1), NvmeSpec("/b", share=0.9))}, "nvme"),
        ({"allow": ("s3://c/",)}, "allow"),
        ({"rules": (Rule("s3://b/", (1,), ()),)}, "allow"),
        ({"quota": (QuotaSpec("user", 5),)}, "quota"),
        ({"source": (SourceSection("s3://b/"),)}, "source"),
        ({"hedge_share": 0.0}, "hedge"),
        ({"log": "DEBUG"}, "log"),
    ],
)
def test_these_change_at_once(change: dict[str, Any], option: str) -> None:
    found = compare(RUNNING, replace(RUNNING, **change))
    assert (found.taken, found.waiting) == ((option,), ())
    assert found.settings == replace(RUNNING, **change)


@pytest.mark.parametrize(
    "change",
    [
        {"ram_bytes": 0},
        {"nvme": (NvmeSpec("/a", 5),)},
        {"nvme": (NvmeSpec("/b", share=0.5), NvmeSpec("/a", 5))},
        {"nvme": (NvmeSpec("/a", 5, mounted=True), NvmeSpec("/b", share=0.5))},
    ],
)
def test_a_tier_comes_goes_or_moves_with_the_next_start(change: dict[str, Any]) -> None:
    found = compare(RUNNING, replace(RUNNING, **change))
    assert (found.taken, found.settings) == ((), RUNNING)
    assert len(found.waiting) == 1


def test_all_other_settings_wait_and_are_named_by_options_of_serve() -> None:
    live = {"ram_bytes", "nvme", "allow", "rules", "quota", "source", "hedge_share", "log"}
    of_code = {"filler_threads", "metadata_expiry_s"}
    of_one_command = {"takeover", "origin"}
    keys = config_file.keys(serve)
    for field in fields(Settings):
        if field.name not in live | of_code | of_one_command:
            found = compare(RUNNING, replace(RUNNING, **{field.name: other(field.name)}))
            assert (found.taken, found.settings) == ((), RUNNING), field.name
            assert found.waiting[0].split(",")[0] in keys


def test_a_change_that_waits_does_not_hide_one_that_does_not() -> None:
    found = compare(RUNNING, replace(RUNNING, ram_bytes=5, fillers=RUNNING.fillers + 1))
    assert (found.taken, found.waiting) == (("ram",), ("fillers",))
    assert found.settings == replace(RUNNING, ram_bytes=5)
