"""What a daemon hears of the order in which one run through a dataset will need its extents, and how far it came."""

from __future__ import annotations

from contextlib import suppress

from cachesvc.client import Control
from cachesvc.core.errors import DaemonUnavailable, NotFound
from cachesvc.core.model import DatasetId
from cachesvc.core.order import Plan
from cachesvc.leases import DaemonGrants
from loader.forks import abandon_in_children


class Announcer:
    """One connection with its plan, which is kept, and submitted again to a daemon that was restarted."""

    def __init__(self, directory: str, dataset: DatasetId, job: int) -> None:
        """`directory`: of the daemon's sockets. `job`: as in `DaemonGrants`."""
        self._directory, self._dataset = directory, dataset
        self._plan: Plan | None = None
        self.daemon = DaemonGrants(directory, dataset, self._connected, job)
        abandon_in_children(self.daemon)

    def submit(self, plan: Plan) -> None:
        """From now on extents are needed so. A daemon that is away, or has forgotten the dataset, gets it when it is
        back: reads will say so."""
        self._plan = plan
        with suppress(DaemonUnavailable, NotFound):
            self.daemon.announce()

    def passed(self, step: int) -> None:
        """Everything before `step` of the plan has been consumed."""
        self.daemon.passed(step)

    def close(self) -> None:
        """Nothing will be needed."""
        self._plan = None
        self.daemon.close()

    def _connected(self, token: int) -> None:
        plan = self._plan
        if plan is None:
            return
        following = () if plan.following is None else plan.following
        with Control(self._directory) as control:
            control.plan(token, self._dataset, plan.extent, plan.first_step, plan.last_step, following)
