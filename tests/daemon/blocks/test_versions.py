"""Releases that follow one another speak the lower version of the blocks' protocol."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from cachesvc.daemon.blocks.client import PeerFailed
from cachesvc.daemon.blocks.wire import OLDEST_VERSION, VERSION, VERSIONS
from testbed import WAIT_S
from tests.support.membership.blocks import DATA, Copy, client, digests_of, resident, serving

DIGESTS = digests_of(DATA)
OLD, NEW, NEWER = range(1, 2), range(1, 3), range(2, 4)


@pytest.mark.parametrize(
    ("server", "reader"), [(OLD, NEW), (NEW, OLD), (NEW, NEWER), (NEWER, NEW), (NEW, NEW)]
)
def test_neighbours_agree_on_the_lower_version(server: range, reader: range) -> None:
    with resident() as lend, serving(lend, versions=server) as address, client(versions=reader) as peers:
        for _ in range(2):
            with Copy() as copy:
                assert copy.read_from(peers, address) == DIGESTS
                assert copy.bytes() == DATA


def test_reads_that_meet_an_older_node_at_once_all_agree() -> None:
    with (
        resident() as lend,
        serving(lend, versions=OLD) as address,
        client(versions=NEW) as peers,
        ThreadPoolExecutor(8) as pool,
    ):
        together = threading.Barrier(8)

        def read() -> bytes:
            with Copy() as copy:
                together.wait(WAIT_S)
                return copy.read_from(peers, address)

        reading = [pool.submit(read) for _ in range(8)]
        assert [each.result(WAIT_S) for each in reading] == [DIGESTS] * 8


def test_releases_without_a_common_version_say_so() -> None:
    with (
        resident() as lend,
        serving(lend, versions=NEWER) as address,
        client(versions=OLD) as peers,
        Copy() as copy,
        pytest.raises(PeerFailed, match="speaks version 3 of the protocol, and this node 1 to 1"),
    ):
        copy.read_from(peers, address)


def test_this_release_speaks_its_version_and_the_one_before() -> None:
    assert list(VERSIONS) == list(range(OLDEST_VERSION, VERSION + 1))
    assert VERSION - OLDEST_VERSION <= 1
