"""Secrets appear in no log, error, status, metric or command line: all output is searched for known strings."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from cachesvc.catalog.options import Options
from cachesvc.client.control import Control
from cachesvc.client.grants import DaemonGrants
from cachesvc.config import SourceSection
from cachesvc.core.errors import CacheError, InvalidInput
from cachesvc.core.model import DatasetId, ReaderId
from cachesvc.core.safe_text import redacted
from cachesvc.daemon.access.tenants import Peer
from cachesvc.daemon.grants.reader_events import ConnectedReader
from cachesvc.sources.s3.proxies import Proxy
from cachesvc.sources.s3.s3 import open_s3
from testbed import WAIT_S
from testbed.node import Daemon
from testbed.servers import SeaweedFS, free_ports
from tests.support.processes import children

RECORDS = Options(format="records", record_bytes=4096)
SECRET, SESSION, KEY = "Zs3cr3tZaccessZkeyZvalue", "Zs3ss10nZt0kenZvalue", "ZtlsZkeyZcontents"
ACCESS_KEY = "AKIAZZNOTAREALKEYZZ"


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("s3://u:PASS@bkt/x: no", "s3://***@bkt/x: no"),
        ("http://u:PA@SS@h:9/x@y", "http://***@h:9/x@y"),
        (
            's3://u:PASS@bkt/: Invalid bucket name "u:PASS@bkt"',
            's3://***@bkt/: Invalid bucket name "***@bkt"',
        ),
        ("https://h/x?sv=1&sig=PASS#PASS, and", "https://h/x?sv=***&sig=***#*** and"),
        ("'https://h/x#PASS'", "'https://h/x#***'"),
        ("s3://b/part#1.bin: gone", "s3://b/part#1.bin: gone"),
        ("a@b.example", "a@b.example"),
        ("s3://AKIA:ab/PASS+c@bkt/x: no", "s3://***@bkt/x: no"),
        ("http://u:a?PASS#b@h:9/", "http://***@h:9/"),
        ("http://h:9/x@y", "http://h:9/x@y"),
        ("s3://b/10:30@cam.jpg", "s3://b/10:30@cam.jpg"),
        ("https://h/x?code=PASS&pwd=PASS", "https://h/x?code=***&pwd=***"),
    ],
)
def test_secrets_in_a_url_are_redacted(said: str, shown: str) -> None:
    assert redacted(said) == shown
    assert redacted(shown) == shown


def test_a_signature_in_a_library_message_is_redacted() -> None:
    said = "Retrying (Retry(total=1)) after connection broken: /b/0.bin?X-Amz-Signature=PASS&sig=PASS&part=1"
    assert redacted(said) == said.replace("PASS", "***")


@pytest.mark.parametrize(
    "part", ["://a:b", "https://a", "://", "https://a#", "u:p@s3://", "#http://a", "&token=x"]
)
def test_redaction_of_crafted_names_takes_linear_time(part: str) -> None:
    """A search to the end of the text at each of the 20,000 parts would take minutes."""
    before = time.thread_time()
    redacted("s3://b/" + part * 20_000)
    assert time.thread_time() - before < 5


def test_objects_with_a_secret_do_not_show_it_in_their_repr() -> None:
    """An error's arguments, a debugger and an assertion all use `repr`."""
    peer = Peer(1000, frozenset())
    reader = ConnectedReader(ReaderId(1), socket.socket(), peer, 99887766)
    reader.channel.close()
    proxy = Proxy("h", 1, "Proxy-Authorization: Basic 99887766")
    assert "99887766" not in f"{reader!r} {proxy!r}"


