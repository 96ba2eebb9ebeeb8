"""The journal of events: bounded, quick to repeat itself never, and whole after a restart."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachesvc.core.errors import SourceUnavailable
from cachesvc.daemon.events.event import EVENTS, Event, failed, record
from cachesvc.daemon.events.journal import FILE, REPEAT_S, Journal, read_events
from tests.support.clock import Clock

DOWN = SourceUnavailable("s3://b/ does not answer")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def journal(tmp_path: Path, clock: Clock) -> Iterator[Journal]:
    logger = logging.getLogger(EVENTS)
    before = logger.level
    found = Journal(str(tmp_path), now=clock)
    found.start()
    yield found
    found.close()
    logger.setLevel(before)


def kinds(events: list[Event]) -> list[str]:
    return [event.kind for event in events]


def test_events_are_in_memory_at_once_and_on_disk_after_the_end(tmp_path: Path, journal: Journal) -> None:
    record(Event("pinned", uid=1000, uri="s3://b/a/", size_bytes=5))
    record(Event("unpinned", uid=1000, uri="s3://b/a/"))
    assert kinds(journal.since(0)) == ["pinned", "unpinned"]
    assert journal.since(journal.since(0)[1].time) == journal.since(0)[1:]
    journal.close()
    assert list(read_events(str(tmp_path))) == journal.since(0)
    assert (tmp_path / FILE).stat().st_mode & 0o077 == 0


def test_the_next_journal_goes_on_after_a_line_that_a_crash_cut_short(
    tmp_path: Path, journal: Journal
) -> None:
    record(Event("pinned"))
    journal.close()
    with open(tmp_path / FILE, "ab") as file:
        file.write(b'\xff\n{"kind": "unpi')
    following = Journal(str(tmp_path))
    following.start()
    record(Event("evicted"))
    following.close()
    assert kinds(following.since(0)) == kinds(list(read_events(str(tmp_path)))) == ["pinned", "evicted"]


def test_an_error_is_kept_once_a_minute_for_each_cause_with_a_count(journal: Journal, clock: Clock) -> None:
    for _ in range(3):
        record(failed("source_failed", DOWN, dataset="a"))
    record(failed("source_failed", DOWN, dataset="b"))
    clock.now += REPEAT_S
    record(failed("source_failed", DOWN, dataset="a"))
    assert [(each.dataset, each.left_out) for each in journal.since(0)] == [("a", 0), ("b", 0), ("a", 2)]


def test_events_reach_the_journal_where_the_log_is_quiet(journal: Journal) -> None:
    parent = logging.getLogger("cachesvc")
    before = parent.level
    parent.setLevel(logging.ERROR)
    try:
        record(Event("pinned"))
    finally:
        parent.setLevel(before)
    assert kinds(journal.since(0)) == ["pinned"]


def test_no_secret_of_a_url_is_kept(journal: Journal) -> None:
    record(
        Event(
            "refused",
            uri="s3://u:S3CR3T@b/",
            error="NotAllowed",
            why="https://h/x?token=S3CR3T is not allowed",
        )
    )
    assert "S3CR3T" not in repr(journal.since(0))


def test_the_files_are_bounded_and_the_oldest_events_go(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path), file_bytes=2000)
    journal.start()
    for number in range(200):
        record(Event("pinned", uid=number))
    journal.close()
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 4000
    kept = [event.uid for event in read_events(str(tmp_path))]
    assert len(kept) > 20
    assert kept == list(range(200 - len(kept), 200))


def test_a_directory_that_takes_no_files_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(str(tmp_path / "absent"))
    journal.start()
    record(Event("pinned"))
    record(Event("unpinned"))
    journal.close()
    assert kinds(journal.since(0)) == ["pinned", "unpinned"]
    assert len([each for each in caplog.records if each.message == "events are not kept"]) == 1


def test_a_listener_misses_none_between_the_past_and_the_future(journal: Journal) -> None:
    heard: queue.Queue[Event] = queue.Queue()
    ready = threading.Event()

    def work() -> None:
        for number in range(500):
            record(Event("pinned", uid=number))
            ready.set()

    writer = threading.Thread(target=work)
    writer.start()
    ready.wait()
    past = journal.listen(heard.put, 0)
    writer.join()
    journal.ignore(heard.put)
    record(Event("unpinned"))
    assert [each.uid for each in [*past, *heard.queue]] == list(range(500))
