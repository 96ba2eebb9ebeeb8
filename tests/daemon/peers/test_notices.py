"""Events about members: one for each change, with the reason."""

from __future__ import annotations

from dataclasses import replace

import grpc
import pytest

from cachesvc.daemon.peers.messages import NodeRow
from cachesvc.daemon.peers.notices import changes
from cachesvc.daemon.peers.peer_calls import reason

ROW = NodeRow("b", "10.0.0.2:7070", "", 100, "present", 0, "", 0)
AWAY = replace(ROW, state="away", away_s=1, why="Connection refused")
LEFT = replace(ROW, state="left", away_s=1)
REFUSED = replace(ROW, state="refused", why="too old")
SLOW = replace(ROW, state="slow", why="it is late")
UNREADABLE = replace(ROW, state="unreadable", why="no answer")
LISTED = replace(ROW, name="", state="unknown")


def said(before: NodeRow | None, after: NodeRow | None) -> list[tuple[str, str, str]]:
    found = changes([before] if before else [], [after] if after else [])
    return [(each.kind, each.node, each.why) for each in found]


@pytest.mark.parametrize(
    ("before", "after", "kind", "why"),
    [
        (None, ROW, "member_present", ""),
        (LISTED, ROW, "member_present", ""),
        (ROW, SLOW, "left_out", "it is late"),
        (None, UNREADABLE, "left_out", "no answer"),
        (UNREADABLE, ROW, "read_again", ""),
        (SLOW, AWAY, "member_away", "Connection refused"),
        (SLOW, None, "member_gone", "it is late"),
        (ROW, AWAY, "member_away", "Connection refused"),
        (AWAY, ROW, "member_present", ""),
        (ROW, LEFT, "member_left", ""),
        (LEFT, ROW, "member_present", ""),
        (AWAY, None, "member_gone", "Connection refused"),
        (LISTED, replace(LISTED, why="no route"), "member_silent", "no route"),
        (None, REFUSED, "member_refused", "too old"),
        (
            REFUSED,
            replace(REFUSED, why="twice"),
            "member_refused",
            "twice",
        ),
    ],
)
def test_a_change_gives_one_event(before: NodeRow | None, after: NodeRow | None, kind: str, why: str) -> None:
    node, at = ("b", "10.0.0.2:7070") if (after or ROW).name else ("10.0.0.2:7070", "")
    assert said(before, after) == [(kind, node, ": ".join(filter(None, [at, why])))]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (ROW, replace(ROW, round_trip_us=9)),
        (SLOW, UNREADABLE),
        (AWAY, replace(AWAY, away_s=9, why="it did not answer in 2 s")),
        (None, LISTED),
        (LISTED, None),
    ],
)
def test_what_is_no_news_gives_no_event(before: NodeRow | None, after: NodeRow | None) -> None:
    assert said(before, after) == []


class Failed(grpc.RpcError):
    """An error as gRPC raises it."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details


@pytest.mark.parametrize(
    ("code", "details", "text"),
    [
        (
            grpc.StatusCode.UNAVAILABLE,
            "failed to connect to all addresses; last error: UNKNOWN: ipv6:%5B::1%5D:9: Failed to connect to remote host: "
            "Connection refused",
            "Connection refused",
        ),
        (
            grpc.StatusCode.UNAVAILABLE,
            "DNS resolution failed for n9:7070: no data",
            "its name does not resolve",
        ),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", "it did not answer in 2 s"),
        (grpc.StatusCode.INVALID_ARGUMENT, "this node\nspeaks", "INVALID_ARGUMENT: this node speaks"),
    ],
)
def test_a_reason_is_one_line_without_what_grpc_puts_around_it(
    code: grpc.StatusCode, details: str, text: str
) -> None:
    assert reason(Failed(code, details)) == text
