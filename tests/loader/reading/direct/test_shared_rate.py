"""Processes that read directly share one rate."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachesvc.core.errors import InvalidInput
from loader.reading.direct.shared_rate import BURST_S, VARIABLE, SharedRate, direct_rate
from testbed import WAIT_S

RATE = 1000.0
_TAKES = """
import sys, time
from loader.reading.direct.shared_rate import SharedRate
rate = SharedRate(sys.argv[1], float(sys.argv[2]))
for _ in range(int(sys.argv[4])):
    time.sleep(rate.take(int(sys.argv[3])))
"""


@given(st.lists(st.tuples(st.floats(0, 2), st.integers(0, 3), st.integers(1, 2000)), max_size=40))
def test_bytes_granted_in_any_interval_are_at_most_the_rate_and_a_burst(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[float, int, int]]
) -> None:
    path, now = str(tmp_path_factory.mktemp("rate") / "rate"), [100.0]
    sharers = [SharedRate(path, RATE, lambda: now[0]) for _ in range(4)]
    fetched = []
    for pause, sharer, size in steps:
        now[0] += pause
        fetched.append((now[0] + sharers[sharer].take(size), size))
    assert fetched == sorted(fetched, key=lambda one: one[0]), "in the order asked"
    for at, (began, _) in enumerate(fetched):
        total = 0
        for ended, size in fetched[at:]:
            total += size
            # The bytes of the first fetch were reserved before it began.
            assert total <= RATE * (ended - began + BURST_S) + fetched[at][1] + 1e-6


def test_an_idle_rate_grants_one_burst_at_once(tmp_path: Path) -> None:
    rate = SharedRate(str(tmp_path / "rate"), RATE, lambda: 50.0)
    assert rate.take(int(RATE * BURST_S)) == 0.0
    assert rate.take(int(RATE)) == pytest.approx(1.0)
    assert rate.take(int(RATE)) == pytest.approx(2.0)


@pytest.mark.slow
def test_real_processes_share_the_rate(tmp_path: Path) -> None:
    size, times, rate = 1 << 20, 8, float(16 << 20)
    started = time.monotonic()
    command = [sys.executable, "-c", _TAKES, str(tmp_path / "rate"), str(rate), str(size), str(times)]
    processes = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait(WAIT_S) for process in processes] == [0] * 2
    assert time.monotonic() - started >= 2 * times * size / rate - BURST_S


@pytest.mark.parametrize("given", ["0", "fast", "-1"])
def test_an_invalid_rate_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv(VARIABLE, given)
    with pytest.raises(InvalidInput, match=VARIABLE):
        direct_rate(str(tmp_path))


def test_without_a_file_each_process_has_its_own_rate(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rate = SharedRate(str(tmp_path / "gone" / "rate"), RATE)
    assert rate.take(500) == 0.5
    assert "each process keeps its own rate" in caplog.text
