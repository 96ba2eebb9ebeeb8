"""Compares, before the first batch, what all ranks are about to read, so that no rank goes on out of step.

Process 0 opens a round in the job's store, every process writes its facts there, and process 0 compares them and writes
the verdict. A process that cannot begin writes its failure to the round instead, or leaves it for the next round.
"""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress

from cachesvc.core.errors import DeadlineExceeded, StateMismatch, from_code
from cachesvc.core.limits import AGREE_S
from loader.job.store import JobStore, polls
from loader.job.topology import Topology

TELL_FAILURE_S = 30.0
"""How long a process that cannot begin waits for the others to read its failure, before it raises its own error."""
_MAX_NAMED = 8
KEPT = "kept versions"
"""A fact that may differ: the versions that open on a rank's node, separated by spaces, while the source is down."""


def agree(
    topology: Topology, facts: Mapping[str, str | int], store: JobStore, timeout_s: float = AGREE_S
) -> str:
    """Wait until every process of the job has stated the same facts. Returns a name that is equal on all processes and
    new in this store.

    Process 0 opens a round and compares, so the store receives a few requests a process. Raises on all processes:
    `StateMismatch` when a fact differs, when ranks have unequal numbers of processes, or when a process cannot begin;
    `DeadlineExceeded` when a process has not stated its facts within `timeout_s`, or the store is gone.
    """
    rounds = _rounds(topology, store)
    statement = [topology.rank, dict(facts) | {"world size": topology.world_size}]
    try:
        if topology.process == 0:
            number = rounds.count("opened", 1)
            rounds.put(f"{number}/0", statement)
            code, message = _verdict(topology, rounds.below(f"{number}"), timeout_s)
            rounds.put(f"{number}/verdict", [code, message])
        else:
            # Twice: the deadline of process 0 may begin when ours would end.
            number, (code, message) = _await_verdict(topology.process, rounds, statement, 2 * timeout_s)
    except RuntimeError as gone:  # torch's DistError: the store's host is gone, usually process 0
        raise DeadlineExceeded("the job's store does not answer: look for process 0's own error") from gone
    if code:
        raise from_code(code, message)
    return f"{topology.group}loader-{number}"


def tell_failure(topology: Topology, failure: str, store: JobStore) -> None:
    """Tell every process that this one cannot begin: in a round that takes place within `TELL_FAILURE_S`, else in the
    next one."""
    timeout_s = TELL_FAILURE_S if topology.process == 0 else TELL_FAILURE_S / 2
    try:
        agree(topology, {"failure": failure}, store, timeout_s)
    except StateMismatch:
        pass  # the others have read the failure
    except DeadlineExceeded:
        if topology.process:  # without process 0 there is no round
            with suppress(RuntimeError):
                rounds = _rounds(topology, store)
                text = f"process {topology.process} cannot go on: {failure}"
                rounds.put(f"{rounds.count('opened') + 1}/{_failure_key()}", text)


def _rounds(topology: Topology, store: JobStore) -> JobStore:
    return store.below(f"agree/{topology.group}loader")


def _failure_key() -> str:
    """The key of a failure that a process left before the round. It has the restart count, since torchrun keeps the store
    when it restarts processes."""
    return f"gone/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}"


def _await_verdict(
    process: int, rounds: JobStore, statement: list[object], timeout_s: float
) -> tuple[int, tuple[int, str]]:
    """Write the statement to process 0's newest round; returns that round, and its verdict once there is one.

    torchrun keeps the store when it restarts processes. A round that has a verdict, or a statement of this process from
    before the restart, is over. A round without them may be over too: so look for newer ones until there is a verdict.
    """
    stated = 0
    for _ in polls(timeout_s, "process 0 to compare"):
        newest = rounds.count("opened")
        # The stated round first: process 0 opens no round before the previous one has its verdict.
        if stated and (verdict := rounds.read(f"{stated}/verdict")):
            return stated, verdict
        is_over = newest == stated or rounds.read(f"{newest}/verdict")
        if not is_over and rounds.arrive(f"{newest}/here", process):
            rounds.put(f"{newest}/{process}", statement)
            stated = newest
    raise DeadlineExceeded(f"process 0 gave no verdict within {timeout_s:.0f} s: look for its own error")


def _verdict(topology: Topology, current: JobStore, timeout_s: float) -> tuple[int, str]:
    """Compare the statements of all processes, as process 0: the error's code and text, (0, "") where all agree."""
    deadline, processes = time.monotonic() + timeout_s, topology.processes
    ranks: list[int] = []
    stated: list[dict[str, str | int]] = []
    for process in range(processes):
        for _ in polls(max(0.001, deadline - time.monotonic()), f"process {process} of {processes}"):
            if failure := current.read(_failure_key()):
                return StateMismatch.code, failure
            if statement := current.read(f"{process}"):
                break
        else:
            return DeadlineExceeded.code, (
                f"process {process} of {processes} did not report within {timeout_s:.0f} s: look for its own error; to look"
                " at a batch on one rank call peek(); a loader of one rank alone wants shard=False, one of some ranks the"
                " mesh of those"
            )
        ranks.append(statement[0])
        stated.append(statement[1])
    for process, facts in enumerate(stated):
        if "failure" in facts:
            return StateMismatch.code, f"process {process} cannot go on: {facts['failure']}"
    differing = [_difference(fact, stated) for fact in sorted(set().union(*stated) - {KEPT})]
    found = "; ".join(filter(None, differing)) or _uneven_ranks(ranks, topology.world_size)
    if not found:
        return 0, ""
    return StateMismatch.code, f"the job's processes disagree: {found}; {_common_version(stated)}"


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
