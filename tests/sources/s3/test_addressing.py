"""Public buckets, requester pays, directory buckets, access points and PrivateLink: GETs go where botocore's LISTs go."""

from __future__ import annotations

import os
from collections.abc import Iterator
from email.message import Message
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from cachesvc.config import SourceSection
from cachesvc.core.errors import NotAllowed
from cachesvc.sources.s3.addressing import Addressing, split_uri
from cachesvc.sources.s3.identity import sign_in
from cachesvc.sources.s3.s3 import S3Source, open_s3
from tests.support.faults.fake_s3 import FakeS3, Object, fake_s3, pattern

ARN = "arn:aws:s3:us-west-2:123456789012:accesspoint"
DIRECTORY = "x--use1-az4--x-s3"
PRIVATE = "https://bucket.vpce-1a2b-5e6f.s3.us-east-1.vpce.amazonaws.com"
SESSION = (
    b"<CreateSessionResult><Credentials><SessionToken>ticket</SessionToken><SecretAccessKey>s</SecretAccessKey>"
    b"<AccessKeyId>k</AccessKeyId><Expiration>2099-01-01T00:00:00Z</Expiration></Credentials></CreateSessionResult>"
)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeS3]:
    """A fake server with two objects, and an environment without AWS settings."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, os.devnull)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with fake_s3() as found:
        found.objects |= {"a/1": Object(100), "a/2": Object(200)}
        monkeypatch.setenv("AWS_ENDPOINT_URL", found.endpoint)
        yield found


@pytest.fixture
def keys(server: FakeS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")


def recorded(server: FakeS3) -> list[tuple[str, Message]]:
    """Have the server record (method and path, headers) of each request."""
    seen: list[tuple[str, Message]] = []

    def record(handler: BaseHTTPRequestHandler) -> None:
        seen.append((f"{handler.command} {handler.path}", handler.headers))

    server.refuse = record
    return seen


def read_all(source: S3Source, uri: str) -> list[bytes]:
    bodies = []
    for version in source.list(uri):
        into = bytearray(version.size_bytes)
        source.read_into(source.head(version.uri), 0, memoryview(into))
        bodies.append(bytes(into))
    return bodies


BODIES = [pattern(0, 100), pattern(0, 200)]


def test_a_public_bucket_is_read_without_credentials(server: FakeS3) -> None:
    seen = recorded(server)
    assert read_all(open_s3(), "s3://bucket/a/") == BODIES
    assert [headers["Authorization"] for _, headers in seen] == [None] * 5


def test_a_private_bucket_without_credentials_says_what_to_set(server: FakeS3) -> None:
    server.refuse = lambda handler: (403, "AccessDenied")
    source = open_s3()
    for call in (lambda: list(source.list("s3://bucket/a/")), lambda: source.head("s3://bucket/a/1")):
        with pytest.raises(
            NotAllowed, match=r"is not public.*no S3 credentials were found: set AWS_ACCESS_KEY_ID"
        ):
            call()


def test_credentials_that_appear_are_used(
    server: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.refuse = lambda handler: None if handler.headers["Authorization"] else (403, "AccessDenied")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "keys"))
    source = open_s3()
    (tmp_path / "keys").write_text("[default]\naws_access_key_id = a\naws_secret_access_key = s\n")
    assert read_all(source, "s3://bucket/a/") == BODIES


@pytest.mark.usefixtures("keys")
def test_signatures_can_be_left_out(server: FakeS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_NO_SIGN_REQUEST", "YES")
    seen = recorded(server)
    source = open_s3()
    assert read_all(source, "s3://bucket/a/") == BODIES
    assert {headers["Authorization"] for _, headers in seen} == {None}
    server.refuse = lambda handler: (403, "AccessDenied")
    with pytest.raises(NotAllowed, match="AWS_NO_SIGN_REQUEST is set"):
        list(source.list("s3://bucket/a/"))


@pytest.mark.usefixtures("keys")
@pytest.mark.parametrize("pays", [True, False])
def test_the_requester_pays_where_the_environment_says_so(
    server: FakeS3, monkeypatch: pytest.MonkeyPatch, pays: bool
) -> None:
    if pays:
        monkeypatch.setenv("AWS_REQUEST_PAYER", "requester")
    seen = recorded(server)
    assert read_all(open_s3(), "s3://bucket/a/") == BODIES
    assert {headers["x-amz-request-payer"] for _, headers in seen} == {"requester" if pays else None}
    assert all(("x-amz-request-payer" in headers["Authorization"]) == pays for _, headers in seen), (
        "it is signed"
    )


@pytest.mark.usefixtures("keys")
def test_a_directory_bucket_is_read_with_the_keys_of_a_session(server: FakeS3) -> None:
    seen: list[tuple[str, Message]] = []

    def answer(handler: BaseHTTPRequestHandler) -> tuple[int, str] | None:
        if "session" in handler.path.partition("?")[2]:
            handler.send_response(200)
            handler.send_header("Content-Length", str(len(SESSION)))
            handler.send_header("Connection", "close")
            handler.end_headers()
            handler.wfile.write(SESSION)
            raise ConnectionAbortedError
        seen.append((f"{handler.command} {handler.path}", handler.headers))
        if "prefix=a" in handler.path and "prefix=a%2F" not in handler.path:
            return 400, "InvalidRequest"  # only prefixes that end in a delimiter
        return None

    server.refuse = answer
    source = open_s3()
    assert read_all(source, f"s3://{DIRECTORY}/a") == BODIES
    assert [each.uri for each in source.list(f"s3://{DIRECTORY}/a/1")] == [f"s3://{DIRECTORY}/a/1"]
    gets = [headers for line, headers in seen if line.startswith("GET") and "list-type" not in line]
    assert len(gets) == 2
    for headers in gets:
        assert headers["x-amz-s3session-token"] == "ticket"
        assert "Credential=k/" in headers["Authorization"]


@pytest.mark.usefixtures("keys")
@pytest.mark.parametrize(
    ("endpoint", "uri", "url", "region"),
    [
        ("", "s3://bucket/k", "https://bucket.s3.amazonaws.com/k", "us-east-1"),
        ("", "s3://a.dotted/k", "https://s3.amazonaws.com/a.dotted/k", "us-east-1"),
        (
            "",
            f"s3://{ARN}/mine/k",
            "https://mine-123456789012.s3-accesspoint.us-west-2.amazonaws.com/k",
            "us-west-2",
        ),
        ("", "s3://mine-abc-s3alias/k", "https://mine-abc-s3alias.s3.amazonaws.com/k", "us-east-1"),
        (
            "",
            f"s3://{DIRECTORY}/k",
            f"https://{DIRECTORY}.s3express-use1-az4.us-east-1.amazonaws.com/k",
            "us-east-1",
        ),
        (PRIVATE, "s3://bucket/a b", f"{PRIVATE}/bucket/a%20b", "us-east-1"),
        ("http://127.0.0.1:9000/s3", "s3://bucket/k", "http://127.0.0.1:9000/s3/bucket/k", "us-east-1"),
    ],
)
def test_reads_go_where_botocore_says(
    server: FakeS3, monkeypatch: pytest.MonkeyPatch, endpoint: str, uri: str, url: str, region: str
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    bucket, key = split_uri(uri)
    address = Addressing(sign_in(SourceSection("s3://", endpoint)).client_in).of(bucket)
    assert (address.target(key).url, address.region) == (url, region)


@pytest.mark.usefixtures("keys")
def test_a_learned_region_moves_the_host(server: FakeS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    address = Addressing(sign_in(SourceSection("s3://")).client_in).of("bucket", "eu-central-1")
    assert (address.base, address.region) == ("https://bucket.s3.eu-central-1.amazonaws.com/", "eu-central-1")


def test_access_points_are_split_from_keys() -> None:
    assert split_uri(f"s3://{ARN}/mine/a/b") == (f"{ARN}/mine", "a/b")
    assert split_uri(f"s3://{ARN}:mine/a/b") == (f"{ARN}:mine", "a/b")
    assert split_uri(f"s3://{ARN}/mine/", key_needed=False) == (f"{ARN}/mine", "")
