"""`cachesvc top` fits its terminal, shows what the status says, and follows its keys."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cachesvc.__main__ import run
from cachesvc.cli.top.place import BACK, DOWN, ENTER, TAB, UP, Place, keys_of, pressed
from cachesvc.cli.top.screen import once, residency, screen, spark
from cachesvc.v1 import cachesvc_pb2 as pb
from testbed import WAIT_S
from tests.support.canned import CannedCache, canned_daemon


def status(datasets: int = 2, jobs: int = 2) -> pb.StatusReply:
    """A node with work, of which each number is another one."""
    found = pb.StatusReply(version="1.2.3", node="node-a", uptime_s=3723, readers=7, fills_running=1)
    found.tiers.add(name="ram", budget_bytes=100 << 20, used_bytes=50 << 20, held_bytes=1 << 20)
    found.tiers.add(name="nvme0", budget_bytes=1 << 30, used_bytes=1 << 30, lost=True)
    found.throughput.source, found.throughput.ram = 3 << 20, 7 << 20
    found.history.source.extend([1 << 20] * 50)
    for number in range(datasets):
        row = found.datasets.add(
            resident_bytes=number << 20, readers=number, hit_rate=0.25, bound=0.5, hits=1, misses=3
        )
        row.dataset.id, row.dataset.uri = (
            f"{number:032x}",
            f"s3://a-bucket/with/a/long/prefix/part-{number}/train/",
        )
        row.dataset.size_bytes, row.dataset.extents = 100 << 20, 100
        row.residency.ram.extend([100] * number + [0] * (100 - number))
        row.residency.nvme.extend([0] * 100)
        row.residency.filling.extend([0] * 100)
        row.epochs.add(number=number, touched=10, hits=5, hit_rate=0.5, bound=0.75, of_bound=0.66)
    for number in range(jobs):
        job = found.jobs.add(
            id=f"job{number}", readers_connected=2, waits_for=f"the source, {number} extents for 12 s"
        )
        job.batches_per_s, job.waiting = 10.0 + number, 0.5
        reader = job.readers.add(
            pid=4000 + number, dataset=f"{0:032x}", step=5, steps=90, waiting_s=12 - number
        )
        reader.waits.add(cause="source", share=0.5)
    found.fills.add(dataset=f"{0:032x}", extent=9, reads="source", tier="ram", age_s=1.5)
    found.events.add(time=1.0, kind="tier_lost", words="a tier is lost: nvme0", error="TierFailed")
    return found


def text(lines: list[Any]) -> str:
    return "\n".join(line.plain for line in lines)


@pytest.mark.pure
@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 20), (200, 60), (20, 5)])
@pytest.mark.parametrize("datasets", [0, 2, 50])
def test_a_screen_fits_its_terminal(width: int, height: int, datasets: int) -> None:
    shown = status(datasets, datasets)
    for place in (
        Place(),
        Place(help=True),
        Place(inside=f"{1:032x}"),
        Place(inside="job1"),
        Place(inside="gone"),
    ):
        lines = screen(shown, place, width, height, "no answer")
        assert len(lines) <= height
        assert all(len(line.plain) <= width for line in lines)


@pytest.mark.pure
def test_the_head_says_that_the_cache_is_bypassed() -> None:
    shown = status()
    assert "bypassed" not in text(once(shown, 120))
    shown.bypassed = True
    assert "bypassed" in once(shown, 120)[0].plain


@pytest.mark.pure
def test_80_by_24_shows_what_the_status_says() -> None:
    shown = text(screen(status(), Place(), 80, 24))
    for expected in (
        "cachesvc on node-a  1.2.3, up 1:02:03, 7 readers, 1 fill",
        "50.0 %  50.0 MiB of 100.0 MiB, 1.0 MiB held",
        "lost: see the daemon's log",
        "3.0 MiB/s",
        "100.0 MiB     1.0 %        1    25.0 %  50.0 %",
        "job0  5/90       10.0     50 %  the source, 0 extents for 12 s",
        "1 source > ram; the oldest for 1.5 s",
        "a tier is lost: nvme0",
    ):
        assert expected in shown


@pytest.mark.pure
def test_many_rows_leave_room_for_the_others_and_the_selected_one_is_shown() -> None:
    found = status(50, 50)
    place: Place | None = Place()
    for _ in range(30):
        assert place is not None
        place = pressed(place, DOWN, found)
    assert place is not None
    lines = screen(found, place, 150, 24)
    selected = [line for line in lines if str(line.style) == "reverse"]
    assert len(selected) == 1
    assert "part-19" in selected[0].plain  # sorted by readers, the most first
    assert "job0 " in text(lines)
    assert "a tier is lost" in text(lines)


@pytest.mark.pure
def test_keys_select_sort_and_look_into() -> None:
    found, place = status(), Place()

    def after(*keys: str) -> Place:
        given: Place | None = place
        for key in keys:
            assert given is not None
            given = pressed(given, key, found)
        assert given is not None
        return given

    assert after(UP).row == 0
    assert after(DOWN, DOWN, DOWN).row == 1
    assert after(ENTER).inside == f"{1:032x}"
    assert after(DOWN, ENTER).inside == f"{0:032x}"
    assert after(DOWN, ENTER, BACK) == after(DOWN)
    assert after(TAB, DOWN, ENTER).inside == "job1"
    assert after(*"sssss", ENTER).inside == f"{0:032x}"  # by uri
    assert after("?").help
    assert not after("?", "x").help
    assert pressed(place, "q", found) is None
    assert pressed(after(ENTER), "q", found) is None
    assert pressed(place, ENTER, pb.StatusReply()) == place
    inside = text(screen(found, after(ENTER), 80, 24))
    assert "66.0 %" in inside
    assert "  4001  5/90" in text(screen(found, after(TAB, DOWN, ENTER), 80, 24))


@pytest.mark.pure
def test_the_members_are_shown_with_those_in_trouble_first() -> None:
    found = status()
    assert "this daemon is alone" in str(screen(found, Place(cluster=True), 80, 24)[1])
    for number in range(40):
        found.nodes.add(
            name=f"n{number:02}",
            me=number == 7,
            state="away" if number == 30 else "present",
            weight_bytes=1 << 30,
            free_bytes=1 << 20,
            extents=number,
        )
    shown = list(map(str, screen(found, Place(cluster=True), 80, 24)))
    assert len(shown) == 24
    assert all(len(line) <= 80 for line in shown)
    assert "40 members, 39 present; 40.0 GiB of room, 39.0 MiB free; 780 extents" in shown
    first = shown.index(next(line for line in shown if line.startswith("n30")))
    assert shown[first + 1].startswith("n07 (this node)")
    assert shown[-2] == "and 26 more"
    assert len(once(found, 80, cluster=True)) == 1 + 4 + 1 + 1 + 1 + 40
    place = pressed(Place(), "c", found)
    assert place == Place(cluster=True)
    assert pressed(place, "c", found) == pressed(place, BACK, found) == Place()
    assert pressed(place, ENTER, found) == place


@pytest.mark.pure
def test_keys_are_cut_out_of_what_a_terminal_sends() -> None:
    assert keys_of("\x1b[Bj\x1bOAk\t\rq\x1b") == [DOWN, DOWN, UP, UP, TAB, ENTER, "q", BACK]
    assert keys_of("\x1b[Cs") == ["s"]


@pytest.mark.pure
def test_maps_and_sparks_draw_what_is_most() -> None:
    cells = pb.Residency(ram=[100, 0, 0, 30, 40], nvme=[0, 100, 0, 30, 50], filling=[0, 0, 60, 0, 0])
    assert text(residency(cells, 4)) == "█▒+·\n▒"
    assert spark([0, 50, 100], 100).strip() == "▁▅█"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CannedCache]:
    monkeypatch.setenv("CACHESVC_SOCKET", str(tmp_path))
    with canned_daemon(tmp_path) as servicer:
        servicer.datasets = list(status().datasets)
        yield servicer


def test_without_a_terminal_one_screen_is_printed(cache: CannedCache, capsys: Any) -> None:
    assert run(["top"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("cachesvc on")
    assert max(map(len, lines)) <= 80
    assert run(["top", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["version"] == "9.9"
    assert text(once(status(50, 50), 80)).count("/train/") == 100


def test_a_terminal_shows_screens_until_q_and_is_left_as_it_was(cache: CannedCache) -> None:
    ours, terminal = pty.openpty()
    before = termios.tcgetattr(terminal)
    process = subprocess.Popen(
        [sys.executable, "-m", "cachesvc", "top"],
        stdin=terminal,
        stdout=terminal,
        env=os.environ | {"TERM": "xterm", "LANG": "C.UTF-8", "COLUMNS": "80", "LINES": "24"},
    )
    shown = b""

    def until(expected: bytes) -> None:
        nonlocal shown
        deadline = time.monotonic() + WAIT_S
        while expected not in shown:
            assert select.select([ours], [], [], deadline - time.monotonic())[0], shown
            shown += os.read(ours, 1 << 16)

    try:
        until(b"/train/")
        os.write(ours, b"\x1b[B\r")
        until(b"at the source or elsewhere")
        os.write(ours, b"q")
        until(b"\x1b[?1049l")  # back from the alternate screen
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.wait()
    assert termios.tcgetattr(terminal) == before
    os.close(terminal)
    os.close(ours)
