"""Wrong AWS settings are errors that name the setting, show no keys, and cost no cached extent."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from botocore.exceptions import HTTPClientError, MissingDependencyException

from cachesvc.catalog.options import Options
from cachesvc.client.control import Control
from cachesvc.client.grants import DaemonGrants
from cachesvc.core.errors import CacheError, InvalidInput, NotAllowed, SourceUnavailable
from cachesvc.core.model import ObjectVersion
from cachesvc.sources.open import Sources, SourceSettings
from cachesvc.sources.s3 import errors as s3_errors
from cachesvc.sources.s3.s3 import open_s3
from testbed import WAIT_S
from testbed.node import Daemon
from tests.support.faults.fake_s3 import FakeS3, Object, fake_s3, pattern
from tests.support.processes import children
from tests.support.waiting import wait_until

EXTENT = 1 << 20
EXTENTS = 4
RECORDS = Options(format="records", record_bytes=4096)
KEYS = '{"Version": 1, "AccessKeyId": "a", "SecretAccessKey": "s", "SessionToken": "t"%s}'
LATE = ', "Expiration": "2099-01-01T00:00:00Z"'


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeS3]:
    """A fake server, and an environment without other AWS settings."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    with fake_s3() as found:
        monkeypatch.setenv("AWS_ENDPOINT_URL", found.endpoint)
        yield found


def soon() -> str:
    """The end of keys that botocore wants to refresh already."""
    end = datetime.now(timezone.utc) + timedelta(minutes=5)
    return f', "Expiration": "{end:%Y-%m-%dT%H:%M:%SZ}"'


def answers(call: Callable[[], object]) -> bool:
    with suppress(SourceUnavailable):
        call()
        return True
    return False


def configure(tmp_path: Path, said: str) -> None:
    (tmp_path / "config").write_text(f"[default]\n{said}\n")


def helper(tmp_path: Path, said: str) -> Path:
    """Write a credential process that the profile names."""
    found = tmp_path / "helper"
    found.write_text(f"#!{sys.executable}\nprint({said!r})\n")
    found.chmod(0o700)
    configure(tmp_path, f"credential_process = {found}")
    return found


def refused(said: str, kind: type[CacheError] = InvalidInput) -> str:
    with pytest.raises(kind, match=said) as caught:
        open_s3()
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_missing_or_broken_credential_helper_is_named(server: FakeS3, tmp_path: Path) -> None:
    configure(tmp_path, "credential_process = /nonexistent/tool")
    assert "/nonexistent/tool" in refused("credential_process")
    for said in ("", "hello", "[1]", "{}"):
        helper(tmp_path, said)
        refused("credential_process")


def test_the_output_of_a_failing_credential_helper_is_not_shown(server: FakeS3, tmp_path: Path) -> None:
    """It may contain keys, and each user of a dataset sees the error."""
    helper(tmp_path, "").write_text(f"#!{sys.executable}\nraise SystemExit('no such token as hunter2')\n")
    assert "hunter2" not in refused("credential_process failed")


def test_an_endpoint_that_is_no_url_is_shown_without_its_password(
    server: FakeS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "u:hunter2@127.0.0.1:9")
    assert "hunter2" not in refused("AWS_ENDPOINT_URL")


