"""Every kind of event, from the real thing: who did it, to what, how much, and why."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import cachesvc
from cachesvc.__main__ import run
from cachesvc.client.control import Control
from cachesvc.core.errors import CacheError, NotAllowed
from cachesvc.daemon.events.event import KINDS
from cachesvc.v1 import cachesvc_pb2 as pb
from testbed.node import Daemon
from testbed.servers import two_ports
from tests.support.faults.disks import flip
from tests.support.faults.disks import stored as files
from tests.support.processes import stopped_fills
from tests.support.records import EXTENTS, RECORDS, opened, options, written
from tests.support.shared_daemon import for_one_test
from tests.support.users import ALICE, BOB, as_root, as_user
from tests.support.waiting import wait_until

JOB = "4711"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with one cache directory, which may keep half of one extent for Alice."""
    root = tmp_path_factory.getbasetemp()
    nvme = tmp_path_factory.mktemp("nvme")
    nvme.parent.chmod(0o755)
    more = ["--nvme", f"{nvme}=64MiB", "--socket-mode", "666"]
    with Daemon(tmp_path_factory.mktemp("node"), ["--ram", "0", *options(root, *more)[2:]]) as found:
        os.chmod(found.socket_dir, 0o755)
        (found.root / "nvme").write_text(str(nvme))
        yield found


