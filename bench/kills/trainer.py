"""One life of a training run: resumes where its ledger ends, and trains until it is killed or told to stop.

A life reads the records as they are, or what a function prepares of them, which it and its workers then do for the daemon.
Its ledger has the digests of what the function makes in each case.

The fork server has imported torch, so that a timed start does not include that import.
"""

from __future__ import annotations

import os
import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any, Literal

from bench.kills.ledger import Entry, Writer, digest

Workers = Literal["none", "thread", "fork", "spawn"]
Prepared = Literal["", "even", "uneven"]
RECORD = 4096
BATCH = 16
STEP_S = 0.02
"""Longest simulated training step, so that kills hit reads, hand-over and steps alike."""
NO_DAEMON = 71
"""Exit code when the daemon was away for longer than `require` waits at the start."""
_LOADING: dict[Workers, dict[str, Any]] = {
    "none": {},
    "thread": {"num_workers": 2, "worker_type": "thread"},
    "fork": {"num_workers": 2, "multiprocessing_context": "fork"},
    "spawn": {"num_workers": 2, "multiprocessing_context": "spawn"},
}


@dataclass(frozen=True, slots=True)
class Life:
    """Settings of one trainer process. When the file `stop` exists, the run ends after its epoch."""

    uri: str
    extent_bytes: int
    ledger: str
    log: str
    stop: str
    seed: int
    workers: Workers
    env: dict[str, str] = field(default_factory=dict)
    prepared: Prepared = ""


def train(life: Life) -> None:
    """Train until the stop file exists. Exits with `NO_DAEMON`, or with a traceback in the log."""
    log = os.open(life.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(life.env)
    ledger = Writer(life.ledger)
    from cachesvc.core.errors import DaemonUnavailable  # imported here, so that a failure is in the log

    try:
        batches = _loader(life)
    except DaemonUnavailable as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(NO_DAEMON)
    draw, parent = random.Random(life.seed), os.getppid()
    while not (os.path.exists(life.stop) and _between_epochs(ledger)):
        latest = ledger.latest()
        if latest is not None:
            batches.load_state_dict(latest.state)
        _epoch(batches, ledger, draw, parent, life.prepared)


def _loader(life: Life) -> Any:
    import torch  # imported here, since the drill itself needs no torch

    from loader import DataLoader, open_dataset

    torch.set_num_threads(1)
    data = open_dataset(life.uri, format="records", record_bytes=RECORD, extent_bytes=life.extent_bytes)
    if life.prepared:
        function, max_bytes = (turned, 0) if life.prepared == "even" else (turned_in_two, RECORD)
        data = data.prepared(function, max_bytes=max_bytes)
    collate: dict[str, Any] = {"collate_fn": list} if life.prepared == "uneven" else {}
    loading = _LOADING[life.workers] | collate
    return DataLoader(data, batch_size=BATCH, shuffle=True, seed=1, window=2 * life.extent_bytes, **loading)


def turned(record: Any) -> Any:
    """Return a record backwards and inverted: no byte of it is lost, and none stays."""
    return 255 - record.flip(0)


def turned_in_two(record: Any) -> dict[str, Any]:
    """Return it in two parts, whose lengths differ from record to record."""
    cut = _cut(record[0])
    return {"head": turned(record)[:cut], "rest": turned(record)[cut:]}


def _cut(first: Any) -> int:
    return int(first) * RECORD // 256


def _digest_of(sample: Any, prepared: Prepared) -> str:
    """Return the digest of what `turned` makes of a record."""
    if prepared == "uneven":
        head, rest = sample["head"].numpy().tobytes(), sample["rest"].numpy().tobytes()
        whole = head + rest
        return digest(whole) if len(head) == _cut(255 - whole[-1]) else "cut elsewhere"
    return digest((sample if prepared else turned(sample)).numpy().tobytes())


def _epoch(batches: Any, ledger: Writer, draw: random.Random, parent: int, prepared: Prepared) -> None:
    for batch in batches:
        digests = [_digest_of(sample, prepared) for sample in batch]
        state = batches.state_dict()
        ledger.commit(Entry(batches.epoch, batches.indices.tolist(), digests, state))
        if os.getppid() != parent:
            sys.exit("the drill has ended")
        time.sleep(draw.uniform(0, STEP_S))


def _between_epochs(ledger: Writer) -> bool:
    latest = ledger.latest()
    return latest is None or not (latest.state["step"] or latest.state["micro"])
