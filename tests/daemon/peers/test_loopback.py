"""An address that other machines cannot reach is found."""

from __future__ import annotations

import pytest

from cachesvc.daemon.peers.loopback import hidden_from

THERE = "192.0.2.1:7070"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.1.1", "localhost", "[::1]"])
def test_a_loopback_address_is_hidden_from_other_machines_only(host: str) -> None:
    mine = f"{host}:7070"
    assert hidden_from(mine, [mine, "127.0.0.2:7070"]) == ""
    assert hidden_from(mine, [mine, THERE]) == THERE


def test_an_address_of_a_network_is_not_hidden() -> None:
    assert hidden_from(THERE, ["192.0.2.2:7070"]) == ""
