"""Prepares extents for the daemon of this node, on threads beside the ones that read.

Each thread that reads prepared samples has one that prepares. It works while the reading one waits for the daemon, and
rests with it: after `IDLE_S` without a read it ends its offer.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import get_worker_info

from cachesvc.catalog.layout import OFFSET_BYTES
from cachesvc.catalog.prepared import PreparedForm
from cachesvc.client.preparing import PreparerConnection, Work
from cachesvc.core.errors import CacheError, DaemonUnavailable, OutOfSpace, TierFailed, is_bad_sample
from cachesvc.core.limits import PROBE_CAP_S
from cachesvc.system.fork_hooks import abandon_in_children
from cachesvc.tiers.checksum import DIGEST_BYTES, block_digest
from cachesvc.tiers.tier import CHECKSUM_BLOCK_BYTES
from loader.prepare.records import error_fields
from loader.prepare.uneven import record_of, record_of_error
from loader.reading.reader import Ints

IDLE_S = 60.0
"""How long a thread goes on to prepare after the last read beside it."""
LOOK_S = 0.5
"""How often an idle thread looks whether it is to end."""
SAMPLES_AT_ONCE = 32
"""Samples whose bytes are read at once."""
MAX_MESSAGE_BYTES = 1 << 10
_log = logging.getLogger("cachesvc")


class Maker(Protocol):
    """Makes prepared samples of a dataset."""

    @property
    def form(self) -> PreparedForm:
        """The form of their records."""
        ...

    def samples(self, ids: Ints) -> Iterator[Any]:
        """Make samples one at a time. Raises the error of the first that cannot be made."""
        ...

    def content_of(self, sample: int) -> bytes:
        """Return the digest of the bytes of a sample's extent in the source. Raises the errors of reading."""
        ...


class Preparers:
    """The preparing threads of one dataset in this process. Safe to share between threads; a forked child begins anew."""

    def __init__(self, connect: Callable[[], PreparerConnection], maker: Maker, extent_first: Ints) -> None:
        """`extent_first`: the first sample of each prepared extent."""
        self._connect, self._maker, self._first = connect, maker, extent_first
        self._own = threading.local()
        self._lock = threading.Lock()
        self._threads: list[_Thread] = []
        weakref.finalize(self, _stop, self._threads).atexit = False

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Prepare while the body reads, and for a while after it."""
        mine: _Thread | None = getattr(self._own, "thread", None)
        if mine is None or not mine.alive:
            mine = self._own.thread = _Thread(self._connect, self._maker, self._first)
            with self._lock:
                self._threads[:] = [*(each for each in self._threads if each.alive), mine]
            abandon_in_children(self)
            mine.start()
        mine.reads += 1
        try:
            yield
        finally:
            mine.reads -= 1
            mine.read_at = time.monotonic()

    def close(self) -> None:
        """End all offers. An extent that is being prepared goes to another process."""
        with self._lock:
            _stop(self._threads)

    def abandon(self) -> None:
        """Forget the parent's threads in a forked child."""
        for each in self._threads:
            each.abandon()
        self._own, self._lock = threading.local(), threading.Lock()
        self._threads.clear()


def _stop(threads: list[_Thread]) -> None:
    for each in threads:
        each.stop()


class _Thread:
    def __init__(self, connect: Callable[[], PreparerConnection], maker: Maker, first: Ints) -> None:
        self._connect, self._maker, self._first = connect, maker, first
        self._connection: PreparerConnection | None = None
        self._begun: PreparerConnection | None = None
        self._ends = threading.Event()
        self.reads, self.read_at = 0, time.monotonic()
        self.alive = True

    def start(self) -> None:
        """Offer to prepare, so that the daemon knows of it before the first read, and start the thread."""
        with suppress(CacheError):
            self._connection = self._begun = self._connect()
        threading.Thread(target=self._run, name="cachesvc-prepare", daemon=True).start()

    def stop(self) -> None:
        self._ends.set()
        if (connection := self._connection) is not None:
            connection.end()

    def abandon(self) -> None:
        if self._connection is not None:
            self._connection.abandon()

    @property
    def _rests(self) -> bool:
        return not self.reads and time.monotonic() - self.read_at >= IDLE_S

    def _run(self) -> None:
        if get_worker_info() is not None:  # in a forked child torch cannot use several threads
            torch.set_num_threads(1)
        try:
            serve(self._connected, self._maker, self._first, lambda: self._ends.is_set() or self._rests)
        finally:
            self.alive = False

    def _connected(self) -> PreparerConnection:
        """Return the connection that `start` made, and then others."""
        made, self._begun = self._begun, None
        self._connection = made or self._connect()
        return self._connection


def serve(
    connect: Callable[[], PreparerConnection], maker: Maker, extent_first: Ints, ends: Callable[[], bool]
) -> None:
    """Prepare what the daemon wants until `ends()`, also after its restarts. `connect` makes a connection."""
    while not ends():
        try:
            with closing(connect()) as connection:
                while not ends():
                    if (work := connection.next(LOOK_S)) is not None:
                        prepare(connection, work, maker, extent_first, ends)
        except CacheError as error:  # mostly DaemonUnavailable: it restarts
            _log.debug("a preparer is without its daemon: %s", error)
            if not ends():
                time.sleep(PROBE_CAP_S)


