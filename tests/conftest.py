"""Fixtures of all tests: one S3 server for the run, a new bucket and proxy for each test; and the `pure` marker."""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import settings

from cachesvc.config import SourceSection
from cachesvc.sources.s3.s3 import S3Source, open_s3
from testbed.forked import ForkedProcess
from testbed.node import Daemon
from testbed.servers import Proxy, SeaweedFS
from tests.support.faults.fake_s3 import FakeS3, fake_s3

settings.register_profile("untimed", deadline=None)  # a busy machine is no failure
settings.load_profile("untimed")
# A shell ignores SIGINT in background commands, and nohup SIGHUP. Their children inherit that, among them daemons that
# must end.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# As `Control` sets it, and before a test that uses gRPC by itself: its fork handlers can stop a child in `fork`.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
Daemon.forks = ForkedProcess


IMPURE_IMPORTS = (
    *(
        "cachesvc.gateway.s3.__main__",
        "grpc",
        "http.server",
        "lightning",
        "loader",
        "multiprocessing",
        "psutil",
        "subprocess",
        "testbed.",
        "tests.compat.launch",
        "torch",
    ),
    *(
        f"cachesvc.daemon.{name}"
        for name in ("fills.pool", "grants.acceptor", "grants.server", "processes.fork_server", "serve")
    ),
    *(
        f"tests.support.{name}"
        for name in ("canned", "faults", "fillers", "membership", "processes", "training")
    ),
)
IMPURE_FIXTURES = {"s3_server", "s3_env", "bucket", "proxy", "fake", "source", "no_collection"}
"""Fixtures that start servers, and `no_collection`: what measures memory runs without the recording of coverage."""
IMPURE_EVENTS = {"subprocess.Popen", "os.fork", "os.posix_spawn", "os.exec", "socket.bind", "socket.connect"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as `pure` the tests whose module imports nothing that starts a process or a server, nor torch."""
    for item in items:
        module = getattr(item, "module", None)
        impure = IMPURE_FIXTURES & set(getattr(item, "fixturenames", ()))
        if module is not None and not impure and _imports_nothing_impure(module):
            item.add_marker("pure")


def pytest_collection_finish() -> None:
    """Leave modules and test items out of garbage collections, which would take a quarter of a second each."""
    gc.collect()
    gc.freeze()


@functools.cache
def _imports_nothing_impure(module: ModuleType) -> bool:
    names = (
        getattr(each, "__module__", None) or getattr(each, "__name__", "") for each in vars(module).values()
    )
    return not any(str(name).startswith(IMPURE_IMPORTS) for name in names)


class Audit:
    """Records the processes and sockets that the main thread makes, from the interpreter's audit events.

    Threads that an earlier test left behind are no part of this test.
    """

    def __init__(self) -> None:
        self.events: list[str] = []
        sys.addaudithook(self._heard)

    def _heard(self, event: str, _: object) -> None:
        if event in IMPURE_EVENTS and threading.current_thread() is threading.main_thread():
            self.events.append(event)


AUDIT = Audit()


@pytest.fixture(autouse=True)
def stays_pure(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a pure test that starts a process or a server."""
    before = len(AUDIT.events)
    yield
    if request.node.get_closest_marker("pure"):
        assert AUDIT.events[before:] == [], "this test is not pure: see IMPURE_IMPORTS in tests/conftest.py"


@pytest.fixture(scope="session")
def s3_server() -> Iterator[SeaweedFS]:
    """A running SeaweedFS."""
    with SeaweedFS() as server:
        yield server


@pytest.fixture
def s3_env(s3_server: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """AWS_* variables of the server, set in this process."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    found = s3_server.env()
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    return found


@pytest.fixture
def bucket(s3_server: SeaweedFS) -> str:
    """The name of a new, empty bucket."""
    return s3_server.create_bucket(f"b-{uuid.uuid4().hex[:12]}")


@pytest.fixture
def proxy(s3_server: SeaweedFS) -> Iterator[Proxy]:
    """A proxy before the server, without faults or delay."""
    with Proxy(s3_server.endpoint.removeprefix("http://")) as found:
        yield found


@pytest.fixture
def direct(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process reads without a daemon, and keeps its catalogs in a folder of its own."""
    monkeypatch.setenv("CACHESVC", "off")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def target(tmp_path: Path) -> Iterator[int]:
    with open(tmp_path / "extent", "w+b") as file:
        yield file.fileno()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeS3]:
    """An S3 server that answers as a test says; this process has credentials for it."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "first")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    with fake_s3() as found:
        yield found


@pytest.fixture
def source(fake: FakeS3) -> Iterator[S3Source]:
    """A source that reads from the fake server."""
    found = open_s3(SourceSection("s3://", endpoint=fake.endpoint))
    yield found
    found.close()
