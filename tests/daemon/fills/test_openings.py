"""Openings while the source is down: the version that was opened last stands in, and nothing else does."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from cachesvc.catalog.options import Options
from cachesvc.catalog.survey import Survey
from cachesvc.client.control import Control
from cachesvc.core.errors import CacheError, NotAllowed, NotFound, SourceUnavailable
from cachesvc.core.limits import STALE_AFTER_S
from cachesvc.daemon.fills.openings import KeptVersion, Openings
from cachesvc.daemon.processes.jobs import BuildJob
from cachesvc.sources.open import Sources, SourceSettings
from cachesvc.sources.resilient import Resilience
from loader import open_dataset
from testbed.node import Daemon
from tests.support.faults.fake_s3 import FakeS3, Object

URI = "s3://bucket/d/"
DAY_S = 86_400.0


@pytest.fixture
def down(fake: FakeS3, monkeypatch: pytest.MonkeyPatch) -> FakeS3:
    """A bucket with a dataset, which is served until a test says otherwise."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", fake.endpoint)
    fake.objects = {f"d/{number}.bin": Object(100, f"e{number}") for number in range(3)}
    return fake


def openings(
    folder: Path, stale_s: float = DAY_S, after_s: float = STALE_AFTER_S, now: float = 0.0
) -> Openings:
    """The openings of a builder that lists at each one, and gives up a source after half a second."""
    resilience = Resilience(deadline_s=0.5)
    sources = Sources(
        SourceSettings(resilience, metadata_directory=folder / "metadata", metadata_expiry_s=0.0)
    )
    return Openings(sources, stale_s, after_s, lambda: now)


def job(folder: Path, uri: str = URI, version: str = "", **options: int) -> BuildJob:
    asked = Options(format="records", **{"record_bytes": 10, **options})  # type: ignore[arg-type]
    return BuildJob([uri], asked, str(folder), False, version)


def open_once(folder: Path, now: float = 0.0) -> str:
    """Open the dataset while the source works; return its version."""
    made = openings(folder, now=now)
    found = made.find(job(folder))
    assert isinstance(found, Survey)
    Path(folder, f"{found.id}.lmdb").touch()
    made.opened(job(folder), found.id)
    return found.id


@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_the_version_that_was_opened_last_stands_in_for_a_source_that_is_down(
    down: FakeS3, tmp_path: Path, status: int
) -> None:
    version = open_once(tmp_path, now=1000)
    down.refuse = lambda handler: (status, "Error")
    found = openings(tmp_path, now=5000).find(job(tmp_path))
    assert isinstance(found, KeptVersion)
    assert (found.id, found.listed_at) == (version, 1000)
    assert str(status) in found.why


def test_the_last_of_several_versions_stands_in(down: FakeS3, tmp_path: Path) -> None:
    first = open_once(tmp_path)
    down.objects["d/9.bin"] = Object(100, "new")
    second = open_once(tmp_path, now=10)
    down.refuse = lambda handler: (500, "Error")
    found = openings(tmp_path, now=20).find(job(tmp_path))
    assert isinstance(found, KeptVersion)
    assert found.id == second != first


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [(401, "", NotAllowed), (403, "AccessDenied", NotAllowed), (404, "NoSuchBucket", NotFound)],
)
def test_a_refusal_is_no_outage(
    down: FakeS3, tmp_path: Path, status: int, code: str, kind: type[CacheError]
) -> None:
    open_once(tmp_path)
    down.refuse = lambda handler: (status, code)
    with pytest.raises(kind):
        openings(tmp_path).find(job(tmp_path))


def test_nothing_else_stands_in(down: FakeS3, tmp_path: Path) -> None:
    version = open_once(tmp_path, now=1000)
    down.refuse = lambda handler: (500, "Error")
    hour_later = 1000 + 3600.0
    for made, asked in (
        (openings(tmp_path, stale_s=0, now=hour_later), job(tmp_path)),
        (openings(tmp_path, stale_s=3599, now=hour_later), job(tmp_path)),
        (openings(tmp_path, now=900), job(tmp_path)),  # the clock was set back
        (openings(tmp_path, now=hour_later), job(tmp_path, record_bytes=20)),
        (openings(tmp_path, now=hour_later), job(tmp_path, "s3://bucket/d")),
        (openings(tmp_path, now=hour_later), job(tmp_path, version="0" * 32)),
    ):
        with pytest.raises(SourceUnavailable):
            made.find(asked)
    assert isinstance(openings(tmp_path, now=hour_later).find(job(tmp_path, version=version)), KeptVersion)
    Path(tmp_path, f"{version}.lmdb").unlink()
    with pytest.raises(SourceUnavailable):
        openings(tmp_path, now=hour_later).find(job(tmp_path))


@pytest.mark.slow
def test_a_source_that_says_nothing_is_down_and_one_that_is_slow_is_not(down: FakeS3, tmp_path: Path) -> None:
    open_once(tmp_path)
    let_go = threading.Event()

    def hang(handler: BaseHTTPRequestHandler) -> None:
        let_go.wait(30)

    down.refuse = hang
    found = openings(tmp_path, after_s=0.5).find(job(tmp_path))
    let_go.set()
    assert isinstance(found, KeptVersion)
    down.objects = {f"d/{number:05}.bin": Object(100, "e") for number in range(6000)}
    down.refuse = lambda handler: time.sleep(1.0)  # a page of six; all of them take longer than the limit
    assert isinstance(openings(tmp_path, after_s=5.0).find(job(tmp_path)), Survey)


@pytest.mark.slow
def test_a_job_starts_while_its_bucket_is_down(
    down: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options = ["--ram", "128MiB", "--allow", "s3://bucket/d/"]
    monkeypatch.setenv("CACHESVC", "require")
    with Daemon(tmp_path / "node", options) as daemon:
        monkeypatch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
        with Control(daemon.socket_dir) as control:
            info = control.open_dataset([URI], Options(format="records", record_bytes=10))
            *_, last = control.prefetch(info.id)
            assert last.resident_extents == last.extents
            before = open_dataset(URI, format="records", record_bytes=10)
            down.refuse = lambda handler: (500, "Error")
            pinned = open_dataset(URI, format="records", record_bytes=10, version=info.id)
            assert (pinned.version, bytes(pinned[7])) == (info.id, bytes(before[7]))
            down.asked.clear()
            time.sleep(31)  # until the kept listing has expired
            found = open_dataset(URI, format="records", record_bytes=10)
            assert (found.version, bytes(found[7])) == (info.id, bytes(before[7]))
            (warning,) = [row.message for row in caplog.records if "the source is down" in row.message]
            assert info.id in warning
            assert "listed at 2" in warning
            assert warning in daemon.log
            (row,) = control.list()
            assert row.listed_at > 0
            down.refuse = lambda handler: None
            assert control.open_dataset([URI], Options(format="records", record_bytes=10)).stale == ""
            assert control.list()[0].listed_at == 0
