"""The parts of the daemon that take other settings while it runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from cachesvc.config import Settings
from cachesvc.core.errors import CacheError
from cachesvc.core.model import TierName
from cachesvc.daemon.access.path_lookups import Lookups
from cachesvc.daemon.access.quotas import Quotas
from cachesvc.daemon.access.tenants import Tenants
from cachesvc.daemon.claims import DatasetClaims
from cachesvc.daemon.datasets import Datasets
from cachesvc.daemon.disks.budgets import Budgets
from cachesvc.daemon.disks.memory_pressure import MemoryPressure
from cachesvc.daemon.fills.pool import FillerPool
from cachesvc.daemon.loop.loop import Loop
from cachesvc.daemon.processes.logs import set_level
from cachesvc.daemon.reload.changes import Changes


@dataclass(slots=True)
class LiveParts:
    """`disks` are the names of the cache directories, in the order of `Settings.nvme`."""

    loop: Loop
    lookups: Lookups
    tenants: Tenants
    datasets: Datasets
    quotas: Quotas
    claims: DatasetClaims
    budgets: Budgets
    pressure: MemoryPressure
    fillers: FillerPool
    disks: Sequence[TierName]

    def take(self, changes: Changes) -> None:
        """Take changed settings. Call it on a thread that may wait for lookups. Raises CacheError, and changes nothing, for
        what they get wrong; SourceUnavailable after the change where a loaded dataset cannot be looked up."""
        settings = changes.settings
        allowed = self.lookups.allowlist(settings.allow, exact=bool(settings.rules))
        Tenants(allowed, settings.rules)
        Quotas(settings.quota, self.quotas.resolve)
        if not {"allow", "source", "log"}.isdisjoint(changes.taken):
            self._renew_fillers(settings, allowed.roots)
        self.tenants.replace(allowed, settings.rules)
        self.quotas.replace(settings.quota)
        set_level(settings.log)
        self.loop.call(lambda: self._resize(settings))
        self.datasets.check_again()

    def _renew_fillers(self, settings: Settings, roots: tuple[str, ...]) -> None:
        try:
            self.loop.call(lambda: self.fillers.renew(settings, roots))
        except OSError as error:
            raise CacheError(
                f"no process with the new settings can be started ({os.strerror(error.errno or 0)}); allow more"
                " processes or memory"
            ) from None

    def _resize(self, settings: Settings) -> None:
        self.claims.quotas_changed()
        self.budgets.replace(dict(zip(self.disks, settings.nvme, strict=True)))
        self.pressure.replace(settings.ram_bytes)
