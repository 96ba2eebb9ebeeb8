"""Names workers that are alive and send nothing while the trainer waits for them: a deadlock looks like slow data."""

from __future__ import annotations

import logging
from collections.abc import Iterable

SILENT_S = 60.0
"""Longer than a batch usually takes, and shorter than the patience of collectives (10 minutes in torch)."""
AFTER_FORK = (
    "If they never do, a thread held a lock when they were forked (Polars starts such threads, for one): give"
    " multiprocessing_context='forkserver' or 'spawn', or worker_type='thread'. Else reading the data or your code"
    " takes so long"
)
OF_OTHERS = "Reading the data or your code takes so long: py-spy dump --pid shows where"
_log = logging.getLogger("cachesvc")


class Silence:
    """The time for which the trainer has waited without a message of any worker. Warns once."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._since: float | None = None
        self._warned = False

    def heard(self) -> None:
        """Count anew: a worker has sent something."""
        self._since = None

    def is_long(self, now: float) -> bool:
        """Count the wait that goes on at `now`. Returns whether to warn of it."""
        if self._since is None:
            self._since = now
        return now - self._since >= self.limit_s and not self._warned

    def warn(self, pids: Iterable[int | None], forked: bool) -> None:
        """Name the workers that the trainer waits for."""
        self._warned = True
        _log.warning(
            "workers are alive and have sent no batch for %.0f s: pid %s. %s",
            self.limit_s,
            ", ".join(map(str, pids)),
            AFTER_FORK if forked else OF_OTHERS,
        )
