"""The verbs against a real gRPC server that serves canned replies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from cachesvc.__main__ import run
from cachesvc.cli import cli
from cachesvc.config import CONTROL_SOCKET
from cachesvc.core.errors import NotAllowed, NotFound
from cachesvc.v1 import cachesvc_pb2 as pb
from testbed import WAIT_S
from tests.support.canned import DATASET, NEW, OLD, URI, CannedCache, canned_daemon


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CannedCache]:
    """Run a canned daemon, and point the environment to it. Output goes to no terminal."""
    monkeypatch.delenv("LINES", raising=False)
    monkeypatch.setenv("CACHESVC_SOCKET", str(tmp_path))
    with canned_daemon(tmp_path) as servicer:
        yield servicer


def progress(resident: int, done: bool = False, **more: Any) -> pb.PrefetchReply:
    size = 10 << 20
    return pb.PrefetchReply(
        extents=10,
        resident_extents=resident,
        size_bytes=size,
        resident_bytes=size * resident // 10,
        done=done,
        **more,
    )


def rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_prefetch_ends_with_0_when_every_extent_is_resident(cache: CannedCache, capsys: Any) -> None:
    cache.prefetch = [progress(0), progress(5), progress(10, done=True, source_bytes=7)]
    assert run(["prefetch", URI]) == 0
    out, err = capsys.readouterr()
    assert "10 of 10 extents resident" in out
    assert err == ""
    assert cache.asked[-1].dataset == NEW
    assert run(["prefetch", "--json", URI]) == 0
    last = rows(capsys.readouterr().out)[-1]
    assert (last["event"], last["resident"], last["source_bytes"]) == ("prefetched", True, 7)


CHANGED = [pb.ExtentFailure(extent="aa", code=6, message="s3://bucket/x changed")] * 2
WHOLE, PART = progress(10, done=True), pb.VerifyReply(checked_extents=1, extents=4)
CORRUPT = pb.VerifyReply(checked_extents=10, extents=10, corrupt_extents=1, done=True)
UNFIT = progress(6, done=True, unfit_bytes=4 << 20)
ENDS: dict[str, tuple[list[str], pb.PrefetchReply, pb.VerifyReply, int, tuple[str, ...]]] = {
    "what does not fit": (["prefetch", URI], UNFIT, PART, 8, ("4,194,304 bytes", "--nvme")),
    "what would not fit": (["prefetch", "--dry-run", URI], UNFIT, PART, 8, ("4,194,304 bytes", "--nvme")),
    "failures": (["prefetch", URI], progress(8, done=True, failures=CHANGED), PART, 6, ("2 extents", "x changed")),
    "an incomplete prefetch": (["prefetch", URI], progress(9, done=True), PART, 1, ("only 9 of 10",)),
    "corrupt extents after a prefetch": (["prefetch", "--verify", NEW], WHOLE, CORRUPT, 5, ("corrupt",)),
    "corrupt extents": (["verify", NEW], WHOLE, CORRUPT, 5, ("corrupt",)),
    "an incomplete verification": (["verify", NEW], WHOLE, PART, 1, ("ended the check",)),
}  # fmt: skip


@pytest.mark.parametrize("end", ENDS)
def test_what_is_not_whole_is_one_line_and_its_code(cache: CannedCache, capsys: Any, end: str) -> None:
    words, prefetched, verified, code, says = ENDS[end]
    cache.prefetch, cache.verify = [prefetched], [verified]
    assert run(words) == code
    out, err = capsys.readouterr()
    assert out or code != 8
    assert err.count("\n") == 1
    assert [word for word in says if word not in err] == []


def test_a_good_verification_is_0(cache: CannedCache, capsys: Any) -> None:
    cache.verify = [pb.VerifyReply(checked_extents=4, extents=4, done=True)]
    assert run(["verify", "--json", NEW]) == 0
    assert rows(capsys.readouterr().out)[0]["corrupt_extents"] == 0


def test_a_full_tier_is_named_in_every_report(cache: CannedCache, capsys: Any, tmp_path: Path) -> None:
    cache.prefetch = [progress(6, done=True, unfit_bytes=4 << 20, full_tiers=["nvme0"])]
    assert run(["prefetch", URI]) == 8
    assert "nvme0 takes no more" in capsys.readouterr().err
    cache.tier = pb.TierStatus(name="nvme0", full=True)
    assert run(["status"]) == 0
    assert "takes no more" in capsys.readouterr().out
    run(["doctor", "--json", "--ram", "1MiB", "--extent-bytes", "1MiB", "--state-dir", str(tmp_path)])
    (told,) = (row for row in rows(capsys.readouterr().out) if row["check"] == "daemon")
    assert told["level"] == "warn"
    assert "nvme0 takes no more" in told["text"]
    cache.tier = pb.TierStatus(name="nvme0", unplanned_bytes=3 << 20)
    assert run(["status"]) == 0
    assert "3.0 MiB without a plan" in capsys.readouterr().out
    cache.tier = pb.TierStatus(name="nvme0", full=True, stalled=True)
    assert run(["status"]) == 0
    assert "does not answer" in capsys.readouterr().out


def test_a_failing_dataset_does_not_keep_the_next_from_being_filled(cache: CannedCache, capsys: Any) -> None:
    cache.prefetch = [progress(6, done=True, unfit_bytes=1)]
    assert run(["prefetch", NEW, OLD]) == 8
    assert [request.dataset for request in cache.asked] == [NEW, OLD]
    assert capsys.readouterr().err.count("does not fit") == 2


def test_several_uris_are_several_datasets_unless_together(cache: CannedCache, capsys: Any) -> None:
    cache.prefetch = [progress(10, done=True)]
    assert run(["prefetch", "s3://b/1", "s3://b/2"]) == 0
    assert [list(r.uris) for r in cache.asked if isinstance(r, pb.OpenDatasetRequest)] == [
        ["s3://b/1"],
        ["s3://b/2"],
    ]
    cache.asked.clear()
    assert run(["prefetch", "--together", "s3://b/1", "s3://b/2"]) == 0
    assert list(cache.asked[0].uris) == ["s3://b/1", "s3://b/2"]


def test_dataset_options_reach_the_daemon(cache: CannedCache, capsys: Any) -> None:
    cache.prefetch = [progress(10, done=True)]
    given = "--format tokens --dtype uint16 --seq-len 2048 --overlap 1 --split val"
    assert run(["prefetch", *given.split(), URI]) == 0
    wanted = cache.asked[0].options
    assert wanted.split == "val"
    assert (wanted.format, wanted.dtype, wanted.seq_len, wanted.overlap) == ("tokens", "uint16", 2048, 1)
    assert wanted.extent_bytes == 0


def test_a_local_path_is_sent_absolute(
    cache: CannedCache, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cache.prefetch = [progress(10, done=True)]
    assert run(["prefetch", "data/"]) == 0
    assert list(cache.asked[0].uris) == [f"{tmp_path}/data/"]


def test_status_shows_tiers_and_datasets(cache: CannedCache, capsys: Any) -> None:
    cache.datasets = [pb.DatasetStatus(dataset=DATASET, resident_bytes=5 << 20, hits=3, misses=1, bound=0.5)]
    assert run(["status"]) == 0
    out = capsys.readouterr().out
    assert "pid 42" in out
    assert "50.0 %" in out
    assert "75.0 %" in out
    assert run(["status", "--json"]) == 0
    (row,) = rows(capsys.readouterr().out)
    assert row["tiers"][0]["budget_bytes"] == 1 << 30
    assert row["datasets"][0]["dataset"]["id"] == NEW


def test_long_names_are_not_folded_outside_a_terminal(cache: CannedCache, capsys: Any) -> None:
    long = pb.Dataset(id=NEW, uri="s3://bucket/" + "x" * 300, size_bytes=1)
    cache.datasets = [pb.DatasetStatus(dataset=long)]
    assert run(["ls"]) == 0
    assert long.uri in capsys.readouterr().out


def test_evict_drops_every_known_version_of_a_uri_without_opening_it(cache: CannedCache, capsys: Any) -> None:
    old = pb.Dataset(id=OLD, uri=URI)
    cache.datasets = [pb.DatasetStatus(dataset=old), pb.DatasetStatus(dataset=DATASET)]
    assert run(["evict", "--json", URI]) == 1  # the canned daemon always reports bytes that stay
    assert [row["dataset"] for row in rows(capsys.readouterr().out)] == [OLD, NEW]
    assert not [request for request in cache.asked if isinstance(request, pb.OpenDatasetRequest)]


def test_evict_reports_the_bytes_that_stay(cache: CannedCache, capsys: Any) -> None:
    assert run(["evict", NEW]) == 1
    out, err = capsys.readouterr()
    assert "3.0 MiB evicted; 1.0 MiB are leased or pinned" in out
    assert "1.0 MiB" in err


def test_pin_opens_a_uri_and_unpin_takes_an_id(cache: CannedCache, capsys: Any) -> None:
    cache.prefetch = [progress(10, done=True)]
    assert run(["pin", URI]) == 0
    assert run(["unpin", NEW]) == 0
    pins = [request for request in cache.asked if isinstance(request, pb.PinRequest)]
    assert [(request.dataset, request.pinned) for request in pins] == [(NEW, True), (NEW, False)]


def test_pin_says_how_much_has_no_room(cache: CannedCache, capsys: Any) -> None:
    cache.prefetch = [progress(6, done=True, unfit_bytes=4 << 20)]
    assert run(["pin", NEW]) == 0
    out, err = capsys.readouterr()
    assert "is pinned" in out
    assert err.startswith("warning: 4.0 MiB of it have no room")


@pytest.mark.parametrize(
    "refusal", [NotAllowed("s3://x/ is not on the allowlist"), NotFound("no bucket 'x'")]
)
def test_a_refusal_is_one_line_and_its_code(cache: CannedCache, capsys: Any, refusal: Any) -> None:
    cache.refusal = refusal
    assert run(["prefetch", "s3://x/"]) == refusal.code
    assert capsys.readouterr().err == f"cachesvc: {refusal}\n"


@pytest.mark.parametrize(
    "verb", [["status"], ["ls"], ["prefetch", "s3://b/x"], ["evict", NEW], ["verify", NEW]]
)
@pytest.mark.parametrize("dead_socket", [False, True])
def test_no_daemon_is_10_and_says_how_to_start_one(
    tmp_path: Path, capsys: Any, verb: list[str], dead_socket: bool
) -> None:
    if dead_socket:
        (tmp_path / CONTROL_SOCKET).touch()
    assert run([*verb, "--socket", str(tmp_path)]) == 10
    err = capsys.readouterr().err
    assert "cachesvc serve" in err
    assert err.count("\n") == 1


def test_a_closed_pipe_is_no_traceback(cache: CannedCache) -> None:
    cache.datasets = [pb.DatasetStatus(dataset=DATASET)] * 5000
    done = subprocess.run(
        [f"{sys.executable} -m cachesvc ls --json | head -1"],
        shell=True,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert done.stderr == ""
    assert json.loads(done.stdout)["dataset"]["id"] == NEW


@pytest.fixture
def _interrupts() -> Iterator[None]:
    """Handle SIGINT, which a shell's background job and its children ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interrupts")
