"""A daemon that the tests of a module share, each with datasets of its own."""

from __future__ import annotations

import gc
from collections.abc import Iterator

from cachesvc.client.control import Control
from cachesvc.core.model import DatasetId
from testbed.node import Daemon
from tests.support.waiting import wait_until

EMPTY_S = 10.0


def for_one_test(shared: Daemon) -> Iterator[Daemon]:
    """Lend a shared daemon to one test, which may kill or end it. The daemon lives before the test, and is empty after
    it."""
    assert shared.process is not None
    if shared.process.poll() is not None:
        shared.start()
    yield shared
    if shared.process.poll() is None and not emptied(shared):
        gc.collect()  # readers that the test left behind
        try:
            wait_until(lambda: emptied(shared), EMPTY_S)
        except AssertionError:  # the traceback of a failed test still refers to its readers
            shared.kill()


def emptied(daemon: Daemon) -> bool:
    """Unpin and evict everything; return True once the daemon holds nothing and the last reader has left."""
    with Control(daemon.socket_dir) as control:
        for each in control.list():
            control.pin(DatasetId(each.dataset.id), False)
            control.evict(DatasetId(each.dataset.id))
        status = control.status()
    return status.readers == 0 and all(tier.used_bytes == tier.held_bytes == 0 for tier in status.tiers)
