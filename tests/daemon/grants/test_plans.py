"""Plans reach the core as their readers wrote them, in turn. An invalid plan ends its reader's connection."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachesvc.catalog.options import Options
from cachesvc.client import plan_memory as plans
from cachesvc.client.control import Control
from cachesvc.client.grants import DaemonGrants
from cachesvc.client.protocol import Granted
from cachesvc.core import wire
from cachesvc.core.errors import CacheError, DaemonUnavailable, InvalidInput
from cachesvc.core.events import PlanEnded
from cachesvc.core.model import DatasetId, ExtentId
from cachesvc.core.order.epoch_order import Plan
from cachesvc.core.wire import Op
from cachesvc.daemon.grants.bypass import Bypass
from cachesvc.daemon.grants.plan_intake import SHORT_ROWS, PlanEntries, PlanIntake, ReceivedPlan
from cachesvc.daemon.grants.reader_events import ConnectedReader
from cachesvc.daemon.grants.server import GrantsServer
from testbed import WAIT_S
from testbed.node import Daemon
from tests.support.greetings import greeted
from tests.support.users import BOB, as_root
from tests.support.waiting import wait_until

EXTENT, EXTENTS = 4096, 16
IDS = tuple(ExtentId(bytes([number])) for number in range(EXTENTS))


def memory(body: bytes) -> int:
    fd = os.memfd_create("plan")
    os.write(fd, body)
    return fd


class ManualLane:
    """A lane that runs its calls one by one, each on `run`."""

    def __init__(self) -> None:
        self.calls: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []

    def submit(self, work: Callable[[], Any], then: Callable[[Any], None], otherwise: object) -> None:
        self.calls.append((work, then))

    def run(self) -> None:
        work, then = self.calls.pop(0)
        then(work())


class RecordedRequests:
    """Records the plans and events that the grants socket passes on."""

    def __init__(self) -> None:
        self.received: list[object] = []

    def planned(self, reader: ConnectedReader, plan: PlanEntries) -> None:
        self.received.append((reader.id, len(plan.entries)))

    def handle(self, event: object) -> None:
        self.received.append(event)

    def gone(self, reader: ConnectedReader) -> None:
        pass

    def connected(self, reader: ConnectedReader, dataset: DatasetId, then: Callable[[Any], None]) -> None:
        then(SimpleNamespace(id=dataset, extent_ids=IDS))

    def tier_budgets(self) -> list[int]:
        return []


LONG = SHORT_ROWS + 1
Numbers = list[int]


def served(root: Path, ram: str) -> Daemon:
    """A daemon over a file of 16 extents."""
    (root / "data").mkdir()
    (root / "data" / "0.bin").write_bytes(os.urandom(EXTENTS * EXTENT))
    options = ["--ram", ram, "--extent-bytes", str(EXTENT), "--fillers", "1"]
    return Daemon(root / "node", [*options, "--allow", f"{root}/data"])


def opened(daemon: Daemon) -> DatasetId:
    with Control(daemon.socket_dir) as control:
        wanted = Options(format="records", record_bytes=1024)
        return control.open_dataset([str(daemon.root.parent / "data")], wanted).id


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with served(tmp_path_factory.mktemp("plans"), str(8 * EXTENT)) as found:
        yield found
        assert "Traceback" not in found.log


@pytest.fixture(scope="module")
def dataset(daemon: Daemon) -> DatasetId:
    return opened(daemon)


def columns(extents: Numbers, firsts: Numbers, lasts: Numbers, following: Numbers) -> bytes:
    kinds = zip((extents, firsts, lasts, following), ("<u4", "<u8", "<u8", "<u4"), strict=True)
    return b"".join(np.array(each, kind).tobytes() for each, kind in kinds)


@given(
    rows=st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**62), st.integers(0, 2**62))),
    following=st.none() | st.lists(st.integers(0, 2**32 - 1)),
)
def test_a_plan_is_read_as_it_was_written(
    rows: list[tuple[int, int, int]], following: Numbers | None
) -> None:
    extents, firsts, lasts = (np.array([row[at] for row in rows], np.int64) for at in range(3))
    plan = Plan(extents, firsts, lasts, None if following is None else np.array(following, np.int64))
    fd, count, more = plans.write(plan)
    found = plans.read(fd, count, more)
    os.close(fd)
    assert list(zip(*found[:3], strict=True)) == rows
    assert list(found.following) == (following or [])


def test_a_plan_of_too_many_extents_is_refused_before_it_is_sent() -> None:
    rows = np.zeros(plans.MAX_ROWS + 1, np.int64)
    with pytest.raises(InvalidInput, match="extent_bytes"):
        plans.write(Plan(rows, rows, rows))


# ---- at a daemon


def descriptors(daemon: Daemon) -> int:
    assert daemon.process is not None
    return len(os.listdir(f"/proc/{daemon.pid}/fd"))


def pipe() -> int:
    reading, writing = os.pipe()
    os.close(writing)
    return reading


def on_disk() -> int:
    with tempfile.TemporaryFile(dir=Path(__file__).parent) as file:
        return os.dup(file.fileno())


BEYOND = LONG * [EXTENTS - 1] + [EXTENTS]
HOSTILE: dict[str, tuple[Callable[[], int], int, int]] = {
    "an extent beyond": (lambda: memory(columns([EXTENTS], [0], [0], [])), 1, 0),
    "an extent beyond, in the epoch after": (lambda: memory(columns([], [], [], [EXTENTS])), 0, 1),
    "an extent beyond, late": (lambda: memory(columns([], [], [], BEYOND)), 0, len(BEYOND)),
    "not sorted": (lambda: memory(columns([0, 1], [1, 0], [1, 1], [])), 2, 0),
    "not sorted, late": (
        lambda: memory(columns([0] * LONG, [1] * (LONG - 1) + [0], [1] * LONG, [])),
        LONG,
        0,
    ),
    "too short": (lambda: memory(columns([0], [0], [0], [])), 2, 0),
    "too long": (lambda: memory(columns([0], [0], [0], []) + b"x"), 1, 0),
    "nothing in it": (lambda: memory(b""), LONG, 0),
    "more than a plan may have": (lambda: memory(b""), plans.MAX_ROWS + 1, 0),
    "more than the fields hold": (lambda: memory(b""), 2**32 - 1, 2**64 - 1),
    "a pipe without data": (pipe, 1, 0),
    "a device": (lambda: os.open("/dev/zero", os.O_RDONLY), 1, 0),
    "a file on a disk": (on_disk, 0, 0),
    "a directory": (lambda: os.open("/", os.O_RDONLY), 0, 0),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_an_invalid_plan_ends_its_connection(daemon: Daemon, dataset: DatasetId, kind: str) -> None:
    make, rows, more = HOSTILE[kind]
    before = descriptors(daemon)
    with greeted(daemon, dataset) as channel:
        fd = make()
        socket.send_fds(channel, [wire.encode(Op.PLAN, rows, more)], [fd])
        os.close(fd)
        assert channel.recv(4096) == b""
    wait_until(lambda: descriptors(daemon) <= before)


@pytest.mark.parametrize("identified", [False, True])
def test_a_plan_without_a_dataset_or_memory_ends_its_connection(
    daemon: Daemon, dataset: DatasetId, identified: bool
) -> None:
    before = descriptors(daemon)
    with greeted(daemon, None if identified else dataset) as channel:
        fd = memory(columns([0], [0], [0], []))
        socket.send_fds(channel, [wire.encode(Op.PLAN, 1, 0)], [fd] if identified else [])
        os.close(fd)
        assert channel.recv(4096) == b""
    wait_until(lambda: descriptors(daemon) <= before)


@pytest.mark.parametrize("repeats", [1, 20_000])
def test_messages_after_a_plan_are_handled_after_it(daemon: Daemon, dataset: DatasetId, repeats: int) -> None:
    def touched() -> int:
        with Control(daemon.socket_dir) as control:
            return sum(epoch.touched for epoch in control.list()[0].epochs)

    order = np.repeat(np.arange(EXTENTS), repeats)
    steps = np.arange(len(order))
    with contextlib.closing(DaemonGrants(daemon.socket_dir, dataset)) as grants:
        grants.submit(Plan(order, steps, steps))
        grants.passed(len(order))  # without effect if it were handled before the plan
        wait_until(lambda: touched() == len(order))


def test_jobs_one_after_the_other_on_a_pinned_dataset_have_epochs_of_their_own(tmp_path: Path) -> None:
    steps = np.arange(EXTENTS)
    with served(tmp_path, "1MiB") as node, Control(node.socket_dir) as control:
        wanted = opened(node)
        control.pin(wanted, True)

        def told() -> list[tuple[int, int]]:
            return [(epoch.touched, epoch.hits) for epoch in control.list()[0].epochs]

        for number in range(3):  # one job number, as of one script
            with contextlib.closing(DaemonGrants(node.socket_dir, wanted, job=7)) as grants:
                grants.submit(Plan(steps, steps, steps))
                grants.acquire(range(EXTENTS), WAIT_S)
                grants.passed(EXTENTS)
                expected = [(EXTENTS, EXTENTS if each else 0) for each in range(number + 1)]
                wait_until(lambda expected=expected: told() == expected)


@pytest.mark.slow
def test_a_reader_that_ends_while_its_plan_is_read_leaves_nothing(daemon: Daemon, dataset: DatasetId) -> None:
    before = descriptors(daemon)
    rows = [0] * plans.MAX_ROWS
    body = columns(rows, rows, rows, rows)
    for _ in range(8):
        with greeted(daemon, dataset) as channel:
            fd = memory(body)
            socket.send_fds(channel, [wire.encode(Op.PLAN, len(rows), len(rows))], [fd])
            os.close(fd)
    wait_until(lambda: descriptors(daemon) <= before)
    with Control(daemon.socket_dir) as control:
        wait_until(lambda: control.status().readers == 0)


def test_a_plan_is_sent_again_to_a_restarted_daemon(tmp_path: Path) -> None:
    with served(tmp_path, "1MiB") as node:
        grants = DaemonGrants(node.socket_dir, opened(node))
        node.kill()
        steps = np.arange(EXTENTS)
        grants.submit(Plan(steps, steps, steps))  # no daemon runs
        with pytest.raises(DaemonUnavailable):
            grants.acquire([0], 5.0)
        node.start()
        grants.passed(0)  # stays disconnected until an extent is acquired
        assert all(isinstance(each, Granted) for each in grants.acquire([0], WAIT_S))
        with Control(node.socket_dir) as control:
            wait_until(lambda: control.list()[0].resident_extents == EXTENTS)  # the plan fetches all of it
        grants.close()


# ---- users in turn


def handed(*extents: int) -> ReceivedPlan:
    rows = list(extents)
    return ReceivedPlan(memory(columns(rows, [0] * len(rows), [0] * len(rows), [])), len(rows), 0, IDS)


def test_users_take_turns_and_short_plans_do_not_wait() -> None:
    lane, read = ManualLane(), list[str]()
    intake = PlanIntake(lane)  # type: ignore[arg-type]

    def take(name: str, user: int, plan: ReceivedPlan) -> ReceivedPlan:
        intake.read(
            plan, user, lambda found: read.append(name if isinstance(found, PlanEntries) else "wrong")
        )
        return plan

    for number in range(4):
        take(f"first's {number}", 1, handed(*[number] * LONG))
    forgotten = take("forgotten", 2, handed(*[1] * LONG))
    take("second's", 2, handed(*[1] * LONG))
    take("short", 3, handed(5))
    take("first's wrong one", 1, handed(*[EXTENTS] * LONG))
    intake.forget(forgotten)
    assert read == ["short"]
    while lane.calls:
        assert intake.under_way
        lane.run()
    assert read == ["short", "first's 0", "first's 1", "second's", "first's 2", "first's 3", "wrong"]
    assert not intake.under_way


def test_the_memory_of_a_plan_is_closed_when_it_is_read_or_forgotten() -> None:
    lane, found = ManualLane(), list[PlanEntries | CacheError]()
    intake = PlanIntake(lane)  # type: ignore[arg-type]
    before = len(os.listdir("/proc/self/fd"))
    for each in (handed(1), handed(EXTENTS), handed(*[1] * LONG), handed(*[2] * LONG)):
        intake.read(each, 1, found.append)
    intake.forget(each)
    while lane.calls:
        lane.run()
    assert len(os.listdir("/proc/self/fd")) == before
    assert [isinstance(one, PlanEntries) for one in found] == [True, False, True]


# ---- the cap on rows


@as_root
def test_a_reader_whose_plan_exceeds_the_cap_stays_connected_without_a_plan(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched: dict[int, Callable[[], object]] = {}
    before, lane = len(os.listdir("/proc/self/fd")), ManualLane()
    requests, intake = RecordedRequests(), PlanIntake(lane, rows_per_user=8)  # type: ignore[arg-type]
    numbers = iter(range(1, 10))
    server = GrantsServer(
        requests,  # type: ignore[arg-type]
        intake,
        watched.__setitem__,
        watched.__delitem__,
        lambda: next(numbers),
        Bypass(str(tmp_path / "bypass")),
    )
    server.listen(str(tmp_path / "grants.sock"), 0o666, 9)
    (listener,) = watched
    channels: dict[int, socket.socket] = {}
    theirs: dict[int, int] = {}

    def hand_over(reader: int, rows: int, more: int = 0) -> None:
        fd = memory(columns([1] * rows, [0] * rows, [0] * rows, [1] * more))
        socket.send_fds(channels[reader], [wire.encode(Op.PLAN, rows, more)], [fd])
        os.close(fd)
        watched[theirs[reader]]()

    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)  # other users may not look up the folders above it
    for number in (1, 2, 3):
        channels[number] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        os.seteuid(BOB)  # the kernel notes the effective user at connect
        channels[number].connect("grants.sock")
        os.seteuid(0)
        known = set(watched)
        watched[listener]()
        (theirs[number],) = set(watched) - known
        channels[number].send(wire.encode(Op.HELLO, wire.MAGIC, digest=bytes(16)))
        watched[theirs[number]]()
    hand_over(3, 1, 1)
    while lane.calls:
        lane.run()
    requests.received.clear()
    hand_over(1, 6)
    hand_over(2, 1)
    assert requests.received == [(1, 6), PlanEnded(2)]
    assert "a plan is not taken" in caplog.text
    channels[3].close()
    watched[theirs[3]]()
    hand_over(2, 1)
    assert requests.received[2:] == [(2, 1)]
    hand_over(1, 4, 4)
    assert requests.received[3:] == [PlanEnded(1)]
    hand_over(2, 4, 4)
    assert requests.received[4:] == [(2, 4)]
    server.close()
    for channel in channels.values():
        channel.close()
    while lane.calls:
        lane.run()
    assert len(os.listdir("/proc/self/fd")) == before