def test_an_unreadable_file_is_named_with_its_variable(
    server: FakeS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://127.0.0.1:1/x")
    monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", "/nonexistent")
    refused("check AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE$")


@pytest.mark.parametrize("bundle", ["/nonexistent", "/etc", __file__])
@pytest.mark.parametrize("by", ["variable", "profile"])
def test_an_invalid_ca_bundle_is_named(
    server: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bundle: str, by: str
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://127.0.0.1:1")
    helper(tmp_path, KEYS % "")
    if by == "variable":
        monkeypatch.setenv("AWS_CA_BUNDLE", bundle)
    else:
        configure(tmp_path, f"ca_bundle = {bundle}\ncredential_process = {tmp_path}/helper")
    assert bundle in refused("AWS_CA_BUNDLE")


def test_a_process_at_its_limit_is_no_wrong_setting(
    server: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    helper(tmp_path, KEYS % "")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://127.0.0.1:1")
    monkeypatch.setattr("ssl.create_default_context", short)
    refused("at its limit: .*Too many open files", SourceUnavailable)


def test_a_helper_that_fails_at_a_refresh_is_waited_for(server: FakeS3, tmp_path: Path) -> None:
    server.objects["x"] = Object(10)
    program = helper(tmp_path, KEYS % soon())
    source = open_s3()
    (version,) = source.list("s3://bucket/")
    program.unlink()
    into = bytearray(10)
    source.read_into(version, 0, memoryview(into))  # the previous keys are still used
    assert into == pattern(0, 10)
    with pytest.raises(SourceUnavailable, match="helper"):
        source.head(version.uri)  # botocore refreshes by itself
    source.close()


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["helper", pytest.param("bundle", marks=pytest.mark.slow)])
def test_wrong_settings_keep_cached_extents(
    server: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/0.bin").write_bytes(os.urandom(EXTENTS * EXTENT))
    server.objects["0.bin"] = Object(EXTENTS * EXTENT)
    program = helper(tmp_path, KEYS % "")
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    profile = f"credential_process = {program}\nendpoint_url = "
    configure(tmp_path, f"{profile}{server.endpoint}")
    options = ["--ram", "16MiB", "--extent-bytes", str(EXTENT), "--fillers", "1"]
    options += ["--allow", f"{tmp_path}/", "--allow", "s3://bucket/"]
    with Daemon(tmp_path / "node", options) as daemon, Control(daemon.socket_dir) as control:
        there = control.open_dataset([f"{tmp_path}/data/"], RECORDS).id
        *_, last = control.prefetch(there)
        assert last.resident_extents == EXTENTS
        remote = control.open_dataset(["s3://bucket/"], RECORDS).id
        (before,) = control.status().tiers
        if wrong == "helper":
            program.unlink()
        else:
            configure(tmp_path, f"{profile}https://127.0.0.1:1\nca_bundle = /nonexistent")
        for pid in children(daemon.pid):  # their successors open sources anew
            os.kill(pid, signal.SIGKILL)
        grants = DaemonGrants(daemon.socket_dir, remote)
        for extent in range(EXTENTS):
            with pytest.raises(InvalidInput, match="the AWS configuration does not work"):
                grants.acquire([extent], 20.0)
        grants.close()
        (after,) = control.status().tiers
        assert (after.budget_bytes, after.used_bytes) == (before.budget_bytes, EXTENTS * EXTENT)
        assert "Traceback" not in daemon.log


NAMES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


@pytest.fixture
def keys(server: FakeS3, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "first")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", ["S3CR3T\n", "S3CR3T\r\nRange: bytes=0-1", "\tS3CR3T", "S3CR3T\udcff"])
def test_keys_that_no_header_can_hold_are_refused_without_showing_them(
    keys: None, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    assert "S3CR3T" not in refused(f"^{name}, .* no header can hold")


@pytest.mark.parametrize("name", NAMES)
def test_renewed_keys_that_no_header_can_hold_are_not_shown(
    keys: None, server: FakeS3, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    source = open_s3()
    server.refuse = lambda handler: (400, "ExpiredToken")
    monkeypatch.setenv(name, "S3CR3T\n")
    with pytest.raises(InvalidInput, match=f"^{name}, ") as caught:
        list(source.list("s3://bucket/"))
    assert "S3CR3T" not in f"{caught.value} {caught.value.__cause__}"
    assert server.requests == 1
    source.close()


@pytest.mark.parametrize("token", [r'"S3CR3T\n"', "53"])
def test_keys_of_a_helper_that_no_header_can_hold_are_not_shown(
    server: FakeS3, tmp_path: Path, token: str
) -> None:
    helper(tmp_path, KEYS.replace('"t"', token) % LATE)
    source = open_s3()  # refreshable keys are not fetched yet
    version = ObjectVersion("s3://bucket/x", 10, "e")
    for ask in (
        lambda: list(source.list("s3://bucket/")),
        lambda: source.read_into(version, 0, memoryview(bytearray(10))),
    ):
        with pytest.raises(InvalidInput, match=r"^AWS_SESSION_TOKEN") as caught:
            ask()
        assert "S3CR3T" not in str(caught.value)
    source.close()
    assert server.requests == 0


def test_keys_that_only_botocore_has_refreshed_are_not_shown(
    server: FakeS3, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.objects["x"] = Object(10)
    helper(tmp_path, KEYS % soon())
    source = open_s3()
    (version,) = source.list("s3://bucket/")
    helper(tmp_path, KEYS.replace('"t"', r'"S3CR3T\n"') % soon())
    source.read_into(version, 0, memoryview(bytearray(10)))  # the previous keys are still used
    with pytest.raises(SourceUnavailable, match=r"cannot be sent \(ValueError\)$") as caught:
        source.head(version.uri)
    assert "S3CR3T" not in "".join(traceback.format_exception(caught.value)) + caplog.text
    source.close()


def test_an_http_librarys_error_about_headers_is_not_quoted() -> None:
    error = HTTPClientError(error=ValueError("Invalid header value b'S3CR3T\\n'"))
    assert "S3CR3T" not in str(s3_errors.from_botocore(error, "s3://bucket/x"))
    error = HTTPClientError(error=OSError(2, "No such file or directory"))
    assert "No such file" in str(s3_errors.from_botocore(error, "s3://bucket/x"))


@pytest.mark.parametrize("url", ["ftp://host", "http://host:99999", "host", "http://", "http://[::1"])
def test_an_endpoint_that_is_not_http_is_refused(
    keys: None, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    refused("AWS_ENDPOINT_URL")


@pytest.mark.parametrize(
    ("name", "value"), [("AWS_SESSION_TOKEN", "S3CR3T\n"), ("AWS_ENDPOINT_URL", "ftp://host")]
)
def test_a_client_gets_the_error_of_wrong_settings_at_once(
    keys: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with (
        Daemon(tmp_path / "node", ["--ram", "64MiB", "--allow", "s3://bucket/"]) as daemon,
        Control(daemon.socket_dir) as control,
    ):
        for _ in range(2):  # the first call also waits for the builder to start
            with pytest.raises(InvalidInput, match=name) as caught:
                control.open_dataset(["s3://bucket/"], RECORDS)
        assert "S3CR3T" not in str(caught.value) + daemon.log


def test_a_status_is_said_once_and_a_code_beside_it() -> None:
    assert str(s3_errors.from_response("500", "500", "s3://b/e/", {})) == "s3://b/e/: the server answered 500"
    assert "(403 AccessDenied)" in str(s3_errors.from_response("403", "AccessDenied", "s3://b/e/", {}))


def test_a_package_that_botocore_lacks_is_named() -> None:
    error = s3_errors.from_botocore(
        MissingDependencyException(msg="needs crt"), "s3://arn:aws:s3::1:accesspoint/a.mrap/d/"
    )
    assert isinstance(error, InvalidInput)
    assert "pip install awscrt" in str(error)
    assert "AWS_ENDPOINT_URL" not in str(error)


def hanging_helper(tmp_path: Path, said: str) -> Path:
    """Write a credential process that answers once the file that is returned exists."""
    go_on = tmp_path / "go on"
    program = helper(tmp_path, said)
    waits = f"import os, time\nwhile not os.path.exists({str(go_on)!r}): time.sleep(0.01)\n"
    program.write_text(program.read_text().replace("\n", f"\n{waits}", 1))
    return go_on


def test_a_helper_that_hangs_holds_up_nothing_else_and_is_named(
    server: FakeS3, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    go_on = hanging_helper(tmp_path, KEYS % "")
    server.objects["x"] = Object(9)
    (tmp_path / "data").write_bytes(b"data")
    sources, failed = Sources(SourceSettings(), open_s=1.0), list[SourceUnavailable]()

    def open_remote() -> None:
        with pytest.raises(SourceUnavailable) as caught:
            sources("s3://bucket/x")
        failed.append(caught.value)

    threads = [threading.Thread(target=open_remote) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert sources(f"file://{tmp_path}/data").head(f"file://{tmp_path}/data").size_bytes == 4
    assert not failed
    for thread in threads:
        thread.join(WAIT_S)
    for error in failed:
        assert f"the credential_process {tmp_path}/helper of the AWS profile default" in str(error)
        assert error.of_node
    assert "credential_process" in caplog.text
    open_remote()  # at once: the same call of the helper is still awaited
    go_on.touch()
    wait_until(lambda: answers(lambda: sources("s3://bucket/x").head("s3://bucket/x")))


def test_a_refresh_that_hangs_is_given_up(server: FakeS3, tmp_path: Path) -> None:
    go_on = hanging_helper(tmp_path, KEYS % soon())
    go_on.touch()
    server.objects["x"] = Object(9)
    source = open_s3(helper_s=0.5)
    go_on.unlink()
    with pytest.raises(SourceUnavailable, match=r"credential_process .*helper.* has not answered"):
        source.head("s3://bucket/x")
    go_on.touch()
    wait_until(lambda: answers(lambda: source.head("s3://bucket/x")))
    source.close()


def test_a_profile_that_wants_a_code_of_mfa_is_refused_in_words(
    server: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config").write_text(
        "[profile p]\nrole_arn = arn:aws:iam::123456789012:role/r\nsource_profile = b\n"
        "mfa_serial = arn:aws:iam::123456789012:mfa/u\n"
        "[profile b]\naws_access_key_id = k\naws_secret_access_key = s\n"
    )
    monkeypatch.setenv("AWS_PROFILE", "p")
    source = open_s3()
    for call in (lambda: list(source.list("s3://bucket/")), lambda: source.head("s3://bucket/x")):
        with pytest.raises(NotAllowed, match="the AWS profile p wants a code of MFA"):
            call()
    with pytest.raises(NotAllowed, match="MFA"):
        source.read_into(ObjectVersion("s3://bucket/x", 9, ""), 0, memoryview(bytearray(9)))
    source.close()
