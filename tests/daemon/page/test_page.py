"""The status page is answered to this machine alone, under names that only this machine has, and loads nothing else."""

from __future__ import annotations

import json
import os
import re

import pytest

from cachesvc.daemon.page.page import DATA, HTML, PAGE, Page, policy
from cachesvc.v1 import cachesvc_pb2 as pb

HERE = "127.0.0.1"
pytestmark = pytest.mark.pure


def page() -> Page:
    return Page(lambda: pb.StatusReply(node="here"), "127.0.0.1:9464")


@pytest.mark.parametrize(
    "host",
    ["localhost:9464", "127.0.0.1:9464", "[::1]:9464", "LOCALHOST", os.uname().nodename, "10.0.0.7:80"],
)
def test_names_of_this_host_are_answered(host: str) -> None:
    for path in (PAGE, DATA):
        answer = page().answer(path, host, HERE)
        assert answer is not None
        assert answer.status == 200


@pytest.mark.parametrize(
    "host",
    [
        "",
        "evil.example",
        "evil.example:9464",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "[::1",
        ":",
    ],
)
def test_other_names_are_refused_so_that_no_web_page_reads_the_status(host: str) -> None:
    for path in (PAGE, DATA):
        answer = page().answer(path, host, HERE)
        assert answer is not None
        assert answer.status == 403
        assert b"here" not in answer.body


@pytest.mark.parametrize("client", ["10.0.0.7", "::ffff:10.0.0.7", "fe80::1%eth0"])
def test_other_machines_are_refused(client: str) -> None:
    answer = page().answer(DATA, "localhost", client)
    assert answer is not None
    assert answer.status == 403


@pytest.mark.parametrize("client", ["127.0.0.1", "127.8.0.1", "::1", "::ffff:127.0.0.1"])
def test_addresses_of_this_machine_are_answered(client: str) -> None:
    answer = page().answer(DATA, "localhost", client)
    assert answer is not None
    assert json.loads(answer.body)["node"] == "here"


def test_paths_of_others_are_left_to_them() -> None:
    assert page().answer("/metrics", "localhost", HERE) is None


def test_snapshots_are_read_at_most_once_a_second() -> None:
    taken = []

    def read() -> pb.StatusReply:
        taken.append(1)
        return pb.StatusReply()

    shown = Page(read, "127.0.0.1:9464")
    shown.answer(PAGE, "localhost", HERE)
    assert not taken
    answers = [shown.answer(DATA, "localhost", HERE) for _ in range(2)]
    assert answers[0] == answers[1]
    assert len(taken) == 1


def test_the_page_names_no_other_place() -> None:
    html = HTML.read_text()
    assert set(re.findall(r"https?://[^\s\"']+", html)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<(img|iframe|object|embed|form)\b|\bon\w+=|\bstyle=|innerHTML|eval\(", html)


def test_the_policy_allows_its_own_script_and_style_alone() -> None:
    found = dict(part.strip().split(" ", 1) for part in policy(HTML.read_text()).split(";"))
    assert found["default-src"] == "'none'"
    assert found["connect-src"] == "'self'"
    for kind in ("script-src", "style-src"):
        assert re.fullmatch(r"'sha256-[A-Za-z0-9+/]{43}='", found[kind])
