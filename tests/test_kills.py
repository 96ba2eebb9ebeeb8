"""Whoever is killed: what stands on disk, in memory and in ledgers afterwards. The long drill is `make kills`."""

from __future__ import annotations

import os
import pickle
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.kills.audit import Audit, differing
from bench.kills.ledger import Entry, Reader, Writer
from bench.node import Daemon
from cachesvc.client import plan_memory as plans
from cachesvc.config import Settings
from cachesvc.core.errors import DaemonUnavailable, SourceUnavailable
from cachesvc.core.order.epoch_order import Plan
from cachesvc.daemon.fills.pool import Fillers
from cachesvc.daemon.processes import jobs
from loader import DataLoader, open_dataset
from tests.processes import slow_fillers

LATE = 2
"""The drill's exit code when starts took too long, and nothing else was wrong."""
ROOT = Path(__file__).resolve().parent.parent


def entry(step: int, *indices: int, epoch: int = 0) -> Entry:
    return Entry(epoch, list(indices), [str(index) for index in indices], {"step": step})


def drill(kills: int, seed: int, limit_s: float, *more: int) -> None:
    """Ends with code 0, or with one of `more`."""
    command = [sys.executable, "-m", "bench.kills", str(kills), str(seed)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s)
    assert done.returncode in (0, *more), done.stdout + done.stderr


def test_a_few_kills_lose_double_and_leave_nothing() -> None:
    drill(6, 1, 100.0, LATE)  # beside other tests starts are not timed


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_many_kills_lose_double_and_leave_nothing() -> None:
    drill(120, 2, 580.0)


