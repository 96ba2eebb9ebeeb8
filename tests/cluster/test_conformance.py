"""The conformance suite of every membership, and files of members that are written in other ways than by renaming."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachesvc.cluster.open import open_membership
from cachesvc.cluster.polled import MAX_BYTES, Membership, Registration
from tests.support.membership.sources import DnsSource, EtcdSource, FileSource, OperatorSource
from tests.support.membership.watching import Watching
from tests.support.waiting import wait_until

ME = Registration("node-0", "10.0.0.9:7070", "zone-a")
A, B, C = "10.0.0.1:7070", "10.0.0.2:7071", "[2001:db8::3]:7070"
KINDS = {"file": FileSource, "dns": DnsSource, "etcd": EtcdSource}


@pytest.fixture(params=KINDS)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OperatorSource]:
    made = KINDS[request.param](tmp_path)
    yield made
    made.stop()


def watching(source: OperatorSource) -> Watching:
    return Watching(open_membership(source.spec, ME), without=[ME.address])


def outages(caplog: pytest.LogCaptureFixture) -> int:
    return sum("members cannot be read" in record.message for record in caplog.records)


def returns(caplog: pytest.LogCaptureFixture) -> int:
    return sum("known again" in record.message for record in caplog.records)


def test_the_first_list_has_all_members(source: OperatorSource) -> None:
    source.set([A, B, C])
    with watching(source) as seen:
        seen.until([A, B, C])


def test_a_change_is_seen(source: OperatorSource) -> None:
    source.set([A])
    with watching(source) as seen:
        seen.until([A])
        source.set([A, B, C])
        seen.until([A, B, C])
        source.set([C])
        seen.until([C])


def test_the_last_list_holds_while_the_source_is_away(
    source: OperatorSource, caplog: pytest.LogCaptureFixture
) -> None:
    source.set([A, B])
    with watching(source) as seen:
        seen.until([A, B])
        source.lose()
        wait_until(lambda: outages(caplog) == 1)
        source.set([A, B])
        wait_until(lambda: returns(caplog) == 1)
        assert seen.told == 0
        source.set([B])
        seen.until([B])
    assert outages(caplog) == 1


def test_a_source_that_comes_late_is_seen(source: OperatorSource, caplog: pytest.LogCaptureFixture) -> None:
    with watching(source) as seen:
        wait_until(lambda: outages(caplog) == 1)
        assert seen.told == 0
        source.set([A])
        seen.until([A])


def test_a_source_without_members_is_away(source: OperatorSource, caplog: pytest.LogCaptureFixture) -> None:
    if isinstance(source, EtcdSource):
        pytest.skip("etcd always has this node itself")
    source.set([A])
    with watching(source) as seen:
        seen.until([A])
        source.set([])
        wait_until(lambda: outages(caplog) == 1)
        assert seen.told == 0
        source.set([B])
        seen.until([B])


def test_close_ends_the_watch_of_a_lost_source(
    source: OperatorSource, caplog: pytest.LogCaptureFixture
) -> None:
    source.set([A])
    with watching(source) as seen:
        seen.until([A])
        source.lose()
        wait_until(lambda: outages(caplog) == 1)


@pytest.mark.slow
def test_close_ends_the_watch_of_a_silent_source(
    source: OperatorSource, caplog: pytest.LogCaptureFixture
) -> None:
    source.set([A])
    if isinstance(source, FileSource):
        pytest.skip("a file cannot be silent")
    assert isinstance(source, DnsSource | EtcdSource)
    with watching(source) as seen:
        seen.until([A])
        source.server.signal(signal.SIGSTOP)
        wait_until(lambda: outages(caplog) == 1)


def test_close_before_the_watch_ends_it_at_once(source: OperatorSource) -> None:
    membership = open_membership(source.spec, ME)
    membership.close()
    membership.close()
    membership.watch(lambda _: pytest.fail("it is closed"))


def test_a_static_list_is_told_once_and_closed() -> None:
    membership: Membership = open_membership("static:10.0.0.1:7070,10.0.0.2:7071,[2001:db8::3]:7070", ME)
    with Watching(membership) as seen:
        seen.until([A, B, C])
    assert seen.told == 0
    membership.watch(lambda _: pytest.fail("it is closed"))


@pytest.fixture(autouse=True)
def warnings_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="cachesvc.cluster")


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(f"{A}\n10.0.0.2", id="cut"),
        pytest.param(f"{A} {B}\n", id="two on a line"),
        pytest.param("# none\n", id="comments only"),
        pytest.param("\udcff", id="no text"),
        pytest.param("#" * (MAX_BYTES + 1), id="too long"),
    ],
)
def test_an_invalid_file_is_logged_once_and_the_last_list_holds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, bad: str
) -> None:
    source = FileSource(tmp_path)
    source.set([A])
    with Watching(open_membership(source.spec, ME)) as seen:
        seen.until([A])
        source.path.write_bytes(bad.encode(errors="surrogateescape"))
        wait_until(lambda: len(caplog.records) == 1)
        assert seen.told == 0
        source.path.write_text(f"{A}\n{B}\n")
        seen.until([A, B])
    assert ["last list holds" in record.message for record in caplog.records] == [True, False]


def test_a_folder_that_is_swapped_behind_a_link_is_seen(tmp_path: Path) -> None:
    """Kubernetes updates the files of a ConfigMap so."""
    for version, address in (("1", A), ("2", B)):
        (tmp_path / version).mkdir()
        (tmp_path / version / "members").write_text(f"{address}\n")
    (tmp_path / "now").symlink_to("1")
    with Watching(open_membership(f"file://{tmp_path}/now/members", ME)) as seen:
        seen.until([A])
        (tmp_path / "next").symlink_to("2")
        os.replace(tmp_path / "next", tmp_path / "now")
        seen.until([B])


def test_a_file_that_is_touched_changes_nothing(tmp_path: Path) -> None:
    source = FileSource(tmp_path)
    source.set([A])
    with Watching(open_membership(source.spec, ME)) as seen:
        seen.until([A])
        source.set([A])
        source.replace(f"{B}\n")
        assert {each.address for each in seen.next()} == {B}
