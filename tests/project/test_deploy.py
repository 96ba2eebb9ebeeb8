"""The files of deploy/, checked against the linters of each format and against the real commands and settings."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import ssl
import subprocess
import sysconfig
import threading
import time
from contextlib import suppress
from pathlib import Path

import click
import pytest

from cachesvc import config
from cachesvc.cli.run import run
from cachesvc.cluster.addresses import host_addresses
from cachesvc.core.errors import InvalidInput
from cachesvc.daemon.access.tls import TlsContexts, certificate_end
from testbed import ROOT, WAIT_S
from tests.support.deploy import (
    DEPLOY,
    IMAGE,
    daemon_settings,
    directories,
    image_environment,
    instructions,
    text,
    verb_of,
)


def test_dockerfile_is_clean_for_hadolint() -> None:
    scripts = sysconfig.get_path("scripts")
    hadolint = shutil.which("hadolint", path=scripts) or "hadolint"
    found = subprocess.run([hadolint, str(DEPLOY / "Dockerfile")], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "")


def test_dockerfile_copies_what_is_there_and_what_docker_is_sent() -> None:
    sent = {line[1:] for line in text("Dockerfile.dockerignore").splitlines() if line.startswith("!")}
    copied = {name for found in instructions("COPY") if "--from" not in found for name in found.split()[:-1]}
    assert copied == sent
    assert all((ROOT / name).exists() for name in copied)


def test_dockerfile_runs_a_daemon_that_is_not_root(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = image_environment()
    assert json.loads(instructions("ENTRYPOINT")[0]) == ["cachesvc"]
    settings = daemon_settings(monkeypatch, json.loads(instructions("CMD")[0]), environment)
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", instructions("USER")[0])
    made = re.search(r"install -d .* -m 0750 (.+)", text("Dockerfile"))
    assert made is not None
    assert made[1].split() == [settings.socket_dir, settings.state_dir]


def test_dockerfile_health_check_is_a_real_command() -> None:
    _, _, command = instructions("HEALTHCHECK")[0].partition(" CMD ")
    assert verb_of(json.loads(command)) == "status"


def test_docker_run_in_the_comment_starts_a_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    comment = " ".join(line.strip("# \\") for line in text("Dockerfile").splitlines() if line.startswith("#"))
    run = re.search(rf"docker run (.*?) {IMAGE} (serve .*? --socket-mode \d+)", comment)
    assert run is not None
    settings = daemon_settings(monkeypatch, shlex.split(run[2]), image_environment())
    mounted = re.findall(r"-v (\S+):(\S+)", run[1])
    assert {inside for _, inside in mounted} == directories(settings)


def test_unit_starts_a_daemon_in_the_directories_that_systemd_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    program, *arguments = shlex.split(unit("ExecStart").replace("%%", "%"))
    environment = dict(
        line.split("=", 1) for line in text("cachesvc.env").splitlines() if line and not line.startswith("#")
    )
    state_dir = f"/var/lib/{unit('StateDirectory')}"
    settings = daemon_settings(monkeypatch, arguments, environment | {"STATE_DIRECTORY": state_dir})
    (cache,) = settings.nvme
    disk = unit("RequiresMountsFor")
    assert cache.mounted
    assert program == f"/opt/cachesvc/bin/{Path(program).name}"
    assert settings.socket_dir == f"/run/{unit('RuntimeDirectory')}"
    assert settings.state_dir == state_dir
    assert unit("ReadWritePaths") == cache.path == unit("ExecStartPre").split()[-1]
    assert unit("AssertPathIsMountPoint") == disk == str(Path(cache.path).parent)
    assert unit("EnvironmentFile") == "/etc/cachesvc/cachesvc.env"
    assert int(unit("RestartPreventExitStatus")) == InvalidInput.code


def test_the_units_node_joins_a_cluster_by_the_lines_in_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = dict(re.findall(r"^#?(CACHESVC_\w+)=(.*)$", text("cachesvc.env"), re.MULTILINE))
    settings = daemon_settings(monkeypatch, ["serve"], lines)
    assert settings.cluster is not None
    assert len(host_addresses(settings.cluster.members.removeprefix("static:"))) == 16


def test_the_certificate_that_is_made_serves_all_nodes_and_is_renewed(tmp_path: Path) -> None:
    tls = make_certificates(tmp_path)
    handshake(TlsContexts(tls), TlsContexts(tls, "cachesvc-peers"))
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(TlsContexts(tls), TlsContexts(tls, "another-name"))
    before = [Path(file).read_text() for file in (tls.ca, tls.certificate, tls.key)]
    old = TlsContexts(tls, "cachesvc-peers")
    make_certificates(tmp_path)
    after = [Path(file).read_text() for file in (tls.ca, tls.certificate, tls.key)]
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, False]
    handshake(TlsContexts(tls), old)


def test_each_node_gets_a_certificate_for_the_common_and_its_own_name(tmp_path: Path) -> None:
    make_certificates(tmp_path, "10.0.0.1", "n2")
    first, second = (certificate_files(tmp_path / node) for node in ("10.0.0.1", "n2"))
    for server, name in ((first, "cachesvc-peers"), (second, "cachesvc-peers"), (second, "n2"), (first, "")):
        handshake(TlsContexts(server), TlsContexts(first, name))
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(TlsContexts(first), TlsContexts(second, "n2"))
    keys = {Path(tls.key).read_text() for tls in (first, second)}
    make_certificates(tmp_path, "n2")
    renewed = {Path(tls.key).read_text() for tls in (first, second)}
    assert len(keys & renewed) == 1
    handshake(TlsContexts(second), TlsContexts(first, "cachesvc-peers"))


def test_certificates_begin_an_hour_ago(tmp_path: Path) -> None:
    tls, now = make_certificates(tmp_path, "n1"), time.time()
    for path in (tls.certificate, tls.ca):
        command = ["openssl", "x509", "-in", path, "-noout", "-startdate"]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        began = ssl.cert_time_to_seconds(said.strip().removeprefix("notBefore="))
        assert 3600 <= now - began < 3600 + WAIT_S + 2
    assert certificate_end(tls.certificate) > now + 364 * 86_400


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed here")
def test_unit_is_valid_and_hardened_for_systemd(tmp_path: Path) -> None:
    program = unit("ExecStart").split()[0]
    stand_in = tmp_path / "cachesvc"
    stand_in.write_text("#!/bin/sh\n")
    stand_in.chmod(0o755)
    copy = tmp_path / "cachesvc.service"
    copy.write_text(text("cachesvc.service").replace(f"={program}", f"={stand_in}"))
    found = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, "")
    exposure = ["systemd-analyze", "security", "--offline=true", "--threshold=20", str(copy)]
    found = subprocess.run(exposure, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("code", [0, 3])
def test_slurm_script_runs_training_in_a_cluster_of_the_job(tmp_path: Path, code: int) -> None:
    done = run_slurm_script(tmp_path, ["sh", "-c", f"exit {code}"])
    assert (done.returncode, done.stderr) == (code, "")
    given = run.make_context("run", shlex.split(done.stdout)[1:]).params
    assert given["job_cluster"]
    assert given["command"] == ("sh", "-c", f"exit {code}")


def test_the_daemon_of_a_node_runs_from_its_first_job_to_its_last(tmp_path: Path) -> None:
    assert run_for_jobs(tmp_path, "prolog", 1, answers=True) == ["systemctl start cachesvc"]
    assert run_for_jobs(tmp_path, "prolog", 2, answers=True) == ["systemctl start cachesvc"]
    assert run_for_jobs(tmp_path, "epilog", 1) == []
    assert run_for_jobs(tmp_path, "epilog", 2) == ["systemctl stop cachesvc"]
    assert run_for_jobs(tmp_path, "epilog", 2) == []


def test_a_job_starts_although_the_daemon_does_not_answer(tmp_path: Path) -> None:
    _, said = run_for_jobs(tmp_path, "prolog", 1, answers=False)
    assert said == "logger -t cachesvc job 1 starts without a cache: the daemon does not answer"


def run_for_jobs(folder: Path, script: str, number: int, answers: bool = False) -> list[str]:
    """Run the prolog or the epilog of a job; return its calls of `systemctl` and `logger`, which print themselves."""
    for name in ("systemctl", "logger"):
        (folder / name).write_text(f'#!/bin/sh\necho {name} "$@"\n')
        (folder / name).chmod(0o755)
    given = text(f"slurm/{script}.sh")
    for program, *arguments in re.findall(r"(/opt/cachesvc/bin/)(cachesvc) (status --json)", given):
        assert program == f"{Path(unit('ExecStart').split()[0]).parent}/"
        assert verb_of(" ".join(arguments).split()) == "status"
    given = re.sub(r"/opt/cachesvc/bin/cachesvc .*json", str(answers).lower(), given)
    environment = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SLURM_JOB_ID": str(number),
        "CACHESVC_JOBS": str(folder / "jobs"),
        "CACHESVC_PROLOG_S": "0",
    }
    done = subprocess.run(
        ["bash", "-c", given], env=environment, capture_output=True, text=True, timeout=WAIT_S
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed here")
def test_scripts_are_clean_for_shellcheck() -> None:
    found = subprocess.run(["shellcheck", *map(str, DEPLOY.rglob("*.sh"))], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "")


def test_a_flag_that_does_not_exist_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(click.UsageError):
        daemon_settings(monkeypatch, ["serve", "--cache-size", "1GiB"], {})
    with pytest.raises(AssertionError):
        daemon_settings(monkeypatch, ["serve"], {"CACHESVC_CACHE_SIZE": "1GiB"})
    with pytest.raises(InvalidInput):
        daemon_settings(monkeypatch, ["serve", "--socket-mode", "660"], {})


def run_slurm_script(folder: Path, training: list[str]) -> subprocess.CompletedProcess[str]:
    """Run job.sh on one machine with an `srun` that runs its command, and a `cachesvc` that prints its arguments and runs
    the command behind them."""
    programs = {
        "srun": 'exec "$@"',
        "cachesvc": """printf '%q ' "$@"; while test "$1" != --; do shift; done; shift; exec "$@" """,
    }
    for name, script in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}"}
    command = ["bash", str(DEPLOY / "slurm" / "job.sh"), *training]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WAIT_S)


def make_certificates(folder: Path, *nodes: str) -> config.Tls:
    """Run certificates.sh in a folder; return its files, those of the last node where there are some."""
    command = ["bash", str(DEPLOY / "certificates.sh"), "cachesvc-peers", *nodes]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=WAIT_S)
    where = folder.joinpath(*nodes[-1:])
    return certificate_files(where)


def certificate_files(folder: Path) -> config.Tls:
    return config.Tls(*(str(folder / name) for name in ("node.pem", "node.key", "ca.pem")))


def handshake(server: TlsContexts, client: TlsContexts) -> None:
    """Make a connection between two nodes over a pair of sockets. Raises what the client's side raises."""
    ours, theirs = socket.socketpair()
    ours.settimeout(WAIT_S)
    theirs.settimeout(WAIT_S)

    def serve() -> None:
        with suppress(OSError), server.accept(theirs) as accepted:
            accepted.do_handshake()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with ours:
            client.connect(ours, "10.0.0.1").close()
    finally:
        thread.join()


def unit(key: str) -> str:
    """The one value of a key of the systemd unit."""
    (value,) = re.findall(rf"^{key}=(.*)$", text("cachesvc.service"), re.MULTILINE)
    return value
