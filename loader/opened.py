"""One dataset version as this process has it open; the views of a dataset share it."""

from __future__ import annotations

import threading

from cachesvc.catalog.catalog import Catalog
from cachesvc.core.order import Plan
from cachesvc.core.stalls import StallReport
from loader.around import Access
from loader.connect import Link, read_timeout_s
from loader.forks import abandon_in_children
from loader.reader import Reader
from loader.stages import READING


class Opened:
    """The catalog, and a reader that is connected at its first use. Picklable: the copy opens the same version
    again. A forked child connects by itself."""

    def __init__(self, link: Link, verify: bool = False) -> None:
        """`verify`: check reads of cached files. Raises what mapping the catalog raises."""
        self.link = link
        self._verify = verify
        self.catalog: Catalog = link.catalog()
        self._reader: Reader | None = None
        self._access: Access | None = None
        self._connecting = threading.Lock()
        abandon_in_children(self)

    def __getstate__(self) -> tuple[Link, bool]:
        return self.link, self._verify

    def __setstate__(self, state: tuple[Link, bool]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def reader(self) -> Reader:
        """This process's reader; threads share it."""
        found = self._reader
        if found is not None:
            return found
        with self._connecting:
            if self._reader is None:
                self._access = self.link.access(self.catalog)
                suspect = self._access.suspect if self._verify else None
                self._reader = Reader(
                    self.catalog, self._access.grants, timeout_s=read_timeout_s(), suspect=suspect
                )
                abandon_in_children(self)
            return self._reader

    def submit(self, plan: Plan) -> None:
        """Say in which order this rank will touch extents."""
        self.reader()
        assert self._access is not None
        self._access.submit(plan)

    def passed(self, step: int) -> None:
        """Everything before `step` of the plan has been consumed."""
        if self._access is not None:
            self._access.grants.passed(step)

    def origin_bytes(self) -> dict[str, int]:
        """Bytes that this process read so far, by where they lay."""
        return self._reader.origin_bytes() if self._reader is not None else {}

    def reading_s(self) -> tuple[float, ...]:
        """Seconds that this thread waited for bytes so far, by `stages.READING`."""
        return tuple(self._reader.stages.seconds) if self._reader is not None else (0.0,) * len(READING)

    def report(self, report: StallReport) -> None:
        """Say what steps waited for, to a daemon's metrics."""
        if self._access is not None:
            self._access.report(report)

    def close(self) -> None:
        """Give back leases, mappings and the connection; the next use connects again."""
        if self._reader is not None:
            self._reader.close()
        self.abandon()

    def abandon(self) -> None:
        """In a forked child: the reader is the parent's, and perhaps a thread of it held the lock."""
        self._connecting = threading.Lock()
        self._reader = self._access = None
