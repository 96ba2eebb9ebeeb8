"""Writes through the S3 endpoint of a real daemon to a real S3 server, as boto3, torch and other programs write."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import socket
import ssl
import time
import uuid
import zlib
from collections.abc import Iterator
from http.client import HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from botocore.exceptions import ClientError

from cachesvc.daemon.access.tenants import Peer
from cachesvc.gateway.s3.__main__ import SECRET_FILE
from cachesvc.gateway.s3.keys import Keys, ask_for_keys
from testbed.node import Daemon
from testbed.servers import SeaweedFS
from tests.support import s3_endpoint
from tests.support.membership.nodes import authority, certified

MIB = 1 << 20
HOST = "127.0.0.2"
"""An address beyond those that are known as loopback. So it has TLS, over which boto3 sends trailing checksums."""
STRANGER = 4_000_000
"""A uid of nobody, who may read."""


@pytest.fixture(scope="module")
def bucket(s3_server: SeaweedFS) -> str:
    return s3_server.create_bucket(f"w-{uuid.uuid4().hex[:12]}")


@pytest.fixture(scope="module")
def daemon(s3_server: SeaweedFS, bucket: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    options = ["--ram", "64MiB", "--extent-bytes", "1MiB", "--allow", f"s3://{bucket}/data/"]
    options += ["--s3-writes", f"s3://{bucket}/data/ckpt/=uid:{os.getuid()}", "--s3-fresh", "1h"]
    root = tmp_path_factory.mktemp("node")
    options += certified(root, "node", authority(root), HOST)
    with s3_endpoint.served(root, options, s3_server.env(), HOST) as found:
        yield found


@pytest.fixture
def client(daemon: Daemon) -> Any:
    return s3_endpoint.client_of(daemon, ca=str(daemon.root / "ca.pem"))


def refusal(call: Any, **given: Any) -> tuple[str, str]:
    with pytest.raises(ClientError) as refused:
        call(**given)
    found = refused.value.response["Error"]
    return str(found["Code"]), str(found.get("Message", ""))


def read(client: Any, bucket: str, key: str) -> bytes:
    return bytes(client.get_object(Bucket=bucket, Key=key)["Body"].read())


def test_a_written_object_is_seen_at_once_and_is_the_sources(
    client: Any, bucket: str, s3_server: SeaweedFS
) -> None:
    key = "data/ckpt/odd a+b%2F'é"
    assert refusal(client.head_object, Bucket=bucket, Key=key)[0] == "404"
    for body in (b"first", b"", os.urandom(3 * MIB)):
        client.put_object(Bucket=bucket, Key=key, Body=body, ContentType="x/y", Metadata={"k": "v"})
        assert read(client, bucket, key) == read(s3_server.client(), bucket, key) == body
        listed = client.list_objects_v2(Bucket=bucket, Prefix="data/ckpt/odd")["Contents"]
        assert [(row["Key"], row["Size"]) for row in listed] == [(key, len(body))]
    found = s3_server.client().head_object(Bucket=bucket, Key=key)
    assert (found["ContentType"], found["Metadata"]) == ("x/y", {"k": "v"})
    client.copy_object(Bucket=bucket, Key="data/ckpt/copy", CopySource={"Bucket": bucket, "Key": key})
    assert read(client, bucket, "data/ckpt/copy") == body
    client.delete_object(Bucket=bucket, Key=key)
    assert refusal(client.get_object, Bucket=bucket, Key=key)[0] == "NoSuchKey"
    gone = client.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": "data/ckpt/copy"}]})
    assert [each["Key"] for each in gone["Deleted"]] == ["data/ckpt/copy"]
    assert "Contents" not in client.list_objects_v2(Bucket=bucket, Prefix="data/ckpt/")


def test_uploads_in_parts_are_made_listed_and_given_up(client: Any, bucket: str) -> None:
    there = {"Bucket": bucket, "Key": "data/ckpt/parts"}
    body = os.urandom(6 * MIB)
    upload = client.create_multipart_upload(**there)["UploadId"]
    cuts = [body[: 5 * MIB], body[5 * MIB :]]
    tags = [
        client.upload_part(**there, UploadId=upload, PartNumber=at, Body=part)["ETag"]
        for at, part in enumerate(cuts, 1)
    ]
    assert [row["ETag"] for row in client.list_parts(**there, UploadId=upload)["Parts"]] == tags
    rows = [{"PartNumber": at, "ETag": tag} for at, tag in enumerate(tags, 1)]
    client.complete_multipart_upload(**there, UploadId=upload, MultipartUpload={"Parts": rows})
    assert read(client, **{name.lower(): value for name, value in there.items()}) == body
    other = client.create_multipart_upload(**there)["UploadId"]
    client.abort_multipart_upload(**there, UploadId=other)
    assert refusal(client.list_parts, **there, UploadId=other)[0] == "NoSuchUpload"


def test_a_checkpoint_is_saved_and_loaded_through_one_endpoint(client: Any, bucket: str) -> None:
    import torch

    for step in range(2):
        state: dict[str, Any] = {"step": step, "weights": torch.full((MIB,), float(step))}
        saved = io.BytesIO()
        torch.save(state, saved)
        saved.seek(0)
        client.upload_fileobj(saved, bucket, "data/ckpt/last.pt")
        into = io.BytesIO()
        client.download_fileobj(bucket, "data/ckpt/last.pt", into)
        into.seek(0)
        found = torch.load(into)
        assert found["step"] == step
        assert torch.equal(found["weights"], state["weights"])


def test_only_allowed_users_write_and_only_below_their_prefixes(
    daemon: Daemon, client: Any, bucket: str, s3_server: SeaweedFS
) -> None:
    source = s3_server.client()
    for key in ("data/plain", "data/ckpt/x", "secret"):
        source.put_object(Bucket=bucket, Key=key, Body=b"x")
    node = Keys((daemon.root / "state" / SECRET_FILE).read_bytes())
    made = node.issue(Peer(STRANGER, frozenset()), 60, time.time())
    names = {"AccessKeyId": made.access_key, "SecretAccessKey": made.secret_key, "SessionToken": made.token}
    stranger = s3_endpoint.client_of(daemon, names, str(daemon.root / "ca.pem"))
    assert read(stranger, bucket, "data/ckpt/x") == b"x"
    code, words = refusal(stranger.put_object, Bucket=bucket, Key="data/ckpt/x", Body=b"y" * MIB)
    assert (code, "--s3-writes" in words) == ("AccessDenied", True)
    assert refusal(stranger.delete_object, Bucket=bucket, Key="data/ckpt/x")[0] == "AccessDenied"
    for key in ("data/plain", "secret", "data/ckpt/../plain"):
        assert refusal(client.put_object, Bucket=bucket, Key=key, Body=b"y")[0] == "AccessDenied"
        both = {"Objects": [{"Key": "data/ckpt/x"}, {"Key": key}]}
        assert refusal(client.delete_objects, Bucket=bucket, Delete=both)[0] == "AccessDenied"
    into = {"Bucket": bucket, "Key": "data/ckpt/y"}
    assert refusal(client.copy_object, **into, CopySource=f"{bucket}/secret")[0] == "AccessDenied"
    assert refusal(client.put_object, **into, Body=b"", ACL="public-read")[0] == "NotImplemented"
    assert refusal(client.put_object_tagging, **into, Tagging={"TagSet": []})[0] == "NotImplemented"
    assert refusal(client.create_bucket, Bucket=f"{bucket}-2")[0] == "NotImplemented"
    assert refusal(client.create_bucket, Bucket=bucket)[0] == "BucketAlreadyOwnedByYou", (
        "as rclone asks for it"
    )
    for key in ("data/plain", "data/ckpt/x", "secret"):
        assert read(source, bucket, key) == b"x"


def test_half_a_body_leaves_what_was_there(daemon: Daemon, client: Any, bucket: str) -> None:
    client.put_object(Bucket=bucket, Key="data/ckpt/kept", Body=b"before")
    url = client.generate_presigned_url("put_object", Params={"Bucket": bucket, "Key": "data/ckpt/kept"})
    place, where = urlsplit(url), urlsplit(ask_for_keys(daemon.socket_dir)["Endpoint"])
    trusting = ssl.create_default_context(cafile=str(daemon.root / "ca.pem"))
    plain = socket.create_connection((where.hostname, where.port))
    with trusting.wrap_socket(plain, server_hostname=HOST) as half:
        head = f"PUT {place.path}?{place.query} HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Length: {MIB}\r\n\r\n"
        half.sendall(head.encode() + b"x" * 1000)
    client.put_object(Bucket=bucket, Key="data/ckpt/other", Body=b"")  # others are served
    assert read(client, bucket, "data/ckpt/kept") == b"before"


def test_a_body_in_signed_chunks_is_verified_and_written(
    daemon: Daemon, client: Any, bucket: str, s3_server: SeaweedFS
) -> None:
    keys = ask_for_keys(daemon.socket_dir)
    body = os.urandom(100_000)
    where = urlsplit(keys["Endpoint"])
    for name, spoilt in (("whole", b""), ("spoilt", b"x")):
        headers, sent = signed_chunks(keys, f"{keys['Endpoint']}/{bucket}/data/ckpt/{name}", body, spoilt)
        trusting = ssl.create_default_context(cafile=str(daemon.root / "ca.pem"))
        connection = HTTPSConnection(where.netloc, context=trusting)
        connection.request("PUT", f"/{bucket}/data/ckpt/{name}", sent, headers)
        answer = connection.getresponse()
        said = answer.read()
        assert (answer.status, b"SignatureDoesNotMatch" in said) == ((403, True) if spoilt else (200, False))
        connection.close()
    found = s3_server.client().head_object(Bucket=bucket, Key="data/ckpt/whole", ChecksumMode="ENABLED")
    assert found["ContentLength"] == len(body)
    assert read(client, bucket, "data/ckpt/whole") == body
    assert refusal(client.get_object, Bucket=bucket, Key="data/ckpt/spoilt")[0] == "NoSuchKey"


def signed_chunks(keys: dict[str, str], url: str, body: bytes, spoilt: bytes) -> tuple[dict[str, str], bytes]:
    """Return headers and bytes of a PUT as the SDK of Java sends it: signed chunks, and a signed trailer. `spoilt` replaces
    the ends of the chunks after they were signed."""
    given = {"x-amz-trailer": "x-amz-checksum-crc32", "x-amz-decoded-content-length": str(len(body))}
    request = AWSRequest("PUT", url, {"content-encoding": "aws-chunked", **given})
    signer = _Chunked(
        Credentials(keys["AccessKeyId"], keys["SecretAccessKey"], keys["SessionToken"]), "s3", "x"
    )
    signer.add_auth(request)
    before, at = request.headers["Authorization"].rpartition("=")[2], request.context["timestamp"]
    crc = base64.b64encode(zlib.crc32(body).to_bytes(4, "big")).decode()
    scope, out, nothing = signer.credential_scope(request), [], hashlib.sha256(b"").hexdigest()
    for part in (body[:65_536], body[65_536:], b""):
        digest = hashlib.sha256(part).hexdigest()
        lines = ["AWS4-HMAC-SHA256-PAYLOAD", at, scope, before, nothing, digest]
        before = signer.signature("\n".join(lines), request)
        sent = part[: len(part) - len(spoilt)] + spoilt if part else part
        out.append(f"{len(part):x};chunk-signature={before}\r\n".encode() + sent + b"\r\n" * bool(part))
    digest = hashlib.sha256(f"x-amz-checksum-crc32:{crc}\n".encode()).hexdigest()
    last = signer.signature("\n".join(["AWS4-HMAC-SHA256-TRAILER", at, scope, before, digest]), request)
    out.append(f"x-amz-checksum-crc32:{crc}\r\nx-amz-trailer-signature:{last}\r\n\r\n".encode())
    return dict(request.headers.items()), b"".join(out)


class _Chunked(S3SigV4Auth):
    def payload(self, request: AWSRequest) -> str:
        return "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER"


def test_versions_are_read_by_their_ids(client: Any, bucket: str, s3_server: SeaweedFS) -> None:
    s3_server.client().put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    there = {"Bucket": bucket, "Key": "data/ckpt/versions"}
    ids = [client.put_object(**there, Body=body)["VersionId"] for body in (b"first", b"second")]
    found = [client.get_object(**there, VersionId=each, Range="bytes=1-") for each in ids]
    assert [each["Body"].read() for each in found] == [b"irst", b"econd"]
    assert client.head_object(**there, VersionId=ids[0])["ContentLength"] == 5
    assert read(client, bucket, there["Key"]) == b"second"
    client.delete_object(**there, VersionId=ids[1])
    assert read(client, bucket, there["Key"]) == b"first"
    assert refusal(client.get_object, Bucket=bucket, Key="secret", VersionId=ids[0])[0] == "AccessDenied"
