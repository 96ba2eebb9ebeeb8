"""Attempts to read outside the allowed prefixes: links swapped at the worst moment, misleading URLs, redirects."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cachesvc.config import SourceSection
from cachesvc.core.errors import CacheError, InvalidInput, NotAllowed, NotFound, SourceChanged
from cachesvc.core.model import ObjectVersion
from cachesvc.sources.files import FilesSource
from cachesvc.sources.s3.s3 import open_s3
from cachesvc.sources.uri import allowlist

METADATA = "169.254.169.254"


@pytest.mark.parametrize(
    "trick",
    [
        "s3://bucket/train/../other/x", "s3://bucket/train/%2e%2e/other", "s3://bucket/train/%2E%2e%2Fother",
        "s3://bucket/train%2f..%2fother", "s3://bucket/train/..", "s3://bucket//train", "s3://bucket/train\\..\\x",
        "S3://BUCKET/train/", "s3://bucket@evil/train/", "s3://user:secret@bucket/train/", "s3://bucket:80/train/",
        "s3://bucket/train/\t", "s3:/bucket/train/", "s3:bucket/train/", "s3://bucket.evil.example/train/",
        "s3://[::1]/train/", "s3://[::ffff:169.254.169.254]/latest", f"s3://{METADATA}/latest/meta-data/",
        f"http://{METADATA}/latest/", f"HTTP://{METADATA}/", "http://2852039166/", "http://0xa9fea9fe/",
        f"https://s3.amazonaws.com@{METADATA}/", "gs://bucket/train/", "simplecache::s3://bucket/other/",
        "filecache::file:///etc/", "file:///etc/passwd", "FILE:///etc/passwd", "file://etc/passwd",
        "file://localhost/etc/passwd", "file:/etc/passwd", "local://etc/passwd", "/etc/passwd", "etc/passwd",
        "s3://bucket/trainer/", "s3://bucket/train\x00/", "s3://bucket/train?versionId=1/../x", "s3://bücket/train/",
        "s3://bucket\u2215train/", "s3://bucket/train\u2028/../x", "//bucket/train", "s3://", "s3:///train/",
    ],
)  # fmt: skip
def test_no_spelling_leads_out_of_the_allowlist(trick: str) -> None:
    with pytest.raises((NotAllowed, InvalidInput)) as caught:
        allowlist(["s3://bucket/train/"]).check(trick)
    assert isinstance(caught.value, CacheError)


def test_a_link_swapped_between_listing_and_reading_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    secret = tmp_path / "out" / "x"
    secret.write_bytes(b"secret")
    inside = tmp_path / "in" / "x"
    inside.write_bytes(b"public")
    os.utime(secret, ns=(1, 1))
    source = FilesSource(allowlist([str(tmp_path / "in")]).roots)
    (listed,) = source.list(f"file://{tmp_path}/in/")
    found = os.stat(secret)
    forged = ObjectVersion(listed.uri, found.st_size, f"{found.st_mtime_ns}-{found.st_ctime_ns}")
    inside.unlink()
    inside.symlink_to(secret)
    for version in (listed, forged):
        with pytest.raises((NotAllowed, SourceChanged)):
            source.read_into(version, 0, memoryview(bytearray(6)))
    with pytest.raises(NotAllowed):
        source.head(listed.uri)


def test_folders_and_links_swapped_all_the_time_never_give_a_byte_from_outside(tmp_path: Path) -> None:
    for name, body in (("in/d", b"public"), ("out", b"secret")):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "x").write_bytes(body)
    (tmp_path / "in" / "link").symlink_to(tmp_path / "out")
    stop = threading.Event()

    def swap() -> None:
        folder, link, spare = (str(tmp_path / "in" / name) for name in ("d", "link", "spare"))
        while not stop.is_set():
            for old, new in ((folder, spare), (link, folder), (folder, link), (spare, folder)):
                os.rename(old, new)

    swapper = threading.Thread(target=swap)
    swapper.start()
    try:
        source, uri = FilesSource((str(tmp_path / "in"),)), f"file://{tmp_path}/in/d/x"
        seen: set[str] = set()
        for _ in range(2000):
            try:
                into = bytearray(6)
                source.read_into(ObjectVersion(uri, 6, ""), 0, memoryview(into))
                seen.add(into.decode())
                source.head(uri)
                seen.update("a listed file" for _ in source.list(f"file://{tmp_path}/in/d"))
            except (NotAllowed, NotFound) as refusal:
                seen.add(type(refusal).__name__)
    finally:
        stop.set()
        swapper.join()
    assert "public" in seen
    assert "secret" not in seen


def test_a_link_from_one_root_into_another_is_not_followed(tmp_path: Path) -> None:
    """An inner root may belong to other users: its files are read by their own path only."""
    (tmp_path / "all" / "team").mkdir(parents=True)
    (tmp_path / "all" / "team" / "x").write_bytes(b"secret")
    (tmp_path / "all" / "window").symlink_to(tmp_path / "all" / "team" / "x")
    source = FilesSource(allowlist([str(tmp_path / "all"), str(tmp_path / "all" / "team")]).roots)
    assert source.head(f"file://{tmp_path}/all/team/x").size_bytes == 6
    with pytest.raises(NotAllowed):
        source.head(f"file://{tmp_path}/all/window")


def test_a_link_that_flips_while_a_folder_is_listed_never_shows_a_size_from_outside(tmp_path: Path) -> None:
    for name, size in (("in/ds/d", 1000), ("out", 123_457)):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "x").write_bytes(bytes(size))
    flip, spare = tmp_path / "in" / "flip", tmp_path / "in" / "spare"
    flip.symlink_to(tmp_path / "in" / "ds" / "d")
    for number in range(50):
        (tmp_path / "in" / "ds" / f"file{number}").symlink_to(flip / "x")
        (tmp_path / "in" / "ds" / f"folder{number}").symlink_to(flip)
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            for target in (tmp_path / "out", tmp_path / "in" / "ds" / "d"):
                spare.symlink_to(target)
                spare.rename(flip)

    swapper = threading.Thread(target=swap)
    swapper.start()
    sizes: set[int] = set()
    try:
        for roots in ((), (str(tmp_path / "in"),)):
            for _ in range(60):
                try:
                    sizes.update(v.size_bytes for v in FilesSource(roots).list(f"file://{tmp_path}/in/ds/"))
                except NotAllowed:
                    continue
    finally:
        stop.set()
        swapper.join()
    assert sizes == {1000}


def test_the_error_for_a_link_outside_does_not_depend_on_its_target(tmp_path: Path) -> None:
    """The text is the same whether the target exists or not, and never contains its real path."""
    for name in ("in", "out", "out/folder"):
        (tmp_path / name).mkdir()
    (tmp_path / "out" / "x").write_bytes(b"secret")
    (tmp_path / "in" / "door").symlink_to(tmp_path / "out")
    (tmp_path / "in" / "through").symlink_to(tmp_path / "out" / "x" / "y")
    source = FilesSource((str(tmp_path / "in"),))
    for name in ("door/x", "door/none", "door/folder", "door/x/y", "door", "through"):
        uri = f"file://{tmp_path}/in/{name}"
        for call in (
            lambda uri=uri: source.head(uri),
            lambda uri=uri: list(source.list(uri)),
            lambda uri=uri: source.read_into(ObjectVersion(uri, 1, ""), 0, memoryview(bytearray(1))),
        ):
            with pytest.raises(NotAllowed) as caught:
                call()
            assert str(caught.value) == f"{uri} leads outside what may be read"
    assert list(source.list(f"file://{tmp_path}/in/")) == []


@pytest.mark.parametrize("special", ["pipe", "device", "folder"])
def test_only_regular_files_are_read(tmp_path: Path, special: str) -> None:
    path = tmp_path / "x"
    if special == "pipe":
        os.mkfifo(path)
    elif special == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    source = FilesSource()
    with pytest.raises(CacheError):
        source.head(str(path))
    with pytest.raises(CacheError):
        source.read_into(ObjectVersion(str(path), 1, ""), 0, memoryview(bytearray(1)))


@pytest.fixture
def redirecting() -> Iterator[tuple[str, list[str]]]:
    """An S3 endpoint that redirects every request, and the requests that followed."""
    visitors: list[str] = []

    class Inside(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            visitors.append(self.path)
            body = b'{"AccessKeyId": "stolen"}'
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", '"e"')
            self.end_headers()
            self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    inside = ThreadingHTTPServer(("127.0.0.1", 0), Inside)

    class Redirect(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            _, status, target = self.path.split("/", 2)[1].split("-", 2)
            to = f"http://127.0.0.1:{inside.server_port}" if target == "local" else f"http://{METADATA}"
            self.send_response(int(status))
            self.send_header("Location", f"{to}/latest/meta-data/iam/")
            self.send_header("x-amz-bucket-region", f"x@127.0.0.1:{inside.server_port}/#")
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    outside = ThreadingHTTPServer(("127.0.0.1", 0), Redirect)
    threads = [threading.Thread(target=each.serve_forever, args=(0.05,)) for each in (inside, outside)]
    for thread in threads:
        thread.start()
    yield f"http://127.0.0.1:{outside.server_port}", visitors
    for each in (inside, outside):
        each.shutdown()
        each.server_close()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("target", ["local", "metadata"])
def test_redirects_are_errors_and_are_not_followed(
    redirecting: tuple[str, list[str]], s3_env: dict[str, str], status: int, target: str
) -> None:
    endpoint, visitors = redirecting
    source = open_s3(SourceSection("s3://", endpoint=endpoint, region="us-east-1"))
    uri = f"s3://bkt-{status}-{target}/key"
    try:
        with pytest.raises(CacheError):
            list(source.list(uri.rpartition("/")[0] + "/"))
        with pytest.raises(CacheError):
            source.head(uri)
        with pytest.raises(CacheError):
            source.read_into(ObjectVersion(uri, 25, "e"), 0, memoryview(bytearray(25)))
    finally:
        source.close()
    assert visitors == []
