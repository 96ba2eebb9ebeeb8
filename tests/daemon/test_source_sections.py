"""Sections `[[source]]`: prefixes that are read with an endpoint, profile, payer or rate of their own, or below a path."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from cachesvc.client.control import Control
from cachesvc.client.grants import DaemonGrants
from testbed.node import Daemon
from tests.support.faults.fake_s3 import FakeS3, Object, fake_s3
from tests.support.reading import contents
from tests.support.records import RECORDS

SIZE = 64 << 10
NAMES = ("usual", "ours", "public", "mounted")
PROFILES = """
[default]
aws_access_key_id = of-all
aws_secret_access_key = s
[team]
aws_access_key_id = of-team
aws_secret_access_key = s
"""


class Store:
    """An S3 server that records the headers of its requests."""

    def __init__(self, fake: FakeS3, filled_with: bytes) -> None:
        self.endpoint, self.body = fake.endpoint, filled_with * SIZE
        self.headers: list[dict[str, str]] = []
        fake.objects["d/0.bin"] = Object(SIZE, data=self.body)
        fake.refuse = self._record

    def _record(self, handler: BaseHTTPRequestHandler) -> None:
        self.headers.append({name.lower(): value for name, value in handler.headers.items()})

    @property
    def keys(self) -> set[str]:
        """The access keys of the requests."""
        found = [headers.get("authorization", "") for headers in self.headers]
        return {each.partition("Credential=")[2].partition("/")[0] for each in found}

    @property
    def payers(self) -> set[str]:
        return {headers.get("x-amz-request-payer", "") for headers in self.headers}


@pytest.fixture
def stores() -> Iterator[list[Store]]:
    with ExitStack() as stack:
        yield [Store(stack.enter_context(fake_s3()), bytes([number])) for number in range(4)]


@pytest.fixture
def environment(tmp_path: Path, stores: list[Store]) -> dict[str, str]:
    """The configuration, and the AWS environment that holds for what it leaves out."""
    usual, ours, public, _ = stores
    (tmp_path / "profiles").write_text(PROFILES)
    (tmp_path / "mount/d").mkdir(parents=True)
    (tmp_path / "mount/d/0.bin").write_bytes(stores[3].body)
    (tmp_path / "config.toml").write_text(
        f"""
        ram = "16MiB"
        extent-bytes = {SIZE}
        fillers = 1
        allow = {[f"s3://{name}/" for name in NAMES]}
        [[source]]
        prefix = "s3://ours/"
        endpoint = "{ours.endpoint}"
        profile = "team"
        requester-pays = true
        requests-per-s = 1000
        bytes-per-s = "100MB"
        [[source]]
        prefix = "s3://public/d/"
        endpoint = "{public.endpoint}"
        anonymous = true
        [[source]]
        prefix = "s3://mounted/"
        path = "{tmp_path}/mount"
        """
    )
    return {
        "AWS_ENDPOINT_URL": usual.endpoint,
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "profiles"),
        "CACHESVC_CONFIG": str(tmp_path / "config.toml"),
        **dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"), ""),
    }


def check(stores: list[Store]) -> None:
    """Each store was asked with its own keys, and the mounted one was not asked."""
    assert [store.keys for store in stores] == [{"of-all"}, {"of-team"}, {""}, set()]
    assert [store.payers for store in stores] == [{""}, {"requester"}, {""}, set()]


@pytest.mark.slow
def test_the_daemon_reads_each_prefix_as_its_section_says(
    tmp_path: Path, stores: list[Store], environment: dict[str, str]
) -> None:
    with Daemon(tmp_path / "node", [], environment) as daemon:
        for name, store in zip(NAMES, stores, strict=True):
            with Control(daemon.socket_dir) as control:
                dataset = control.open_dataset([f"s3://{name}/d/"], RECORDS).id
            with closing(DaemonGrants(daemon.socket_dir, dataset)) as grants:
                (answer,) = grants.acquire([0], 20.0)
                assert contents(answer) == store.body
        assert "Traceback" not in daemon.log
    check(stores)


@pytest.mark.slow
def test_a_reload_moves_a_prefix(tmp_path: Path, stores: list[Store], environment: dict[str, str]) -> None:
    with Daemon(tmp_path / "node", [], environment) as daemon, Control(daemon.socket_dir) as control:
        control.open_dataset(["s3://ours/d/"], RECORDS)
        file = tmp_path / "config.toml"
        file.write_text(file.read_text().replace(stores[1].endpoint, stores[3].endpoint))
        assert list(control.reload().taken) == ["source"]
        assert not stores[3].headers
        control.open_dataset(["s3://ours/d/"], RECORDS, refresh=True)
        assert stores[3].keys == {"of-team"}


def test_a_process_without_a_daemon_reads_so_too(
    tmp_path: Path, stores: list[Store], environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from loader import open_dataset

    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CACHESVC", "off")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, store in zip(NAMES, stores, strict=True):
        dataset = open_dataset(f"s3://{name}/d/", format="records", dtype="u1", record_bytes=SIZE)
        with closing(dataset):
            assert bytes(dataset[0]) == store.body
    check(stores)
