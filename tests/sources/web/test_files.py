"""Named files of web servers: braces, ranges or none, redirects, and files that change."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachesvc.core.errors import (
    CacheError,
    CorruptData,
    InvalidInput,
    NotAllowed,
    NotFound,
    SourceChanged,
    SourceUnavailable,
)
from cachesvc.sources.resilient import Resilience, Resilient
from cachesvc.sources.uri import allowlist, canonical
from cachesvc.sources.web.files import WebSource
from loader import open_dataset
from testbed.node import Daemon
from tests.support.clock import Clock
from tests.support.datasets import tar_bytes
from tests.support.faults.web_server import WebServer, serving
from tests.support.reads import read

DATA = os.urandom(300_000)


@pytest.fixture
def server() -> Iterator[WebServer]:
    made = WebServer({"/a b.bin": DATA, "/empty": b"", "/d/ü.bin": b"x" * 10})
    with serving(made):
        yield made


@pytest.fixture
def source() -> Iterator[WebSource]:
    made = WebSource()
    yield made
    made.close()


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("tags", [True, False])
def test_files_are_read_by_ranges_or_behind_what_is_skipped(
    server: WebServer, source: WebSource, ranges: bool, tags: bool
) -> None:
    server.ranges, server.tags = ranges, tags
    (version,) = source.list(f"{server.url}/a b.bin")
    assert version.size_bytes == len(DATA)
    assert version.etag
    assert read(source, version) == DATA
    assert read(source, version, 1000, 70_000) == DATA[1000:71_000]
    assert read(source, version, len(DATA) - 1) == DATA[-1:]
    assert source.head(f"{server.url}/empty").size_bytes == 0
    assert read(source, source.head(f"{server.url}/d/ü.bin")) == b"x" * 10
    server.files["/a b.bin"] = DATA[1:] if not tags else DATA[::-1]
    with pytest.raises(SourceChanged):
        read(source, version, 1000, 70_000)


def test_a_large_file_without_ranges_is_refused(server: WebServer) -> None:
    server.ranges = False
    source = WebSource(max_skipped_bytes=1000)
    with pytest.raises(InvalidInput, match="serves no byte ranges"):
        read(source, source.head(f"{server.url}/a b.bin"), 2000, 10)


def test_refusals_are_typed(server: WebServer, source: WebSource) -> None:
    with pytest.raises(NotFound):
        source.head(f"{server.url}/absent")
    with pytest.raises(InvalidInput, match="name its files"):
        list(source.list(f"{server.url}/d/"))
    for status, kind in (
        (403, NotAllowed),
        (500, SourceUnavailable),
        (429, SourceUnavailable),
        (400, InvalidInput),
        (200, SourceUnavailable),
    ):
        server.refuse = [status]
        with pytest.raises(kind) as caught:
            source.head(f"{server.url}/a b.bin")
        assert getattr(caught.value, "throttled", False) == (status == 429)


@pytest.mark.parametrize("ranges", [True, False])
def test_a_web_page_in_the_place_of_a_file_is_no_other_version(
    server: WebServer, source: WebSource, ranges: bool
) -> None:
    server.ranges = ranges
    patient = Resilient(source, Resilience(), clock := Clock(), sleep=clock.sleep)
    version = patient.head(f"{server.url}/a b.bin")
    server.refuse = [200] * 8
    with pytest.raises(SourceUnavailable, match=r"a web page \(text/html\)"):
        read(source, version, 10, 100)
    assert read(patient, version, 10, 100) == DATA[10:110]
    server.refuse = [200] * 8
    assert read(patient, version) == DATA


def test_an_encoding_that_the_name_does_not_say_is_an_error_that_names_it(
    server: WebServer, source: WebSource
) -> None:
    version = source.head(f"{server.url}/a b.bin")
    server.encoding = "gzip"
    server.files["/d/x.tar.gz"] = DATA
    with pytest.raises(CorruptData, match="Content-Encoding: gzip"):
        list(source.list(f"{server.url}/a b.bin"))
    for size in (len(DATA), 10):  # of a server that named it in no earlier answer
        with pytest.raises(CorruptData, match="Content-Encoding: gzip"):
            read(source, version, 0, size)
    assert read(source, source.head(f"{server.url}/d/x.tar.gz")) == DATA
    server.encoding = "identity"
    assert read(source, version) == DATA


def test_redirects_stay_on_the_host_or_use_tls(server: WebServer, source: WebSource) -> None:
    server.redirects = {"/r": "/a%20b.bin", "/loop": "/loop", "/out": "http://169.254.169.254/latest/"}
    server.redirects["/address"] = "https://127.0.0.2/x"
    assert read(source, source.head(f"{server.url}/r")) == DATA
    with pytest.raises(InvalidInput, match="without an end"):
        source.head(f"{server.url}/loop")
    for path in ("out", "address"):
        with pytest.raises(NotAllowed, match="another host"):
            source.head(f"{server.url}/{path}")


def test_queries_are_part_of_a_file_and_cannot_leave_the_allowlist(server: WebServer) -> None:
    allowed = allowlist([f"{server.url}/d/"])
    assert canonical(f"{server.url}/d/x.tar?sig=a/b//c") == f"{server.url}/d/x.tar?sig=a/b//c"
    assert allowed.check(f"{server.url}/d/x.tar?sig=../a")
    for trick in (f"{server.url}/d/../a", f"{server.url}/e?/d/", "http://169.254.169.254/d/"):
        with pytest.raises(CacheError):
            allowed.check(trick)


@pytest.mark.parametrize("way", ["direct", "daemon"])
def test_a_dataset_of_named_tars(
    server: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    server.files |= {f"/t/{n}.tar": tar_bytes({f"k{n}": {"txt": b"%d" % n}}) for n in range(3)}
    monkeypatch.setenv("CACHESVC", "off" if way == "direct" else "require")
    with Daemon(tmp_path / "node", ["--ram", "64MiB", "--allow", f"{server.url}/t/"]) as daemon:
        monkeypatch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
        data = open_dataset(f"pipe:curl -sL {server.url}/t/{{0..2}}.tar?ticket=1", fields=("txt",))
        assert sorted(data) == [(str(n),) for n in range(3)]
        data.close()