@pytest.mark.parametrize(
    "words", [["prefetch", "--json", NEW], ["run", "--", "sh", "-c", "echo; kill -INT $$"]]
)
def test_ctrl_c_ends_a_verb_after_one_line_and_by_the_signal(cache: CannedCache, words: list[str]) -> None:
    cache.hang = True
    child = subprocess.Popen(
        [sys.executable, "-m", "cachesvc", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    child.stdout.readline()  # a first line: the verb is at work
    if words[0] == "prefetch":
        child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=WAIT_S)
    assert child.returncode == -signal.SIGINT, "a shell ends its loop, as it does not for 130"
    said = ['{"error": "interrupted", "code": 130}'] if "--json" in words else ["cachesvc: interrupted"]
    assert err.split("\n", 1)[1:] == [f"{said[0]}\n"], "behind the ^C of the terminal"


def test_a_terminal_gets_a_bar_and_a_pipe_gets_lines(cache: CannedCache) -> None:
    cache.prefetch = [progress(n) for n in range(10)] + [progress(10, done=True)]
    here, there = os.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "cachesvc", "prefetch", NEW],
        stdout=subprocess.PIPE,
        stderr=there,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "120"},
        timeout=WAIT_S,
    )
    os.close(there)
    shown = b""
    with suppress(OSError):  # EIO: the end of the terminal
        while part := os.read(here, 1 << 16):
            shown += part
    os.close(here)
    assert done.returncode == 0
    assert b"\x1b" not in done.stdout
    assert b"\x1b" in shown
    assert b"10.5/10.5 MB" in shown or b"10.0/10.0 MiB" in shown