@pytest.mark.parametrize("form", ["text", "json"])
def test_uncaught_errors_and_debug_logs_of_libraries_show_no_secret(form: str) -> None:
    program = f"""
import logging, threading
from cachesvc.daemon.processes.logs import configure_logging
configure_logging({form!r}, "DEBUG")
for name in ("aiohttp.client", "urllib3.connectionpool", "azure.core", "botocore.auth", "fsspec"):
    logging.getLogger(name).debug("Authorization: S3CR3T")
    logging.getLogger(name).info("GET /b/0.bin S3CR3T")
logging.getLogger("cachesvc.daemon.fills.fills").debug("our own")
def work():
    raise ValueError("a thread: https://u:S3CR3T@h/x?sig=S3CR3T")
thread = threading.Thread(target=work)
thread.start()
thread.join()
raise ValueError("the program: https://u:S3CR3T@h/x?sig=S3CR3T")
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    for said in ("our own", "a thread: https://***@h/x?sig=***", "the program: https://***@h/x?sig=***"):
        assert said in done.stderr
    assert "S3CR3T" not in done.stderr
    if form == "json":
        assert len([json.loads(line) for line in done.stderr.splitlines()]) == 3


def test_a_bucket_with_a_user_is_refused_without_naming_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "key")
    settings = SourceSection("s3://", endpoint="http://127.0.0.1:9", region="us-east-1")
    with pytest.raises(InvalidInput) as caught:
        list(open_s3(settings).list("s3://u:PASS@bkt/"))
    assert "PASS" not in f"{caught.value!r}"
    assert "***@bkt" in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("works", [True, False])
def test_no_output_shows_a_secret(
    tmp_path: Path,
    s3_server: SeaweedFS,
    bucket: str,
    works: bool,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Run with credentials that work or that the server refuses, and provoke errors; then search the debug log, errors,
    status, metrics, command lines and environments."""
    monkeypatch.setattr(Daemon, "forks", None)  # with a command line of its own
    s3_server.client().put_object(Bucket=bucket, Key="data/0.bin", Body=bytes(1 << 20))
    s3_server.client().put_object(Bucket=bucket, Key="bad/index.json", Body=b"{")
    (metrics,) = free_ports(1)
    options = ["--ram", "8MiB", "--allow", f"s3://{bucket}/", "--extent-bytes", "64KiB", "--fillers", "1"]
    env = {**s3_server.env(), "CACHESVC_LOG": "DEBUG"}
    secrets = [s3_server.secret_key]
    if not works:
        secrets = [SECRET, SESSION, KEY]
        env |= {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_SESSION_TOKEN": SESSION,
        }
        env |= {"UNRELATED_PASSWORD": KEY}
    said: list[str] = []
    with Daemon(tmp_path / "node", [*options, "--metrics", f"127.0.0.1:{metrics}"], env) as daemon:
        assert daemon.process is not None
        pid = daemon.pid
        with Control(daemon.socket_dir) as control:
            for prefix in ("data/", "bad/", "none/", "data/0.bin"):
                try:
                    found = control.open_dataset([f"s3://{bucket}/{prefix}"], RECORDS).id
                    reader = DaemonGrants(daemon.socket_dir, found)
                    s3_server.client().put_object(Bucket=bucket, Key="data/0.bin", Body=os.urandom(1 << 20))
                    reader.acquire([0], 20.0)
                except CacheError as error:
                    said.append(f"{error!r} {error.__cause__!r}")
            said += [str(control.status()), str(control.list())]
            token = DaemonGrants(daemon.socket_dir, DatasetId("1" * 32))
            with pytest.raises(CacheError) as refused:
                token.acquire([0], 5.0)
            said.append(repr(refused.value))
        environment = {**os.environ, **daemon.env}
        for verb in (["doctor"], ["prefetch", f"s3://{bucket}/none/"]):
            done = subprocess.run(
                [sys.executable, "-m", "cachesvc", *verb], env=environment, capture_output=True, text=True
            )
            said.append(done.stdout + done.stderr)
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics}/metrics", timeout=WAIT_S) as answer:
            said.append(answer.read().decode())
        working = children(pid)
        assert len(working) == 3
        for each in (pid, *working):
            said.append(Path(f"/proc/{each}/cmdline").read_bytes().decode())
            said.append(Path(f"/proc/{each}/comm").read_text())
        for (
            child
        ) in working:  # a filler's environment has the credentials, to sign requests, and no other secret
            own = dict(
                pair.split("=", 1)
                for pair in Path(f"/proc/{child}/environ").read_text().split("\0")
                if "=" in pair
            )
            assert not any(secret in own["CACHESVC_GIVEN"] for secret in secrets)
        said.append(daemon.log)
    state = b"".join(path.read_bytes() for path in (tmp_path / "node" / "state").rglob("*") if path.is_file())
    assert len(said) > 10
    assert any("s3://" in each for each in said)
    for secret in secrets:
        assert [each for each in said if secret in each] == []
        assert secret.encode() not in state
    for word in ("Authorization", "X-Amz-Signature", "X-Amz-Security-Token", "aws4_request"):
        assert [each for each in said if word.lower() in each.lower()] == []
    printed = capfd.readouterr()
    assert not any(secret in printed.out + printed.err for secret in secrets)
