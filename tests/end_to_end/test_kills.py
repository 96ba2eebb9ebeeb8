"""Killed builders, daemons and trainers: openings, workers and plans that were under way go on or end."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from cachesvc.catalog.options import Options
from cachesvc.client import plan_memory as plans
from cachesvc.config import Settings
from cachesvc.core.errors import DaemonUnavailable, SourceUnavailable
from cachesvc.core.order.epoch_order import Plan
from cachesvc.daemon.fills.pool import FillerPool
from cachesvc.daemon.processes import jobs
from loader import DataLoader, open_dataset
from testbed import ROOT, WAIT_S
from testbed.node import Daemon
from tests.support.fillers import Loop
from tests.support.processes import slow_fillers


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
    fillers = FillerPool(settings, (str(tmp_path),), loop.watch, loop.unwatch)

    def builders() -> list[int]:
        return [filler.process.pid for filler in fillers._living if filler.builds]

    def gone(pid: int) -> bool:
        return pid not in builders()

    def begun() -> bool:
        return builders() != [] and all(builders())

    held.touch()
    fillers.start()
    options = Options(format="records", record_bytes=4096)
    uris, catalogs = [f"{tmp_path}/data/"], str(tmp_path / "catalogs")
    build = jobs.BuildJob(uris, options, catalogs, refresh=False)
    try:
        fillers.build(build, answers.append)
        for _ in range(deaths):
            loop.run_until(begun)
            (victim,) = builders()
            os.kill(victim, signal.SIGKILL)
            loop.run_until(partial(gone, victim))
        held.unlink()
        loop.run_until(lambda: any(isinstance(answer, jobs.JobDone) for answer in answers))
        done = answers[-1]
        assert isinstance(done, jobs.JobDone)
        assert (done.code, done.lost) == (code, code != 0), done
    finally:
        fillers.stop()


@pytest.mark.slow
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
        assert bytes(copy.result(WAIT_S)[3].numpy().tobytes()) == bytes(range(256)) * 16
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
        multiprocessing.current_process()._config["tempdir"] = None  # as in a job without a launcher
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


@pytest.mark.slow
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
    print("the worker has started", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
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
        assert not living, "a worker outlived its trainer"


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

        def killing(plan: Plan, write: Callable[..., tuple[int, int, int]] = plans.write) -> Any:
            """Replace the daemon between the reader's hello and its plan."""
            if not killed:
                killed.append(1)
                daemon.kill()
                daemon.start()
            return write(plan)

        monkeypatch.setattr(plans, "write", killing)
        batches = DataLoader(
            open_dataset(tmp_path / "data", format="records", record_bytes=4096), batch_size=8
        )
        assert sum(len(batch) for batch in batches) == 64
        assert killed
