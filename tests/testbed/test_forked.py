"""A forked process behaves as the one that `subprocess.Popen` starts."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from testbed import WAIT_S
from testbed.forked import ForkedProcess

PRELOADED = ("json",)
ECHO = "import os, sys; print(os.environ['SAID'], sys.argv[1:], sys.stdin.readline().strip())"
WAITS = "import sys; sys.stdin.read()"


def forked(code: str, *words: str, **streams: int) -> ForkedProcess:
    return ForkedProcess(
        [sys.executable, "-c", code, *words], os.environ | {"SAID": "so"}, preloaded=PRELOADED, **streams
    )


def test_it_has_its_arguments_environment_and_streams() -> None:
    process = forked(ECHO, "a", "b c", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("d\n")
    process.stdin.flush()
    assert process.stdout.read() == "so ['a', 'b c'] d\n"
    process.close()


@pytest.mark.parametrize(
    ("code", "ends"),
    [
        ("", 0),
        ("raise SystemExit", 0),
        ("raise SystemExit(3)", 3),
        ("raise SystemExit('why')", 1),
        ("1 / 0", 1),
        ("import os; os._exit(4)", 4),
        ("import os; os.kill(os.getpid(), 9)", -9),
    ],
)
def test_its_exit_code_is_known(code: str, ends: int) -> None:
    process = forked(code, stderr=subprocess.PIPE)
    assert process.wait(WAIT_S) == ends
    assert process.poll() == process.returncode == ends
    process.kill()  # no effect
    process.close()


def test_signals_reach_it_and_waits_time_out() -> None:
    process = forked(WAITS, stdin=subprocess.PIPE)
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.send_signal(signal.SIGTERM)
    process.close()
    assert process.returncode == -signal.SIGTERM


def test_a_module_runs_as_the_program(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with open(tmp_path / "out", "r+") as out:
        process = ForkedProcess(
            [sys.executable, "-m", "json.tool", "--help"], stdout=out, preloaded=PRELOADED
        )
        assert process.wait(WAIT_S) == 0
    assert "usage" in (tmp_path / "out").read_text()


def test_it_ends_with_what_started_it() -> None:
    code = f"""
import sys
from testbed.forked import ForkedProcess
process = ForkedProcess([sys.executable, "-c", {WAITS!r}], stdin=-1, preloaded={PRELOADED!r})
print(process.pid, flush=True)
sys.stdin.read()
"""
    owner = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    watched = os.pidfd_open(int(owner.stdout.readline()))
    owner.kill()
    owner.communicate()
    try:
        assert select.select([watched], [], [], WAIT_S)[0], "the forked process goes on"
    finally:
        os.close(watched)
