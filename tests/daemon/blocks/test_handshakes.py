"""The pool of unfinished handshakes: whom a full one drives out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cachesvc.daemon.blocks.server import Handshakes


def test_a_crowd_drives_out_its_own_oldest_connection() -> None:
    ended: list[str] = []
    pool: Handshakes[str] = Handshakes(ended.append, limit=3)
    for connection, host in (("m1", "member"), ("s1", "stranger"), ("s2", "stranger"), ("s3", "stranger")):
        pool.began(connection, host)
    assert ended == ["s1"]
    assert not pool.finished("s1"), "an ended connection is no member's, whatever its handshake gives"
    assert pool.finished("m1")
    assert not pool.finished("m1")
    assert pool.refused == 1


@given(st.lists(st.sampled_from("ssssssssm"), max_size=300))
def test_a_host_below_its_part_of_the_pool_loses_no_connection(hosts: list[str]) -> None:
    """A member that has few handshakes at a time finishes all of them, however many a stranger begins."""
    ended: list[tuple[str, int]] = []
    pool: Handshakes[tuple[str, int]] = Handshakes(ended.append, limit=4)
    waiting: list[tuple[str, int]] = []
    for number, host in enumerate(hosts):
        pool.began((host, number), host)
        waiting += [(host, number)] if host == "m" else []
        if len(waiting) == 2:
            assert pool.finished(waiting.pop(0))
    assert not [each for each in ended if each[0] == "m"]
