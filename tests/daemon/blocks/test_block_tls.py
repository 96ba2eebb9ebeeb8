"""Reads of blocks over TLS: the certificates of both sides are verified, by host or by the common name."""

from __future__ import annotations

import fcntl
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import trustme

from cachesvc.config import Tls
from cachesvc.core.errors import InvalidInput
from cachesvc.daemon.blocks.client import PeerBusy, PeerFailed, PeerSilent
from testbed import WAIT_S
from tests.support.membership.blocks import BLOCKS, DATA, Copy, client, digests_of, resident, serving
from tests.support.waiting import wait_until

NAME = "peers.cachesvc.internal"
DIGESTS = digests_of(DATA)


DAYS = {"foreign": (-1, 1), "expired": (-2, -1), "early": (1, 2)}
"""The days from now on which a certificate begins and ends."""


def certified(
    folder: Path, node: str, ca: trustme.CA, name: str = "127.0.0.1", days: tuple[int, int] = (-1, 1)
) -> Tls:
    """The files of a node whose certificate is for `name`; an existing node gets new ones."""
    begin, end = (datetime.now(timezone.utc) + timedelta(days=each) for each in days)
    (folder / node).mkdir(exist_ok=True)
    found = Tls(*(str(folder / node / file) for file in ("cert.pem", "key.pem", "ca.pem")))
    issued = ca.issue_cert(name, not_before=begin, not_after=end)
    ca.cert_pem.write_to_path(found.ca)
    issued.private_key_pem.write_to_path(found.key)
    issued.cert_chain_pems[0].write_to_path(found.certificate)
    return found


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


@contextmanager
def shared(tls: Tls | None) -> Iterator[str]:
    """A peer that has the extent."""
    with resident() as lend, serving(lend, tls) as address:
        yield address


def test_blocks_come_over_tls_while_they_are_filled(tmp_path: Path, ca: trustme.CA) -> None:
    theirs, ours = certified(tmp_path, "theirs", ca), certified(tmp_path, "ours", ca)
    with (
        Copy() as filled,
        serving(filled.lend, theirs) as address,
        client(ours) as peers,
        Copy() as copy,
        ThreadPoolExecutor() as pool,
    ):
        reading = pool.submit(copy.read_from, peers, address)
        for first in range(BLOCKS - 10, -1, -10):
            filled.fill(first, 10)
            wait_until(lambda at=first: copy.progress.complete(at) == BLOCKS - at)
        assert not reading.done()
        filled.progress.finish()
        assert reading.result(WAIT_S) == DIGESTS
        fcntl.fcntl(copy.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        assert copy.bytes() == DATA


def test_one_certificate_serves_all_nodes_under_its_name(tmp_path: Path, ca: trustme.CA) -> None:
    tls = certified(tmp_path, "all", ca, NAME)
    with shared(tls) as address, Copy() as copy:
        with client(tls) as by_host, pytest.raises(PeerFailed, match="certificate"):
            copy.read_from(by_host, address)
        with client(tls, "other.name") as by_another, pytest.raises(PeerFailed, match="certificate"):
            copy.read_from(by_another, address)
        with client(tls, NAME) as by_name:
            assert copy.read_from(by_name, address) == DIGESTS


def test_strangers_get_nothing_and_are_asked_nothing(tmp_path: Path, ca: trustme.CA) -> None:
    ours, stranger = certified(tmp_path, "ours", ca), certified(tmp_path, "stranger", trustme.CA())
    trusting = Tls(stranger.certificate, stranger.key, ours.ca)
    with Copy() as copy:
        for server, reader in (
            (ours, stranger),
            (ours, trusting),
            (stranger, ours),
            (ours, None),
            (None, ours),
        ):
            with shared(server) as address, client(reader, silent_s=5) as peers, pytest.raises(PeerFailed):
                copy.read_from(peers, address)
        assert copy.progress.runs(0, BLOCKS) == []


def test_both_sides_use_renewed_certificates(tmp_path: Path, ca: trustme.CA) -> None:
    theirs, ours = certified(tmp_path, "theirs", ca), certified(tmp_path, "ours", ca)
    later = trustme.CA()
    with shared(theirs) as address, client(ours) as peers:
        with Copy() as copy:
            assert copy.read_from(peers, address) == DIGESTS
        certified(tmp_path, "ours", later)
        with Copy() as copy:
            with pytest.raises(PeerFailed):
                copy.read_from(peers, address)
            certified(tmp_path, "theirs", later)
            assert copy.read_from(peers, address) == DIGESTS


def test_unusable_certificates_are_refused_at_once(tmp_path: Path, ca: trustme.CA) -> None:
    tls = certified(tmp_path, "node", ca)
    Path(tls.key).write_text("no key")
    with pytest.raises(InvalidInput), client(tls):
        pass


def test_a_full_server_says_so_over_tls(tmp_path: Path, ca: trustme.CA) -> None:
    tls = certified(tmp_path, "node", ca)
    with (
        resident() as lend,
        serving(lend, tls, max_connections=0) as address,
        client(tls) as peers,
        Copy() as copy,
        pytest.raises(PeerBusy),
    ):
        copy.read_from(peers, address)


def test_a_peer_that_makes_no_handshake_is_given_up(tmp_path: Path, ca: trustme.CA) -> None:
    tls = certified(tmp_path, "node", ca)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        client(tls, silent_s=0.2) as peers,
        Copy() as copy,
        pytest.raises(PeerSilent),
    ):
        copy.read_from(peers, f"127.0.0.1:{silent.getsockname()[1]}")


