"""The promises of the Grants protocol, for every implementation: a daemon's grants, direct fills, local files, the
wrappers around them, and the fake of the loader's tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from cachesvc.catalog.catalog import Catalog
from cachesvc.client.control import Control
from cachesvc.client.failover import FailoverGrants
from cachesvc.client.grants import DaemonGrants
from cachesvc.client.protocol import Granted, Grants, Refused
from cachesvc.core.errors import CacheError, DaemonUnavailable, DeadlineExceeded, NotFound, SourceUnavailable
from cachesvc.core.model import DatasetId, Extent
from cachesvc.system.fill_target import OnBytes
from loader.reading.direct.direct_grants import DirectGrants
from testbed import WAIT_S
from testbed.node import Daemon
from tests.support.descriptors import descriptors
from tests.support.processes import stopped_fills
from tests.support.reading import contents
from tests.support.records import EXTENT, EXTENTS, RECORDS
from tests.support.training.loader_fakes import MemoryGrants, compiled, encoded, extent_bytes
from tests.support.waiting import wait_until

ROOM = 6
"""Extents that a daemon, direct fills and the fake have room for."""
TIMEOUT_S = 30.0


class Fills:
    """Direct fills of one catalog, which can be stalled and made to fail."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.failing = self.stalled = False

    def grants(self) -> DirectGrants:
        return DirectGrants(lambda index: encoded(self.catalog.extent(index)), *self._sources)

    def local(self) -> DirectGrants:
        return DirectGrants(self.catalog.extent, *self._sources)

    @property
    def _sources(self) -> tuple[Callable[[Extent, int, OnBytes], str], Callable[[int], float], int]:
        return self._fill, lambda _: 0.0, ROOM * EXTENT

    def _fill(self, extent: Extent, fd: int, passing: OnBytes) -> str:
        wait_until(lambda: not self.stalled)
        if self.failing:
            raise SourceUnavailable("the source is busy; try again")
        os.pwrite(fd, extent_bytes(extent), 0)
        return ""


class Setting:
    """One dataset and the ways to its extents."""

    def __init__(self, daemon: Daemon, root: Path) -> None:
        self.daemon, self.body = daemon, os.urandom(EXTENTS * EXTENT)
        self.file = root / "data/0.bin"
        self.file.parent.mkdir()
        self.file.write_bytes(self.body)
        link = compiled(root / "data", root, format="records", record_bytes=4096, extent_bytes=EXTENT)
        self.fills = Fills(link.catalog())

    def open(self) -> DatasetId:
        with Control(self.daemon.socket_dir) as control:
            return control.open_dataset([f"{self.file.parent}/"], RECORDS).id

    def part(self, extent: int) -> bytes:
        return self.body[extent * EXTENT : (extent + 1) * EXTENT]

    def daemons(self) -> DaemonGrants:
        return DaemonGrants(self.daemon.socket_dir, self.open())

    def failover(self) -> FailoverGrants:
        return FailoverGrants(self.daemons(), self.fills.grants())

    def fallback(self) -> FailoverGrants:
        gone = MemoryGrants(self.fills.catalog.extent)
        gone.alive = False
        return FailoverGrants(gone, self.fills.grants())

    def copied(self) -> DirectGrants:
        """Local files all of which are copied."""
        grants = self.fills.local()
        grants.follow(range(EXTENTS), EXTENTS * EXTENT)

        def are_copied() -> bool:
            answers = grants.acquire(range(EXTENTS), TIMEOUT_S)
            grants.release(close_all(answers))
            return {answer.origin for answer in answers if isinstance(answer, Granted)} == {"direct"}

        wait_until(are_copied)
        return grants

    def memory(self) -> MemoryGrants:
        return MemoryGrants(self.fills.catalog.extent, room=ROOM)

    @contextmanager
    def stalled(self) -> Iterator[None]:
        """No fill ends meanwhile."""
        with Control(self.daemon.socket_dir) as control:
            control.evict(self.open())
        self.fills.stalled = True
        with stopped_fills(self.daemon):
            yield
        self.fills.stalled = False


