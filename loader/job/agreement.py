"""Compares, before the first batch, what all ranks are about to read, so that no rank goes on out of step.

Process 0 opens a round in the job's store, every process writes its facts there, and process 0 compares them and writes
the verdict. A process that cannot begin writes its failure to the round instead, or leaves it for the next round.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from cachesvc.core.errors import DeadlineExceeded, StateMismatch
from cachesvc.core.limits import AGREE_S
from loader.job.topology import Topology, process_group

TELL_FAILURE_S = 30.0
"""How long a process that cannot begin waits for the others to read its failure, before it raises its own error."""
WARN_AFTER_S = 30.0
"""A wait this long for another process is logged."""
POLL_S = 0.5
"""The interval at which a waiting process polls the store: two requests of 50 us; shorter in the first second."""
_MAX_NAMED = 8
KEPT = "kept versions"
"""A fact that may differ: the versions that open on a rank's node, separated by spaces, while the source is down."""
_log = logging.getLogger("cachesvc")


class Store(Protocol):
    """The part of `torch.distributed.Store` that is used here."""

    def set(self, key: str, value: str, /) -> Any: ...

    def get(self, key: str, /) -> bytes: ...

    def add(self, key: str, amount: int, /) -> int: ...

    def check(self, keys: list[str], /) -> bool: ...

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


def job_store() -> Store | None:
    """The process group's key-value store; None without an initialised group."""
    if process_group() is None:
        return None
    store: Store = sys.modules["torch.distributed"].distributed_c10d._get_default_store()
    return store


def agree(
    topology: Topology,
    facts: Mapping[str, str | int],
    store: Store,
    name: str = "loader",
    timeout_s: float = AGREE_S,
) -> str:
    """Wait until every process of the job has stated the same facts. Returns a name that is equal on all processes and
    new in this store.

    Every process calls this with the same `name`. Process 0 opens a round and compares, so the store receives a few
    requests a process. Raises on all processes: `StateMismatch` when a fact differs, when ranks have unequal numbers of
    processes, or when a process cannot begin; `DeadlineExceeded` when a process has not stated its facts within
    `timeout_s`, or the store is gone.
    """
    rounds = f"cachesvc/agree/{topology.group}{name}"
    statement = json.dumps([topology.rank, dict(facts) | {"world size": topology.world_size}], sort_keys=True)
    try:
        if topology.process == 0:
            number = store.add(rounds, 1)
            store.set(f"{rounds}/{number}/0", statement)
            kind, message = _verdict(topology, f"{rounds}/{number}", store, timeout_s)
            store.set(f"{rounds}/{number}/verdict", json.dumps([kind, message]))
        else:
            # Twice: the deadline of process 0 may begin when ours would end.
            number = _await_verdict(topology.process, rounds, statement, store, 2 * timeout_s)
            kind, message = json.loads(store.get(f"{rounds}/{number}/verdict"))
    except RuntimeError as gone:  # torch's DistError: the store's host is gone, usually process 0
        raise DeadlineExceeded("the job's store does not answer: look for process 0's own error") from gone
    if kind == "mismatch":
        raise StateMismatch(message)
    if kind == "late":
        raise DeadlineExceeded(message)
    return f"{topology.group}{name}-{number}"


def tell_failure(topology: Topology, failure: str, store: Store, name: str = "loader") -> None:
    """Tell every process that this one cannot begin: in a round that takes place within `TELL_FAILURE_S`, else in the
    next one."""
    timeout_s = TELL_FAILURE_S if topology.process == 0 else TELL_FAILURE_S / 2
    try:
        agree(topology, {"failure": failure}, store, name, timeout_s)
    except StateMismatch:
        pass  # the others have read the failure
    except DeadlineExceeded:
        if topology.process:  # without process 0 there is no round
            rounds = f"cachesvc/agree/{topology.group}{name}"
            with suppress(RuntimeError):
                text = f"process {topology.process} cannot go on: {failure}"
                store.set(_failure_key(f"{rounds}/{store.add(rounds, 0) + 1}"), text)


def _failure_key(round_key: str) -> str:
    """The key of a failure that a process left before the round. It has the restart count, since torchrun keeps the store
    when it restarts processes."""
    return f"{round_key}/gone/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}"


def _polls(timeout_s: float, awaited: str) -> Iterator[None]:
    """Yield for each poll of the store until the timeout, at growing intervals. The store's own wait would not see a new
    round, and logs each timeout."""
    began, pause_s, warned = time.monotonic(), 0.01, False
    while (waited_s := time.monotonic() - began) < timeout_s:
        yield
        if waited_s >= WARN_AFTER_S and not warned:
            warned = True
            _log.warning(
                "waiting for %s, up to %.0f s more: it may start slowly, or only this rank was moved (set_epoch,"
                " skip, load_state_dict, other data) or iterates (look at a batch by peek(), and give a loader of one rank"
                " alone shard=False)",
                awaited,
                timeout_s - waited_s,
            )
        time.sleep(min(pause_s, timeout_s))
        pause_s = min(2 * pause_s, POLL_S)