STRANGERS = 300


def half_open(address: str, stack: ExitStack, count: int = STRANGERS) -> list[socket.socket]:
    """Connect from another host of loopback and say nothing."""
    host, port = address.split(":")
    made = []
    for _ in range(count):
        stranger = socket.create_connection((host, int(port)), WAIT_S, source_address=("127.0.0.2", 0))
        made.append(stack.enter_context(stranger))
    return made


def test_half_open_connections_of_a_stranger_stop_no_member(
    tmp_path: Path, ca: trustme.CA, caplog: pytest.LogCaptureFixture
) -> None:
    tls = certified(tmp_path, "node", ca)
    with (
        resident() as lend,
        serving(lend, tls, max_connections=8) as address,
        client(tls) as peers,
        ExitStack() as stack,
    ):
        strangers = half_open(address, stack)
        for _ in range(20):
            with Copy() as copy:
                assert copy.read_from(peers, address) == DIGESTS
            peers.close()  # so that each read makes a handshake
        assert strangers[0].recv(1) == b"", "the oldest of the crowd is ended"
        strangers[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            strangers[-1].recv(1)
    line = caplog.records[0]
    assert vars(line)["host"] == "127.0.0.2"
    assert "does not finish their TLS handshakes" in vars(line)["why"]


@pytest.mark.parametrize(
    ("theirs", "said_by_the_server", "said_by_the_reader"),
    [
        (
            "foreign",
            "is of another authority",
            "it refuses this node's certificate, which is of another authority",
        ),
        ("expired", "has expired; renew it", "it refuses this node's certificate, which has expired"),
        ("early", "is not valid yet; compare the clocks", "it refuses this node's certificate"),
    ],
)
def test_both_sides_say_what_is_wrong_with_a_certificate(
    tmp_path: Path,
    ca: trustme.CA,
    caplog: pytest.LogCaptureFixture,
    theirs: str,
    said_by_the_server: str,
    said_by_the_reader: str,
) -> None:
    good = certified(tmp_path, "good", ca)
    bad = certified(tmp_path, "bad", trustme.CA() if theirs == "foreign" else ca, days=DAYS[theirs])
    reader = Tls(bad.certificate, bad.key, good.ca)
    with (
        shared(good) as address,
        client(reader) as peers,
        Copy() as copy,
        pytest.raises(PeerFailed, match=said_by_the_reader),
    ):
        copy.read_from(peers, address)
    wait_until(lambda: any(said_by_the_server in vars(each).get("why", "") for each in caplog.records))
    with shared(bad) as address, client(good) as peers, Copy() as copy, pytest.raises(PeerFailed) as refused:
        copy.read_from(peers, address)
    assert said_by_the_server in str(refused.value)
