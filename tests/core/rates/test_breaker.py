"""The breaker over a tier: broken disks are left alone in time, busy ones are not, and they come back."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hypothesis import given
from hypothesis import strategies as st

from cachesvc.core.rates.breaker import Breaker, Limits, Probe

LIMITS = Limits()
Disk = Callable[[float, Probe], tuple[float, str]]
"""(now, probe) -> (seconds until the answer, error)."""


def play(breaker: Breaker, disk: Disk, until: float, start: float = 0.0) -> Iterator[tuple[float, bool]]:
    """(time, lost) whenever that changes; the answers come when the disk says."""
    now, was, answer = start, breaker.lost, (float("inf"), 0.0, "")
    while now < until:
        now = max(now, min(breaker.next_deadline(), answer[0]))
        if answer[0] <= now:
            breaker.answered(now, answer[1], answer[2])
            answer = (float("inf"), 0.0, "")
        probe = breaker.tick(now)
        if probe is not None:
            took_s, error = disk(now, probe)
            answer = (now + took_s, took_s, error)
        if breaker.lost != was:
            was = breaker.lost
            yield now, was


def first(breaker: Breaker, disk: Disk) -> float:
    return next(play(breaker, disk, 1000.0))[0]


def test_a_disk_with_errors_is_left_alone_at_once() -> None:
    assert first(Breaker(LIMITS, 0.0), lambda now, _: (0.01, "EIO" if now > 100 else "")) < 103


def test_a_disk_that_answers_in_5_s_or_never_is_left_alone_within_30_s() -> None:
    def disk(took_s: float) -> Disk:
        return lambda now, _: (took_s if now > 100 else 0.0, "")

    for took_s in (5.0, 8.0, 20.0, 1e9):
        assert first(Breaker(LIMITS, 0.0), disk(took_s)) < 130


def test_writes_that_hang_while_reads_work_are_found_by_the_call_that_is_stuck() -> None:
    breaker = Breaker(LIMITS, 0.0)
    breaker.suspect(LIMITS.stuck_s)
    disk: Disk = lambda _, probe: (1e9 if probe is Probe.THOROUGH else 0.001, "")  # noqa: E731
    assert first(breaker, disk) < 30


def test_writes_that_take_5_s_while_reads_are_quick_are_found_by_the_call_that_is_slow() -> None:
    def disk(took_s: float) -> Disk:
        return lambda _, probe: (0.001 if probe is Probe.CANARY else took_s, "")

    for took_s in (3.1, 5.0, 8.0, 1e9):
        breaker = Breaker(LIMITS, 0.0)
        breaker.doubt()  # of a call that began `slow_s` before
        assert first(breaker, disk(took_s)) < 30 - LIMITS.slow_s - LIMITS.probe_s


def test_a_read_that_was_under_way_says_nothing_about_writes() -> None:
    breaker = Breaker(LIMITS, 0.0)
    assert breaker.tick(0.0) is Probe.CANARY
    breaker.doubt()
    breaker.answered(0.1, 0.1)
    assert breaker.tick(breaker.next_deadline()) is Probe.WRITE


def test_slow_syncs_alone_are_no_reason_to_leave_a_disk_alone() -> None:
    breaker = Breaker(LIMITS, 0.0)

    def loaded(now: float, probe: Probe) -> tuple[float, str]:
        breaker.doubt()
        if probe is not Probe.THOROUGH:
            breaker.suspect(now)
        return (12.0 if probe is Probe.THOROUGH else 0.5), ""

    assert not list(play(breaker, loaded, 3600.0))


def test_a_disk_is_silent_while_a_probe_is_late_that_does_not_sync() -> None:
    breaker, now = Breaker(LIMITS, 0.0), 0.0
    for silent in (True, False):
        sent_at = now
        assert breaker.tick(now) is (Probe.CANARY if silent else Probe.THOROUGH)
        assert not breaker.silent
        while now - sent_at <= LIMITS.slow_s:
            now = breaker.next_deadline()
            assert breaker.tick(now) is None
        assert breaker.silent is silent, "a sync may take longer"
        breaker.answered(now, now - sent_at)
        assert not breaker.silent
        breaker.suspect(now)


def test_a_doubt_that_was_wrong_costs_one_write() -> None:
    breaker = Breaker(LIMITS, 0.0)
    breaker.doubt()
    probes: list[Probe] = []
    assert not list(play(breaker, lambda _, probe: (probes.append(probe) or 0.01, ""), 60.0))
    assert probes.pop(0) is Probe.WRITE
    assert set(probes) == {Probe.CANARY}


def test_an_error_of_one_copy_is_not_the_tiers() -> None:
    breaker = Breaker(LIMITS, 0.0)

    def suspected(now: float, _: Probe) -> tuple[float, str]:
        breaker.suspect(now)
        return 0.01, ""

    assert not list(play(breaker, suspected, 500.0))


def test_a_canary_that_cannot_be_read_is_written_anew_before_the_tier_is_lost() -> None:
    disk: Disk = lambda _, probe: (0.01, "gone" if probe is Probe.CANARY else "")  # noqa: E731
    assert not list(play(Breaker(LIMITS, 0.0), disk, 500.0))


@given(delays=st.lists(st.floats(0.0, 12.0), min_size=20, max_size=60))
def test_load_never_trips_while_one_answer_in_three_is_quick(delays: list[float]) -> None:
    answers = iter(range(10**6))

    def busy(_: float, __: Probe) -> tuple[float, str]:
        number = next(answers)
        return (2.9 if number % 2 else delays[number % len(delays)]), ""

    assert not list(play(Breaker(LIMITS, 0.0), busy, 600.0))


def test_a_daemon_that_was_held_up_does_not_blame_the_disk() -> None:
    breaker = Breaker(LIMITS, 0.0)
    assert breaker.tick(0.0) is Probe.CANARY
    assert breaker.tick(120.0) is None
    assert not breaker.lost
    breaker.answered(120.1, 0.001)
    assert not breaker.lost
    breaker = Breaker(LIMITS, 0.0)
    assert breaker.tick(0.0) is Probe.CANARY
    breaker.answered(40.0, 40.0)  # stopped all that time, the probe's thread as well
    assert not breaker.lost


def test_a_lost_tier_comes_back_after_three_good_answers_and_flaps_ever_less() -> None:
    breaker = Breaker(LIMITS, 0.0)
    disk: Disk = lambda now, _: (0.01, "EIO" if now % 40 < 10 else "")  # noqa: E731
    turns = list(play(breaker, disk, 3600.0))
    assert [lost for _, lost in turns[:3]] == [True, False, True]
    back_after_s = [back[0] - lost[0] for lost, back in zip(turns[::2], turns[1::2], strict=False)]
    assert 10 <= back_after_s[0] <= 40
    assert back_after_s == sorted(back_after_s)
    assert len(turns) < 10
