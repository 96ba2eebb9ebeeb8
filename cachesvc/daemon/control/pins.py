"""Keeps pinned datasets: claims that outlive their readers and, in a small file, the daemon."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from cachesvc.core import events
from cachesvc.core.errors import NotFound, OutOfSpace
from cachesvc.core.model import DatasetId
from cachesvc.daemon.access.tenants import NO_USER
from cachesvc.daemon.claims import DatasetClaims
from cachesvc.daemon.control.state_file import StateFile
from cachesvc.daemon.datasets import Datasets, ServedDataset
from cachesvc.daemon.loop.loop import Loop
from cachesvc.daemon.runner import Runner

log = logging.getLogger(__name__)


class PinFile:
    """The pinned datasets and their users, on disk."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._file = StateFile(path)

    def stored(self) -> dict[DatasetId, int]:
        """Read the pinned datasets and their users. Raises OSError where the file cannot be read."""
        return {DatasetId(each): user for each, user in self._file.read().items() if isinstance(user, int)}

    def store(self, dataset: DatasetId, user: int | None) -> int:
        """Add a dataset as the last one of the file, or remove it where `user` is None. Return the user of the pin. Raises
        OSError."""
        with self._file.changed() as stored:
            before = stored.pop(dataset, NO_USER)
            if user is not None:
                user = user if before == NO_USER or user == os.geteuid() else before
                stored[dataset] = user
        return NO_USER if user is None else user


class Pins:
    """Pins datasets. Call `restore` once at the start, and `pinned_last` before it; `pin` is safe from any thread."""

    def __init__(
        self, file: PinFile, runner: Runner, loop: Loop, datasets: Datasets, claims: DatasetClaims
    ) -> None:
        self.stored = file.stored
        self._file, self._runner, self._loop = file, runner, loop
        self._datasets, self._claims = datasets, claims
        self._jobs: dict[DatasetId, int] = {}

    def __contains__(self, dataset: DatasetId) -> bool:
        return dataset in self._jobs

    def pinned_last(self, found: events.Recovered) -> events.Recovered:
        """Return the event with the extents of pinned datasets last: where a tier exceeds its budget, the first extents are
        evicted. Waits for the catalogs. Datasets that cannot be loaded are not moved."""
        try:
            loading = [self._datasets.load(wanted) for wanted in self.stored()]
        except OSError:
            return found  # `restore` logs it
        loaded = [each.result() for each in loading if each.exception() is None]
        pinned = {extent for each in loaded for extent in self._datasets.admit(each).index_of}
        rest = {extent: size for extent, size in found.extents.items() if extent not in pinned}
        return events.Recovered(found.tier, rest | found.extents)

    def restore(self) -> None:
        """Pin the datasets of the file again: at once where a dataset is loaded, else when it is. A dataset that cannot be
        loaded is logged, and stays in the file unless its catalog is gone."""
        try:
            stored = self.stored()
        except OSError as error:
            log.error("the pins cannot be read", extra={"file": self._file.path, "error": error.strerror})
            return
        for wanted, user in stored.items():
            if (known := self._datasets.known(wanted)) is not None:
                self._claim(known, True, user, gradual=False)  # the loop does not run yet
                continue
            self._datasets.load(wanted).add_done_callback(partial(self._restored, wanted, user))

    def pin(self, dataset: ServedDataset, pinned: bool, user: int, then: Callable[[], None]) -> None:
        """Pin or unpin for a user. The file is written first, so that a pin survives a crash. A dataset that is pinned
        already stays its first user's, unless the daemon's own user pins it. `then` is called on the loop's thread when the
        pin is done. Raises OutOfSpace where the file cannot be written."""
        try:
            user = self._file.store(dataset.id, user if pinned else None)
        except OSError as error:
            raise OutOfSpace(
                f"{self._file.path} cannot be rewritten ({error.strerror}); look at the state directory"
            ) from None

        def claim() -> None:
            self._claim(dataset, pinned, user)
            self._claims.after(self._runner.node.claims.settled, dataset.id, then)

        self._loop.call(claim)

    def _restored(self, wanted: DatasetId, user: int, done: Future[ServedDataset]) -> None:
        error = done.exception()
        if error is None:
            dataset = done.result()
            self._loop.post(lambda: self._claim(self._datasets.admit(dataset), True, user))
            return
        log.warning(
            "a pinned dataset cannot be kept",
            extra={"dataset": wanted, "error": str(error.__cause__ or error)},
        )
        if isinstance(error, NotFound) and not self._datasets.stored(wanted):
            self._file.store(wanted, None)

    def _claim(self, dataset: ServedDataset, pinned: bool, user: int, gradual: bool = True) -> None:
        """Declare or end the job of a pin. The job is not a reader's, since a pin must outlive readers."""
        if pinned:
            if dataset.id not in self._jobs:
                self._jobs[dataset.id] = self._claims.next_id()
                self._claims.declare(self._jobs[dataset.id], dataset, user, gradual)
            self._claims.pin(dataset, user, gradual)
        elif dataset.id in self._jobs:
            self._runner.handle(events.Unpinned(dataset.id))
            self._runner.handle(events.JobEnded(self._jobs.pop(dataset.id)))
