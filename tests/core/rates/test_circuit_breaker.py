"""The circuit breaker of sources and peers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cachesvc.core.rates.circuit_breaker import PEER_TRIP, CircuitBreaker


def test_a_source_that_is_down_costs_one_probe_an_interval() -> None:
    breaker, probes = CircuitBreaker(), []
    for number in range(breaker.trip.failures):
        assert breaker.ask(number / 3) == 0
        breaker.failed(number / 3)
    assert breaker.open
    now = 4.0
    while now < 64:
        if not breaker.ask(now):
            probes.append(now)
            assert breaker.ask(now) > 0  # no other request is sent
            breaker.failed(now + 0.1)
        now += 0.05
    assert len(probes) <= 4 + 60 / breaker.trip.cap_s
    assert breaker.down_s(64) == 64
    breaker.succeeded()
    assert (breaker.ask(64), breaker.down_s(64)) == (0, 0)


@given(st.lists(st.booleans(), max_size=100))
def test_a_source_that_answers_now_and_then_is_not_down(answers: list[bool]) -> None:
    breaker = CircuitBreaker()
    for number, fine in enumerate(answers):
        now = number / 10
        breaker.succeeded() if fine or number % 15 == 0 else breaker.failed(now)
        assert not breaker.open


def test_a_peer_is_probed_less_and_less_often() -> None:
    breaker = CircuitBreaker(PEER_TRIP)
    for _ in range(PEER_TRIP.failures):
        assert not breaker.open
        breaker.failed(0.0)
    assert breaker.open
    probes, now = [], 0.0
    while now < 2000:
        if not breaker.wait_s(now):
            assert breaker.ask(now) == 0
            probes.append(now)
            breaker.failed(now)
        now += 1
    pauses = [after - before for before, after in zip([0.0, *probes], probes, strict=False)]
    assert pauses[:6] == [10, 10, 20, 40, 80, 160]
    assert set(pauses[6:]) == {PEER_TRIP.cap_s}
    breaker.succeeded()
    assert breaker.wait_s(now) == 0
    assert not breaker.open