def prepare(
    connection: PreparerConnection,
    work: Work,
    maker: Maker,
    extent_first: Ints,
    ends: Callable[[], bool] = lambda: False,
) -> None:
    """Prepare one extent, and report it as made, or why not. Raises DaemonUnavailable when the daemon is gone, and where
    `ends()` says so in the middle."""
    failure: CacheError | None = None
    takes_bytes, failed = 0, list[str]()
    try:
        ids = np.arange(extent_first[work.extent], extent_first[work.extent + 1])
        table = OFFSET_BYTES * (len(ids) + 1) if maker.form.most_bytes else 0
        with Target(work.target, work.size_bytes, table) as target:
            for record in _records(maker, ids, failed):
                if ends():
                    raise DaemonUnavailable("this process prepares no more")
                connection.progress(work, target.write(record))
            connection.progress(work, target.finish())
        takes_bytes = target.size_bytes if table else 0
        if failed:
            _log.warning(
                "%d of %d samples cannot be prepared, and are kept as errors: first %s",
                len(failed),
                len(ids),
                failed[0],
            )
    except DaemonUnavailable:
        raise
    except CacheError as error:
        failure = error
    except Exception as error:  # noqa: BLE001  another process may succeed; otherwise readers get the error themselves
        _log.warning("an extent could not be prepared", exc_info=error)
        failure = CacheError(f"prepare= failed: {type(error).__name__}: {error}")
    connection.made(work, failure, takes_bytes)


def _records(maker: Maker, ids: Ints, failed: list[str]) -> Iterator[bytearray]:
    """Yield the record of each sample, and note in `failed` what is wrong with one. Raises an error that no sample
    caused."""
    for begin in range(0, len(ids), SAMPLES_AT_ONCE):
        some = ids[begin : begin + SAMPLES_AT_ONCE]
        while len(some):
            done = 0
            try:
                for number, sample in zip(some.tolist(), maker.samples(some), strict=True):
                    record = record_of(maker.form, sample, maker.content_of(number))
                    done += 1
                    yield record
            except Exception as error:
                if not is_bad_sample(error):
                    raise
                failed.append(
                    f"sample {some[done]}: {error_fields(error, MAX_MESSAGE_BYTES)[1].decode(errors='replace')}"
                )
                yield record_of_error(maker.form, error, maker.content_of(int(some[done])))
                done += 1
            some = some[done:]


class Target:
    """Writes an extent from its beginning to its end, in whole blocks. Closes the descriptor at the end.

    An extent of uneven records begins with a table of their offsets, which is known last: the blocks that hold it are
    digested once more, and no digest is told before.
    """

    def __init__(self, fd: int, most_bytes: int, table_bytes: int = 0) -> None:
        """`most_bytes`: the room of the target."""
        self._fd, self._most_bytes, self._at = fd, most_bytes, 0
        self._rest = bytearray(table_bytes)
        self._offsets, self._digests = [table_bytes] if table_bytes else [], bytearray()

    def __enter__(self) -> Target:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    @property
    def size_bytes(self) -> int:
        """The bytes written so far."""
        return self._at + len(self._rest)

    def write(self, record: bytearray) -> bytes:
        """Add a record; return the digests of the blocks that are complete. Raises OutOfSpace, TierFailed, CacheError
        where there is no room."""
        if self.size_bytes + len(record) > self._most_bytes:
            raise CacheError("an extent is larger than it was before: prepare= is not deterministic")
        self._rest += record
        digests = self._store(len(self._rest) // CHECKSUM_BLOCK_BYTES * CHECKSUM_BLOCK_BYTES)
        if not self._offsets:
            return digests
        self._offsets.append(self.size_bytes)
        self._digests += digests
        return b""

    def finish(self) -> bytes:
        """Write the last block, and the table; return the digests that are left."""
        last = self._store(len(self._rest))
        if not self._offsets:
            return last
        self._digests += last
        table = np.asarray(self._offsets, "<u8").tobytes()
        self._put(memoryview(table), 0)
        for begin in range(0, len(table), CHECKSUM_BLOCK_BYTES):
            size = min(CHECKSUM_BLOCK_BYTES, self._at - begin)
            at = begin // CHECKSUM_BLOCK_BYTES * DIGEST_BYTES
            self._digests[at : at + DIGEST_BYTES] = block_digest(memoryview(os.pread(self._fd, size, begin)))
        return bytes(self._digests)

    def _store(self, count: int) -> bytes:
        digests = []
        with memoryview(self._rest)[:count] as whole:
            for begin in range(0, count, CHECKSUM_BLOCK_BYTES):
                digests.append(block_digest(whole[begin : begin + CHECKSUM_BLOCK_BYTES]))
            self._put(whole, self._at)
        del self._rest[:count]
        self._at += count
        return b"".join(digests)

    def _put(self, data: memoryview, at: int) -> None:
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self._fd, data[done:], at + done)
        except OSError as error:
            failure = OutOfSpace if error.errno in (28, 122) else TierFailed
            raise failure(f"cannot write a prepared extent: {error.strerror}") from error
