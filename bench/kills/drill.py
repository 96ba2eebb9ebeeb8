"""The drill: several training runs over one daemon, whose processes are killed at random moments.

Everything is real: an S3 server, a daemon whose RAM and NVMe tiers together are smaller than the data, trainers that
keep a ledger. The seed decides the order of kills and the settings of each life. The exact moment of a kill depends on
the machine.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.kills import leftovers
from bench.kills.audit import Audit, differing
from bench.kills.clock import Clock
from bench.kills.ledger import digest
from bench.kills.leftovers import Orphans
from bench.kills.node import Node
from bench.kills.run import Run
from bench.kills.trainer import RECORD, Life
from cachesvc.catalog.options import Options
from cachesvc.client.control import Control
from cachesvc.core.model import DatasetId
from testbed.node import Daemon
from testbed.servers import SeaweedFS

PER_EXTENT = 32
EXTENT = PER_EXTENT * RECORD
FILES = 40
SAMPLES = FILES * PER_EXTENT - 7
RUNS = min(4, max(2, os.cpu_count() or 1))
"""Parallel runs: at least one of each kind (`require` and `auto`). With more runs than cores, a start waits for the
others, since a trainer and its two spawned workers each import torch."""
RAM, NVME = 12 * EXTENT, 12 * EXTENT
"""24 of 40 extents fit, so each epoch streams about 40 % of its bytes from the source."""
ANY_MOMENT = 0.3
"""Share of the kills that do not wait until the victim serves."""
PAUSE_S = 0.6
"""The longest pause before a kill."""
TICK_S = 0.01
STUCK_S = 120.0
"""A process that does not serve within this time is stuck."""
WEIGHTS = {"trainer": 45, "worker": 20, "daemon": 22, "filler": 13}


@dataclass(frozen=True, slots=True)
class Report:
    """Result of a drill. It has passed when `left`, `faults` and `late` are empty."""

    clock: Clock
    audits: list[Audit]
    torn: int
    left: list[str]
    faults: list[str]
    late: list[str]
    seconds: float


def drill(root: Path, s3: SeaweedFS, kills: int, seed: int) -> Report:
    """Kill `kills` times, let every run end at the end of an epoch, then look for leftovers. Writes below `root`."""
    started, token = time.monotonic(), secrets.token_hex(8)
    temporary, nvme = root / "tmp", root / "nvme"
    for folder in (temporary, nvme):
        folder.mkdir()
    os.environ |= {"PYTHONWARNINGS": "ignore:resource_tracker"}  # it cleans up after killed processes
    os.environ |= {leftovers.TOKEN: token, "TMPDIR": str(temporary), "AWS_EC2_METADATA_DISABLED": "true"}
    shared_memory = set(os.listdir("/dev/shm"))
    uri, truth = _uploaded(s3, seed)
    options = ["--ram", str(RAM), "--nvme", f"{nvme}={NVME}", "--extent-bytes", str(EXTENT)]
    with Daemon(root / "node", [*options, "--allow", uri, "--fillers", "2"], s3.env()) as daemon:
        processes = _Processes(root, daemon, s3, uri, truth, seed)
        processes.run(kills)
        with Control(daemon.socket_dir) as control:
            # A daemon that was killed after all trainers had ended knows no dataset yet, prepared ones among them.
            control.open_dataset([uri], Options(format="records", record_bytes=RECORD, extent_bytes=EXTENT))
            for catalog in (daemon.root / "state/catalogs").glob("*.lmdb"):
                control.evict(DatasetId(catalog.stem))
        left = [*leftovers.in_daemon(daemon)]
        if (code := daemon.stop()) != 0:
            left.append(f"the daemon's exit code is {code}")
        living, late = leftovers.processes(token)
        left += [*living, *leftovers.files(daemon, nvme, temporary, shared_memory)]
    return processes.report(left, late, time.monotonic() - started)


def _uploaded(s3: SeaweedFS, seed: int) -> tuple[str, list[str]]:
    """Upload the dataset; return its URI and the digest of what is prepared of each sample."""
    body = random.Random(seed).randbytes(SAMPLES * RECORD)
    bucket = s3.create_bucket(f"kills-{secrets.token_hex(4)}")
    client = s3.client()
    for number in range(FILES):
        part = body[number * EXTENT : (number + 1) * EXTENT]
        client.put_object(Bucket=bucket, Key=f"data/{number:02d}.bin", Body=part)
    turned = bytes(255 - byte for byte in range(256))  # as `trainer.turned`
    records = (body[at : at + RECORD][::-1].translate(turned) for at in range(0, len(body), RECORD))
    truth = [digest(record) for record in records]
    return f"s3://{bucket}/data/", truth


class _Processes:
    """The training runs and the daemon of one drill, and the choice of the next victim."""

    def __init__(
        self, root: Path, daemon: Daemon, s3: SeaweedFS, uri: str, truth: list[str], seed: int
    ) -> None:
        self._draw = random.Random(seed)
        self._clock, self._orphans = Clock(), Orphans()
        self._stop, self._faults = root / "stop", list[str]()
        self._node = Node(daemon, self._clock, self._orphans, seed)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["loader", "bench.kills.trainer"])
        first = context.Process(target=int)  # once it has ended, the fork server has imported torch
        first.start()
        first.join()
        self._runs = []
        for number in range(RUNS):
            direct = number % 2 == 1  # half of the runs may read S3 while the daemon is down, half must wait
            env = {**daemon.env, "CACHESVC": "auto" if direct else "require", "CACHESVC_TIMEOUT_S": "60"}
            env |= {"XDG_CACHE_HOME": str(root / f"cache{number}")} | (s3.env() if direct else {})
            name = f"run {number}"
            ledger, log = str(root / f"{number}.ledger"), str(root / f"{number}.log")
            life = Life(uri, EXTENT, ledger, log, str(self._stop), 0, "none", env)
            audit = Audit(name, truth)
            self._runs.append(
                Run(context, life, audit, self._node, self._clock, self._orphans, seed * RUNS + number)
            )

    def run(self, kills: int) -> None:
        """Start the runs, kill, let every run end its epoch. A stuck process is a fault and ends the drill."""
        try:
            for run in self._runs:
                run.start()
            self._kill(kills)
            self._end()
        except TimeoutError as error:
            self._faults.append(str(error))
        finally:
            for run in self._runs:
                run.end()

    def _kill(self, kills: int) -> None:
        self._until(lambda: all(run.serving for run in self._runs))
        done = 0
        while done < kills:
            self._pause()
            done += self._kill_one()

    def _pause(self) -> None:
        ends = time.monotonic() + self._draw.uniform(0, PAUSE_S)
        self._until(lambda: time.monotonic() >= ends)

    def _end(self) -> None:
        self._stop.touch()
        self._until(lambda: all(run.ended for run in self._runs) and self._node.serving)
        for run in self._runs:
            if not run.audit.between_epochs:
                self._faults.append(f"{run.audit.run} ended in mid-epoch")

    def report(self, left: list[str], late: list[str], seconds: float) -> Report:
        """The result of the drill."""
        audits = [run.audit for run in self._runs]
        torn = sum(run.torn for run in self._runs)
        faults = [fault for run in self._runs for fault in run.faults] + self._node.faults
        faults += [fault for audit in audits for fault in audit.faults] + differing(audits)
        return Report(
            self._clock,
            audits,
            torn,
            left,
            faults + self._faults,
            self._clock.late + self._orphans.late + late,
            seconds,
        )

    def _kill_one(self) -> bool:
        (kind,) = self._draw.choices(list(WEIGHTS), list(WEIGHTS.values()))
        run, at_once = self._draw.choice(self._runs), self._draw.random() < ANY_MOMENT
        if kind == "worker":
            run = next((each for each in self._runs if each.workers()), run)
        victim = run if kind in ("trainer", "worker") else self._node
        self._until(lambda: at_once or victim.serving)
        if kind == "worker":
            return run.kill_worker()
        if kind == "filler":
            return self._node.kill_filler()
        victim.kill()
        return True

    def _until(self, reached: Callable[[], bool]) -> None:
        """Poll all processes until `reached`. Raises TimeoutError, naming the stuck runs, after `STUCK_S`."""
        deadline = time.monotonic() + STUCK_S
        while True:
            for poll in (*(run.poll for run in self._runs), self._node.poll, self._orphans.poll):
                poll()
            if reached():
                return
            if time.monotonic() > deadline:
                stuck = [
                    f"{run.kind}: {run.log_end()}" for run in self._runs if not (run.serving or run.ended)
                ]
                raise TimeoutError(f"after {STUCK_S:.0f} s: {stuck}\n{self._node.daemon.log[-500:]}")
            time.sleep(TICK_S)