def test_a_narrow_terminal_gets_a_line_for_each_row(cache: CannedCache) -> None:
    cache.datasets = [pb.DatasetStatus(dataset=DATASET)] * 3
    for terminal in ("xterm", "dumb"):
        here, there = os.openpty()
        done = subprocess.run(
            [sys.executable, "-m", "cachesvc", "ls"],
            stdout=there,
            env=os.environ | {"TERM": terminal, "COLUMNS": "40"},
            timeout=WAIT_S,
        )
        os.close(there)
        shown = os.read(here, 1 << 16)
        os.close(here)
        assert done.returncode == 0
        assert [line.split()[0] for line in shown.splitlines()[1:]] == 3 * [NEW[:12].encode()], shown


def test_names_that_the_terminal_cannot_encode_are_escaped(cache: CannedCache) -> None:
    cache.datasets = [pb.DatasetStatus(dataset=pb.Dataset(id=NEW, uri="s3://b/na\u00efve/"))]
    done = subprocess.run(
        [sys.executable, "-m", "cachesvc", "ls"],
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        timeout=WAIT_S,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"s3://b/na\xefve/" in done.stdout


def test_closed_streams_are_an_error_or_silence(cache: CannedCache) -> None:
    cachesvc = f"{sys.executable} -m cachesvc"
    said = "cachesvc: the output cannot be written: Bad file descriptor\n"
    for command, code, err in (
        (f"{cachesvc} ls >&-", 1, said),
        (f"{cachesvc} ls <&- >&- 2>&-", 1, ""),
        (f"{cachesvc} ls 2>&-", 0, ""),
    ):
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=WAIT_S)
        assert (done.returncode, done.stderr) == (code, err), command


def test_each_verb_says_what_it_does_in_a_line(capsys: Any) -> None:
    assert run(["--help"]) == 0
    out = capsys.readouterr().out
    lines = [line for line in out.split("Exit codes")[0].splitlines() if line.strip()]
    verbs = [line for line in lines if line.split()[0] in cli.all_commands()]
    assert len(verbs) > 10
    assert [line for line in verbs if not line.endswith(".") or line.endswith(("...", "e.g."))] == []
