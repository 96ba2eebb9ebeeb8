"""The forms of the option `--cluster`, and lists of hosts as Slurm writes them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachesvc.cluster.addresses import MAX_MEMBERS, host_addresses
from cachesvc.cluster.open import open_membership
from cachesvc.cluster.polled import Registration
from cachesvc.core.errors import InvalidInput

ME = Registration("node-0", "10.0.0.9:7070")


@pytest.mark.parametrize(
    "spec",
    [
        "static:node[01-16]:7070",
        "file:///etc/cachesvc/members",
        "dns+srv://_peers._tcp.cachesvc-peers",
        "dns+srv://_cachesvc._tcp.example.?server=127.0.0.1:5353",
        "dns+srv://_cachesvc._tcp.example?server=[::1]:5353",
        "etcd://etcd-0:2379,10.0.0.1:2379,[::1]:2379/cachesvc/a",
    ],
)
def test_each_form_is_opened_without_io(spec: str) -> None:
    open_membership(spec, ME).close()


@pytest.mark.parametrize(
    "spec",
    [
        *(
            "",
            "node1:7070",
            "consul://a:1/b",
            "static",
            "static:",
            "static:a",
            "etcd",
            "dns+srv:a",
            "etcd:a:1/b",
        ),
        *(
            "file:",
            "file://",
            "file:///",
            "file://host/path",
            "file:relative",
            "file:///folder/",
            "file:///a?b",
        ),
        *("dns+srv://", "dns+srv:///a", "dns+srv://a..b", "dns+srv://a/b", f"dns+srv://{'a' * 64}"),
        *("dns+srv://a?server=localhost:53", "dns+srv://a?server=1.1.1.1", "dns+srv://a?servers=1.1.1.1:53"),
        *("dns+srv://a?server=1.1.1.1:53&x=1", "dns+srv://a?x", "etcd://a:1", "etcd://a:1/", "etcd://a/b"),
        *("etcd:///b", "etcd://a:1,/b", "etcd://user:word@a:1/b", "etcd://a:1/b?c", "etcds://a:1/b"),
    ],
)
def test_what_is_no_form_is_an_error_of_one_line(spec: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        open_membership(spec, ME)
    assert "\n" not in str(raised.value)


def test_an_unknown_form_is_answered_with_all_forms() -> None:
    with pytest.raises(InvalidInput, match=r"static:.*file:.*dns\+srv:.*etcd:"):
        open_membership("consul://a", ME)


@pytest.mark.parametrize(
    "me",
    [Registration("", "a:1"), Registration("a/b", "a:1"), Registration("a b", "a:1"), Registration("a", "a")],
)
def test_etcd_takes_no_registration_that_others_could_not_read(me: Registration) -> None:
    open_membership("static:a:1", me)
    with pytest.raises(InvalidInput):
        open_membership("etcd://a:1/b", me)


@pytest.mark.parametrize(("spec", "module"), [("dns+srv://a", "dns"), ("etcd://a:1/b", "aetcd")])
def test_without_its_package_a_form_says_what_to_install(
    spec: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InvalidInput, match=r"pip install '\.\[cluster\]'"):
        open_membership(spec, ME)


def test_a_path_may_have_escapes(tmp_path: Path) -> None:
    (tmp_path / "a b").write_text("10.0.0.1:7070\n")
    membership = open_membership(f"file://{tmp_path}/a%20b", ME)
    found: set[str] = set()

    def first(members: frozenset) -> None:
        found.update(each.address for each in members)
        membership.close()

    membership.watch(first)
    assert found == {"10.0.0.1:7070"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node1:7070", "node1:7070"),
        ("node[1-3]:7070", "node1:7070 node2:7070 node3:7070"),
        ("node[08-11]:7070", "node08:7070 node09:7070 node10:7070 node11:7070"),
        ("node[001,7,9-10]:1", "node001:1 node7:1 node9:1 node10:1"),
        ("node[098-101]:1", "node098:1 node099:1 node100:1 node101:1"),
        ("r[1-2]n[1-2]:1", "r1n1:1 r1n2:1 r2n1:1 r2n2:1"),
        ("node[1-2]-ib.example:1", "node1-ib.example:1 node2-ib.example:1"),
        ("a[1-2],b7:7070,10.0.0.1:7071", "a1:7070 a2:7070 b7:7070 10.0.0.1:7071"),
        ("a[1,3]:1,b[2,4]:2", "a1:1 a3:1 b2:2 b4:2"),
        ("a,b,c[1-2]:65535", "a:65535 b:65535 c1:65535 c2:65535"),
        ("[::1]:7070", "[::1]:7070"),
        ("[2001:db8::1]:7070,[2001:db8::2],n1:7071", "[2001:db8::1]:7070 [2001:db8::2]:7071 n1:7071"),
        ("a:1,a:1,a:2", "a:1 a:2"),
    ],
)
def test_a_list_is_expanded_in_its_order(text: str, expected: str) -> None:
    assert host_addresses(text) == expected.split()


@pytest.mark.parametrize(
    "text",
    [
        *("", ":", "a", "a:", "a:0", "a:65536", "a:7070x", "a b:1", "a:1,", ",a:1", "a:1,,b:2", "a:1,b"),
        *("node[1-3:1", "node1-3]:1", "node[]:1", "node[3-1]:1", "node[1-]:1", "node[a-b]:1", "node[[1]]:1"),
        *("node[1--3]:1", "node[1,]:1", "::1:7070", "[::g]:1", "a/b:1", "http://a:1", "-a:1", "node[1-2]:٣"),
        *("node[1-9999999]:1", "a[1-99]b[1-99]:1", "a[0-999999999]b[0-999999999]c[0-999999999]:1"),
    ],
)
def test_what_is_no_list_is_an_error_of_one_line(text: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        host_addresses(text)
    assert "\n" not in str(raised.value)


def test_the_most_hosts_are_taken_and_no_more() -> None:
    assert len(host_addresses(f"n[1-{MAX_MEMBERS}]:1")) == MAX_MEMBERS
    with pytest.raises(InvalidInput):
        host_addresses(f"n[1-{MAX_MEMBERS}],a:1")


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 30)), min_size=1, max_size=5), st.integers(1, 4))
def test_ranges_mean_each_of_their_numbers(ranges: list[tuple[int, int]], width: int) -> None:
    text = ",".join(f"{first:0{width}}-{first + more:0{width}}" for first, more in ranges)
    expected = [f"n{i:0{width}}:1" for first, more in ranges for i in range(first, first + more + 1)]
    assert host_addresses(f"n[{text}]:1") == list(dict.fromkeys(expected))


@given(st.text(alphabet="ab[]0123456789,-:.", max_size=30))
def test_any_text_is_a_list_or_invalid_input(text: str) -> None:
    try:
        found = host_addresses(text)
    except InvalidInput:
        return
    assert 0 < len(found) <= MAX_MEMBERS
