"""Configuration files: what they set, what goes before them, and what is said about a wrong one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import jsonschema
import msgspec
import pytest

from cachesvc import config_files
from cachesvc.__main__ import run
from cachesvc.cli import config_file
from cachesvc.cli.config import resolved
from cachesvc.cli.serve import serve
from cachesvc.config import NvmeSpec, QuotaSpec, Rule, Settings, SourceSection
from tests.support.users import ALICE, as_root

FULL = """
ram = "2GiB"
nvme = ["/a=10GB", "/b=80%,mounted"]
allow = ["s3://b/", "/data=uid:1000"]
quota = ["user=500GiB"]
fillers = 3.0
unplanned-share = 0.05
socket-mode = "660"
stale-if-error = "90m"
rejoin-grace = 30
cluster = "static:node1:7070"
node-name = "node1"
tls-cert = "c.pem"
tls-key = "k.pem"
tls-ca = "a.pem"

[[source]]
prefix = "s3://ours"
endpoint = "https://minio:9000"
profile = "team"
requester-pays = true

[[source]]
prefix = "s3://public/a/"
anonymous = true
requests-per-s = 0.5
bytes-per-s = "500MB"

[[source]]
prefix = "gs://mounted/"
path = "/mnt/data"
"""
Write = Callable[[str], str]


@pytest.fixture(autouse=True)
def no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's own files and variables set nothing."""
    for name in [name for name in os.environ if name.startswith("CACHESVC")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(config_files, "SYSTEM_FILE", str(tmp_path / "etc.toml"))


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(text: str) -> str:
        path = tmp_path / "given.toml"
        path.write_text(text)
        return str(path)

    return written


def settings(*words: str) -> Settings:
    return resolved(words)[1]


def test_a_file_sets_what_options_set(write: Write) -> None:
    found = settings("--config", write(FULL))
    assert found.ram_bytes == 2 << 30
    assert found.nvme == (NvmeSpec("/a", 10 * 10**9), NvmeSpec("/b", share=0.8, mounted=True))
    assert found.allow == ("s3://b/", "/data")
    assert found.rules == (Rule("/data", (1000,), ()),)
    assert found.quota == (QuotaSpec("user", 500 << 30),)
    assert (found.fillers, found.unplanned_share, found.socket_mode) == (3, 0.05, 0o660)
    assert found.stale_if_error_s == 5400
    assert found.cluster is not None
    assert (found.cluster.node_name, found.cluster.rejoin_grace_s) == ("node1", 30)
    assert found.tls is not None
    assert found.source == (
        SourceSection("s3://ours/", "https://minio:9000", profile="team", requester_pays=True),
        SourceSection("s3://public/a/", anonymous=True, requests_per_s=0.5, bytes_per_s=500 * 10**6),
        SourceSection("gs://mounted/", path="/mnt/data"),
    )
    words = [word for each in found.source for word in ("--source", config_files.source_text(each))]
    assert settings("--ram", "1GiB", *words).source == found.source


def test_flags_go_before_variables_before_files(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write('ram = "1GiB"\nfillers = 1\nmetrics = "127.0.0.1:1"\n')
    monkeypatch.setenv("CACHESVC_CONFIG", file)
    monkeypatch.setenv("CACHESVC_RAM", "2GiB")
    monkeypatch.setenv("CACHESVC_FILLERS", "2")
    found = settings("--ram", "3GiB")
    assert (found.ram_bytes, found.fillers, found.metrics) == (3 << 30, 2, "127.0.0.1:1")


def test_the_users_file_goes_before_the_systems(tmp_path: Path) -> None:
    (tmp_path / "etc.toml").write_text('ram = "1GiB"\nfillers = 1\n')
    (tmp_path / "home/cachesvc").mkdir(parents=True)
    (tmp_path / "home/cachesvc/config.toml").write_text("fillers = 2\n")
    found = settings()
    assert (found.ram_bytes, found.fillers) == (1 << 30, 2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('rma = "1GiB"', "rma is no setting; is it ram?"),
        ("extent_bytes = 4096", "extent_bytes is no setting; is it extent-bytes?"),
        ("takeover = true", "takeover is no setting; settings are advertise, "),
        ('ram = "lots"', "ram: 'lots' is not a size; write it as 64GiB"),
        ("ram = true", "ram: True is neither text nor a number"),
        ('ram = ["1GiB"]', "ram: ['1GiB'] is neither text nor a number"),
        ('allow = "s3://b/"', "allow: write a list"),
        ("socket-mode = 660", 'socket-mode: write a file mode as text: "660"'),
        ("fillers = 65", "fillers: 65 is not in the range 1<=x<=64."),
        ('log-format = "xml"', "log-format: 'xml' is not one of 'text', 'json'."),
        ("[[source]]", "source: a source: Object missing required field `prefix`"),
        ('[[source]]\nprefix = "s3:///a/"', "source: the source 's3:///a/' is no prefix of URIs"),
        ('[[source]]\nprefix = "file:///a/"', "source: the source 'file:///a/' is no prefix of URIs"),
        ('[[source]]\nprefix = "s3://b/"\nendpont = "x"', "endpont is no key of a source; is it endpoint?"),
        ('[[source]]\nprefix = "s3://b/"\nanonymous = 3', "source: a source: Expected `bool`, got `int`"),
        ('[[source]]\nprefix = "s3://b/"\nrequests-per-s = -1', "has a rate that is no number from 0 on"),
        (
            '[[source]]\nprefix = "s3://b/"\nprofile = "a"\nanonymous = true',
            "is anonymous, and has a profile",
        ),
        ('[[source]]\nprefix = "gs://b/"\nregion = "a"', "is not of S3, and has region; leave that out"),
        ('[[source]]\nprefix = "s3://b/"\nregion = "a"\npath = "/x"', "below a path, and has region"),
        ('[[source]]\nprefix = "s3://b/"\npath = "x"', "the path 'x' of the source s3://b/ is not absolute"),
        ("source = [3]", "source: 3 is no source; write [[source]]"),
        ("ram = ", "is no TOML: "),
        ("ram = 1\nram = 2", "is no TOML: "),
    ],
)
def test_a_wrong_file_is_one_line_that_names_file_key_and_change(
    write: Write, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    file = write(text)
    for verb in (["serve"], ["config", "check"], ["config", "show"]):
        assert run([*verb, "--config", file]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"cachesvc: {file}")
        assert said in line


def test_a_file_that_is_named_must_be_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--config", str(tmp_path / "absent")]) == 4
    assert "there is no configuration file" in capsys.readouterr().err


@as_root
def test_a_file_that_cannot_be_read_is_not_passed_over(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write("fillers = 1")
    Path(file).parent.chmod(0o755)
    Path(file).chmod(0o600)
    os.seteuid(ALICE)
    try:
        assert run(["config", "check", "--config", file]) == 3
    finally:
        os.seteuid(0)
    assert "cannot be read (Permission denied)" in capsys.readouterr().err


def test_check_says_what_serve_would_say(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    file = write('socket-mode = "666"\n')
    assert run(["config", "check", "--config", file]) == 2
    assert "a socket for other users needs --allow" in capsys.readouterr().err
    assert run(["config", "check", "--config", file, "--allow", "/data"]) == 0
    assert capsys.readouterr().out == f"good: {file}\n"


def rows(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert run(["config", "show", "--json", *words]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return {row["key"]: (row["value"], row["from"]) for row in found}


def test_show_says_where_each_value_comes_from(
    write: Write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(FULL)
    monkeypatch.setenv("CACHESVC_FILLERS", "2")
    found = rows(capsys, "--config", file, "--ram", "3GiB")
    assert found["ram"] == ("3GiB", "--ram")
    assert found["fillers"] == (2, "CACHESVC_FILLERS")
    assert found["allow"] == (["s3://b/", "/data=uid:1000"], file)
    assert found["extent-bytes"] == ("64MiB", "default")
    assert found["node-name"] == ("node1", file)


def test_what_show_prints_is_a_file_that_sets_the_same(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--config", write(FULL))
    before = settings(*words)
    shown = {key: value for key, (value, _) in rows(capsys, *words).items() if value not in ("", [])}
    again = write("\n".join(f"{key} = {json.dumps(value)}" for key, value in shown.items()))
    assert settings("--config", again) == before
    keys = set(config_file.keys(serve))
    assert set(rows(capsys, *words)) == keys


def test_the_schema_takes_what_serve_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(msgspec.toml.decode(FULL), schema)
    for wrong in (
        {"rma": 1},
        {"ram": True},
        {"allow": "s3://b/"},
        {"log-format": "xml"},
        {"socket-mode": 660},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


def test_every_option_of_serve_has_a_key_or_is_of_one_command() -> None:
    options = {str(each.name) for each in serve.params if isinstance(each, click.Option)}
    keys = {str(each.name) for each in config_file.keys(serve).values()}
    assert options - keys <= config_file.NOT_IN_FILES
