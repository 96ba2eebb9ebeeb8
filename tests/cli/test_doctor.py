"""`cachesvc doctor`: its findings and its advice."""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from cachesvc.__main__ import run
from cachesvc.cli import doctor_checks
from cachesvc.cli.doctor_checks import Level
from cachesvc.client.control import Control
from cachesvc.config import NvmeSpec, Settings, Tls
from cachesvc.tiers.mounts import Mount
from testbed.node import Daemon
from tests.support.faults.fake_s3 import Object, fake_s3
from tests.support.membership.nodes import authority, certified
from tests.support.users import ALICE, as_root, as_user
from tests.support.waiting import wait_until


@pytest.fixture
def no_cloud(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An environment without credentials, endpoint or daemon."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "CACHESVC_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("CACHESVC_SOCKET", str(tmp_path / "no-daemon"))


@pytest.fixture
def refusing_server() -> Iterator[str]:
    """A real HTTP server that refuses everything, as S3 does without a signature."""

    class Refuse(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_error(403)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = HTTPServer(("127.0.0.1", 0), Refuse)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def found(capsys: Any) -> dict[str, list[dict[str, str]]]:
    """The rows of `--json`, by check."""
    rows: dict[str, list[dict[str, str]]] = {}
    for line in capsys.readouterr().out.splitlines():
        rows.setdefault(json.loads(line)["check"], []).append(json.loads(line))
    return rows


def test_the_daemon_examines_its_own_settings_and_sources(
    no_cloud: None, capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with fake_s3() as store:
        store.objects["d/0"] = Object(4096)
        allow = ["--allow", "s3://b/", "--allow", "s3://b/d/", "--allow", str(tmp_path)]
        options = ["--ram", "64MiB", "--fillers", "1", *allow]
        options += ["--source", f"s3://b/d/,endpoint={store.endpoint}", "--nvme", f"{tmp_path}=1GiB"]
        keys = {"AWS_ACCESS_KEY_ID": "AKIAVISIBLE", "AWS_SECRET_ACCESS_KEY": "hunter2"}
        elsewhere = {"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}
        with Daemon(tmp_path / "node", options, keys | elsewhere) as daemon:
            monkeypatch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
            assert run(["doctor", "--json"]) == 1, "the endpoint of s3://b/ does not answer"
            rows = found(capsys)
            assert rows["asked"][0]["text"].startswith("the daemon in ")
            assert "RAM budget 67,108,864 of" in rows["memory"][0]["text"]
            assert rows["settings"][0]["text"] == f"serves s3://b/ s3://b/d/ {tmp_path}"
            assert rows["credentials"][0]["text"] == "S3 credentials from env: found, not tried"
            assert [row["level"] for row in rows["source"]] == ["fail", "ok", "ok"]
            assert rows["source"][1]["text"].startswith("s3://b/d/ was listed in ")
            assert rows["clock"][0]["level"] == "fail"
            assert "budget 1,073,741,824" in rows["nvme"][-1]["text"]
            assert store.asked == ["LIST"]
            run(["doctor", "--json", "--ram", "1MiB", "--extent-bytes", "4096"])
            rows = found(capsys)
            assert rows["asked"][0]["text"].startswith("this shell: with the options given")
            assert rows["credentials"][0]["text"] == "no S3 credentials found"


@pytest.mark.slow
def test_a_daemon_that_lost_a_disk_is_asked_all_the_same(
    no_cloud: None, capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    options = ["--ram", "64MiB", "--fillers", "1", "--allow", str(tmp_path), "--nvme", f"{disk}=1GiB"]
    with Daemon(tmp_path / "node", options) as daemon, Control(daemon.socket_dir) as control:
        monkeypatch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
        shutil.rmtree(disk)
        wait_until(lambda: any(tier.lost for tier in control.status().tiers))
        assert run(["doctor", "--json"]) == 1
        rows = found(capsys)
        assert rows["asked"][0]["text"].startswith("the daemon in ")
        assert "tier nvme0 is lost" in rows["daemon"][0]["text"]


def test_a_shell_is_named_as_that_and_takes_every_option_of_serve(
    no_cloud: None, capsys: Any, tmp_path: Path
) -> None:
    options = certified(
        tmp_path, "node", authority(tmp_path), ends=datetime.now(timezone.utc) + timedelta(90)
    )
    more = ["--listen", "0.0.0.0:7071", "--scrub-rate", "1MiB", "--quota", "user=1GiB", "--log", "DEBUG"]
    assert run(["doctor", "--json", "--ram", "1MiB", "--extent-bytes", "4096", *options, *more]) == 0
    rows = found(capsys)
    assert rows["asked"][0]["text"] == "this shell: no daemon answers"
    assert rows["certificate"][0]["level"] == "ok"


@as_root
def test_only_its_own_user_has_the_daemon_examined(no_cloud: None, tmp_path: Path) -> None:
    options = ["--ram", "64MiB", "--fillers", "1", "--allow", str(tmp_path), "--socket-mode", "666"]
    with Daemon(tmp_path / "node", options) as daemon:
        os.chmod(daemon.socket_dir, 0o755)
        directory = daemon.socket_dir

        def examine() -> None:
            with Control(directory) as control:
                control.examine()

        refused = as_user(ALICE, examine)
    assert refused == ["NotAllowed", "only user 0, who runs the daemon, may have it examined"]


def test_a_directory_on_the_kubelets_disk_leaves_what_the_kubelet_wants_free(tmp_path: Path) -> None:
    def levels(left: int, place: str) -> list[Level]:
        return [each.level for each in doctor_checks.kubelet(str(tmp_path), 1000, left, [place])]

    assert levels(149, str(tmp_path)) == [Level.WARN]
    assert levels(150, str(tmp_path)) == []
    assert levels(0, "/proc/version") == []
    assert levels(0, "/nowhere") == []


def test_a_plain_machine_passes_with_warnings(no_cloud: None, capsys: Any, tmp_path: Path) -> None:
    assert (
        run(["doctor", "--json", "--ram", "1MiB", "--extent-bytes", "4096", "--nvme", f"{tmp_path}=4KiB"])
        == 0
    )
    found = {row["check"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert found["kernel"]["level"] == "ok"
    assert found["memory"]["level"] == "ok"
    assert found["socket"]["level"] == "warn"
    assert found["credentials"]["level"] == "warn"
    assert "cachesvc serve" in found["socket"]["mend"]


def test_a_failed_check_is_exit_1(no_cloud: None, capsys: Any) -> None:
    assert run(["doctor", "--ram", "1PiB", "--nvme", "/nowhere=1G"]) == 1
    out = capsys.readouterr().out
    assert "fail  memory" in out
    assert "fail  nvme: /nowhere is no directory; create it" in out


def test_extents_of_size_zero_fail_a_check(no_cloud: None, capsys: Any) -> None:
    assert run(["doctor", "--extent-bytes", "0"]) == 1
    assert "--extent-bytes 0 is not a multiple" in capsys.readouterr().out


def test_a_budget_above_the_disk_is_a_warning_since_serve_lowers_it(
    no_cloud: None, capsys: Any, tmp_path: Path
) -> None:
    assert run(["doctor", "--json", "--ram", "64MiB", "--nvme", f"{tmp_path}=1PiB"]) == 0
    found = {row["check"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert (found["nvme"]["level"], found["nvme"]["mend"]) == ("warn", "free space, or lower the budget")


def test_secrets_are_never_shown(no_cloud: None, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAVISIBLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    assert run(["doctor", "--ram", "1MiB", "--extent-bytes", "1MiB"]) == 0
    out = capsys.readouterr().out
    assert "ok    credentials: S3 credentials from env: found, not tried" in out
    assert "AKIA" not in out
    assert "hunter2" not in out


@pytest.mark.slow
@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(
    "endpoint",
    [
        "http://u:hunter2@127.0.0.1:1",
        "http://127.0.0.1:1/?token=hunter2",
        "http://u:a/hunter2@127.0.0.1:1",
        "u:hunter2@127.0.0.1:1",
    ],
)
def test_an_endpoint_is_shown_without_its_password(
    no_cloud: None, capsys: Any, monkeypatch: pytest.MonkeyPatch, endpoint: str, as_json: bool
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://u:hunter2@127.0.0.1:1/?token=hunter2")
    words = ["doctor", "--ram", "1MiB", "--extent-bytes", "1MiB"]
    assert run([*words, "--json"] if as_json else words) == 1
    out = capsys.readouterr().out
    assert "127.0.0.1:1" in out
    assert "hunter2" not in out


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(
    ("env", "profile", "mend"),
    [
        ({}, "credential_process = /nonexistent/tool", "credential_process"),
        ({}, "credential_process = /bin/echo [1]", "credential_process"),
        (
            {"AWS_WEB_IDENTITY_TOKEN_FILE": "/nonexistent", "AWS_ROLE_ARN": "arn:aws:iam::1:role/x"},
            "",
            "AWS_WEB_IDENTITY_TOKEN_FILE",
        ),
        ({"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "hunter2\n"}, "", "set it anew without that"),
    ],
)
def test_unavailable_credentials_are_one_failed_check(
    no_cloud: None,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    env: dict[str, str],
    profile: str,
    mend: str,
    as_json: bool,
) -> None:
    (tmp_path / "config").write_text(f"[default]\nregion = us-east-1\n{profile}\n")
    for name, value in ({"AWS_CONFIG_FILE": str(tmp_path / "config")} | env).items():
        monkeypatch.setenv(name, value)
    words = ["doctor", "--ram", "1MiB", "--extent-bytes", "1MiB", "--endpoint", "http://127.0.0.1:1"]
    assert run([*words, "--json"] if as_json else words) == 1
    out = capsys.readouterr().out
    assert "hunter2" not in out
    if as_json:
        found = {row["check"]: row for row in map(json.loads, out.splitlines())}
        assert found["credentials"]["level"] == "fail"
        assert mend in found["credentials"]["mend"]
    else:
        (line,) = [line for line in out.splitlines() if line.startswith("fail  credentials: ")]
        assert mend in line.partition("; ")[2]
    assert "clock" in out  # the checks after it ran too


def test_a_socket_without_an_answer_fails(no_cloud: None, capsys: Any, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "cachesvc.sock"))
    assert run(["doctor", "--ram", "1MiB", "--extent-bytes", "1MiB", "--socket", str(tmp_path)]) == 1
    assert "dead daemon" in capsys.readouterr().out


def test_a_file_that_is_not_a_socket_fails(no_cloud: None, capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "cachesvc.sock").mkdir()
    assert run(["doctor", "--ram", "1MiB", "--extent-bytes", "1MiB", "--socket", str(tmp_path)]) == 1
    assert "cachesvc.sock is no socket; remove it" in capsys.readouterr().out


def test_the_clock_is_read_from_a_refusal_too(refusing_server: str) -> None:
    assert doctor_checks.clock(refusing_server).level is Level.OK


def test_a_missing_endpoint_fails() -> None:
    assert doctor_checks.clock("http://127.0.0.1:1").level is Level.FAIL
    assert doctor_checks.clock("minio:9000").level is Level.FAIL


@pytest.mark.parametrize(("off_s", "level"), [(5, Level.OK), (-100, Level.WARN), (1000, Level.FAIL)])
def test_a_clock_skew_is_judged_by_the_limit_of_signatures(off_s: int, level: Level) -> None:
    date = "Sat, 21 Nov 2026 06:00:00 GMT"
    assert doctor_checks.skew("http://s3", date, 1795240800 + off_s).level is level


def test_a_network_disk_is_a_warning(tmp_path: Path) -> None:
    found = list(
        doctor_checks.disk(
            NvmeSpec(str(tmp_path), size_bytes=1), 1, [Mount("0:9", "/", str(tmp_path), "nfs4")]
        )
    )
    assert found[0].level is Level.WARN
    assert found[0].advice == "use a disk of this node"


def test_a_budget_below_an_extent_fails_until_extents_are_there(tmp_path: Path) -> None:
    spec = NvmeSpec(str(tmp_path), size_bytes=4096)
    assert [each.level for each in doctor_checks.disk(spec, 8192)][-1] is Level.FAIL
    shelf = tmp_path / "cachesvc-nvme" / "v1" / "extents" / "00"
    shelf.mkdir(parents=True)
    (shelf / "extent").write_bytes(bytes(4096))
    assert [each.level for each in doctor_checks.disk(spec, 8192)][-1] is Level.OK


def test_a_budget_beyond_what_the_daemons_own_processes_leave_is_a_warning_with_the_number_to_use() -> None:
    def memory(ram_bytes: int, allowed: int = 1 << 30) -> doctor_checks.Finding:
        given = Settings(ram_bytes, (), (), "/s", "/d", fillers=2, extent_bytes=16 << 20)
        return doctor_checks.memory(given, allowed)

    largest = (1 << 30) - (1 << 30) // 20 - (124 + 2 * 28 + 4 * 16 << 20)
    assert memory(largest).level is Level.OK
    assert f"{largest:,} at most" in memory(1).text
    assert memory(largest + 1).level is Level.WARN
    assert memory(largest + 1).advice == f"give --ram {largest >> 20}MiB, or raise the memory limit"
    assert memory(1 << 30).level is Level.WARN
    assert memory((1 << 30) + 1).level is Level.FAIL
    assert memory(1 << 20, 64 << 20).advice == "lower --extent-bytes, or raise the memory limit"


@pytest.mark.parametrize(
    ("days", "level", "text"),
    [(90.0, "ok", "ends at"), (6.0, "warn", "days"), (-1.0, "fail", "has expired at")],
)
def test_the_end_of_the_certificate_is_checked(
    no_cloud: None, tmp_path: Path, days: float, level: str, text: str
) -> None:
    now = datetime.now(timezone.utc)
    options = certified(tmp_path, "node", authority(tmp_path), ends=now + timedelta(days=days))
    files = dict(zip(options[::2], options[1::2], strict=True))
    tls = Tls(files["--tls-cert"], files["--tls-key"], files["--tls-ca"])
    found = doctor_checks.certificate(tls, now.timestamp())
    assert (found.level.value, text in found.text) == (level, True)
    assert bool(found.advice) == (level != "ok")
    Path(tls.key).unlink()
    assert doctor_checks.certificate(tls, now.timestamp()).level is Level.FAIL
