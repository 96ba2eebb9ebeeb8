"""The process that fillers are forked from: its death, and theirs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from cachesvc.core.errors import SourceUnavailable
from cachesvc.core.model import RAM
from cachesvc.daemon import jobs
from tests.test_daemon import wait_until
from tests.test_fillers_replaced import Pool, a_pool, opened


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    """Two fillers that have begun."""
    with a_pool(tmp_path, 2) as found:
        found.pids()
        yield found


def server(pool: Pool) -> psutil.Process:
    return psutil.Process(pool.pids()[0]).parent()


def test_fillers_are_replaced_when_what_they_are_forked_from_dies(pool: Pool) -> None:
    before, first = pool.pids(), server(pool)
    assert first.pid in [each.pid for each in psutil.Process().children()]
    with opened(pool.inside) as memory:
        for pid in before:
            os.kill(pid, signal.SIGSTOP)  # none has answered when the server dies
        pool.verify("under way", memory, RAM)
        first.kill()
        done = pool.of("under way")
        assert (done.code, done.retry, done.lost) == (SourceUnavailable.code, True, True)
        pool.verify("again", memory, RAM)
        assert pool.of("again").code == 0
    assert not set(before) & set(pool.pids())
    assert not any(
        psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in before
    )
    assert server(pool) != first


def test_a_server_found_dead_is_replaced_at_once(pool: Pool) -> None:
    first = server(pool)
    first.kill()
    wait_until(lambda: first.status() == psutil.STATUS_ZOMBIE)
    child, channel = pool.fillers._forks.fork()  # before the loop heard of it
    with channel:
        pool.loop.run_until(lambda: bool(child.pid))
        assert psutil.Process(child.pid).parent() in psutil.Process().children()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_the_end_of_a_filler_is_told_with_its_code(pool: Pool, number: signal.Signals) -> None:
    with opened(pool.inside) as memory:
        for pid in pool.pids():
            os.kill(pid, signal.SIGSTOP)
        pool.verify("under way", memory, RAM)
        for pid in pool.pids():
            os.kill(pid, number)
            os.kill(pid, signal.SIGCONT)
        assert f"(exit code -{int(number)})" in pool.of("under way").message


def test_a_filler_that_is_not_needed_before_it_has_begun_ends_all_the_same(pool: Pool) -> None:
    forks = pool.fillers._forks
    os.kill(server(pool).pid, signal.SIGSTOP)
    child, channel = forks.fork()
    child.kill()
    assert forks.wait(child, 0.01) is None
    os.kill(server(pool).pid, signal.SIGCONT)
    assert forks.wait(child, 10.0) == -signal.SIGKILL
    channel.close()


def test_an_opening_survives_the_death_of_the_server(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/0.bin").write_bytes(bytes(4096))
    (tmp_path / "catalogs").mkdir()
    answers = list[jobs.Answer]()
    options: dict[str, str | int] = {"format": "records", "record_bytes": 4096}
    uris, catalogs = [f"{tmp_path}/data/"], str(tmp_path / "catalogs")
    first = server(pool)
    first.suspend()
    for pid in [each.pid for each in first.children()]:
        os.kill(pid, signal.SIGSTOP)
    build = partial(jobs.Build, uris=uris, options=options, catalogs=catalogs, refresh=False)
    pool.fillers.build(build, answers.append)
    first.kill()
    pool.loop.run_until(lambda: any(isinstance(answer, jobs.Done) for answer in answers))
    assert [answer.code for answer in answers if isinstance(answer, jobs.Done)] == [0]


def test_descriptors_of_one_filler_are_no_others(pool: Pool) -> None:
    """Each hears of the daemon's end by its own channel alone, and holds nothing of the server's."""
    held = [os.readlink(path) for pid in pool.pids() for path in Path(f"/proc/{pid}/fd").iterdir()]
    sockets = [each for each in held if each.startswith("socket:")]
    assert len(sockets) == len(set(sockets)) == len(pool.pids())
    assert not [each for each in held if "pidfd" in each]


def test_a_filler_that_is_done_for_leaves_no_descriptor(pool: Pool) -> None:
    with opened(pool.inside) as memory:

        def life(number: int) -> None:
            for pid in pool.pids():
                os.kill(pid, signal.SIGKILL)
            pool.loop.run_until(lambda: len(pool.fillers._living) == 1)  # the builder's
            pool.verify(number, memory, RAM)
            assert pool.of(number).code == 0
            pool.pids()

        life(0)
        before = len(os.listdir("/proc/self/fd"))
        for number in range(1, 6):
            life(number)
        assert len(os.listdir("/proc/self/fd")) == before
        (parent,) = {psutil.Process(pid).parent() for pid in pool.pids()}
        assert len(parent.children()) == 3, "and no zombie"
