"""Extents that this process fills from the source into its own memory, or copies from local files."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from cachesvc.catalog.catalog import Catalog
from cachesvc.client.protocol import Granted, Refused
from cachesvc.core.errors import CacheError, SourceUnavailable, TierFailed
from cachesvc.core.model import Extent
from cachesvc.system.fill_target import OnBytes
from cachesvc.tiers.checksum import checksums_of
from loader.reading.direct.direct_grants import DirectGrants
from testbed import WAIT_S
from testbed.node import open_files
from tests.support.descriptors import descriptors
from tests.support.training.loader_fakes import encoded, extent_bytes
from tests.support.waiting import wait_until

SIZE = 8192
TIMEOUT_S = 10.0


def write(extent: Extent, fd: int, passing: OnBytes) -> str:
    os.pwrite(fd, extent_bytes(extent), 0)
    return ""


def filled(
    catalog: Catalog, extents: int, fill: Callable[[Extent, int, OnBytes], str] = write
) -> DirectGrants:
    """Direct grants with room for so many extents."""
    return DirectGrants(lambda index: encoded(catalog.extent(index)), fill, lambda _: 0.0, extents * SIZE)


def held() -> int:
    """Extents in this process's memory."""
    return sum(name.startswith("/memfd:cachesvc-direct") for name in open_files(os.getpid()))


def taken(grants: DirectGrants, extents: Sequence[int]) -> dict[int, str]:
    """Acquire extents, and close their descriptors; returns the origin of each, or "refused"."""
    origins = {}
    for answer in grants.acquire(extents, TIMEOUT_S):
        if isinstance(answer, Granted):
            os.close(answer.fd)
        origins[answer.extent] = answer.origin if isinstance(answer, Granted) else "refused"
    return origins


def test_fills_stay_within_their_budget_and_make_way_for_those_ahead(catalog: Catalog) -> None:
    begun: set[bytes] = set()

    def fill(extent: Extent, fd: int, passing: OnBytes) -> str:
        begun.add(extent.id)
        return write(extent, fd, passing)

    before, held_before = descriptors(), held()
    direct = filled(catalog, 3, fill)
    direct.follow(range(10))
    for index in range(9):
        [answer] = direct.acquire([index], TIMEOUT_S)
        assert isinstance(answer, Granted)
        assert os.pread(answer.fd, SIZE, 0) == extent_bytes(catalog.extent(index))
        os.close(answer.fd)
        assert held() - held_before <= 3
        wait_until(lambda index=index: catalog.extent(index + 1).id in begun)
        direct.release([index])
    wait_until(lambda: [*taken(direct, [0, 1, 2, 3]).values()].count("refused") == 1)
    direct.close()
    wait_until(lambda: descriptors() <= before)


def test_too_many_open_files_are_a_typed_error_and_keep_nothing_leased(catalog: Catalog) -> None:
    grants = filled(catalog, 4, lambda extent, fd, passing: "")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)

    def taken_with(most_files: int) -> dict[int, str]:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, limits[1]))
        try:
            return taken(grants, [0])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    for spare in (0, 1):  # no memory for an extent; memory for it, and no descriptor of it for the reader
        with pytest.raises(TierFailed, match="open-file limit"):
            taken_with(free + spare)
    (found,) = grants.acquire([0], TIMEOUT_S)
    assert isinstance(found, Granted)
    os.close(found.fd)
    grants.follow(range(4))
    assert taken_with(found.fd + 1) == {0: "direct"}, "read before anything is read ahead"
    grants.release([0, 0])

    def have_room() -> bool:
        found = taken(grants, range(4, 8))
        grants.release([extent for extent, origin in found.items() if origin != "refused"])
        return "refused" not in found.values()

    wait_until(have_room)
    grants.close()


def test_a_failing_request_releases_no_lease_of_another(catalog: Catalog) -> None:
    slow, left = threading.Event(), [1]

    def fill(extent: Extent, fd: int, passing: OnBytes) -> str:
        if extent.id == catalog.extent(1).id:
            slow.wait(WAIT_S)
        elif left[0]:
            left[0] -= 1
            raise SourceUnavailable("the source is busy; try again")
        return ""

    direct = filled(catalog, 2, fill)
    with ThreadPoolExecutor() as others:
        failing = others.submit(taken, direct, [0, 1])  # knows of the first when the second is there
        wait_until(lambda: not left[0])
        origins = dict[int, str]()
        while not origins:
            with suppress(SourceUnavailable):
                origins = taken(direct, [0])
        slow.set()
        with pytest.raises(SourceUnavailable):
            failing.result()
    assert taken(direct, [1]) == {1: "direct"}
    assert direct.acquire([2], TIMEOUT_S) == [Refused(2)], "both places are leased"
    direct.close()


def test_room_for_copies_of_files_is_made_by_the_reader(catalog: Catalog) -> None:
    grants = DirectGrants(catalog.extent, write, lambda _: WAIT_S)
    grants.follow(range(4), 2 * SIZE)

    def origin(extent: int) -> str:
        """Acquire an extent and return its origin. A file is for one read."""
        (answer,) = grants.acquire([extent], TIMEOUT_S)
        if isinstance(answer, Refused):
            return "refused"
        os.close(answer.fd)
        once = answer.origin == "local" and extent < 4
        assert (answer.once, answer.brief) == (once, once)
        return answer.origin

    for extent in (0, 1):
        wait_until(lambda extent=extent: origin(extent) == "direct")
    assert [origin(2), origin(2), origin(2)] == ["refused", "local", "refused"]
    assert origin(5) == "local", "no plan has it"
    grants.release([0])
    wait_until(lambda: origin(2) == "direct")
    grants.close()


def test_only_what_a_source_sent_is_digested(catalog: Catalog) -> None:
    fetched = filled(catalog, 2)
    (granted,) = fetched.acquire([0], TIMEOUT_S)
    assert isinstance(granted, Granted)
    assert granted.content == checksums_of(granted.fd, 0, SIZE).content
    os.close(granted.fd)
    fetched.close()
    copies = DirectGrants(catalog.extent, write, lambda _: 0.0)
    copies.follow([0], 2 * SIZE)
    wait_until(lambda: taken(copies, [0]) == {0: "direct"})
    (copied,) = copies.acquire([0], TIMEOUT_S)
    assert isinstance(copied, Granted)
    assert copied.content == b"", "a digest takes longer than a copy"
    os.close(copied.fd)
    copies.close()


def test_close_ends_a_wait_for_a_fill(catalog: Catalog) -> None:
    begun = threading.Event()

    def take(size_bytes: int) -> float:
        begun.set()
        return WAIT_S

    grants = DirectGrants(lambda index: encoded(catalog.extent(index)), write, take)
    with ThreadPoolExecutor() as other:
        waiting = other.submit(taken, grants, range(8))  # more than are filled at once
        begun.wait(WAIT_S)
        grants.close()
        with pytest.raises(CacheError, match="closed"):
            waiting.result(WAIT_S / 2)


def test_a_fill_may_close_its_own_grants(catalog: Catalog) -> None:
    """A thread that fills may be the one that collects a dropped dataset as garbage."""
    before, closed = held(), threading.Event()

    def fill(extent: Extent, fd: int, passing: OnBytes) -> str:
        grants.close()
        closed.set()
        return ""

    grants = filled(catalog, 4, fill)
    with suppress(CacheError):
        taken(grants, [0])
    assert closed.is_set()
    wait_until(lambda: held() <= before)