MAKERS: dict[str, Callable[[Setting], Grants]] = {
    "daemon": Setting.daemons,
    "failover": Setting.failover,
    "fallback": Setting.fallback,
    "direct": lambda setting: setting.fills.grants(),
    "local": lambda setting: setting.fills.local(),
    "copied": Setting.copied,
    "memory": Setting.memory,
}
FILLING = ["daemon", "failover", "fallback", "direct"]
"""The implementations whose extents are filled on demand."""


def leases(grants: object) -> int:
    """Leases that are out."""
    match grants:
        case DaemonGrants():
            return sum(grants._leases.values())
        case DirectGrants():
            return sum(copy.leases for copy in grants._copies.values())
        case MemoryGrants():
            return sum(grants.leases.values())
        case FailoverGrants():
            assert sum(grants._from_fallback.values()) == leases(grants._fallback)
            return leases(grants._primary) + leases(grants._fallback)
    raise AssertionError(grants)


def close_all(answers: Sequence[Granted | Refused]) -> list[int]:
    """Close the descriptors of granted extents; returns these extents."""
    granted = [answer for answer in answers if isinstance(answer, Granted)]
    for answer in granted:
        os.close(answer.fd)
    return [answer.extent for answer in granted]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    root = tmp_path_factory.mktemp("node")
    options = ["--ram", f"{ROOM}MiB", "--extent-bytes", str(EXTENT), "--allow", f"{root.parent}/"]
    with Daemon(root, options) as found:
        yield found


@pytest.fixture
def setting(daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return Setting(daemon, tmp_path_factory.mktemp("set"))


@pytest.fixture(params=MAKERS)
def grants(setting: Setting, request: pytest.FixtureRequest) -> Iterator[Grants]:
    found = MAKERS[request.param](setting)
    yield found
    found.close()


def test_each_extent_is_answered_once_with_its_bytes(grants: Grants, setting: Setting) -> None:
    for extents in ([5], [3, 1, 2]):
        answers = {answer.extent: contents(answer) for answer in grants.acquire(extents, TIMEOUT_S)}
        assert answers == {extent: setting.part(extent) for extent in extents}
        grants.release(extents)


def test_released_extents_are_granted_again_and_nothing_stays_open(grants: Grants, setting: Setting) -> None:
    assert contents(*grants.acquire([0], TIMEOUT_S)) == setting.part(0)
    grants.release([0])
    before = descriptors()
    for _ in range(5):
        assert contents(*grants.acquire([0], TIMEOUT_S)) == setting.part(0)
        grants.release([0])
    assert leases(grants) == 0
    wait_until(lambda: descriptors() <= before)


def test_leases_of_one_extent_are_counted(grants: Grants, setting: Setting) -> None:
    first, second = grants.acquire([2], TIMEOUT_S) + grants.acquire([2], TIMEOUT_S)
    counted = leases(grants)
    assert contents(first) == setting.part(2)
    grants.release([2])
    assert leases(grants) == max(0, counted - 1)
    assert contents(second) == setting.part(2)
    grants.release([2])
    assert leases(grants) == 0


def test_a_refused_extent_is_granted_once_others_are_released(grants: Grants, setting: Setting) -> None:
    answers = grants.acquire(range(EXTENTS), TIMEOUT_S)
    refused = [answer.extent for answer in answers if isinstance(answer, Refused)]
    granted = close_all(answers)
    assert len(granted) >= ROOM - 1
    assert sorted(granted + refused) == [*range(EXTENTS)]
    grants.release(granted)
    for extent in refused:
        found: list[Granted | Refused] = []

        def is_granted(extent: int = extent, found: list[Granted | Refused] = found) -> bool:
            found[:] = grants.acquire([extent], TIMEOUT_S)
            return isinstance(found[0], Granted)

        wait_until(is_granted)
        assert contents(*found) == setting.part(extent)
        grants.release([extent])


def test_threads_get_the_extents_that_they_request(grants: Grants, setting: Setting) -> None:
    def reads(seed: int) -> bool:
        right = True
        for extent in ((seed + turn) % ROOM for turn in range(12)):
            (answer,) = grants.acquire([extent], TIMEOUT_S)
            if isinstance(answer, Granted):
                right = right and contents(answer) == setting.part(extent)
                grants.release([extent])
        return right

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(reads, range(3)))
    assert leases(grants) == 0


