"""Builds of several users share the builder fairly. Some tests need root, for real users."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachesvc.catalog.options import Options
from cachesvc.client.control import Control
from cachesvc.daemon.fills.build_queue import BuildQueue, BuildRequest
from cachesvc.daemon.fills.pool import OnAnswer
from cachesvc.daemon.processes import jobs
from testbed import WAIT_S
from testbed.node import Daemon
from tests.support.faults.fake_s3 import FakeS3, Object, fake_s3
from tests.support.users import ALICE, BOB, as_root, as_user
from tests.support.waiting import wait_until

HOARDED = 2 * jobs.JOBS_AT_ONCE


class Builder:
    """A builder whose running builds are in the order of their starts; `end` ends one of them."""

    def __init__(self) -> None:
        self.under_way: list[tuple[jobs.BuildJob, OnAnswer]] = []
        self.builds = BuildQueue(self._build)

    def _build(self, job: jobs.BuildJob, answered: OnAnswer) -> None:
        self.under_way.append((job, answered))

    def open(self, user: int, what: str, answered: OnAnswer) -> BuildRequest:
        job = jobs.BuildJob([what], Options(), "", refresh=False)
        return self.builds.submit(user, what, job, answered)

    def end(self, at: int = 0) -> None:
        build, answered = self.under_way.pop(at)
        answered(jobs.BuildProgress(1, 2))
        answered(jobs.JobDone(dataset=build.uris[0]))

    @property
    def names(self) -> list[str]:
        return [build.uris[0] for build, _ in self.under_way]


def test_equal_builds_run_one_at_a_time_and_once_more_for_all_later_callers() -> None:
    builder, answers = Builder(), Counter[str]()

    def heard(who: str, answer: jobs.Answer) -> None:
        answers[who] += isinstance(answer, jobs.JobDone)

    builder.open(1, "x", partial(heard, "first"))
    for who in ("second", "third"):
        builder.open(1, "x", partial(heard, who))
    builder.open(1, "y", partial(heard, "other"))
    assert builder.names == ["x", "y"]
    builder.end()
    assert answers == {"first": 1}
    assert builder.names == ["y", "x"]
    builder.end(1)
    assert answers == {"first": 1, "second": 1, "third": 1}
    assert builder.names == ["y"]


def test_a_cancelled_build_never_runs_and_a_running_one_counts_to_its_end() -> None:
    builder = Builder()

    def unheard(_: jobs.Answer) -> None:
        raise AssertionError("a caller that left gets no answer")

    for number in range(HOARDED):
        builder.builds.cancel(builder.open(1, f"{number}", unheard), unheard)
    share = len(builder.names)
    assert share < jobs.JOBS_AT_ONCE
    builder.open(2, "theirs", lambda _: None)
    assert builder.names[share:] == ["theirs"]
    while builder.names:
        builder.end()
    builder.open(1, "again", lambda _: None)
    assert builder.names == ["again"]


@given(st.lists(st.tuples(st.sampled_from(["open", "end", "leave"]), st.integers(1, 5), st.integers(0, 20))))
def test_every_build_is_answered_once_and_users_take_turns(said: list[tuple[str, int, int]]) -> None:
    builder, answered = Builder(), Counter[int]()
    waiting: dict[int, tuple[BuildRequest, OnAnswer]] = {}
    for number, (verb, user, what) in enumerate(said):
        if verb == "open":

            def hear(answer: jobs.Answer, number: int = number) -> None:
                answered[number] += isinstance(answer, jobs.JobDone)
                if isinstance(answer, jobs.JobDone):
                    del waiting[number]

            waiting[number] = builder.open(user, f"{user}:{what}", hear), hear
            if answered[number]:
                del waiting[number]
        elif verb == "end" and builder.names:
            builder.end(what % len(builder.names))
        elif verb == "leave" and waiting:
            builder.builds.cancel(*waiting.pop(list(waiting)[what % len(waiting)]))
        assert len(builder.names) <= jobs.JOBS_AT_ONCE
        assert len(set(builder.names)) == len(builder.names)
    while builder.names:
        builder.end()
    assert not waiting
    assert set(answered.values()) <= {0, 1}


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FakeS3, threading.Event]]:
    """An S3 server that answers no request until the event is set."""
    for name, value in {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}.items():
        monkeypatch.setenv(name, value)
    with fake_s3() as found:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", found.endpoint)
        go = threading.Event()
        found.objects["a.bin"] = Object(4096)
        found.refuse = lambda _: (go.wait(WAIT_S), None)[1]
        try:
            yield found, go
        finally:
            go.set()


@pytest.mark.slow
@as_root
def test_long_builds_of_one_user_do_not_delay_other_users(
    slow: tuple[FakeS3, threading.Event], tmp_path: Path
) -> None:
    server, go = slow
    (tmp_path / "bobs").mkdir()
    (tmp_path / "bobs" / "x.bin").write_bytes(bytes(4096))
    options = ["--ram", "64MiB", "--allow", "s3://bucket/", "--allow", str(tmp_path / "bobs")]
    with Daemon(tmp_path / "node", [*options, "--socket-mode", "666", "--fillers", "1"]) as daemon:
        here = daemon.socket_dir
        Path(here).chmod(0o755)

        def hoard() -> str:
            def open_one(number: int) -> None:
                with Control(here) as control:
                    control.open_dataset(["s3://bucket/"], Options(extent_bytes=4096 * (number + 1)))

            with ThreadPoolExecutor(HOARDED) as openers:
                list(openers.map(open_one, range(HOARDED)))
            return "done"

        def open_mine() -> str:
            with Control(here) as control:
                return control.open_dataset([str(tmp_path / "bobs")], Options(format="files")).dataset.format

        hoarder = threading.Thread(target=as_user, args=(ALICE, hoard))
        hoarder.start()
        wait_until(lambda: server.requests > 2)
        theirs: list[object] = []
        visitor = threading.Thread(target=lambda: theirs.append(as_user(BOB, open_mine)))
        visitor.start()
        visitor.join(WAIT_S)
        in_time = list(theirs)
        go.set()
        visitor.join()
        hoarder.join()
        assert in_time == ["files"]