@pytest.fixture
def daemon(shared: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    monkeypatch.setenv("SLURM_JOB_ID", JOB)
    yield from for_one_test(shared)


@pytest.fixture
def nvme(daemon: Daemon) -> Path:
    return Path((daemon.root / "nvme").read_text())


class Since:
    """The events of a daemon from here on."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon, self._began = daemon, time.time()

    def all(self) -> list[pb.Event]:
        with Control(self._daemon.socket_dir) as control:
            return list(control.events(self._began))

    def of(self, kind: str) -> list[pb.Event]:
        return [event for event in self.all() if event.kind == kind]

    def one(self, kind: str) -> pb.Event:
        """Wait for the only event of a kind."""
        wait_until(partial(self.of, kind))
        (found,) = self.of(kind)
        return found


def who(event: pb.Event) -> tuple[int, int, str]:
    return event.uid, event.pid, event.job


def test_what_a_user_does_is_recorded_with_who_and_how_much(tmp_path: Path, daemon: Daemon) -> None:
    since, data = Since(daemon), written(tmp_path)
    dataset = opened(daemon, tmp_path)
    with Control(daemon.socket_dir) as control:
        list(control.prefetch(dataset, dry_run=True))
        list(control.prefetch(dataset))
        control.pin(dataset, True)
        control.pin(dataset, False)
        control.evict(dataset)
    found = since.all()
    assert [event.kind for event in found] == ["opened", "prefetched", "pinned", "unpinned", "evicted"]
    for event in found:
        assert who(event) == (os.geteuid(), os.getpid(), JOB)
        assert (event.dataset, event.uri) == (dataset, f"file://{tmp_path}/data/")
        assert event.size_bytes == len(data)
        assert event.error == event.why == ""


def test_a_prefetch_that_is_given_up_says_so(tmp_path: Path, daemon: Daemon) -> None:
    since = Since(daemon)
    written(tmp_path)
    dataset = opened(daemon, tmp_path)
    with stopped_fills(daemon), Control(daemon.socket_dir) as control:
        next(control.prefetch(dataset))  # the iterator is closed
        assert since.one("prefetched").why == "it was ended early"


def test_a_refusal_names_the_error_and_is_kept_once_a_minute(tmp_path: Path, daemon: Daemon) -> None:
    since = Since(daemon)
    with Control(daemon.socket_dir) as control:
        for _ in range(3):
            with pytest.raises(NotAllowed):
                control.open_dataset(["s3://elsewhere/"], RECORDS)
    found = since.one("refused")
    assert who(found) == (os.geteuid(), os.getpid(), JOB)
    assert (found.uri, found.error) == ("s3://elsewhere/", "NotAllowed")
    assert "not below an allowed prefix" in found.why


def test_a_source_that_fails_is_recorded_once_for_all_extents(tmp_path: Path, daemon: Daemon) -> None:
    written(tmp_path)
    dataset = opened(daemon, tmp_path)
    (tmp_path / "data/0.bin").rename(tmp_path / "gone")
    since = Since(daemon)
    with Control(daemon.socket_dir) as control:
        *_, last = control.prefetch(dataset)
        assert len(last.failures) == EXTENTS
        with pytest.raises(CacheError):
            control.open_dataset([f"{tmp_path}/absent/"], RECORDS)
    fill, opening = since.of("source_failed")
    assert (fill.dataset, fill.uri) == (dataset, f"file://{tmp_path}/data/")
    assert fill.error in ("NotFound", "SourceChanged")
    assert "0.bin" in fill.why
    assert (opening.uri, opening.error) == (f"{tmp_path}/absent/", "NotFound")


def test_a_flipped_bit_and_its_repair_are_recorded(tmp_path: Path, daemon: Daemon, nvme: Path) -> None:
    written(tmp_path)
    dataset = opened(daemon, tmp_path)
    with Control(daemon.socket_dir) as control:
        list(control.prefetch(dataset))
        wait_until(lambda: len(files(nvme)) == EXTENTS)
        since, damaged = Since(daemon), files(nvme)[0]
        flip(damaged, 7)
        list(control.verify(dataset))
        list(control.prefetch(dataset))
    for event in (since.one("corrupt"), since.one("repaired")):
        assert (event.extent, event.tier) == (damaged.name.partition(".")[0], "nvme0")
    assert since.one("repaired").dataset == dataset


@pytest.mark.slow
def test_a_lost_directory_and_its_return_are_recorded(daemon: Daemon, nvme: Path) -> None:
    since, away = Since(daemon), nvme.with_name("away")
    nvme.rename(away)
    lost = since.one("tier_lost")
    assert lost.tier == "nvme0"
    assert lost.why
    away.rename(nvme)
    assert since.one("tier_back").tier == "nvme0"


def test_a_crash_an_adoption_and_an_upgrade_are_recorded(tmp_path: Path) -> None:
    data = written(tmp_path)
    with Daemon(tmp_path / "node", options(tmp_path)) as daemon:
        since, before = Since(daemon), daemon.pid
        dataset = opened(daemon, tmp_path)
        with Control(daemon.socket_dir) as control:
            list(control.prefetch(dataset))
        daemon.crash()
        wait_until(lambda: daemon.ready() and daemon.pid != before)
        assert "signal 9" in since.one("crashed").why
        adopted = since.one("adopted")
        assert (adopted.tier, adopted.extents, adopted.size_bytes) == ("ram", EXTENTS, len(data))
        daemon.take_over()
        assert cachesvc.__version__ in since.one("upgraded").why
        assert [each.kind for each in since.all() if each.kind in ("started", "stopped")] == [
            "started",
            "stopped",
            "started",
        ]


@pytest.mark.slow
def test_nodes_that_come_and_go_are_recorded(tmp_path: Path) -> None:
    names = [f"127.0.0.1:{two_ports()}" for _ in range(2)]
    given = [
        *("--ram", "128MiB", "--cluster", f"static:{','.join(names)}"),
        *("--fillers", "1", "--allow", f"{tmp_path}/"),
    ]
    nodes = [[*given, "--node-name", f"n{n}", "--advertise", name] for n, name in enumerate(names)]
    with Daemon(tmp_path / "first", nodes[0]) as first:
        since = Since(first)
        with Control(first.socket_dir) as control:
            wait_until(lambda: any(each.state == "present" for each in control.nodes().nodes))
        assert since.one("member_silent").node == names[1]
        with Daemon(tmp_path / "second", nodes[1]):
            assert since.one("member_present").node == "n1"
        assert since.one("member_left").node == "n1"


@as_root
def test_users_see_their_own_events_and_those_of_the_node(tmp_path: Path, daemon: Daemon) -> None:
    written(tmp_path)
    tmp_path.chmod(0o755)
    directory, uri, since = daemon.socket_dir, f"{tmp_path}/data/", time.time()

    def opens() -> None:
        with Control(directory) as control:
            control.open_dataset([uri], RECORDS)

    def sees() -> list[str]:
        with Control(directory) as control:
            return [event.kind for event in control.events(0) if event.time >= since or not event.uri]

    as_user(ALICE, opens)
    assert as_user(ALICE, sees)[-1] == "opened"
    assert "opened" not in as_user(BOB, sees)
    assert "started" in as_user(BOB, sees)
    with Control(directory) as control:
        assert [event.uid for event in control.events(since)] == [ALICE]


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(["events", *words]) == 0
    return capsys.readouterr().out


def test_the_verb_prints_events_for_people_and_programs(
    tmp_path: Path, daemon: Daemon, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path)
    dataset = opened(daemon, tmp_path)
    socket = ("--socket", daemon.socket_dir)
    last = printed(capsys, *socket).splitlines()[-1]
    assert last.endswith(
        f"a dataset is opened: file://{tmp_path}/data/, 8.0 MiB, uid {os.geteuid()}, pid {os.getpid()}, job {JOB}"
    )
    row = json.loads(printed(capsys, "--json", "--since", "1h", *socket).splitlines()[-1])
    assert (row["kind"], row["dataset"], row["pid"]) == ("opened", dataset, os.getpid())
    assert "why" not in row
    assert printed(capsys, "--since", "0", *socket) == ""


def test_the_verb_reads_the_files_where_no_daemon_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Daemon(tmp_path / "node", options(tmp_path)) as daemon:
        words = ("--socket", daemon.socket_dir, "--state-dir", str(tmp_path / "node" / "state"))
    lines = printed(capsys, *words).splitlines()
    assert [line.split("  ")[1].partition(":")[0] for line in lines] == [KINDS["started"], KINDS["stopped"]]
    assert run(["events", *words[:2], "--state-dir", str(tmp_path)]) == 10


def test_a_follower_hears_of_events_across_a_crash(tmp_path: Path) -> None:
    heard: list[str] = []
    with Daemon(tmp_path / "node", options(tmp_path)) as daemon:

        def follow() -> None:
            from cachesvc.cli.events import _followed

            for event in _followed(daemon.socket_dir, time.time() - 60):
                heard.append(event.kind)
                if event.kind == "crashed":
                    return

        follower = threading.Thread(target=follow, daemon=True)
        follower.start()
        wait_until(lambda: heard == ["started"])
        daemon.crash()
        wait_until(lambda: not follower.is_alive())
    assert heard == ["started", "crashed"]


ELSEWHERE = {
    "drained": "cluster/test_drain.py",
    "fill_failed": "fills/test_fill.py",
    **dict.fromkeys(("unreadable", "tier_taken", "tier_room"), "disks/test_disks.py"),
    "reloaded": "reload/test_reload.py",
    "reload_failed": "reload/test_reload.py",
    **dict.fromkeys(
        ("member_away", "member_refused", "member_silent", "member_gone"), "peers/test_notices.py"
    ),
    **dict.fromkeys(("cluster_warning", "cluster_mended"), "peers/test_told.py"),
    **dict.fromkeys(("bypassed", "bypass_ended"), "grants/test_bypass.py"),
    "left_out": "peers/test_sick_nodes.py",
    "read_again": "peers/test_sick_nodes.py",
    **dict.fromkeys(("wrong_bytes", "wrong_bytes_here"), "peers/test_wrong_bytes.py"),
}
"""Kinds that other tests of the daemon show."""


def test_every_kind_has_a_test() -> None:
    here = Path(__file__)
    pages = {kind: here.parent.parent / ELSEWHERE.get(kind, f"events/{here.name}") for kind in KINDS}
    assert [kind for kind, page in pages.items() if f'"{kind}"' not in page.read_text()] == []