def test_an_unknown_extent_is_an_error_that_leases_nothing(grants: Grants, setting: Setting) -> None:
    def reads() -> None:
        assert contents(*grants.acquire([0], TIMEOUT_S)) == setting.part(0)
        grants.release([0])

    reads()
    before = descriptors()
    with pytest.raises((CacheError, IndexError)):
        grants.acquire([0, EXTENTS + 3], TIMEOUT_S)
    assert leases(grants) == 0
    reads()
    wait_until(lambda: descriptors() <= before + 1)  # a copy without leases


@pytest.mark.parametrize("kind", ["daemon", "failover", "fallback", "direct", "local"])
def test_an_extent_that_cannot_be_read_is_a_typed_error_that_leases_nothing(
    setting: Setting, kind: str
) -> None:
    grants = MAKERS[kind](setting)
    setting.file.rename(setting.file.with_name("gone"))
    setting.fills.failing = True
    before = descriptors()
    with pytest.raises((NotFound, SourceUnavailable, DaemonUnavailable)):
        grants.acquire([1, 4], TIMEOUT_S)
    assert leases(grants) == 0
    # A connection, and copies that have yet to be discarded.
    wait_until(lambda: descriptors() <= before + 1 + ROOM)
    grants.close()


def test_a_failed_fill_is_retried_by_the_next_request(setting: Setting) -> None:
    grants = setting.fills.grants()
    setting.fills.failing = True
    with pytest.raises(SourceUnavailable):
        grants.acquire([0], TIMEOUT_S)
    setting.fills.failing = False
    assert contents(*grants.acquire([0], TIMEOUT_S)) == setting.part(0)
    grants.close()


@pytest.mark.parametrize("kind", FILLING)
def test_a_request_past_its_deadline_leases_nothing_and_the_next_one_succeeds(
    setting: Setting, kind: str
) -> None:
    grants = MAKERS[kind](setting)
    with setting.stalled(), pytest.raises((DeadlineExceeded, DaemonUnavailable)):
        grants.acquire([3], 0.2)
    assert leases(grants) == 0
    wait_until(lambda: contents(*grants.acquire([3], WAIT_S)) == setting.part(3))
    grants.release([3])
    grants.close()


def test_steps_may_be_passed_at_any_time(grants: Grants, setting: Setting) -> None:
    for step in (0, 5, 1 << 40):
        grants.passed(step)
    assert contents(*grants.acquire([0], TIMEOUT_S)) == setting.part(0)
    grants.release([0])
    grants.passed(0)


def test_close_ends_leases_and_leaves_granted_descriptors_readable(grants: Grants, setting: Setting) -> None:
    answers = grants.acquire([0, 1], TIMEOUT_S)
    grants.close()
    grants.close()
    assert leases(grants) == 0
    with ExitStack() as descriptors_closed:
        for answer in answers:
            assert isinstance(answer, Granted)
            descriptors_closed.callback(os.close, answer.fd)
            assert os.pread(answer.fd, EXTENT, answer.offset) == setting.part(answer.extent)
    with pytest.raises(CacheError, match="closed"):
        grants.acquire([0], TIMEOUT_S)
    grants.release([0, 1])
    grants.passed(1)
