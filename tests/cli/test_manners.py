"""Output for people: help by task, tables that fit, Tab, and what a verb did."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.shell_completion import ShellComplete

from cachesvc.__main__ import run
from cachesvc.cli import TASKS, cli, options, output
from cachesvc.cli.progress_bar import ProgressBar
from cachesvc.cli.run import private_dir
from cachesvc.cli.serve import GROUPS
from cachesvc.system.memory import allowed_bytes
from cachesvc.v1 import cachesvc_pb2 as pb
from testbed import WAIT_S
from testbed.node import Daemon
from tests.support.canned import NEW, OLD, CannedCache, canned_daemon

LONG = "s3://a-bucket-with-a-long-name/and/a/long/prefix/below/it/train/"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CannedCache]:
    """A daemon with two datasets, of which one is pinned."""
    monkeypatch.setenv("CACHESVC_SOCKET", str(tmp_path))
    monkeypatch.delenv("LINES", raising=False)
    with canned_daemon(tmp_path) as servicer:
        for id_, uri, readers in ((NEW, LONG, 0), (OLD, "s3://a/", 2)):
            row = pb.DatasetStatus(readers=readers, resident_bytes=1 << 20, pinned=id_ == NEW)
            row.dataset.id, row.dataset.uri, row.dataset.size_bytes = id_, uri, 3 << 20
            servicer.datasets.append(row)
        yield servicer


@pytest.mark.pure
def test_the_help_lists_every_verb_once_by_task(capsys: Any) -> None:
    verbs = [verb for group in TASKS.values() for verb in group]
    assert sorted(verbs) == sorted(verb.name or "" for verb in cli.all_commands().values() if not verb.hidden)
    assert run(["help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n{task}:\n" in shown for task in TASKS)
    assert all(f"\n  {verb} " in shown for verb in verbs)


@pytest.mark.pure
def test_help_shows_a_verb_as_its_option_does(capsys: Any) -> None:
    assert run(["help", "prefetch"]) == 0
    shown = capsys.readouterr().out
    assert run(["prefetch", "--help"]) == 0
    assert capsys.readouterr().out == shown
    assert run(["help", "nonsense"]) == 2


@pytest.mark.parametrize("verb", ["status", "ls"])
def test_tables_fit_80_columns_under_watch_and_are_whole_with_wide(
    cache: CannedCache, verb: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    assert run([verb]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "s3://a" in line]
    assert len(lines) == 2
    assert max(map(len, lines)) <= 80
    assert any("s3://a-" in line and "/train/" in line for line in lines)
    assert run([verb, "--wide"]) == 0
    whole = capsys.readouterr().out
    assert LONG in whole
    assert NEW in whole
    monkeypatch.delenv("LINES")
    assert run([verb]) == 0
    assert LONG in capsys.readouterr().out  # a pipe has no width


def test_ls_is_sorted_by_uri_and_status_by_readers(cache: CannedCache, capsys: Any) -> None:
    assert run(["ls"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == [OLD[:12], NEW[:12]]
    cache.datasets.reverse()
    assert run(["status"]) == 0
    shown = capsys.readouterr().out
    assert shown.index("s3://a/") < shown.index(LONG)
    assert "0 readers, 0 fills running" in shown


def test_unpin_says_whether_there_was_a_pin(cache: CannedCache, capsys: Any) -> None:
    for dataset, was_pinned, words in ((NEW, True, "was pinned"), (OLD, False, "was not pinned")):
        assert run(["unpin", dataset]) == 0
        assert words in capsys.readouterr().out
        assert run(["unpin", "--json", dataset]) == 0
        assert json.loads(capsys.readouterr().out)["was_pinned"] is was_pinned


@pytest.mark.pure
def test_progress_without_a_terminal_tells_only_changes(capsys: Any) -> None:
    times = iter(range(100))
    with ProgressBar("prefetch", now=lambda: next(times)) as bar:
        for done in (0, 0, 0, 5, 5, 5, 10):
            bar.update(done, 10)
    assert [line.split(",")[1] for line in capsys.readouterr().err.splitlines()] == [
        " 0 bytes of 10 bytes",
        " 5 bytes of 10 bytes",
        " 10 bytes of 10 bytes",
    ]


def completed(words: list[str], incomplete: str) -> list[str]:
    assert isinstance(cli, click.Group)
    shell = ShellComplete(cli, {}, "cachesvc", "_CACHESVC_COMPLETE")
    return [item.value for item in shell.get_completions(words, incomplete)]


def test_tab_offers_verbs_formats_and_datasets(cache: CannedCache, monkeypatch: pytest.MonkeyPatch) -> None:
    assert completed([], "st") == ["status", "stop"]
    assert {"text", "tfrecord", "tokens"} <= set(completed(["prefetch", "--format"], "t"))
    assert completed(["prefetch", "--format"], "webd") == ["webdataset"]
    assert completed(["evict"], "s3://a-") == [LONG]
    monkeypatch.setenv("CACHESVC_SOCKET", "/nowhere")
    assert completed(["evict"], "s3://") == []


@pytest.mark.pure
def test_a_private_daemon_needs_no_folder_of_a_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "gone"))
    assert private_dir().startswith(f"{tmp_path}/cachesvc-{os.geteuid()}")
    (tmp_path / "gone").mkdir()
    assert private_dir().startswith(f"{tmp_path}/gone/")


def test_stop_ends_the_daemon_and_its_parent(tmp_path: Path, capsys: Any) -> None:
    with Daemon(tmp_path, ["--ram", "64MiB", "--fillers", "1"]) as daemon:
        pid, parent = daemon.pid, daemon.process
        assert parent is not None
        command = [sys.executable, "-m", "cachesvc", "stop", "--json", "--socket", daemon.socket_dir]
        done = subprocess.run(command, capture_output=True, timeout=WAIT_S)
        assert json.loads(done.stdout) == {"event": "stopped", "pid": pid}
        assert done.returncode == 0
        assert parent.wait(WAIT_S) == 0
        assert run(["stop", "--socket", daemon.socket_dir]) == 10
        assert "few open files" not in daemon.log


@pytest.mark.pure
def test_the_options_of_serve_are_grouped_with_their_defaults(capsys: Any) -> None:
    assert run(["serve", "--help"]) == 0
    shown = capsys.readouterr().out
    for title in GROUPS:
        assert f"\n{title}:\n" in shown
    assert re.search(r"\nOther:\n  (-h, )?--help", shown)  # each option is in a group
    words = " ".join(shown.split())
    for expected in (
        "Size of an extent. [default: 64MiB]",
        "[default: 32MiB]",
        "wider than 600 needs --allow. [default: 600]",
    ):
        assert expected in words
    options = {name for name in re.findall(r"^  (--[a-z-]+)", shown, re.M)}
    assert {
        option
        for line in re.findall(r"cachesvc serve (.*)", shown)
        for option in re.findall(r"--[a-z-]+", line)
    } <= options


@pytest.mark.pure
def test_ram_may_be_a_part_of_the_memory() -> None:
    assert options.RAM.convert("50%", None, None) == allowed_bytes() // 2
    assert options.RAM.convert("1GiB", None, None) == 1 << 30
    for wrong in ("0%", "101%", "%", "x%", "-1%"):
        with pytest.raises(click.UsageError, match="write 1% to 100%"):
            options.RAM.convert(wrong, None, None)


def test_quiet_leaves_out_progress_and_warnings_and_verbose_says_what_is_asked(
    cache: CannedCache, capsys: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with click.Context(click.Command("x"), info_name="x") as context:
        context.meta["cachesvc.quiet"] = True
        with ProgressBar("prefetch", now=iter(range(100)).__next__) as progress:
            progress.update(1, 10)
            progress.update(2, 10)
        output.print_notes(["a note"], as_json=False)
        assert capsys.readouterr() == ("", "")
    output.print_notes(["a note"], as_json=False)
    assert capsys.readouterr().err == "warning: a note\n"
    assert run(["ls", "-q"]) == 0
    with caplog.at_level("DEBUG", "cachesvc"):
        assert run(["ls", "-v"]) == 0
    assert "ListRequest" in caplog.text
