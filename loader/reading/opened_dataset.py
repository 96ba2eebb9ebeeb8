"""One dataset version as this process has it open; the views of a dataset share it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from weakref import WeakKeyDictionary

from cachesvc.catalog.catalog import Catalog
from cachesvc.client.grants import DaemonGrants
from cachesvc.core.order.epoch_order import Plan
from cachesvc.core.stalls import StallReport
from loader.process.fork_hooks import abandon_in_children
from loader.reading.connect import DatasetLink, read_timeout_s
from loader.reading.direct_access import Access
from loader.reading.easing import Easing
from loader.reading.reader import ORIGINS, ExtentReader
from loader.reading.recalls import Recalls
from loader.reading.wait_clock import READING


def _nobody() -> None:
    """The order that died."""


class OpenedDataset:
    """The catalog, and a reader that is connected at its first use and closed with its last user. Picklable: the
    copy opens the same version again. A forked child connects by itself."""

    def __init__(self, link: DatasetLink, verify: bool = False) -> None:
        """`verify`: check reads of cached files. Raises what mapping the catalog raises."""
        self.link = link
        self._verify = verify
        self.catalog: Catalog = link.catalog()
        self._reader: ExtentReader | None = None
        self._read_before: dict[str, int] = {}
        self._waited_before: tuple[float, ...] = (0.0,) * len(READING)
        """By the reader that was closed, and in the thread that closed it."""
        self._access: Access | None = None
        self._easing: Easing | None = None
        self._recalls: Recalls | None = None
        self._dropping: weakref.finalize[..., object] | None = None
        self._connecting = threading.Lock()
        self._leader: Callable[[], object | None] = _nobody
        self._beside: WeakKeyDictionary[object, tuple[DaemonGrants, weakref.finalize[..., object]]] = (
            WeakKeyDictionary()
        )
        abandon_in_children(self)

    def __getstate__(self) -> tuple[DatasetLink, bool]:
        return self.link, self._verify

    def __setstate__(self, state: tuple[DatasetLink, bool]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def reader(self) -> ExtentReader:
        """This process's reader; threads share it."""
        found = self._reader
        if found is not None:
            return found
        with self._connecting:
            if self._reader is None:
                self._access = self.link.access(self.catalog)
                suspect = self._access.suspect if self._verify else None
                self._reader = ExtentReader(
                    self.catalog, self._access.grants, timeout_s=read_timeout_s(), suspect=suspect
                )
                if self.link.daemon:
                    self._easing = Easing(self._reader.ease)
                    self._recalls = Recalls(self._access.recalled, self._reader.forgo)
                self._dropping = weakref.finalize(self, self._reader.drop)
                self._dropping.atexit = False
                abandon_in_children(self)
            return self._reader

    def submit(self, plan: Plan, order: object) -> None:
        """Say how `order` will touch extents. One that runs in the midst of another (the validation of a part, in a
        training epoch) has a connection of its own for that: a plan replaces the one before it."""
        self.reader()
        access = self._access
        assert access is not None
        if order not in self._beside and self._leader() not in (None, order) and access.another is not None:
            connection = access.another()
            closing = weakref.finalize(order, connection.close)
            closing.atexit = False
            self._beside[order] = connection, closing
        if order in self._beside:
            self._beside[order][0].submit(plan)
        else:
            self._leader = weakref.ref(order)
            access.submit(plan)

    def passed(self, step: int, order: object) -> None:
        """Everything before `step` of this order's plan has been consumed."""
        if order in self._beside:
            self._beside[order][0].passed(step)
        elif self._access is not None and self._leader() in (None, order):
            self._access.grants.passed(step)

    def given_up(self, order: object) -> None:
        """This order is over, or goes no further: the next one's plan takes the place of its own."""
        if order in self._beside:
            _, closing = self._beside.pop(order)
            closing()
        elif self._leader() is order:
            self._leader = _nobody

    def origin_bytes(self) -> dict[str, int]:
        """Bytes that this process read so far, by where they lay."""
        here = self._reader.origin_bytes() if self._reader is not None else {}
        return {origin: here.get(origin, 0) + self._read_before.get(origin, 0) for origin in ORIGINS}

    def reading_s(self) -> tuple[float, ...]:
        """Seconds that this thread waited for bytes so far, by `stages.READING`."""
        here = self._reader.stages.seconds if self._reader is not None else (0.0,) * len(READING)
        return tuple(map(sum, zip(here, self._waited_before, strict=True)))

    def report(self, report: StallReport) -> None:
        """Say what steps waited for, to a daemon's metrics."""
        if self._access is not None:
            self._access.report(report)

    def close(self) -> None:
        """Give back leases, mappings and the connection; the next use connects again."""
        read, waited = self.origin_bytes(), self.reading_s()
        if self._reader is not None:
            self._reader.close()
        for _, closing in self._beside.values():
            closing()
        self.abandon()
        self._read_before, self._waited_before = read, waited

    def abandon(self) -> None:
        """In a forked child: the reader is the parent's, and perhaps a thread of it held the lock."""
        self._connecting = threading.Lock()
        self._leader = _nobody
        self._beside = WeakKeyDictionary()
        if self._dropping is not None:
            self._dropping.detach()
        self._reader = self._access = self._dropping = self._easing = self._recalls = None
        self._read_before, self._waited_before = {}, (0.0,) * len(READING)
