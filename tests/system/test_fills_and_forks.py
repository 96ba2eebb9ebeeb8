"""A process that is forked during a fill does not keep the extent from being sealed."""

from __future__ import annotations

import multiprocessing
import os

from cachesvc.core.model import HUGE_BYTES, ExtentId
from cachesvc.system.buffers import Buffers
from cachesvc.system.fill_target import open_target
from cachesvc.tiers.checksum import StreamedChecksums
from cachesvc.tiers.ram import RamTier


def test_an_extent_is_sealed_while_a_child_lives_that_was_forked_during_its_fill() -> None:
    forks = multiprocessing.get_context("fork")
    sealed, extent, tier = forks.Event(), ExtentId(bytes(16)), RamTier()
    child = forks.Process(target=sealed.wait)
    fd = tier.reserve(extent, HUGE_BYTES)
    try:
        with open_target(fd, HUGE_BYTES, Buffers(0)):
            child.start()
        tier.commit(extent, StreamedChecksums(HUGE_BYTES).checksums(fd))
    finally:
        sealed.set()
        child.join()
        os.close(fd)
        tier.close()