def test_a_ledger_line_that_a_kill_cut_counts_as_not_written(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    writer, reader = Writer(str(path)), Reader(path)
    assert writer.latest() is None
    writer.commit(entry(1, 0, 1))
    whole = path.read_bytes()
    for cut in (5, len(whole) // 2, len(whole) - 2):
        with open(path, "ab") as file:
            file.write(whole[:cut])
        assert Writer(str(path)).latest() == entry(1, 0, 1)
        Writer(str(path)).commit(entry(1, 0, 1))
    assert len(list(reader)) == 4
    assert reader.torn == 3
    reader.close()


def test_the_audit_sees_what_is_doubled_missing_wrong_or_in_another_order() -> None:
    def audit(*entries: Entry) -> Audit:
        found = Audit("run", ["0", "1", "2", "3"])
        for each in entries:
            found.add(each)
        return found

    good = audit(entry(1, 0, 1), entry(2, 3, 2), entry(1, 2, 1, epoch=1))
    assert not good.faults
    assert not good.between_epochs
    assert "1 samples twice, 1 never" in audit(entry(1, 0, 1), entry(2, 1, 2)).faults[0]
    assert "went to epoch 1 after 2 samples" in audit(entry(1, 0, 1), entry(1, 0, 1, epoch=1)).faults[0]
    assert "other bytes" in audit(Entry(0, [0], ["1"], {})).faults[0]
    assert differing([good, audit(entry(1, 0, 1), entry(2, 3, 2))]) == []
    assert differing([good, audit(entry(1, 0, 1), entry(2, 2, 3))]) == ["epoch 0 came in 2 orders"]


class Loop:
    """As much of the event loop as fillers need."""

    def __init__(self) -> None:
        self._callbacks: dict[int, Callable[[], None]] = {}
        self.watch, self.unwatch = self._callbacks.__setitem__, self._callbacks.pop

    def run_until(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30.0
        while not reached():
            assert time.monotonic() < deadline
            for fd in select.select(list(self._callbacks), [], [], 1.0)[0]:
                self._callbacks[fd]()


@pytest.mark.parametrize(("deaths", "code"), [(1, 0), (3, 0), (4, SourceUnavailable.code)])
def test_an_opening_survives_three_deaths_of_the_builder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaths: int, code: int
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/0.bin").write_bytes(bytes(4096))
    (tmp_path / "catalogs").mkdir()
    loop, answers = Loop(), list[jobs.Answer]()
    settings = Settings(0, (), (f"{tmp_path}/",), str(tmp_path), str(tmp_path), fillers=1)
    held, path = slow_fillers(tmp_path)
    monkeypatch.setenv("PYTHONPATH", path)
    fillers = Fillers(settings, (str(tmp_path),), loop.watch, loop.unwatch)

    def builders() -> list[int]:
        return [filler.process.pid for filler in fillers._living if filler.builds]

    def begun() -> bool:
        return builders() != [] and all(builders())

    held.touch()
    fillers.start()
    options: dict[str, str | int] = {"format": "records", "record_bytes": 4096}
    uris, catalogs = [f"{tmp_path}/data/"], str(tmp_path / "catalogs")
    build = partial(jobs.Build, uris=uris, options=options, catalogs=catalogs, refresh=False)
    try:
        fillers.build(build, answers.append)
        for _ in range(deaths):
            loop.run_until(begun)
            (victim,) = builders()
            os.kill(victim, signal.SIGKILL)
            loop.run_until(lambda gone=victim: gone not in builders())
        held.unlink()
        loop.run_until(lambda: any(isinstance(answer, jobs.Done) for answer in answers))
        done = answers[-1]
        assert isinstance(done, jobs.Done)
        assert (done.code, done.lost) == (code, code != 0), done
    finally:
        fillers.stop()


def test_a_worker_that_starts_while_the_daemon_restarts_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/0.bin").write_bytes(bytes(range(256)) * 64)
    options = ["--ram", "4MiB", "--extent-bytes", "1MiB", "--allow", f"{tmp_path}/data/"]
    with Daemon(tmp_path / "node", options) as daemon, ThreadPoolExecutor(1) as worker:
        monkeypatch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
        monkeypatch.setenv("CACHESVC", "require")
        spawned = pickle.dumps(open_dataset(tmp_path / "data", format="records", record_bytes=4096))
        daemon.kill()
        copy = worker.submit(pickle.loads, spawned)
        daemon.start()
        assert bytes(copy.result(30.0)[3].numpy().tobytes()) == bytes(range(256)) * 16
        daemon.kill()
        monkeypatch.setenv("CACHESVC_TIMEOUT_S", "0.3")
        with pytest.raises(DaemonUnavailable, match="cachesvc serve"):
            pickle.loads(spawned)


LAUNCHER = """
import multiprocessing, os, time
from multiprocessing.util import get_temp_dir
from loader.process.parent_watch import end_with

def work(said, own):
    if own:
        multiprocessing.current_process()._config["tempdir"] = None  # as in a job that nobody has launched
    end_with(os.getppid(), multiprocessing.current_process()._config.get("tempdir"))
    said.send(get_temp_dir())
    time.sleep(60)

def train(said, own):
    context.Process(target=work, args=(said, own)).start()
    time.sleep(60)

context = multiprocessing.get_context("fork")
launcher = get_temp_dir()
for own in (True, False):
    hear, said = context.Pipe(False)
    trainer = context.Process(target=train, args=(said, own))
    trainer.start()
    said.close()
    folder = hear.recv()
    trainer.kill()
    trainer.join()
    try:
        hear.recv()  # the worker's end closes with the worker
    except EOFError:
        print(folder == launcher, os.path.exists(folder), flush=True)
"""


def test_a_worker_without_its_trainer_removes_its_own_temporary_folder_only() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHER], cwd=ROOT, capture_output=True, text=True, timeout=110
    )
    assert done.stdout.split() == ["False", "False", "True", "True"], done.stderr


TRAINER = """
import multiprocessing, sys, threading, time
from loader import DataLoader, open_dataset

if __name__ == "__main__":
    data = open_dataset(sys.argv[1], format="records", record_bytes=4096)
    reading = iter(DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context="spawn"))
    threading.Thread(target=next, args=(reading,)).start()
    while not multiprocessing.active_children():
        time.sleep(0.01)
    print("its worker has all that it is given", flush=True)
    sys.stdin.read()
"""


def test_a_worker_that_starts_without_its_trainer_does_not_wait_for_a_daemon(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/0.bin").write_bytes(bytes(16 * 4096))
    script = tmp_path / "train.py"
    script.write_text(TRAINER)
    options = ["--ram", "4MiB", "--extent-bytes", "1MiB", "--allow", f"{tmp_path}/data/"]
    with Daemon(tmp_path / "node", options) as daemon:
        env = {**os.environ, **daemon.env, "CACHESVC": "require", "CACHESVC_TIMEOUT_S": "300"}
        trainer = subprocess.Popen(
            [sys.executable, script, tmp_path / "data"],
            cwd=ROOT,
            env={**env, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert trainer.stdin is not None
        assert trainer.stdout is not None
        assert trainer.stdout.readline()
        workers = psutil.Process(trainer.pid).children()
        daemon.kill()
        trainer.kill()
        trainer.wait()
        trainer.stdin.close()
        trainer.stdout.close()
        _, living = psutil.wait_procs(workers, 60.0)
        for worker in living:
            worker.kill()
        assert not living, "the worker waits for what nobody needs"


def test_a_plan_that_meets_the_next_daemon_is_submitted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/0.bin").write_bytes(bytes(64 * 4096))
    options = ["--ram", "4MiB", "--extent-bytes", "65536", "--allow", f"{tmp_path}/data/"]
    with Daemon(tmp_path / "node", options) as daemon:
        monkeypatch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
        monkeypatch.setenv("CACHESVC", "require")
        killed: list[int] = []

        def killing(plan: Plan, written: Callable[..., tuple[int, int, int]] = plans.write) -> Any:
            """Between the reader's hello and its plan the daemon is another one."""
            if not killed:
                killed.append(1)
                daemon.kill()
                daemon.start()
            return written(plan)

        monkeypatch.setattr(plans, "written", killing)
        batches = DataLoader(
            open_dataset(tmp_path / "data", format="records", record_bytes=4096), batch_size=8
        )
        assert sum(len(batch) for batch in batches) == 64
        assert killed
