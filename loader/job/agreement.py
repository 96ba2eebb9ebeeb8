"""Ranks compare what they are about to read before its first batch: one that would go on out of step is found out.

Process 0 opens a round in the job's store, every process states its facts there, process 0 compares and gives the
verdict. Who cannot begin says so in the round instead, or leaves word for the next one.
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
from loader.job.topology import Topology, process_group

AGREE_TIMEOUT_S = 300.0
"""Ranks reach their first batch minutes apart when models load from a slow disk."""
TOLD_S = 30.0
"""How long whoever cannot begin waits for the others to hear of it; its own error comes after that."""
WAITING_S = 30.0
"""Who waits so long for another process says so."""
LOOK_S = 0.5
"""How often a process that waits looks: two requests of 50 us; more often in the first second."""
_NAMED_MOST = 8
_log = logging.getLogger("cachesvc")


class Store(Protocol):
    """What we use of `torch.distributed.Store`."""

    def set(self, key: str, value: str, /) -> Any: ...

    def get(self, key: str, /) -> bytes: ...

    def add(self, key: str, amount: int, /) -> int: ...

    def check(self, keys: list[str], /) -> bool: ...


def job_store() -> Store | None:
    """The process group's key-value store; None where no group is initialised."""
    if process_group() is None:
        return None
    store: Store = sys.modules["torch.distributed"].distributed_c10d._get_default_store()
    return store


def agree(
    topology: Topology,
    facts: Mapping[str, str | int],
    store: Store,
    name: str = "loader",
    timeout_s: float = AGREE_TIMEOUT_S,
) -> str:
    """Return once every process of the job has stated the same facts; what returns is the same on all, and was never
    returned before in this store.

    Every process calls this with the same `name`. Process 0 opens a round and compares, so the store sees a few
    requests a process. Raises `StateMismatch` on all of them when a fact differs, a rank is not on as many processes
    as each other one, or a process said that it cannot begin; `DeadlineExceeded` when one has not stated its own within
    `timeout_s`, or the store is gone.
    """
    rounds = f"cachesvc/agree/{topology.group}{name}"
    told = json.dumps([topology.rank, dict(facts) | {"world size": topology.world_size}], sort_keys=True)
    try:
        if topology.process == 0:
            number = store.add(rounds, 1)
            store.set(f"{rounds}/{number}/0", told)
            kind, message = _verdict(topology, f"{rounds}/{number}", store, timeout_s)
            store.set(f"{rounds}/{number}/verdict", json.dumps([kind, message]))
        else:
            # the comparer's own deadline may have started as late as ours ends
            number = _heard(topology.process, rounds, told, store, 2 * timeout_s)
            kind, message = json.loads(store.get(f"{rounds}/{number}/verdict"))
    except RuntimeError as gone:  # torch's DistError: the store's host, which is process 0 as often as not
        raise DeadlineExceeded("the job's store does not answer: look for process 0's own error") from gone
    if kind == "mismatch":
        raise StateMismatch(message)
    if kind == "late":
        raise DeadlineExceeded(message)
    return f"{topology.group}{name}-{number}"


def tell_failure(topology: Topology, failure: str, store: Store, name: str = "loader") -> None:
    """Have every process hear that this one cannot begin: in a round of within `TOLD_S`, else in the next one."""
    try:
        agree(topology, {"failure": failure}, store, name, TOLD_S if topology.process == 0 else TOLD_S / 2)
    except StateMismatch:
        pass  # they have heard
    except DeadlineExceeded:
        if topology.process:  # who comes later waits for process 0's rounds alone
            rounds = f"cachesvc/agree/{topology.group}{name}"
            with suppress(RuntimeError):
                word = f"process {topology.process} cannot go on: {failure}"
                store.set(_word(f"{rounds}/{store.add(rounds, 0) + 1}"), word)


def _word(prefix: str) -> str:
    """Where one that has gone left word. torchrun keeps the store when it starts processes again: they are others then."""
    return f"{prefix}/gone/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}"