def _await_verdict(process: int, rounds: str, statement: str, store: Store, timeout_s: float) -> int:
    """Write the statement to process 0's newest round; returns that round once it has its verdict."""
    at = 0
    for _ in _polls(timeout_s, "process 0 to compare"):
        at = _round_stated_in(process, rounds, statement, store, at)
        if at and store.check([f"{rounds}/{at}/verdict"]):
            return at
    raise DeadlineExceeded(f"process 0 gave no verdict within {timeout_s:.0f} s: look for its own error")


def _round_stated_in(process: int, rounds: str, statement: str, store: Store, at: int) -> int:
    """Write the statement to the newest round, unless that round is over; returns the round of the latest statement, which
    was `at` before.

    torchrun keeps the store when it restarts processes. A round that has a verdict, or a statement of this process from
    before the restart, is over. A round without them may be over too, so the caller looks for newer rounds until it has a
    verdict.
    """
    newest = store.add(rounds, 0)
    own_key = f"{rounds}/{newest}/{process}"
    # Round `at` first: process 0 opens no round before the previous one has its verdict.
    over = any(store.check([f"{rounds}/{each}/verdict"]) for each in (at, newest))
    if newest == at or over or store.add(f"{own_key}/here", 1) > 1:
        return at
    store.set(own_key, statement)
    return newest


def _verdict(topology: Topology, prefix: str, store: Store, timeout_s: float) -> tuple[str, str]:
    """Compare the statements of all processes, as process 0: the kind of error and its text, ("", "") where all agree."""
    deadline, processes = time.monotonic() + timeout_s, topology.processes
    ranks: list[int] = []
    stated: list[dict[str, str | int]] = []
    for process in range(processes):
        for _ in _polls(max(0.001, deadline - time.monotonic()), f"process {process} of {processes}"):
            if store.check([_failure_key(prefix)]):
                return "mismatch", store.get(_failure_key(prefix)).decode()
            if store.check([f"{prefix}/{process}"]):
                break
        else:
            return "late", (
                f"process {process} of {processes} did not report within {timeout_s:.0f} s: look for its own error; to look"
                " at a batch on one rank call peek(); a loader of one rank alone wants shard=False, one of some ranks the"
                " mesh of those"
            )
        rank, facts = json.loads(store.get(f"{prefix}/{process}"))
        ranks.append(rank)
        stated.append(facts)
    for process, facts in enumerate(stated):
        if "failure" in facts:
            return "mismatch", f"process {process} cannot go on: {facts['failure']}"
    differing = [_difference(fact, stated) for fact in sorted(set().union(*stated) - {KEPT})]
    found = "; ".join(filter(None, differing)) or _uneven_ranks(ranks, topology.world_size)
    if not found:
        return "", ""
    return "mismatch", f"the job's processes disagree: {found}; {_common_version(stated)}"


def _common_version(stated: Sequence[Mapping[str, str | int]]) -> str:
    """Return advice for ranks that disagree. While the source is down, nodes may open different remembered versions. The
    advice then names one that all of them can open, if there is one."""
    if not any(facts.get(KEPT) for facts in stated):
        return "start all of them alike"
    opens = [str(facts.get(KEPT) or facts.get("version")).split() for facts in stated]
    common = next((version for version in opens[0] if all(version in each for each in opens)), "")
    if not common:
        return "the source is down, and no version opens on all nodes: wait for the source"
    return f"the source is down, and nodes remember different versions: version={common!r} opens on all"


def _uneven_ranks(ranks: Sequence[int], size: int) -> str:
    """A text for the first rank with fewer processes than others, or "": its samples would be read by no process, or
    count for less."""
    each, counts = len(ranks) // size, Counter(ranks)
    wrong = [rank for rank in range(size) if counts[rank] < each]
    if not wrong:
        return ""
    return f"{counts[wrong[0]]} of {len(ranks)} are rank {wrong[0]} of {size}, not {each}"


def _difference(fact: str, stated: Sequence[Mapping[str, str | int]]) -> str:
    """A text like `seed is 0 on processes 0, 1, 2 and 1 on process 3`, or "" where all values are equal."""
    holders: defaultdict[str, list[str]] = defaultdict(list)
    for process, facts in enumerate(stated):
        holders[str(facts.get(fact, "not given"))].append(str(process))
    if len(holders) == 1:
        return ""
    shown = [f"{value} on {_processes_text(where)}" for value, where in list(holders.items())[:_MAX_NAMED]]
    return f"{fact} is " + " and ".join(shown)


def _processes_text(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ("process " if len(names) == 1 else "processes ") + ", ".join(names[:_MAX_NAMED]) + more
