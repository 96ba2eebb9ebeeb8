"""Parts of objects that are read without a dataset, from a real daemon."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import pytest

from cachesvc.client.control import Control
from cachesvc.client.object_reads import LeasedPart, ObjectReads
from cachesvc.core.errors import (
    DaemonUnavailable,
    InvalidInput,
    NotAllowed,
    NotFound,
    SourceChanged,
)
from cachesvc.core.model import ObjectVersion
from testbed import WAIT_S
from testbed.node import Daemon
from testbed.servers import SeaweedFS
from tests.support.shared_daemon import for_one_test
from tests.support.waiting import wait_until

PART = 4 << 20
_T = TypeVar("_T")


@pytest.fixture(scope="module")
def bucket(s3_server: SeaweedFS) -> str:
    return s3_server.create_bucket(f"b-{uuid.uuid4().hex[:12]}")


@pytest.fixture(scope="module")
def shared(s3_server: SeaweedFS, bucket: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    options = ["--ram", "12MiB", "--extent-bytes", "1MiB", "--allow", f"s3://{bucket}/data/"]
    with Daemon(tmp_path_factory.mktemp("node"), options, s3_server.env()) as daemon:
        yield daemon


@pytest.fixture
def daemon(shared: Daemon) -> Iterator[Daemon]:
    yield from for_one_test(shared)


def put(server: SeaweedFS, bucket: str, key: str, body: bytes) -> ObjectVersion:
    stored = server.client().put_object(Bucket=bucket, Key=key, Body=body)
    return ObjectVersion(f"s3://{bucket}/{key}", len(body), stored["ETag"].strip('"'))


def run(daemon: Daemon, work: Callable[[ObjectReads], Awaitable[_T]]) -> _T:
    async def connected() -> _T:
        reads = ObjectReads(daemon.socket_dir)
        try:
            return await work(reads)
        finally:
            reads.close()

    return asyncio.run(connected())


async def leased(reads: ObjectReads, version: ObjectVersion, offset: int) -> LeasedPart:
    part = await reads.lease(version, offset, WAIT_S, WAIT_S)
    assert part is not None
    return part


async def read(reads: ObjectReads, version: ObjectVersion, offset: int) -> tuple[int, bytes]:
    """The beginning of the part that holds an offset, and its bytes."""
    part = await leased(reads, version, offset)
    body = os.pread(part.fd, part.end - part.begin, part.at)
    reads.release(part)
    return part.begin, body


def source_bytes(daemon: Daemon) -> int:
    with Control(daemon.socket_dir) as control:
        return int(control.status().sources.bytes)


@pytest.mark.slow
def test_a_byte_costs_its_part_of_the_object_once(daemon: Daemon, s3_server: SeaweedFS, bucket: str) -> None:
    body = os.urandom(PART + 1000)
    version = put(s3_server, bucket, "data/a b%2F//ü", body)

    async def all_parts(reads: ObjectReads) -> list[tuple[int, bytes]]:
        return await asyncio.gather(*[read(reads, version, at) for at in (PART, 0, PART - 1, PART + 999)])

    last, first = (PART, body[PART:]), (0, body[:PART])
    before = source_bytes(daemon)
    for _ in range(2):
        assert run(daemon, all_parts) == [last, first, first, last]
    wait_until(lambda: source_bytes(daemon) - before == len(body))


@pytest.mark.slow
def test_objects_larger_than_the_cache_stream_and_leases_end(
    daemon: Daemon, s3_server: SeaweedFS, bucket: str
) -> None:
    body = os.urandom(1 << 20) * 20
    version = put(s3_server, bucket, "data/large", body)

    async def one_after_another(reads: ObjectReads) -> bytes:
        return b"".join([(await read(reads, version, at))[1] for at in range(0, len(body), PART)])

    assert run(daemon, one_after_another) == body

    async def too_many(reads: ObjectReads) -> list[bool]:
        return [await reads.lease(version, at, WAIT_S, 0.0) is not None for at in range(0, len(body), PART)]

    assert run(daemon, too_many) == [True, True, True, False, False], "12 MiB hold three parts"
    assert run(daemon, one_after_another) == body


def test_what_cannot_be_read_is_a_typed_error_and_the_connection_stays(
    daemon: Daemon, s3_server: SeaweedFS, bucket: str
) -> None:
    version = put(s3_server, bucket, "data/x", b"x" * 10)
    elsewhere = put(s3_server, bucket, "secret/x", b"x")
    wrong = {
        NotAllowed: (elsewhere, 0),
        InvalidInput: (version, 10),
        SourceChanged: (ObjectVersion(version.uri, 10, "0" * 32), 0),
        NotFound: (ObjectVersion(f"s3://{bucket}/data/none", 10, "0" * 32), 0),
    }

    async def each(reads: ObjectReads) -> bytes:
        for error, (asked, offset) in wrong.items():
            with pytest.raises(error):
                await reads.lease(asked, offset, WAIT_S, WAIT_S)
        with pytest.raises(InvalidInput, match="local file"):
            await reads.lease(ObjectVersion("/etc/passwd", 10, "x"), 0, WAIT_S, WAIT_S)
        return (await read(reads, version, 3))[1]

    assert run(daemon, each) == b"x" * 10


@pytest.mark.slow
def test_a_read_goes_on_after_the_daemon_was_killed(
    daemon: Daemon, s3_server: SeaweedFS, bucket: str
) -> None:
    version = put(s3_server, bucket, "data/y", b"y" * 10)

    async def over_a_crash(reads: ObjectReads) -> bytes:
        part = await leased(reads, version, 0)
        daemon.crash()
        again = await leased(reads, version, 0)
        assert os.pread(part.fd, 10, part.at) == b"y" * 10, "a granted descriptor stays readable"
        reads.release(part)
        body = os.pread(again.fd, 10, again.at)
        reads.release(again)
        return body

    assert run(daemon, over_a_crash) == b"y" * 10


def test_without_a_daemon_the_wait_is_bounded(tmp_path: object) -> None:
    async def asked() -> None:
        with pytest.raises(DaemonUnavailable):
            await ObjectReads(str(tmp_path)).lease(ObjectVersion("s3://b/k", 1, "e"), 0, 0.2, 0.0)

    asyncio.run(asked())


@pytest.mark.slow
def test_a_cancelled_read_leaves_no_lease(daemon: Daemon, s3_server: SeaweedFS, bucket: str) -> None:
    version = put(s3_server, bucket, "data/wide", os.urandom(1 << 20) * 16)

    async def cancelled(reads: ObjectReads) -> None:
        for pauses in range(6):
            asking = asyncio.ensure_future(reads.lease(version, 0, WAIT_S, WAIT_S))
            for _ in range(pauses):
                await asyncio.sleep(0)
            asking.cancel()
            (found,) = await asyncio.gather(asking, return_exceptions=True)
            if isinstance(found, LeasedPart):
                reads.release(found)
        for at in range(PART, 4 * PART, PART):
            await leased(reads, version, at)  # these take all of the cache

    run(daemon, cancelled)
