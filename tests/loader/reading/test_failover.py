"""Direct reads while the daemon is gone or has no room."""

from __future__ import annotations

import pytest

from cachesvc.catalog.catalog import Catalog
from cachesvc.client.failover import FailoverGrants
from cachesvc.client.protocol import Granted
from cachesvc.core.errors import (
    DaemonUnavailable,
    NotAllowed,
)
from tests.support.reading import contents
from tests.support.training.loader_fakes import MemoryGrants
from tests.support.waiting import wait_until


def test_direct_reads_replace_a_dead_daemon_until_it_is_back(catalog: Catalog) -> None:
    daemon, around = MemoryGrants(catalog.extent), MemoryGrants(catalog.extent, "direct")
    both = FailoverGrants(daemon, around)

    def origin(index: int) -> str:
        [answer] = both.acquire([index], 5)
        assert isinstance(answer, Granted)
        contents(answer)
        both.release([index])
        return answer.origin

    assert origin(0) == "ram"
    daemon.alive = False
    assert origin(1) == "direct"
    asked = daemon.calls
    assert origin(2) == "direct"
    assert daemon.calls == asked, "a daemon that is down is not knocked at for every extent"
    daemon.alive = True
    wait_until(lambda: origin(3) == "ram")
    assert not any(daemon.leases.values())
    assert not any(around.leases.values())


def test_direct_reads_are_told_once_for_each_cause(
    catalog: Catalog, caplog: pytest.LogCaptureFixture
) -> None:
    daemon, around = MemoryGrants(catalog.extent, room=1), MemoryGrants(catalog.extent, "direct")
    both = FailoverGrants(daemon, around)

    def read() -> None:
        for index in range(4):
            contents(*both.acquire([index], 5))

    read()
    read()
    daemon.alive = False
    read()
    read()
    assert [record.getMessage() for record in caplog.records] == [
        "the daemon has no room: reading directly from the source until it has room",
        "the daemon does not serve (the fake daemon is down; start it again): reading directly from the source until it is"
        " back",
    ]


class Forbidden(MemoryGrants):
    """A source without credentials."""

    def acquire(self, extents, timeout_s):  # type: ignore[no-untyped-def]
        raise NotAllowed("no credentials for this bucket; set them")


def test_without_credentials_readers_wait_for_the_daemon_with_a_deadline(catalog: Catalog) -> None:
    daemon = MemoryGrants(catalog.extent)
    daemon.alive = False
    with pytest.raises(DaemonUnavailable, match="no direct reads: the fake daemon is down; start it again"):
        FailoverGrants(daemon, Forbidden(catalog.extent)).acquire([0], 0.3)
    with pytest.raises(DaemonUnavailable):
        FailoverGrants(daemon, None).acquire([0], 0.3)


def test_extents_that_the_daemon_refuses_are_read_directly(catalog: Catalog) -> None:
    both = FailoverGrants(MemoryGrants(catalog.extent, room=1), MemoryGrants(catalog.extent, "direct"))
    answers = both.acquire([0, 1], 5)
    assert [a.origin for a in answers if isinstance(a, Granted)] == ["ram", "direct"]
    for answer in answers:
        contents(answer)
