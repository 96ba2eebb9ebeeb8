"""Extents that this process fills from the source into its own memory."""

from __future__ import annotations

import os
import resource
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress

import numpy as np
import pytest

from cachesvc.catalog.catalog import Catalog
from cachesvc.client.protocol import Granted, Refused
from cachesvc.core.errors import (
    SourceUnavailable,
    TierFailed,
)
from cachesvc.core.model import Extent
from loader.reading.direct.direct_fills import DirectGrants
from testbed import WAIT_S
from tests.support.descriptors import descriptors
from tests.support.training.loader_fakes import MemoryLink, extent_bytes
from tests.support.waiting import wait_until


def filled(catalog: Catalog, budget: int, failures: int = 0) -> DirectGrants:
    left = [failures]

    def fill(extent: Extent, fd: int) -> str:
        if left[0]:
            left[0] -= 1
            raise SourceUnavailable("the source is busy; try again")
        os.pwrite(fd, extent_bytes(extent), 0)
        return ""

    return DirectGrants(catalog.extent, fill, lambda _: 0.0, budget)


def test_direct_reads_stay_within_their_budget(sequences: tuple[MemoryLink, np.ndarray]) -> None:
    link, _ = sequences
    catalog = link.catalog()
    before = descriptors()
    direct = filled(catalog, budget=3 * 8192)
    direct.follow(range(10))
    for index in range(9):
        [answer] = direct.acquire([index], 10)
        assert isinstance(answer, Granted)
        assert os.pread(answer.fd, 8192, 0) == extent_bytes(catalog.extent(index))
        os.close(answer.fd)
        assert direct._used <= 3 * 8192
        direct.release([index])
    wait([copy.filled for copy in direct._copies.values()], 10)  # room that is being filled ahead is taken
    leased = direct.acquire([0, 1, 2, 3], 10)
    assert [type(answer) for answer in leased].count(Refused) == 1
    for answer in leased:
        if isinstance(answer, Granted):
            os.close(answer.fd)
    direct.close()
    wait_until(lambda: descriptors() <= before)


def test_too_many_open_files_are_a_typed_error_and_keep_nothing_leased(
    sequences: tuple[MemoryLink, np.ndarray],
) -> None:
    grants = filled(sequences[0].catalog(), 10 << 20)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    for spare in (0, 1):  # no memory for an extent; memory for it, and no descriptor of it for the reader
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + spare, limits[1]))
        try:
            with pytest.raises(TierFailed, match="open-file limit"):
                grants.acquire([0], 5.0)
            wait([copy.filled for copy in grants._copies.values()])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    (found,) = grants.acquire([0], 5.0)
    grants.follow(range(8))
    assert isinstance(found, Granted)
    os.close(found.fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (found.fd + 1, limits[1]))
    try:  # what is needed gets its descriptor before anything is read ahead
        (found,) = grants.acquire([0], 5.0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert isinstance(found, Granted)
    os.close(found.fd)
    grants.release([0])
    assert [copy.leases for copy in grants._copies.values()] == [1, *[0] * (len(grants._copies) - 1)]
    grants.close()


def test_extents_behind_the_cursor_are_evicted_for_read_ahead(
    sequences: tuple[MemoryLink, np.ndarray],
) -> None:
    direct = filled(sequences[0].catalog(), budget=3 * 8192)
    direct.follow(range(10))
    ahead = []
    for index in range(9):
        [answer] = direct.acquire([index], 10)
        assert isinstance(answer, Granted)
        os.close(answer.fd)
        ahead.append(index + 1 in direct._copies)
        direct.release([index])
    assert all(ahead)
    direct.close()


def test_a_failing_request_releases_no_lease_of_another(sequences: tuple[MemoryLink, np.ndarray]) -> None:
    catalog, slow, left = sequences[0].catalog(), threading.Event(), [1]

    def fill(extent: Extent, fd: int) -> str:
        if extent.id == catalog.extent(1).id:
            slow.wait(WAIT_S)
        elif left[0]:
            left[0] -= 1
            raise SourceUnavailable("the source is busy; try again")
        return ""

    direct = DirectGrants(catalog.extent, fill, lambda _: 0.0, 2 * 8192)
    with ThreadPoolExecutor() as others:
        failing = others.submit(direct.acquire, [0, 1], 10)  # knows of the first when the second is there
        while left[0]:
            pass
        answers = list[Granted | Refused]()
        while not answers:
            with suppress(SourceUnavailable):
                answers = direct.acquire([0], 10)
        slow.set()
        with pytest.raises(SourceUnavailable):
            failing.result()
    answers += direct.acquire([1], 10)
    assert direct.acquire([2], 10) == [Refused(2)], "both places are leased"
    for answer in answers:
        assert isinstance(answer, Granted)
        os.close(answer.fd)
    direct.close()
