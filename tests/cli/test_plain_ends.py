"""Every failure of a command ends in one line and its exit code; children print nothing else either."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cachesvc.__main__ import run
from cachesvc.cli import doctor_checks, output
from cachesvc.cli.output import print_notes
from cachesvc.client.control import Control
from cachesvc.config import OPEN_FILES, SOCKET_PATH_BYTES, open_files_advised
from cachesvc.core.errors import CorruptData
from cachesvc.v1 import cachesvc_pb2 as pb
from testbed import WAIT_S
from testbed.node import Daemon
from tests.support import datasets
from tests.support.canned import DATASET, NEW, OLD, CannedCache, canned_daemon
from tests.support.processes import children

TOO_LONG = "/tmp/" + 120 * "a"
SMALL = ["--ram", "64MiB", "--fillers", "2"]
pytestmark = pytest.mark.usefixtures("plain")


def launched(tmp_path: Path, *more: str, before: str = "") -> subprocess.Popen[str]:
    """Start `serve` in a process group of its own. Its output ends when the last of its children has ended."""
    serve = f"exec {sys.executable} -m cachesvc serve --state-dir {tmp_path}/state {' '.join(more)}"
    return subprocess.Popen(
        ["sh", "-c", f"{before}{serve}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--allow", "s3://"], "names no bucket"),
        (["--ram", "10TiB"], "machine or cgroup allows; lower --ram"),
        (["--allow", "nonsense"], "neither a URI nor an absolute path"),
        (["--socket", TOO_LONG], f"ends at {SOCKET_PATH_BYTES} bytes"),
    ],
)
def test_a_daemon_that_cannot_start_says_one_line_and_so_do_its_fillers(
    tmp_path: Path, arguments: list[str], says: str
) -> None:
    child = launched(tmp_path, *SMALL, "--socket", str(tmp_path / "s"), *arguments)
    said, _ = child.communicate(timeout=WAIT_S)
    ours = said.splitlines()
    assert (child.returncode, len(ours)) == (2, 1), said
    assert ours[0].startswith("cachesvc: ")
    assert says in ours[0]


def test_a_daemon_that_cannot_start_a_thread_says_one_line(tmp_path: Path) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_STACK)
    if most != resource.RLIM_INFINITY:
        pytest.skip("stacks are limited here: none can be too large")
    larger_than_any_memory = "export OPENBLAS_NUM_THREADS=1; ulimit -s 200000000000; "
    child = launched(tmp_path, *SMALL, "--socket", str(tmp_path / "s"), before=larger_than_any_memory)
    said, _ = child.communicate(timeout=WAIT_S)
    assert (child.returncode, said.count("cachesvc: ")) == (1, 1), said
    assert "cachesvc: no thread can be started; allow more processes" in said
    assert "daemon/serve.py" not in said  # its fillers may have printed theirs


def test_an_invalid_log_level_is_one_line_and_an_empty_one_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CACHESVC_LOG", "loud")
    child = launched(tmp_path, *SMALL, "--socket", str(tmp_path / "s"))
    said, _ = child.communicate(timeout=WAIT_S)
    assert (child.returncode, said.count("\n")) == (2, 1), said
    assert "CACHESVC_LOG) LOUD is no level" in said
    monkeypatch.setenv("CACHESVC_LOG", "")
    child = launched(tmp_path, *SMALL, "--socket", str(tmp_path / "s"), "--nvme", f"{tmp_path / 'none'}=1G")
    assert "is no directory" in child.communicate(timeout=WAIT_S)[0]


@pytest.mark.parametrize(
    ("number", "whom"),
    [(signal.SIGINT, "the group"), (signal.SIGTERM, "the group"), (signal.SIGKILL, "the daemon")],
)
def test_fillers_that_have_just_started_end_silently(
    tmp_path: Path, number: signal.Signals, whom: str
) -> None:
    child = launched(tmp_path, *SMALL, "--socket", str(tmp_path / "s"), "--allow", str(tmp_path))
    deadline = time.monotonic() + WAIT_S
    while not children(child.pid):  # the fork server of the fillers; its imports take a second
        assert child.poll() is None
        assert time.monotonic() < deadline
    (os.killpg if whom == "the group" else os.kill)(child.pid, number)
    said, _ = child.communicate(timeout=WAIT_S)
    assert child.returncode == (0 if whom == "the group" else -signal.SIGKILL)
    assert "ended unexpectedly" not in said
    assert [line for line in said.splitlines() if not re.match(r"\d\d:\d\d:\d\d (INFO|WARNING)", line)] == []


def test_a_path_too_long_for_a_socket_is_the_same_line_everywhere(capsys: Any) -> None:
    for verb in ("status", "ls"):
        assert run([verb, "--socket", TOO_LONG]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert len(set(lines)) == 1
    assert run(["doctor", *SMALL[:2], "--extent-bytes", "1MiB", "--socket", TOO_LONG]) == 1
    assert lines[0].removeprefix("cachesvc: ") in capsys.readouterr().out


def test_the_longest_socket_path_works(tmp_path: Path, pets: Path, capsys: Any) -> None:
    directory = "/tmp/cs-" + str(os.getpid()).ljust(SOCKET_PATH_BYTES - len("/tmp/cs-/cachesvc.sock"), "a")
    child = launched(tmp_path, *SMALL, "--socket", directory, "--allow", str(tmp_path))
    try:
        deadline = time.monotonic() + WAIT_S
        while run(["prefetch", str(pets), "--socket", directory]) != 0:
            assert child.poll() is None
            assert time.monotonic() < deadline
    finally:
        child.terminate()
        child.communicate(timeout=WAIT_S)
        for name in os.listdir(directory):
            os.unlink(f"{directory}/{name}")
        os.rmdir(directory)


@pytest.mark.slow
def test_an_eviction_that_leaves_extents_is_1(daemon: Daemon, pets: Path, capsys: Any) -> None:
    assert run(["prefetch", str(pets)]) == 0
    assert run(["pin", str(pets)]) == 0
    capsys.readouterr()
    assert run(["evict", "--json", str(pets)]) == 1
    out, err = capsys.readouterr()
    row = json.loads(out)
    assert (row["evicted_bytes"], row["busy_bytes"]) == (0, 6000)
    assert "unpin" in json.loads(err)["error"]
    assert run(["unpin", str(pets)]) == 0
    assert run(["evict", str(pets)]) == 0


def test_a_dataset_is_named_by_the_beginning_of_its_id(daemon: Daemon, pets: Path, capsys: Any) -> None:
    with Control(daemon.socket_dir) as control:
        assert run(["prefetch", str(pets)]) == 0
        (row,) = [each for each in control.list() if each.dataset.uri.rstrip("/").endswith(str(pets))]
    short = row.dataset.id[:12]
    for words in (["pin"], ["unpin"], ["verify"], ["prefetch"], ["estimate"], ["find"]):
        capsys.readouterr()
        assert run([*words, short, *(["key != ''", "--count"] if words == ["find"] else [])]) == 0, words
    assert run(["evict", short]) == 0
    assert f"{short} ({row.dataset.id}): 5.9 KiB evicted" in capsys.readouterr().out


def test_the_beginning_of_an_id_must_be_unique(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("CACHESVC_SOCKET", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with canned_daemon(tmp_path) as cache:
        assert isinstance(cache, CannedCache)
        cache.datasets = [
            pb.DatasetStatus(dataset=pb.Dataset(id=OLD)),
            pb.DatasetStatus(dataset=DATASET),
        ]
        assert run(["evict", NEW[:12]]) == 2
        assert OLD in (said := capsys.readouterr().err)
        assert NEW in said
        assert run(["evict", "abcdef123456"]) == 4
        (tmp_path / "20261121").mkdir()  # an existing folder of that name is a path
        assert run(["pin", "20261121"]) == 0
        opened = [each for each in cache.asked if isinstance(each, pb.OpenDatasetRequest)]
        assert list(opened[0].uris) == [str(tmp_path / "20261121")]


def test_tar_shards_are_one_dataset_once_they_are_opened(daemon: Daemon, tmp_path: Path) -> None:
    datasets.tar_shards(tmp_path / "tars", 3, 40, 9000)
    assert run(["prefetch", str(tmp_path / "tars")]) == 0
    with Control(daemon.socket_dir) as control:
        (row,) = [
            each for each in control.list() if each.dataset.uri.rstrip("/").endswith(f"{tmp_path}/tars")
        ]
    assert row.dataset.samples == 120
    assert (
        row.source_bytes == row.dataset.stored_bytes == sum(f.stat().st_size for f in tmp_path.glob("tars/*"))
    )
    assert row.resident_bytes == row.dataset.size_bytes


def test_errors_of_a_verb_that_prints_json_are_json(capsys: Any, tmp_path: Path) -> None:
    for words, code in ((["status"], 10), (["prefetch"], 2), (["serve", "--ram", "lots"], 2)):
        assert (
            run([*words, "--json", *(["--socket", str(tmp_path)] if words != ["prefetch"] else [])]) == code
        )
        found = json.loads(capsys.readouterr().err)
        assert (found["code"], sorted(found)) == (code, ["code", "error"])
    assert run(["run", "--socket", TOO_LONG, "--", "true", "--json"]) == 2
    assert capsys.readouterr().err.startswith("cachesvc: ")  # this --json is the command's


def test_a_failed_start_is_json_where_the_log_is_json(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def said(*words: str) -> str:
        assert run(["serve", *words]) == 2
        return str(capsys.readouterr().err)

    for words in (["--log-format", "json"], ["--log-format=json"]):
        for wrong in ("1", "lots"):
            assert json.loads(said(*words, "--ram", wrong))["code"] == 2
    monkeypatch.setenv("CACHESVC_LOG_FORMAT", "json")
    assert json.loads(said("--ram", "1"))["code"] == 2
    assert said("--ram", "1", "--log-format", "text").startswith("cachesvc: ")
    assert run(["ls", "--socket", TOO_LONG]) == 2  # a command without a log
    assert capsys.readouterr().err.startswith("cachesvc: ")


def test_a_full_disk_under_stderr_does_not_change_the_exit_code(tmp_path: Path) -> None:
    for words, code in ((["status", "--socket", str(tmp_path)], 10), (["ls", "--nonsense"], 2)):
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [sys.executable, "-m", "cachesvc", *words], stdout=subprocess.PIPE, stderr=full
            )
        assert (done.returncode, done.stdout) == (code, b"")


def test_doctor_takes_the_size_options_of_serve(capsys: Any, tmp_path: Path) -> None:
    given = ["doctor", "--json", "--socket", str(tmp_path), "--ram", "1GiB"]
    run([*given, "--extent-bytes", "4096", "--allow", "s3://bucket/"])
    found = {row["check"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert f"{open_files_advised(1 << 30, 4096):,} advised" in found["open files"]["text"]
    assert (found["settings"]["level"], found["settings"]["text"]) == ("ok", "serves s3://bucket/")
    assert run([*given, "--extent-bytes", "5000"]) == 1
    assert "not a multiple of 4096" in capsys.readouterr().out


def test_doctor_and_daemon_advise_the_same_number_of_open_files(tmp_path: Path) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = doctor_checks.open_files(64 << 20, 64 << 20)
    assert f"{OPEN_FILES:,} advised" in found.text
    assert (found.level is doctor_checks.Level.WARN) == (0 <= hard < OPEN_FILES)
    child = launched(tmp_path, *SMALL, "--socket", str(tmp_path / "s"), before="ulimit -n 1000; ")
    assert child.stdout is not None
    assert f"advised={OPEN_FILES}" in child.stdout.readline()
    child.terminate()
    child.communicate(timeout=WAIT_S)


def test_names_that_are_not_utf8_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    datasets.write_files(tmp_path / "d", {"a.tar": datasets.tar_bytes({"\udcfcn": {"jpg": b"1"}})})
    assert run(["find", f"{tmp_path}/d/", "key != 'x'"]) == 0
    assert capsys.readouterr().out == "\\udcfcn\n"


def test_control_characters_in_names_are_escaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    name = "a\nb\x1b[2Jc\r\u2028é d"
    datasets.write_files(tmp_path / "d", {"a.tar": datasets.tar_bytes({name: {"jpg": b"1"}})})
    assert run(["find", f"{tmp_path}/d/", "key != 'x'"]) == 0
    assert capsys.readouterr().out == r"a\nb\x1b[2Jc\r\u2028é d" + "\n"
    assert run(["find", "--json", f"{tmp_path}/d/", "key != 'x'"]) == 0
    assert json.loads(capsys.readouterr().out)["key"] == name
    output.complain(CorruptData(f"{name} is no tar"))
    assert capsys.readouterr().err == r"cachesvc: a b\x1b[2Jc é d is no tar" + "\n"
    print_notes([f"{name} is left out"], as_json=False)
    assert capsys.readouterr().err == r"warning: a b\x1b[2Jc é d is left out" + "\n"


FIND = ["find", "{pets}", "key != 'x'"]
QUICK = [(["status"], ""), (["prefetch", "{pets}", "--json"], ""), (FIND, "1"), (["--help"], "")]
LONGER: list[tuple[list[str], str]] = [
    ([*words, *more], unbuffered)
    for words in (
        ["status"],
        ["ls"],
        ["doctor", *SMALL[:2]],
        ["prefetch", "{pets}"],
        FIND,
        [*FIND, "--count"],
        ["--help"],
        ["ls", "-h"],
        ["--version"],
    )
    for more in ([], ["--json"])
    for unbuffered in ("", "1")
    if not (more and words[-1][0] == "-")
]


@pytest.mark.parametrize(
    ("words", "unbuffered"), [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in LONGER)]
)
def test_output_to_a_full_disk_is_one_line(
    daemon: Daemon, pets: Path, words: list[str], unbuffered: str
) -> None:
    assert run(["prefetch", str(pets)]) == 0
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "cachesvc", *(word.format(pets=pets) for word in words)],
            env={**os.environ, **daemon.env, "PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert (done.returncode, done.stderr.count("\n")) == (8, 1), done.stderr
    as_json = "--json" in words
    said = json.loads(done.stderr)["error"] if as_json else done.stderr.removeprefix("cachesvc: ").strip()
    assert said == "the output cannot be written: No space left on device; free space there"


def test_output_to_a_closed_pipe_ends_silently(daemon: Daemon, pets: Path) -> None:
    assert run(["prefetch", str(pets)]) == 0
    for words in (["status"], ["find", str(pets), "key != 'x'"]):
        reading, writing = os.pipe()
        os.close(reading)
        done = subprocess.run(
            [sys.executable, "-m", "cachesvc", *words],
            env={**os.environ, **daemon.env},
            stdout=writing,
            stderr=subprocess.PIPE,
        )
        os.close(writing)
        assert (done.returncode, done.stderr) == (1, b"")