def _looks(timeout_s: float, awaited: str) -> Iterator[None]:
    """One for each look at the store, ever rarer, in this time: its own wait would see no new round, and warns of each
    time-out."""
    began, pause_s, said = time.monotonic(), 0.01, False
    while (waited_s := time.monotonic() - began) < timeout_s:
        yield
        if waited_s >= WAITING_S and not said:
            said = True
            _log.warning(
                "waiting for %s, up to %.0f s more: it starts slowly, or this rank alone was moved (set_epoch, skip,"
                " load_state_dict, other data) or iterates (a loader of one rank alone wants shard=False)",
                awaited,
                timeout_s - waited_s,
            )
        time.sleep(min(pause_s, timeout_s))
        pause_s = min(2 * pause_s, LOOK_S)


def _heard(process: int, rounds: str, told: str, store: Store, timeout_s: float) -> int:
    """State what is `told` in process 0's newest round, and return that once it has its verdict."""
    at = 0
    for _ in _looks(timeout_s, "process 0 to compare"):
        at = _stated(process, rounds, told, store, at)
        if at and store.check([f"{rounds}/{at}/verdict"]):
            return at
    raise DeadlineExceeded(f"process 0 gave no verdict within {timeout_s:.0f} s: look for its own error")


def _stated(process: int, rounds: str, told: str, store: Store, at: int) -> int:
    """The round in which this process has stated what is `told`: the newest, unless that is of another time. torchrun
    keeps the store when it starts processes again: a round that has a verdict, or a word of this process's former
    self, is over; one without may be, so a newer one is looked for until the verdict comes."""
    newest = store.add(rounds, 0)
    mine = f"{rounds}/{newest}/{process}"
    # Its own first: process 0 opens no round before the one before it has its verdict.
    over = any(store.check([f"{rounds}/{each}/verdict"]) for each in (at, newest))
    if newest == at or over or store.add(f"{mine}/here", 1) > 1:
        return at
    store.set(mine, told)
    return newest


def _verdict(topology: Topology, prefix: str, store: Store, timeout_s: float) -> tuple[str, str]:
    """What process 0 found: ("", "") where all agree."""
    deadline, processes = time.monotonic() + timeout_s, topology.processes
    ranks: list[int] = []
    stated: list[dict[str, str | int]] = []
    for process in range(processes):
        for _ in _looks(max(0.001, deadline - time.monotonic()), f"process {process} of {processes}"):
            if store.check([_word(prefix)]):
                return "mismatch", store.get(_word(prefix)).decode()
            if store.check([f"{prefix}/{process}"]):
                break
        else:
            return "late", (
                f"process {process} of {processes} did not report within {timeout_s:.0f} s: look for its own error; a"
                " loader of one rank alone wants shard=False, one of some ranks the mesh of those"
            )
        rank, facts = json.loads(store.get(f"{prefix}/{process}"))
        ranks.append(rank)
        stated.append(facts)
    for process, facts in enumerate(stated):
        if "failure" in facts:
            return "mismatch", f"process {process} cannot go on: {facts['failure']}"
    differing = [_told(fact, stated) for fact in sorted(set().union(*stated))]
    found = "; ".join(filter(None, differing)) or _unequal(ranks, topology.world_size)
    return (
        ("mismatch", f"the job's processes disagree: {found}; start all of them alike") if found else ("", "")
    )


def _unequal(ranks: Sequence[int], size: int) -> str:
    """The first rank that others outnumber, or nothing: its samples would be nobody's, or count for less."""
    each, counts = len(ranks) // size, Counter(ranks)
    wrong = [rank for rank in range(size) if counts[rank] < each]
    if not wrong:
        return ""
    return f"{counts[wrong[0]]} of {len(ranks)} are rank {wrong[0]} of {size}, not {each}"


def _told(fact: str, stated: Sequence[Mapping[str, str | int]]) -> str:
    """`seed is 0 on 0, 1, 2 and 1 on 3`, or nothing where all say the same."""
    holders: defaultdict[str, list[str]] = defaultdict(list)
    for process, facts in enumerate(stated):
        holders[str(facts.get(fact, "not given"))].append(str(process))
    if len(holders) == 1:
        return ""
    shown = [f"{value} on {_listed(where)}" for value, where in list(holders.items())[:_NAMED_MOST]]
    return f"{fact} is " + " and ".join(shown)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED_MOST} more" if len(names) > _NAMED_MOST else ""
    return ("process " if len(names) == 1 else "processes ") + ", ".join(names[:_NAMED_MOST]) + more
