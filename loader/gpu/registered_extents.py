"""The extents of one reader that are registered with the CUDA driver, so that devices read them where they lie.

A registered extent is pinned and stays leased: neither the kernel nor the daemon can take its memory. So their bytes
are capped, and an extent is unregistered when the reader gives it up, because of a recall for example.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import ReferenceType, WeakKeyDictionary, ref

from loader.reading.reader import ExtentReader, Ints

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
        """At most this many bytes are registered at once."""
        self._place_of = reader.place_of
        self._register, self._unregister = register, unregister
        self._bytes_by_extent: OrderedDict[int, int] = OrderedDict()
        self._in_use: dict[object, Ints] = {}
        self._registered: Ints | None = None
        """Extents that were registered together, and none of them given up since."""
        self._lock = threading.Lock()
        reader.before_unmapping(self._forget)

    @property
    def registered_bytes(self) -> int:
        """Bytes that are registered now."""
        with self._lock:
            return sum(self._bytes_by_extent.values())

    @contextmanager
    def using(self, extents: Ints) -> Iterator[bool]:
        """Keep extents registered meanwhile; yields False when they do not fit. The caller keeps them mapped. The same
        array again costs nothing while none of its extents was given up."""
        read = object()
        with self._lock:
            fits = extents is self._registered or self._register_all(extents)
            if fits:
                self._registered = self._in_use[read] = extents
        try:
            yield fits
        finally:
            with self._lock:
                self._in_use.pop(read, None)

    def _register_all(self, extents: Ints) -> bool:
        """Register extents, and unregister others, those used least recently first, as far as the limit demands. Returns
        False, and changes nothing, where that is not enough."""
        registered, wanted = self._bytes_by_extent, extents.tolist()
        kept = set(wanted).union(*(each.tolist() for each in self._in_use.values()))
        sizes = {extent: self._place_of(extent)[1] for extent in wanted}
        held_bytes = sum(
            size for extent, size in registered.items() if extent in kept and extent not in sizes
        )
        if sum(sizes.values()) + held_bytes > self.limit_bytes:
            return False
        excess = sum(registered.values()) - self.limit_bytes
        excess += sum(size for extent, size in sizes.items() if extent not in registered)
        for extent in [each for each in registered if each not in kept]:
            if excess <= 0:
                break
            excess -= registered[extent]
            self._drop(extent)
        return all(map(self._ensure, wanted))

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
        self._registered = None
        self._unregister(self._place_of(extent)[0])


_of_readers: WeakKeyDictionary[ExtentReader, ReferenceType[RegisteredExtents]] = WeakKeyDictionary()
"""The reader calls it back before it unmaps an extent, and so keeps them valid."""
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
