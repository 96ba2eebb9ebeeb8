"""The entries that members write about themselves."""

from __future__ import annotations

import json

import pytest

from cachesvc.cluster.etcd import Entries, decode, encode
from cachesvc.cluster.polled import Registration
from cachesvc.core.placement.roster import Endpoint

A = Registration("node-a", "10.0.0.1:7070", "zone-1")
B = Registration("node-b", "10.0.0.2:7070")
GRACE_S = 10.0


def entries(*present: Registration) -> Entries:
    made = Entries(GRACE_S)
    made.list({f"/p/{each.name}": encode(each) for each in present})
    return made


def names(of: Entries, now: float = 0.0) -> set[str]:
    return {each.name for each in of.members(now)}


def test_an_entry_says_all_of_a_member() -> None:
    assert decode(encode(A)) == Endpoint("10.0.0.1:7070", "node-a", "zone-1")
    assert json.loads(encode(A))["version"] == 1


def test_an_entry_of_a_later_version_is_read() -> None:
    later = json.loads(encode(A)) | {"version": 2, "weight": 5}
    assert decode(json.dumps(later).encode()) == decode(encode(A))


@pytest.mark.parametrize(
    "value",
    [
        *(b"", b"null", b"[]", b"{}", b'{"version": 1}', b"\xff", b"[" * 100_000),
        b'{"address": "a", "name": "n", "zone": "", "version": 1}',
        b'{"address": "a:1", "name": "", "zone": "", "version": 1}',
        b'{"address": "a:1", "name": "n", "zone": 1, "version": 1}',
        b'{"address": "a:1", "name": "n", "zone": ""}',
    ],
)
def test_a_strange_entry_is_left_out(value: bytes) -> None:
    found = entries(A)
    found.put("/p/strange", value)
    assert names(found) == {"node-a"}
    found.put("/p/node-a", value)
    assert names(found) == set()


def test_after_an_outage_members_have_time_to_register_again() -> None:
    found = entries(A, B)
    found.await_again(now=100.0)
    found.list({"/p/node-a": encode(A)})
    assert names(found, 100.0) == {"node-a", "node-b"}
    assert names(found, 109.9) == {"node-a", "node-b"}
    assert names(found, 110.0) == {"node-a"}


def test_the_time_goes_on_through_a_second_outage() -> None:
    found = entries(A, B)
    found.await_again(now=100.0)
    found.list({"/p/node-a": encode(A)})
    found.await_again(now=105.0)
    found.list({"/p/node-a": encode(A)})
    assert names(found, 114.9) == {"node-a", "node-b"}
    assert names(found, 115.0) == {"node-a"}


def test_a_member_that_leaves_after_an_outage_is_not_awaited() -> None:
    found = entries(A, B)
    found.await_again(now=100.0)
    found.list({"/p/node-a": encode(A), "/p/node-b": encode(B)})
    found.delete("/p/node-b")
    assert names(found, 101.0) == {"node-a"}


def test_an_awaited_member_that_moved_is_seen_where_it_is() -> None:
    found = entries(A)
    found.await_again(now=100.0)
    moved = Registration(A.name, "10.0.0.7:7070", A.zone)
    found.list({"/p/node-a": encode(moved)})
    assert {each.address for each in found.members(101.0)} == {"10.0.0.7:7070"}
