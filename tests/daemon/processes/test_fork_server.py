"""The fork server: its death, and the deaths of the fillers that it forked."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from cachesvc.catalog.options import Options
from cachesvc.core.errors import SourceUnavailable
from cachesvc.core.model import RAM
from cachesvc.daemon.processes import jobs
from tests.support.fillers import Pool, a_pool
from tests.support.waiting import wait_until

PR_SET_CHILD_SUBREAPER = 36
DEAD = os.WEXITED | os.WNOHANG | os.WNOWAIT


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    """Two fillers and a builder, started so far that they die with the fork server."""
    with a_pool(tmp_path, 2) as found:
        found.loop.run_until(
            lambda: all(each.pid for builds in (True, False) for each in found.processes(builds))
        )
        wait_until(lambda: [each.num_threads() > 1 for each in server(found).children()] == [True] * 3)
        yield found


def server(pool: Pool) -> psutil.Process:
    found = psutil.Process(pool.pids()[0]).parent()
    assert found is not None
    return found


@pytest.mark.slow
def test_fillers_are_replaced_when_the_fork_server_dies(pool: Pool) -> None:
    before, first = pool.pids(), server(pool)
    assert first.pid in [each.pid for each in psutil.Process().children()]
    for pid in before:
        os.kill(pid, signal.SIGSTOP)  # so that none answers before the server dies
    pool.verify("under way", pool.memory, RAM)
    first.kill()
    done = pool.of("under way")
    assert (done.code, done.retry, done.lost) == (SourceUnavailable.code, True, True)
    pool.loop.run_until(lambda: not any(map(pool.lives, before)))
    assert pool.works()
    assert not set(before) & set(pool.pids())
    assert not any(
        psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in before
    )
    assert server(pool) != first


def test_a_server_found_dead_is_replaced_at_once(pool: Pool) -> None:
    first = server(pool)
    first.kill()
    wait_until(lambda: first.status() == psutil.STATUS_ZOMBIE)
    child, channel = pool.forks.fork()  # before the loop has seen the death
    with channel:
        pool.loop.run_until(lambda: bool(child.pid))
        assert psutil.Process(child.pid).parent() in psutil.Process().children()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_the_exit_code_of_a_filler_is_reported(pool: Pool, number: signal.Signals) -> None:
    for pid in pool.pids():
        os.kill(pid, signal.SIGSTOP)
    pool.verify("under way", pool.memory, RAM)
    killed = pool.processes()
    for process in killed:
        os.kill(process.pid, number)
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGCONT)
    # The loop waits 50 ms for the server's message, which comes later on a busy host.
    assert [pool.forks.wait(process, 10.0) for process in killed] == [-number] * 2
    assert f"(exit code -{int(number)})" in pool.of("under way").message


@pytest.mark.slow
@pytest.mark.parametrize(("number", "together", "crashed"), [
    (signal.SIGABRT, 1, True), (signal.SIGSEGV, 1, True), (signal.SIGKILL, 1, False), (signal.SIGABRT, 2, False),
])  # fmt: skip
def test_a_filler_that_crashes_over_one_job_says_so(
    tmp_path: Path, number: signal.Signals, together: int, crashed: bool
) -> None:
    with a_pool(tmp_path, 1) as pool:
        (pid,) = pool.pids()
        os.kill(pid, signal.SIGSTOP)
        for job in range(together):
            pool.verify(job, pool.memory, RAM)
        os.kill(pid, number)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        answers = [pool.of(job) for job in range(together)]
        assert {(each.retry, each.lost, each.crashed) for each in answers} == {(True, True, crashed)}


def test_a_filler_that_is_killed_before_its_start_ends(pool: Pool) -> None:
    forks = pool.forks
    os.kill(server(pool).pid, signal.SIGSTOP)
    child, channel = forks.fork()
    forks.kill(child)
    assert forks.wait(child, 0.01) is None
    os.kill(server(pool).pid, signal.SIGCONT)
    assert forks.wait(child, 10.0) == -signal.SIGKILL
    channel.close()


@pytest.mark.slow
def test_an_opening_survives_the_death_of_the_server(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/0.bin").write_bytes(bytes(4096))
    (tmp_path / "catalogs").mkdir()
    answers = list[jobs.Answer]()
    options = Options(format="records", record_bytes=4096)
    uris, catalogs = [f"{tmp_path}/data/"], str(tmp_path / "catalogs")
    first = server(pool)
    first.suspend()
    for pid in [each.pid for each in first.children()]:
        os.kill(pid, signal.SIGSTOP)
    build = jobs.BuildJob(uris, options, catalogs, refresh=False)
    pool.fillers.build(build, answers.append)
    first.kill()
    pool.loop.run_until(lambda: any(isinstance(answer, jobs.JobDone) for answer in answers))
    assert [answer.code for answer in answers if isinstance(answer, jobs.JobDone)] == [0]


def held(pid: int, kind: str) -> set[str]:
    """Sockets or pipes of a process, without standard streams."""
    links = {path.name: os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()}
    return {link for number, link in links.items() if link.startswith(kind) and int(number) > 2}


def test_fillers_share_no_descriptors(pool: Pool) -> None:
    """Each has only its own channel, whose end tells it of the daemon's end, and none of the server's descriptors."""
    first, second = (held(pid, "socket:") for pid in pool.pids())
    assert first != second
    pipes = held(server(pool).pid, "pipe:")
    assert pipes
    assert not any(held(pid, "pipe:") & pipes for pid in pool.pids())


def test_living_fillers_go_on_while_none_can_be_forked(pool: Pool) -> None:
    first = server(pool)
    before = first.rlimit(psutil.RLIMIT_NOFILE)
    first.rlimit(psutil.RLIMIT_NOFILE, (0, before[1]))  # so that it can receive no channel
    killed, living = pool.pids()
    os.kill(killed, signal.SIGKILL)
    pool.loop.run_until(lambda: not pool.lives(killed))
    for _ in range(5):
        assert pool.works()
    os.kill(living, signal.SIGKILL)
    pool.loop.run_until(lambda: not pool.lives(living))
    pool.verify("by nobody", pool.memory, RAM)
    done = pool.of("by nobody")
    assert (done.code, done.retry, done.lost) == (SourceUnavailable.code, True, False)
    assert "allow more processes" in done.message
    pool.loop.run_until(lambda: not pool.processes())
    first.rlimit(psutil.RLIMIT_NOFILE, before)
    assert pool.works()
    assert server(pool) == first


def test_an_inherited_ignored_sigchld_has_no_effect(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # inherited across exec
    try:
        with a_pool(tmp_path, 1) as pool:
            (pid,), first = pool.pids(), server(pool)
            signal.signal(signal.SIGCHLD, before)
            os.kill(pid, signal.SIGKILL)
            pool.loop.run_until(lambda: not pool.lives(pid))
            assert pool.works()
            assert server(pool) == first
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.slow
def test_a_daemon_that_adopts_orphans_reaps_them(pool: Pool) -> None:
    """The first process of a container does so."""
    adopt = partial(ctypes.CDLL(None).prctl, PR_SET_CHILD_SUBREAPER)
    before = pool.pids()
    assert adopt(1) == 0
    try:
        server(pool).kill()
        pool.loop.run_until(lambda: not pool.processes() and not pool.processes(builds=True))
        # A zombie with threads that are not dead yet cannot be reaped.
        wait_until(lambda: all(os.waitid(os.P_PID, pid, DEAD) for pid in before))
        assert pool.works()
        assert not any(psutil.pid_exists(pid) for pid in before)
    finally:
        adopt(0)


@pytest.mark.slow
def test_a_dead_filler_leaves_no_descriptor(pool: Pool) -> None:

    def life(number: int) -> None:
        for pid in pool.pids():
            os.kill(pid, signal.SIGKILL)
        pool.loop.run_until(lambda: not pool.processes())
        assert pool.works()
        pool.pids()

    life(0)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(1, 6):
        life(number)
    assert len(os.listdir("/proc/self/fd")) == before
    # No zombie stays: the server reaps one once its threads are dead.
    wait_until(lambda: len(server(pool).children()) == 3)
