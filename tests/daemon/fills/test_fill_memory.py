"""The memory of fills: bounded, shared, and given back."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard

from cachesvc.core.model import RAM, Piece, extent_of
from cachesvc.core.records.residency import TierState
from cachesvc.daemon.fills.fill_memory import KEPT_PEAKS, MAX_MEASUREMENTS, FillMemory
from cachesvc.sources.fetch import Fetcher
from cachesvc.sources.files import FilesSource
from cachesvc.system.buffers import Buffers
from tests.support.waiting import wait_until

MIB = 1 << 20


class Begun:
    """Records the names of the fills that have begun."""

    def __init__(self, work: FillMemory) -> None:
        self.work, self.names = work, list[str]()

    def begin(self, name: str, cost_bytes: int) -> None:
        self.work.begin(cost_bytes, lambda: self.names.append(name))


def test_fills_begin_in_order_while_there_is_memory() -> None:
    begun = Begun(FillMemory(least_bytes=10, room_bytes=0, ram=None))
    for name, cost_bytes in [("a", 6), ("b", 4), ("large", 60), ("c", 1)]:
        begun.begin(name, cost_bytes)
    assert begun.names == ["a", "b"]
    begun.work.end(6)
    assert begun.names == ["a", "b"], "c does not overtake the fill before it"
    begun.work.end(4)
    assert begun.names == ["a", "b", "large"], "a fill that runs alone may exceed the limit"
    begun.work.end(60)
    assert begun.names == ["a", "b", "large", "c"]


def test_fills_use_memory_that_the_ram_tier_does_not() -> None:
    ram = TierState(RAM, 100, 100)
    begun = Begun(FillMemory(least_bytes=10, room_bytes=110, ram=ram))
    begun.begin("a", 60)
    ram.used_bytes, ram.held_bytes = 30, 10
    begun.begin("b", 11)
    assert begun.names == ["a"]
    ram.held_bytes = 9
    begun.work.memory_measured()
    assert begun.names == ["a", "b"]


@pytest.mark.parametrize("shrinks", [True, False])
def test_a_large_fill_waits_for_the_ram_tier_but_not_forever(shrinks: bool) -> None:
    ram = TierState(RAM, 100, 100, used_bytes=100)
    begun = Begun(FillMemory(least_bytes=10, room_bytes=110, ram=ram))
    begun.begin("large", 60)
    assert begun.work.to_come_bytes == 60, "the RAM tier leaves it free"
    begun.work.memory_measured()
    assert not begun.names
    ram.used_bytes -= 50 * shrinks
    begun.work.memory_measured()
    assert begun.names == ["large"] * shrinks
    for _ in range(2, MAX_MEASUREMENTS):
        begun.work.memory_measured()
    assert begun.names == ["large"]


def test_recent_peaks_of_fills_count_as_used_for_some_time() -> None:
    work = FillMemory(least_bytes=10, room_bytes=0, ram=None)
    assert work.to_come_bytes == 10
    work.begin(8, lambda: None)
    assert work.to_come_bytes == 2
    work.end(8)
    for _ in range(KEPT_PEAKS):
        work.memory_measured()
        assert work.to_come_bytes == 2
    work.memory_measured()
    assert work.to_come_bytes == 10


def test_buffers_are_reused_and_a_request_that_does_not_fit_waits() -> None:
    buffers, got = Buffers(4 * MIB), threading.Event()
    with buffers.borrowed(3 * MIB) as first:
        first[:1] = b"x"

        def take() -> None:
            with buffers.borrowed(MIB):
                got.set()

        waiting = threading.Thread(target=take)
        waiting.start()
        assert not got.wait(0.05), "three MiB take four"
    waiting.join()
    with buffers.borrowed(5 * MIB) as alone:
        assert len(alone) == 5 * MIB


def _anonymous_bytes() -> int:
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) << 10


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _fetch(folder: Path, codec: str, limit_bytes: int) -> None:
    """Fetch 32 MiB of one object, and wait until the process has less anonymous memory than `limit_bytes`."""
    plain = os.urandom(32 * MIB)
    path = folder / "object"
    path.write_bytes(zstandard.compress(plain) if codec else plain)
    source, fd = FilesSource(), os.memfd_create("target")
    fetcher = Fetcher(lambda _: source, part_bytes=8 * MIB)
    try:
        fetcher.fetch(extent_of([Piece(source.head(str(path)), 0, len(plain), codec)]), fd)
        assert os.pread(fd, MIB, 31 * MIB) == plain[31 * MIB :]
        del plain
        wait_until(lambda: _anonymous_bytes() < limit_bytes)
    finally:
        fetcher.close()
        os.close(fd)


@pytest.mark.parametrize("codec", ["", "zstd"])
def test_a_fetch_leaves_no_memory_behind(tmp_path: Path, codec: str, no_collection: None) -> None:
    """Measured without a garbage collection, since a filler's next one may be minutes away."""
    _fetch(tmp_path, codec, _anonymous_bytes() + 16 * MIB)
