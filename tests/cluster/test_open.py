"""The forms of the option `--cluster`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cachesvc.cluster.membership import Registration
from cachesvc.cluster.open import open_membership
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
