"""The S3 endpoint of a real daemon in front of a real S3 server, read by boto3 as any program reads S3."""

from __future__ import annotations

import hashlib
import os
import signal
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from botocore.exceptions import BotoCoreError, ClientError
from urllib3.exceptions import IncompleteRead, ProtocolError

from cachesvc.catalog.options import Options
from cachesvc.client.control import Control
from cachesvc.client.grants import DaemonGrants
from cachesvc.client.protocol import Granted
from cachesvc.daemon.access.tenants import Peer
from cachesvc.gateway.s3.__main__ import SECRET_FILE
from cachesvc.gateway.s3.keys import Keys
from testbed import WAIT_S
from testbed.node import Daemon
from testbed.proxy import Fault, Proxy
from testbed.servers import SeaweedFS
from tests.support import s3_endpoint
from tests.support.waiting import wait_until

MIB = 1 << 20
STRANGER = 4_000_000
"""A uid of nobody."""


@pytest.fixture(scope="module")
def tree(s3_server: SeaweedFS) -> tuple[str, dict[str, bytes]]:
    """A bucket and the bodies of its objects."""
    bucket = s3_server.create_bucket(f"b-{uuid.uuid4().hex[:12]}")
    names = [
        "plain.bin",
        "odd/a b+c%2F?x&=;é~'*.bin",
        "odd/[1]{2}",
        "zero",
        "dir/sub/deep",
    ]
    bodies = {f"data/{name}": os.urandom(1000 + at) for at, name in enumerate(names)}
    bodies |= {"data/zero": b"", "data/large": os.urandom(MIB) * 9 + b"end"}
    bodies |= {f"data/many/{n:02d}": bytes([n]) * 100 for n in range(25)}
    client = s3_server.client()
    for key, body in bodies.items():
        client.put_object(Bucket=bucket, Key=key, Body=body, Metadata={"k": "v"}, ContentType="x/y")
    bodies["data/parts"] = b"".join(put_parts(client, bucket, "data/parts"))
    client.put_object(Bucket=bucket, Key="secret/x", Body=b"x")
    client.put_object(Bucket=bucket, Key="database", Body=b"x")
    client.put_object(Bucket=bucket, Key="data/team/x", Body=b"x")
    return bucket, bodies


def put_parts(client: Any, bucket: str, key: str) -> list[bytes]:
    """Upload an object in two parts; returns them."""
    parts = [os.urandom(5 * MIB), os.urandom(1000)]
    upload = client.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]
    tags = [
        client.upload_part(Bucket=bucket, Key=key, UploadId=upload, PartNumber=at + 1, Body=part)["ETag"]
        for at, part in enumerate(parts)
    ]
    rows = [{"PartNumber": at + 1, "ETag": tag} for at, tag in enumerate(tags)]
    client.complete_multipart_upload(Bucket=bucket, Key=key, UploadId=upload, MultipartUpload={"Parts": rows})
    return parts


