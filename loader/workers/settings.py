"""The loader arguments that say how batches are made."""

from __future__ import annotations

from collections.abc import Callable
from operator import is_not
from typing import Any, NamedTuple

import torch

from cachesvc.core.errors import InvalidInput


class WorkerSettings(NamedTuple):
    """The loader arguments that say how batches are made, as they stand when an iteration begins. torch allows
    changes until then."""

    collate_fn: Any = None
    num_workers: int = 0
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    multiprocessing_context: Any = None
    worker_init_fn: Callable[[int], None] | None = None
    generator: torch.Generator | None = None
    timeout: float = 0
    pin_memory: bool = False
    worker_type: str = "process"
    device: torch.device | None = None
    pinned_bytes: int = 0

    def check(self) -> None:
        """Check what torch checks when an iteration begins. Raises InvalidInput."""
        if self.num_workers and self.prefetch_factor == 0:
            raise InvalidInput("prefetch_factor=0: no worker would make a batch; give 1 or more")
        if self.timeout and not self.num_workers:
            raise InvalidInput(
                f"timeout={self.timeout} is for workers, and num_workers is 0: give workers, or no timeout"
            )
        if self.pinned_bytes and self.device is None:
            raise InvalidInput(
                f"pinned_bytes={self.pinned_bytes} is for batches that a device gathers: give device='cuda', too"
            )
        if self.pinned_bytes and self.num_workers and self.worker_type == "process":
            raise InvalidInput(
                "pinned_bytes= lets the device gather for this process: give num_workers=0 or worker_type='thread'"
            )

    @property
    def reported(self) -> bool:
        """True if batches come with reports: all but those that the trainer's thread makes itself."""
        return self.num_workers > 0 or self.device is not None

    def without_workers(self) -> WorkerSettings:
        """Return these settings for batches that this process makes, and leaves where they are gathered."""
        return self._replace(
            num_workers=0, prefetch_factor=None, persistent_workers=False, timeout=0, pinned_bytes=0
        )

    def differs_from(self, before: WorkerSettings) -> bool:
        """Return whether any setting is another object than in `before`."""
        return any(map(is_not, self, before))


def worker_settings(loader: torch.utils.data.DataLoader[Any], device: torch.device | None) -> WorkerSettings:
    """The settings of a loader, torch's arguments and cachesvc's own, for batches that are moved to `device`."""
    given = WorkerSettings._make(getattr(loader, name) for name in WorkerSettings._fields)
    return given._replace(device=device)
