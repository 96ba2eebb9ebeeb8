"""Fetches chosen extents into a node's cache: those that its ranks read next.

It reads as a trainer would, through the grants socket, and leases each extent until all are there. So exactly these are
resident together at the end, and stay until other data needs their room.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cachesvc.catalog.columns import Ints
from cachesvc.client.control import find_daemon
from cachesvc.client.grants import DaemonGrants
from cachesvc.client.opening import read_timeout_s
from cachesvc.client.protocol import Granted
from cachesvc.core.errors import CacheError, DaemonUnavailable
from cachesvc.core.order.epoch_order import Plan
from cachesvc.saved_runs.catalogs import connected
from cachesvc.saved_runs.open import opened_run
from cachesvc.saved_runs.run_data import Leaf

GROUP = 32
"""Extents that are asked for at once: more than a daemon fills at once."""


@dataclass(slots=True)
class Fetched:
    """The outcome of a fetch, in extents: all, those resident now, those that did not fit, and the first error of
    those that could not be fetched."""

    extents: int
    size_bytes: int
    resident_extents: int = 0
    resident_bytes: int = 0
    unfit_extents: int = 0
    failed_extents: int = 0
    failure: CacheError | None = field(default=None, repr=False)


def fetch(
    parts: Sequence[tuple[Leaf, Ints]],
    socket: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Fetched:
    """Have the daemon fetch extents of datasets, in the given order; `progress(done, total)` in bytes. Raises
    DaemonUnavailable, and what opening a dataset raises."""
    directory = socket or find_daemon()
    if directory is None:
        raise DaemonUnavailable("no daemon answers; start one: cachesvc serve")
    found = Fetched(0, 0)
    for leaf, extents in parts:
        found.extents += len(extents)
        found.size_bytes += int(leaf.catalog.extent_sizes[extents].sum())
    with ExitStack() as leases:
        for leaf, extents in parts:
            grants = leases.enter_context(closing(DaemonGrants(directory, leaf.catalog.id)))
            connected(grants, directory, leaf.source)
            steps = np.arange(len(extents), dtype=np.int64)
            grants.submit(Plan(extents, steps, np.full_like(steps, len(extents))))
            for start in range(0, len(extents), GROUP):
                for granted in _acquired(grants, extents[start : start + GROUP].tolist(), found):
                    found.resident_extents += 1
                    found.resident_bytes += granted.size_bytes
                    found.size_bytes += granted.size_bytes - int(leaf.catalog.extent_sizes[granted.extent])
                progress(found.resident_bytes, found.size_bytes)
    return found


def prefetch_next(
    state: str | Mapping[str, Any],
    *,
    steps: int,
    world: int,
    ranks: Sequence[int],
    socket: str | None = None,
    counts: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Fetched:
    """Fetch what these ranks of `world` read in the next `steps` steps of a saved run: call it before a job's ranks have
    found each other. `state`: a saved state, or the path of its file. `counts`: as of `opened_run`.

    Returns once all is resident, or could not be fetched. Raises as `opened_run` and `fetch`, and InvalidInput for ranks
    that the run cannot have.
    """
    run = opened_run(state, socket=socket, counts=counts)
    slots = [run.slots_of(rank, world) for rank in ranks]
    return fetch(run.extents_ahead(steps, slots), socket, progress)


def _acquired(grants: DaemonGrants, extents: list[int], found: Fetched) -> list[Granted]:
    """The grants of extents that are leased now. Where one fails, the others are asked for one by one."""
    try:
        answers = grants.acquire(extents, read_timeout_s())
    except DaemonUnavailable:
        raise
    except CacheError as error:
        if len(extents) > 1:
            return [each for extent in extents for each in _acquired(grants, [extent], found)]
        found.failed_extents += 1
        found.failure = found.failure or error
        return []
    granted = [answer for answer in answers if isinstance(answer, Granted)]
    for each in granted:
        os.close(each.fd)  # the lease does not need it
    found.unfit_extents += len(answers) - len(granted)
    return granted