@pytest.fixture(scope="module")
def daemon(
    s3_server: SeaweedFS, tree: tuple[str, dict[str, bytes]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Daemon]:
    options = ["--ram", "64MiB", "--extent-bytes", "1MiB", "--allow", f"s3://{tree[0]}/data/"]
    options += ["--allow", f"s3://{tree[0]}/data/team/=uid:{STRANGER + 1}"]
    with s3_endpoint.served(tmp_path_factory.mktemp("node"), options, s3_server.env()) as found:
        yield found


@pytest.fixture
def client(daemon: Daemon) -> Any:
    return s3_endpoint.client_of(daemon)


def digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def code_of(call: Any, **given: Any) -> str:
    with pytest.raises(ClientError) as refusal:
        call(**given)
    return str(refusal.value.response["Error"]["Code"])


def source_bytes(daemon: Daemon) -> int:
    with Control(daemon.socket_dir) as control:
        return int(control.status().sources.bytes)


def test_the_tree_is_the_sources_and_a_second_pass_costs_it_no_body(
    client: Any, daemon: Daemon, tree: tuple[str, dict[str, bytes]], s3_server: SeaweedFS
) -> None:
    bucket, bodies = tree
    wanted = {key: digest(body) for key, body in bodies.items()}
    before, total = source_bytes(daemon), sum(map(len, bodies.values()))
    for _ in range(2):
        pages = client.get_paginator("list_objects_v2").paginate(
            Bucket=bucket, Prefix="data/", PaginationConfig={"PageSize": 10}
        )
        keys = [row["Key"] for page in pages for row in page["Contents"] if row["Key"] != "data/team/x"]
        with ThreadPoolExecutor(4) as pool:
            found = pool.map(lambda key: client.get_object(Bucket=bucket, Key=key)["Body"].read(), keys)
        assert dict(zip(keys, map(digest, found), strict=True)) == wanted
        wait_until(lambda: source_bytes(daemon) - before == total)
    source = s3_server.client()
    for key in ("data/plain.bin", "data/parts", "data/zero"):
        here, there = (each.head_object(Bucket=bucket, Key=key) for each in (client, source))
        names = ("ETag", "LastModified", "ContentLength", "ContentType", "Metadata")
        assert {name: here.get(name) for name in names} == {name: there.get(name) for name in names}


def test_ranges_and_parts_are_those_of_the_object(client: Any, tree: tuple[str, dict[str, bytes]]) -> None:
    bucket, bodies = tree
    body = bodies["data/large"]
    for begin, end in ((0, 1), (4 * MIB - 1, 4 * MIB + 1), (5, 9 * MIB), (9 * MIB, 9 * MIB + 3)):
        found = client.get_object(Bucket=bucket, Key="data/large", Range=f"bytes={begin}-{end - 1}")
        assert found["ContentRange"] == f"bytes {begin}-{end - 1}/{len(body)}"
        assert found["Body"].read() == body[begin:end]
    assert client.get_object(Bucket=bucket, Key="data/large", Range="bytes=-3")["Body"].read() == b"end"
    assert code_of(client.get_object, Bucket=bucket, Key="data/zero", Range="bytes=0-") == "InvalidRange"
    second = client.get_object(Bucket=bucket, Key="data/parts", PartNumber=2)
    assert second["Body"].read() == bodies["data/parts"][5 * MIB :]
    for key, number in (("data/parts", 3), ("data/plain.bin", 2)):
        code = code_of(client.get_object, Bucket=bucket, Key=key, PartNumber=number)
        assert code in ("InvalidPart", "InvalidPartNumber")


def test_listings_have_the_forms_that_clients_ask_for(
    client: Any, tree: tuple[str, dict[str, bytes]]
) -> None:
    bucket, bodies = tree
    first = client.get_paginator("list_objects").paginate(
        Bucket=bucket, Prefix="data/many/", PaginationConfig={"PageSize": 7}
    )
    many = [key for key in sorted(bodies) if key.startswith("data/many/")]
    assert [row["Key"] for page in first for row in page["Contents"]] == many
    folders = client.list_objects_v2(Bucket=bucket, Prefix="data/", Delimiter="/")
    assert [each["Prefix"] for each in folders["CommonPrefixes"]] == [
        "data/dir/", "data/many/", "data/odd/", "data/team/"
    ]  # fmt: skip
    assert {row["Key"] for row in folders["Contents"]} == {key for key in bodies if key.count("/") == 1}
    after = client.list_objects_v2(Bucket=bucket, Prefix="data/many/", StartAfter="data/many/22")
    assert [row["Key"] for row in after["Contents"]] == many[23:]
    assert client.list_objects_v2(Bucket=bucket, Prefix="data/none/")["KeyCount"] == 0
    named = client.list_objects(Bucket=bucket, Prefix="data/many/\n", Delimiter="")
    assert (named["Prefix"], named["Marker"], "Delimiter" in named) == ("data/many/\n", "", False)
    for owned in (
        client.list_objects(Bucket=bucket, Prefix="data/many/"),
        client.list_objects_v2(Bucket=bucket, Prefix="data/many/", FetchOwner=True),
    ):
        assert all("ID" in row["Owner"] for row in owned["Contents"])
    assert "Owner" not in after["Contents"][0]


def test_only_allowed_prefixes_are_seen(client: Any, tree: tuple[str, dict[str, bytes]]) -> None:
    bucket, _ = tree
    assert [each["Name"] for each in client.list_buckets()["Buckets"]] == [bucket]
    assert not client.list_buckets(MaxBuckets=1, ContinuationToken=bucket)["Buckets"]
    assert not client.list_buckets(Prefix=f"{bucket}-")["Buckets"]
    assert client.head_bucket(Bucket=bucket)["ResponseMetadata"]["HTTPStatusCode"] == 200
    client.get_bucket_location(Bucket=bucket)
    above = client.list_objects_v2(Bucket=bucket, Delimiter="/")
    assert [each["Prefix"] for each in above["CommonPrefixes"]] == ["data/"]
    assert "Contents" not in above
    for refused in ({"Prefix": "secret/"}, {"Prefix": "data"}, {"Prefix": ""}):
        assert code_of(client.list_objects_v2, Bucket=bucket, **refused) == "AccessDenied"
    for key in ("secret/x", "database", "data/../secret/x"):
        assert code_of(client.get_object, Bucket=bucket, Key=key) == "AccessDenied"
    assert code_of(client.list_objects_v2, Bucket=bucket, Prefix="data/../secret/") == "AccessDenied"
    assert code_of(client.get_object, Bucket="other", Key="data/x") == "AccessDenied"


def test_keys_of_another_user_open_what_that_user_may_read(
    daemon: Daemon, tree: tuple[str, dict[str, bytes]]
) -> None:
    bucket, bodies = tree
    node = Keys((daemon.root / "state" / SECRET_FILE).read_bytes())

    def keys_of(uid: int) -> dict[str, str]:
        made = node.issue(Peer(uid, frozenset({uid})), 60, time.time())
        return {
            "AccessKeyId": made.access_key,
            "SecretAccessKey": made.secret_key,
            "SessionToken": made.token,
        }

    stranger = s3_endpoint.client_of(daemon, keys_of(STRANGER))
    team = s3_endpoint.client_of(daemon, keys_of(STRANGER + 1))
    assert stranger.get_object(Bucket=bucket, Key="data/plain.bin")["Body"].read() == bodies["data/plain.bin"]
    assert code_of(stranger.get_object, Bucket=bucket, Key="data/team/x") == "AccessDenied"
    assert team.get_object(Bucket=bucket, Key="data/team/x")["Body"].read() == b"x"
    rows = stranger.list_objects_v2(Bucket=bucket, Prefix="data/")["Contents"]
    assert "data/team/x" not in {row["Key"] for row in rows}
    wrong = keys_of(STRANGER) | {"SecretAccessKey": "x"}
    assert code_of(s3_endpoint.client_of(daemon, wrong).list_buckets) == "SignatureDoesNotMatch"


def test_what_is_not_there_and_writes_are_refused_by_name(
    client: Any, tree: tuple[str, dict[str, bytes]]
) -> None:
    bucket, _ = tree
    there = {"Bucket": bucket, "Key": "data/plain.bin"}
    assert code_of(client.get_object, Bucket=bucket, Key="data/none") == "NoSuchKey"
    assert code_of(client.head_object, Bucket=bucket, Key="data/none") == "404"
    assert code_of(client.put_object, **there, Body=b"x") == "MethodNotAllowed"
    assert code_of(client.delete_object, **there) == "MethodNotAllowed"
    assert code_of(client.create_multipart_upload, **there) == "MethodNotAllowed"
    assert code_of(client.get_object_tagging, **there) == "NotImplemented"
    assert code_of(client.get_object, **there, IfMatch='"x"') == "PreconditionFailed"
    etag = client.head_object(**there)["ETag"]
    assert code_of(client.get_object, **there, IfNoneMatch=etag) == "304"
    assert client.get_object(**there, IfMatch=etag)["ETag"] == etag


def test_an_object_that_was_overwritten_is_never_mixed_and_its_new_tag_is_known(
    client: Any, tree: tuple[str, dict[str, bytes]], s3_server: SeaweedFS
) -> None:
    bucket, _ = tree
    key, source = f"data/{uuid.uuid4().hex}", s3_server.client()
    source.put_object(Bucket=bucket, Key=key, Body=b"a" * 5 * MIB)
    assert client.get_object(Bucket=bucket, Key=key, Range="bytes=0-0")["Body"].read() == b"a"
    new = source.put_object(Bucket=bucket, Key=key, Body=b"b" * 5 * MIB)["ETag"]
    tail = client.get_object(Bucket=bucket, Key=key, Range=f"bytes={5 * MIB - 1}-")
    assert (tail["Body"].read(), tail["ETag"]) == (b"b", new), "the source has no other version"
    newer = source.put_object(Bucket=bucket, Key=key, Body=b"c" * 10)["ETag"]
    found = client.get_object(Bucket=bucket, Key=key, IfMatch=newer)
    assert (found["Body"].read(), found["ETag"]) == (b"c" * 10, newer)


@pytest.mark.slow
def test_an_object_that_changes_while_it_is_sent_ends_early(
    client: Any, tree: tuple[str, dict[str, bytes]], s3_server: SeaweedFS
) -> None:
    there = {"Bucket": tree[0], "Key": f"data/{uuid.uuid4().hex}"}
    s3_server.client().put_object(**there, Body=b"a" * 40 * MIB)
    sent = client.get_object(**there)["Body"]
    found = sent.read(1)
    s3_server.client().put_object(**there, Body=b"b" * 40 * MIB)
    with suppress(IncompleteRead, ProtocolError, BotoCoreError):
        while data := sent.read(MIB):
            found += data
    assert len(found) < 40 * MIB
    assert set(found) == {ord("a")}


def test_presigned_urls_and_other_headers_of_an_answer(
    client: Any, tree: tuple[str, dict[str, bytes]]
) -> None:
    bucket, bodies = tree
    given = {"Bucket": bucket, "Key": "data/plain.bin", "ResponseContentType": "a/b"}
    url = client.generate_presigned_url("get_object", Params=given, ExpiresIn=60)
    with urlopen(url) as answer:
        assert answer.read() == bodies["data/plain.bin"]
        assert answer.headers["content-type"] == "a/b"
    with pytest.raises(HTTPError) as refusal:
        urlopen(url.replace("plain", "large"))
    assert b"<Code>SignatureDoesNotMatch</Code>" in refusal.value.read()
    with pytest.raises(HTTPError) as refusal:
        urlopen(Request(url.partition("?")[0]))
    assert b"cachesvc env" in refusal.value.read()


def test_an_endpoint_outlives_its_daemon_and_is_started_again(
    daemon: Daemon, client: Any, tree: tuple[str, dict[str, bytes]]
) -> None:
    bucket, bodies = tree
    before = s3_endpoint.endpoint_process(daemon)
    daemon.crash()
    assert client.get_object(Bucket=bucket, Key="data/large")["Body"].read() == bodies["data/large"]
    assert s3_endpoint.endpoint_process(daemon) == before
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: s3_endpoint.answers(daemon) and s3_endpoint.endpoint_process(daemon) != before)
    assert client.get_object(Bucket=bucket, Key="data/zero")["Body"].read() == b"", "with the same keys"


