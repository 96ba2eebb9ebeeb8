"""The extents of one reader that are registered with the CUDA driver, so that devices read them where they lie.

A registered extent is pinned and stays leased: neither the kernel nor the daemon can take its memory. So their bytes
are capped, and an extent is unregistered when the reader gives it up, because of a recall for example.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from weakref import ReferenceType, WeakKeyDictionary, ref

from loader.reading.reader import ExtentReader

_log = logging.getLogger("cachesvc")


class RegisteredExtents:
    """The registered extents of a reader, least recently used first. Thread-safe."""

    def __init__(
        self,
        reader: ExtentReader,
        register: Callable[[int, int], None],
        unregister: Callable[[int], None],
    ) -> None:
        """`register` takes an address and a size in bytes, and raises RuntimeError when it is refused. `unregister` takes
        the address."""
        self.limit_bytes = 0
        """At most so many bytes are registered at once."""
        self._place_of = reader.place_of
        self._register, self._unregister = register, unregister
        self._bytes_by_extent: OrderedDict[int, int] = OrderedDict()
        self._uses: Counter[int] = Counter()
        self._lock = threading.Lock()
        reader.before_unmapping(self._forget)

    @property
    def registered_bytes(self) -> int:
        """Bytes that are registered now."""
        with self._lock:
            return sum(self._bytes_by_extent.values())

    @contextmanager
    def using(self, extents: Sequence[int]) -> Iterator[bool]:
        """Keep extents registered meanwhile; yields False when they do not fit. The caller keeps them mapped."""
        with self._lock:
            fits = self._make_room(extents) and all(map(self._ensure, extents))
            if fits:
                self._uses.update(extents)
        try:
            yield fits
        finally:
            if fits:
                with self._lock:
                    self._uses.subtract(extents)

    def _make_room(self, extents: Sequence[int]) -> bool:
        """Unregister what is used least recently until `extents` fit, or return False."""
        registered = self._bytes_by_extent
        missing = [extent for extent in extents if extent not in registered]
        if not missing:
            return True
        excess = (
            sum(registered.values()) + sum(self._place_of(each)[1] for each in missing) - self.limit_bytes
        )
        kept = set(extents)
        for extent in [each for each in registered if each not in kept and not self._uses[each]]:
            if excess <= 0:
                break
            excess -= registered[extent]
            self._drop(extent)
        return excess <= 0

    def _ensure(self, extent: int) -> bool:
        """Register an extent unless it is registered. Returns False, and registers nothing from then on, when the
        driver refuses."""
        if extent in self._bytes_by_extent:
            self._bytes_by_extent.move_to_end(extent)
            return True
        address, size_bytes = self._place_of(extent)
        try:
            self._register(address, size_bytes)
        except RuntimeError as error:
            _log.warning("pinned_bytes has no effect from now on: %s", error)
            self.limit_bytes = 0
            return False
        self._bytes_by_extent[extent] = size_bytes
        return True

    def _forget(self, extent: int) -> None:
        """Unregister an extent that is about to be unmapped; no read needs it."""
        with self._lock:
            if extent in self._bytes_by_extent:
                self._drop(extent)

    def _drop(self, extent: int) -> None:
        del self._bytes_by_extent[extent]
        self._unregister(self._place_of(extent)[0])


_of_readers: WeakKeyDictionary[ExtentReader, ReferenceType[RegisteredExtents]] = WeakKeyDictionary()
"""The reader keeps them, by what it calls before it unmaps an extent."""
_of_readers_lock = threading.Lock()


def registered_extents(
    reader: ExtentReader,
    limit_bytes: int,
    register: Callable[[int, int], None],
    unregister: Callable[[int], None],
) -> RegisteredExtents:
    """Return the registered extents of a reader, which all loaders over it share; the first loader's limit holds."""
    with _of_readers_lock:
        known = _of_readers.get(reader)
        found = known() if known is not None else None
        if found is None:
            found = RegisteredExtents(reader, register, unregister)
            found.limit_bytes = limit_bytes
            _of_readers[reader] = ref(found)
        return found
