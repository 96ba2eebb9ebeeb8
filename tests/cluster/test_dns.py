"""Members from DNS, in the forms that SRV and address records take."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachesvc.cluster.open import open_membership
from cachesvc.cluster.polled import Registration
from tests.support.membership.sources import DnsSource
from tests.support.membership.watching import Watching
from tests.support.waiting import wait_until

ME = Registration("node-0", "10.0.0.9:7070")
MANY = 200


@pytest.fixture
def dns(tmp_path: Path) -> Iterator[DnsSource]:
    made = DnsSource(tmp_path)
    yield made
    made.stop()


def test_a_host_has_all_its_ipv4_addresses_or_else_its_ipv6_addresses(dns: DnsSource) -> None:
    dns.serve(
        [
            "--host-record=both.test,10.0.0.1,2001:db8::1",
            *("--host-record=two.test,10.0.0.2", "--host-record=two.test,10.0.0.3"),
            "--host-record=six.test,2001:db8::6",
            *(f"--srv-host={dns.name},{host}.test,7070" for host in ("both", "two", "six")),
        ]
    )
    with Watching(open_membership(dns.spec, ME)) as seen:
        seen.until(["10.0.0.1:7070", "10.0.0.2:7070", "10.0.0.3:7070", "[2001:db8::6]:7070"])


def test_addresses_that_come_with_the_records_are_not_asked_for(dns: DnsSource) -> None:
    dns.set(["10.0.0.1:7070", "[2001:db8::3]:7071"])
    with Watching(open_membership(dns.spec, ME)) as seen:
        seen.until(["10.0.0.1:7070", "[2001:db8::3]:7071"])
    assert set(re.findall(r"query\[(\w+)\]", dns.server.output())) == {"SRV"}


def test_addresses_that_do_not_come_with_the_records_are_asked_for(dns: DnsSource) -> None:
    dns.serve(
        [
            *("--address=/four.test/10.0.0.4", "--address=/six.test/2001:db8::6", "--local=/six.test/"),
            *(f"--srv-host={dns.name},{host}.test,7070" for host in ("four", "six")),
        ]
    )
    with Watching(open_membership(dns.spec, ME)) as seen:
        seen.until(["10.0.0.4:7070", "[2001:db8::6]:7070"])
    asked = re.findall(r"query\[(\w+)\] (\w+)\.test ", dns.server.output())
    assert set(asked) == {("A", "four"), ("A", "six"), ("AAAA", "six")}


def test_a_host_that_has_just_gone_is_left_out(dns: DnsSource) -> None:
    records = [f"--srv-host={dns.name},{host}.test,7070" for host in ("here", "gone")]
    dns.serve(["--host-record=here.test,10.0.0.1", *records])
    with Watching(open_membership(dns.spec, ME)) as seen:
        seen.until(["10.0.0.1:7070"])


def test_an_answer_longer_than_a_datagram_is_complete(dns: DnsSource) -> None:
    addresses = [f"10.0.1.{number}:7070" for number in range(MANY)]
    dns.set(addresses)
    with Watching(open_membership(dns.spec, ME)) as seen:
        seen.until(addresses)


def test_hosts_without_any_address_are_no_list(dns: DnsSource, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="cachesvc.cluster")
    dns.set(["10.0.0.1:7070"])
    with Watching(open_membership(dns.spec, ME)) as seen:
        seen.until(["10.0.0.1:7070"])
        dns.serve([f"--srv-host={dns.name},gone.test,7070"])
        wait_until(lambda: caplog.records)
        assert seen.told == 0
