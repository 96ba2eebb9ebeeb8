"""`cachesvc run`: a daemon while a command runs."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cachesvc.__main__ import run
from cachesvc.cli.run import free_address, make_private, private_dir
from cachesvc.client.control import Control
from cachesvc.core.errors import NotAllowed
from testbed import WAIT_S
from tests.support.canned import canned_daemon
from tests.support.processes import children
from tests.support.waiting import wait_until

CACHESVC = [sys.executable, "-m", "cachesvc"]
SMALL = ["--ram", "8MiB", "--extent-bytes", "1MiB", "--fillers", "1"]


@pytest.fixture
def home(plain: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Set an empty runtime directory with a short path, and hide any settings of the environment."""
    with tempfile.TemporaryDirectory(prefix="cs-") as directory:
        monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
        monkeypatch.setenv("SLURM_JOB_ID", "77")
        yield Path(directory)


def alive(pid: int) -> bool:
    """Tell whether a process runs. A process that ended may wait a moment for init to reap it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def shell(text: str) -> list[str]:
    return ["--", "sh", "-c", text]


def test_a_running_daemon_is_adopted_and_left_alone(home: Path, capfd: Any) -> None:
    with canned_daemon(home):
        assert run(["run", "--socket", str(home), "--json", *shell("echo $CACHESVC_SOCKET; exit 7")]) == 7
        out, err = capfd.readouterr()
        assert out.strip() == str(home)
        assert json.loads(err) == {"event": "ran", "exit_code": 7, "socket": str(home), "started": False}
        assert run(["status", "--socket", str(home)]) == 0


def test_a_relative_directory_is_found_by_a_command_in_another_directory(
    home: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    command = shell(f"cd / && exec {' '.join(CACHESVC)} status")
    with canned_daemon(home):
        for place in (".", "own"):  # with a running daemon, and with one of the command's own
            assert run(["run", "--socket", place, *SMALL, *command]) == 0, capfd.readouterr()


@pytest.mark.parametrize("name", ["a#b50%25?", "/"])
def test_a_socket_directory_may_hold_characters_special_in_uris(home: Path, capfd: Any, name: str) -> None:
    command = shell(f"exec {' '.join(CACHESVC)} status")
    place = f"/{home}" if name == "/" else f"{home}/{name}"  # two slashes in front
    assert run(["run", "--socket", place, *SMALL, *command]) == 0, capfd.readouterr()


@pytest.mark.skipif(
    sys.version_info < (3, 11), reason="Python 3.10 imports what lies in the working directory"
)
def test_modules_of_the_working_directory_are_not_imported(
    home: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "cachesvc").mkdir()  # such as a clone
    (home / "select.py").write_text("raise SystemExit('a user’s own')\n")
    monkeypatch.chdir(home)
    assert run(["run", "--socket", str(home / "own"), *SMALL, *shell("exit 7")]) == 7, capfd.readouterr()


def test_options_after_the_command_are_the_commands_own(home: Path, capfd: Any) -> None:
    with canned_daemon(home):
        assert run(["run", "--socket", str(home), "echo", "--json", "--ram"]) == 0
        assert capfd.readouterr().out == "--json --ram\n"


def test_a_command_that_a_signal_ended_gives_128_and_the_signal(home: Path) -> None:
    with canned_daemon(home):
        assert run(["run", "--socket", str(home), *shell("kill -9 $$")]) == 137


ORPHAN = "pid=$(sh -c 'true >/dev/null & echo $!'); while kill -0 $pid 2>&-; do sleep 0.01; done; exit 7"


def test_the_first_process_of_a_container_reaps_orphans(home: Path) -> None:
    """A process that ended and is not reaped can still be sent signals."""
    namespace = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*namespace, "true"], check=False).returncode:
        pytest.skip("no namespaces of processes here")
    with canned_daemon(home):
        command = [*namespace, *CACHESVC, "run", "--socket", str(home), *shell(ORPHAN)]
        assert subprocess.run(command, timeout=WAIT_S, check=False).returncode == 7


def test_a_command_that_does_not_exist_is_one_line(home: Path, capsys: Any) -> None:
    with canned_daemon(home):
        assert run(["run", "--socket", str(home), "--", "no-such-command"]) == 4
        assert capsys.readouterr().err == "cachesvc: there is no command 'no-such-command' on the PATH\n"


def test_a_command_that_cannot_be_executed_is_one_line(home: Path, capsys: Any) -> None:
    junk = home / "junk"
    junk.write_bytes(b"\0junk")
    junk.chmod(0o700)
    with canned_daemon(home):
        for command in (junk, junk / "below"):
            assert run(["run", "--socket", str(home), "--", str(command)]) == 2
            assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]
)
def test_signals_are_forwarded_to_the_command(home: Path, number: int) -> None:
    script = (
        "import signal,sys\nfor n in (1, 2, 10, 12, 15): signal.signal(n, lambda n, _: sys.exit(40 + n))\n"
    )
    script += "print('ready', flush=True)\nwhile True: signal.pause()"
    with canned_daemon(home):
        child = subprocess.Popen(
            [*CACHESVC, "run", "--socket", str(home), "--", sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        # Ctrl-C reaches the whole foreground group, SIGTERM only the process it is sent to.
        os.killpg(child.pid, number) if number == signal.SIGINT else child.send_signal(number)
        assert child.wait(WAIT_S) == 40 + number
        child.stdout.close()


def test_a_daemon_is_started_for_the_command_and_stopped_after_it(home: Path) -> None:
    command = f"{sys.executable} -m cachesvc status --json; exit 3"
    done = subprocess.run(
        [*CACHESVC, "run", *SMALL, "--json", *shell(command)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 3, done.stderr
    status = json.loads(done.stdout)
    assert status["tiers"][0]["budget_bytes"] == 8 << 20
    assert json.loads(done.stderr)["started"] is True
    assert not alive(status["pid"])
    assert Path(private_dir()).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_during_the_daemons_start_ends_the_daemon_too(home: Path, number: int) -> None:
    task = subprocess.Popen([*CACHESVC, "run", *SMALL, "--", "sleep", "60"])
    began = Path(f"/proc/{task.pid}/task/{task.pid}/children")
    wait_until(lambda: bool(began.read_text()))
    daemon = int(began.read_text())
    task.send_signal(number)
    assert task.wait(WAIT_S) in (128 + number, -number)  # a shell shows both as 128 + number
    wait_until(lambda: not alive(daemon))


def test_warning_signals_of_schedulers_do_not_end_run_or_its_daemon(home: Path) -> None:
    hold = f"trap '' USR1 USR2; {sys.executable} -m cachesvc status --json; read line"
    task = subprocess.Popen(
        [*CACHESVC, "run", *SMALL, *shell(hold)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert task.stdout is not None
    daemon = json.loads(task.stdout.readline())["pid"]
    wait_until(lambda: len(children(daemon)) == 3)
    fillers = children(daemon)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        for pid in (task.pid, daemon, *fillers):
            os.kill(pid, number)
    with Control(private_dir()) as control:
        assert control.status().pid == daemon
    assert all(alive(pid) for pid in fillers)
    task.communicate("\n", timeout=WAIT_S)
    assert task.returncode == 0


def test_tasks_of_a_job_share_a_daemon_until_the_last_ends(home: Path) -> None:
    hold = f"{sys.executable} -m cachesvc status --json; read line"
    tasks = []
    for _ in range(2):
        task = subprocess.Popen(
            [*CACHESVC, "run", *SMALL, *shell(hold)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        tasks.append(task)
    pids = {json.loads(task.stdout.readline())["pid"] for task in tasks if task.stdout}
    assert len(pids) == 1
    tasks[0].communicate("\n", timeout=WAIT_S)
    assert alive(next(iter(pids)))
    tasks[1].communicate("\n", timeout=WAIT_S)
    assert not alive(pids.pop())
    assert [task.returncode for task in tasks] == [0, 0]


def test_a_daemon_that_cannot_start_says_why(home: Path, capsys: Any) -> None:
    assert run(["run", "--ram", "1MiB", "--", "true"]) == 2
    err = capsys.readouterr().err
    assert "the daemon did not start: the RAM budget of 1MiB cannot hold one extent of 64MiB" in err
    assert err.count("\n") == 1


def test_a_directory_that_others_can_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(NotAllowed, match="not this user's own"):
        make_private(str(tmp_path))
    link = tmp_path / "link"
    link.symlink_to("/tmp")
    with pytest.raises(NotAllowed):
        make_private(str(link))


def test_jobs_on_one_node_choose_other_ports_where_theirs_are_taken(
    home: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        monkeypatch.setenv("CACHESVC_METRICS", taken)
        assert run(["run", *SMALL, *shell("exit 7")]) == 7, capfd.readouterr()
        said = capfd.readouterr().err.splitlines()
        assert said[0].startswith(f"cachesvc: --metrics {taken} is taken; this daemon has 127.0.0.1:")
    assert free_address(taken) == taken
    assert free_address("nowhere.invalid:1") == "nowhere.invalid:1"