@pytest.mark.slow
def test_an_endpoint_asks_each_time_where_told_so_and_ends_with_its_service(
    s3_server: SeaweedFS, tree: tuple[str, dict[str, bytes]], tmp_path: Path
) -> None:
    options = ["--ram", "8MiB", "--extent-bytes", "1MiB", "--allow", f"s3://{tree[0]}/data/"]
    options += ["--s3-fresh", "0"]
    with s3_endpoint.served(tmp_path, options, s3_server.env()) as own:
        pid = s3_endpoint.endpoint_process(own)
        before = s3_endpoint.client_of(own)
        for body in (b"1", b"22", b""):
            s3_server.client().put_object(Bucket=tree[0], Key="data/new", Body=body)
            assert before.get_object(Bucket=tree[0], Key="data/new")["Body"].read() == body, "not older"
        own.take_over("--ram", "16MiB")
        wait_until(lambda: not os.path.exists(f"/proc/{pid}"))
        wait_until(lambda: s3_endpoint.answers(own))
        assert before.get_object(Bucket=tree[0], Key="data/zero")["ContentLength"] == 0
        pid = s3_endpoint.endpoint_process(own)
        assert own.stop() == 0
        wait_until(lambda: not os.path.exists(f"/proc/{pid}"))


def test_a_reader_of_one_range_after_the_other_finds_the_next_parts_there(
    client: Any, daemon: Daemon, s3_server: SeaweedFS, tree: tuple[str, dict[str, bytes]]
) -> None:
    there, part = {"Bucket": tree[0], "Key": f"data/{uuid.uuid4().hex}"}, 4 * MIB
    body = os.urandom(8 * part)
    s3_server.client().put_object(**there, Body=body)
    before = source_bytes(daemon)
    for begin, end, parts in (
        (0, part, 1),
        (part // 2, part, 1),
        (part, part + 10, 6),
        (part + 10, 3 * part, 7),
    ):
        found = client.get_object(**there, Range=f"bytes={begin}-{end - 1}")["Body"].read()
        assert found == body[begin:end]
        wait_until(lambda wanted=before + parts * part: source_bytes(daemon) == wanted)


@pytest.mark.slow
def test_metadata_and_bytes_of_a_listed_object_are_asked_for_side_by_side(
    s3_server: SeaweedFS, tree: tuple[str, dict[str, bytes]], proxy: Proxy, tmp_path: Path
) -> None:
    bucket, bodies = tree
    options = [
        "--ram",
        "32MiB",
        "--extent-bytes",
        "1MiB",
        "--allow",
        f"s3://{bucket}/data/",
        "--s3-part",
        "64KiB",
    ]
    options += ["--source", f"s3://{bucket}/,endpoint={proxy.endpoint}"]
    with (
        s3_endpoint.served(tmp_path, options, s3_server.env("http://127.0.0.1:9")) as own,
        ThreadPoolExecutor() as pool,
    ):
        client = s3_endpoint.client_of(own)
        client.list_objects_v2(Bucket=bucket, Prefix="data/many/")
        held = Fault("hold", method="HEAD", path="/data/many/07")
        proxy.faults.append(held)
        asked = pool.submit(lambda: client.get_object(Bucket=bucket, Key="data/many/07")["Body"].read())
        try:
            wait_until(lambda: any("GET" in row and "/data/many/07" in row for row in proxy.counts.by))
        finally:
            held.until.set()
        assert asked.result() == bodies["data/many/07"]
        body = bodies["data/large"]
        found = client.get_object(Bucket=bucket, Key="data/large", Range=f"bytes=100000-{4 * MIB}")[
            "Body"
        ].read()
        assert found == body[100_000 : 4 * MIB + 1]
        wanted = f"GET /{bucket}/data/large bytes={64 << 10}-{(128 << 10) - 1}"
        assert proxy.counts.by[wanted] == 1, "parts of 64 KiB, once each"


def test_ranges_that_an_open_dataset_covers_come_from_its_extents(
    client: Any, daemon: Daemon, s3_server: SeaweedFS, tree: tuple[str, dict[str, bytes]]
) -> None:
    bucket, extent = tree[0], MIB
    bodies = {
        f"data/dir/open/{name}": os.urandom(size) for name, size in (("a.bin", 2 * MIB), ("b.bin", 3 * MIB))
    }
    for key, body in bodies.items():
        s3_server.client().put_object(Bucket=bucket, Key=key, Body=body)

    def read(key: str, begin: int, size: int) -> None:
        answer = client.get_object(Bucket=bucket, Key=key, Range=f"bytes={begin}-{begin + size - 1}")
        assert answer["Body"].read() == bodies[key][begin : begin + size]

    with Control(daemon.socket_dir) as control:
        opened = control.open_dataset(
            [f"s3://{bucket}/data/dir/open/"], Options(format="records", record_bytes=4096)
        )
    grants = DaemonGrants(daemon.socket_dir, opened.id)
    grants.connect()
    before = source_bytes(daemon)
    read("data/dir/open/b.bin", extent + 10, 100)
    wait_until(lambda: source_bytes(daemon) == before + extent)  # this extent, and no part of 4 MiB
    for answer in grants.acquire(range(5), WAIT_S):
        assert isinstance(answer, Granted)
        os.close(answer.fd)
    for key, body in bodies.items():
        read(key, 0, len(body))
    wait_until(lambda: source_bytes(daemon) == before + 5 * extent)
    grants.close()
