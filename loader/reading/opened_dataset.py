"""One dataset version that this process has open; the views of a dataset share it."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Mapping
from weakref import WeakKeyDictionary

from torch.utils.data import get_worker_info

from cachesvc.catalog.catalog import Catalog
from cachesvc.client.grants import DaemonGrants
from cachesvc.client.keepalive import start_polling
from cachesvc.client.opening import read_timeout_s
from cachesvc.core.order.epoch_order import Plan
from cachesvc.core.stalls import StallReport
from cachesvc.system.fork_hooks import abandon_in_children
from cachesvc.system.memory import Memory, of_machine
from loader.reading.active_reads import Ints
from loader.reading.connect import DatasetLink
from loader.reading.contents import Contents, NotingGrants, learn
from loader.reading.direct.direct_access import Access
from loader.reading.reader import ORIGINS, ExtentReader
from loader.reading.wait_clock import READING

_log = logging.getLogger("cachesvc")


def _no_order() -> None:
    """A dead weak reference."""


class OpenedDataset:
    """The catalog, and a reader that is connected at its first use and closed with its last user. Picklable: the copy
    opens the same version again. A forked child connects by itself."""

    def __init__(self, link: DatasetLink, verify: bool = False) -> None:
        """`verify`: check reads of cached files. Raises what mapping the catalog raises."""
        self.link = link
        self.verify = verify
        self.catalog: Catalog = link.catalog()
        self.contents = Contents(len(self.catalog.extent_starts))
        self._reader: ExtentReader | None = None
        self._bytes_before: dict[str, int] = {}
        self._waited_before: tuple[float, ...] = (0.0,) * len(READING)
        """By the reader that was closed, and in the thread that closed it."""
        self._access: Access | None = None
        self._recalls: Recalls | None = None
        self._closing_reader: weakref.finalize[..., object] | None = None
        self._connecting = threading.Lock()
        self._main_order: Callable[[], object | None] = _no_order
        """A weak reference to the order whose plan is sent on the reader's connection."""
        self._other_orders: WeakKeyDictionary[object, tuple[DaemonGrants, weakref.finalize[..., object]]] = (
            WeakKeyDictionary()
        )
        """The connections of orders that run at the same time, and what closes each."""
        abandon_in_children(self)

    def __getstate__(self) -> tuple[DatasetLink, bool]:
        return self.link, self.verify

    def __setstate__(self, state: tuple[DatasetLink, bool]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def reader(self) -> ExtentReader:
        """This process's reader; threads share it. Raises what connecting raises."""
        found = self._reader
        if found is not None:
            return found
        with self._connecting:
            if self._reader is None:
                self._access = self.link.access(self.catalog)
                reader = ExtentReader(
                    self.catalog,
                    NotingGrants(self._access.grants, self.contents),
                    timeout_s=read_timeout_s(),
                    suspect=self._access.suspect,
                    verify=self.verify,
                )
                if self.link.daemon:
                    self._recalls = Recalls(self._access.recalled, reader)
                self._closing_reader = weakref.finalize(self, reader.close_unless_pinned)
                self._closing_reader.atexit = False
                abandon_in_children(self)
                self._reader = reader
            return self._reader

    def learn_contents(self, extents: Ints) -> None:
        """Lease those extents whose bytes have no known digest. Raises as `learn`, and what connecting raises."""
        unknown = self.contents.unknown(extents)
        if unknown.size:
            self.reader().release_unused_mappings()
            assert self._access is not None, "the reader's"
            learn(self._access.grants, self.contents, unknown)

    def submit(self, plan: Plan, order: object, part: float = 1.0) -> None:
        """Send the plan by which `order` will read extents. An order that runs while another does (a validation inside a
        training epoch) gets its own connection for that: a plan replaces the one before it on its connection. `part`: the
        part of these extents' samples that this process reads. The daemon has the trainer's plan, not its workers'."""
        if self.link.daemon and get_worker_info() is not None:
            return
        self.reader()
        access = self._access
        assert access is not None
        if (
            order not in self._other_orders
            and self._main_order() not in (None, order)
            and access.connect_another is not None
        ):
            connection = access.connect_another()
            closing = weakref.finalize(order, connection.close)
            closing.atexit = False
            self._other_orders[order] = connection, closing
        if order in self._other_orders:
            self._other_orders[order][0].submit(plan)
        else:
            self._main_order = weakref.ref(order)
            access.submit(plan, part)

    def passed(self, step: int, order: object) -> None:
        """Report that everything before `step` of this order's plan has been consumed."""
        if order in self._other_orders:
            self._other_orders[order][0].passed(step)
        elif self._access is not None and self._main_order() in (None, order):
            self._access.grants.passed(step)

    def given_up(self, order: object) -> None:
        """End an order: the next order's plan may replace its plan."""
        if order in self._other_orders:
            _, closing = self._other_orders.pop(order)
            closing()
        elif self._main_order() is order:
            self._main_order = _no_order

    def origin_bytes(self) -> dict[str, int]:
        """Bytes that this process has read so far, by origin."""
        here = self._reader.origin_bytes() if self._reader is not None else {}
        return {origin: here.get(origin, 0) + self._bytes_before.get(origin, 0) for origin in ORIGINS}

    def reading_s(self) -> tuple[float, ...]:
        """Seconds that this thread has waited for bytes so far, by `wait_clock.READING`."""
        here = self._reader.wait_clock.seconds if self._reader is not None else (0.0,) * len(READING)
        return tuple(map(sum, zip(here, self._waited_before, strict=True)))

    def report(self, report: StallReport) -> None:
        """Report the waits of steps, for a daemon's metrics."""
        if self._access is not None:
            self._access.report(report)

    def close(self) -> None:
        """Release leases, mappings and the connection; the next use connects again."""
        read, waited = self.origin_bytes(), self.reading_s()
        if self._reader is not None:
            self._reader.close()
        for _, closing in self._other_orders.values():
            closing()
        self.abandon()
        self._bytes_before, self._waited_before = read, waited

    def abandon(self) -> None:
        """Forget the parent's reader in a forked child, and the lock, which a thread of the parent may have held."""
        self._connecting = threading.Lock()
        self._main_order = _no_order
        self._other_orders = WeakKeyDictionary()
        if self._closing_reader is not None:
            self._closing_reader.detach()
        self._reader = self._access = self._closing_reader = self._recalls = None
        self._bytes_before, self._waited_before = {}, (0.0,) * len(READING)


class Recalls:
    """Releases extents that this process holds and does not need. Polls once a second for as long as it lives.

    A reader keeps memory mapped and files open until their room is needed, and what it holds cannot be evicted. So the
    daemon recalls extents that others need the room of, and extents whose file turned out corrupt: the reader's open file
    would stay corrupt however often the daemon fills the extent again. While less than 5 % of the machine's memory is free,
    readers release unused mappings, so that the RAM tier can shrink; leasing one again takes some 50 us.
    """

    def __init__(
        self,
        recalled: Callable[[], Mapping[int, bool]],
        reader: ExtentReader,
        measured: Callable[[], Memory] = of_machine,
    ) -> None:
        """`recalled()` returns the extents that the daemon recalls, and whether each is corrupt. `measured()` returns the
        machine's memory."""
        self._recalled, self._reader, self._measured = recalled, reader, measured
        start_polling(self)

    def poll(self) -> None:
        """Release what the daemon recalls, and unused mappings while memory is short. See `Polled`."""
        if extents := self._recalled():
            if corrupt := sum(extents.values()):
                _log.warning(
                    "the daemon found %d corrupt extents that this process holds: they are read anew", corrupt
                )
            self._reader.release_when_unused(extents)
        machine = self._measured()
        if machine.free_bytes < machine.spare_bytes:
            self._reader.release_unused_mappings()
