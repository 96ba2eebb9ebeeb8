"""Metadata and listings of the source, each remembered for a while. Bytes come through the daemon."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, Generic, TypeVar, cast

from cachesvc.core.errors import SourceChanged, SourceUnavailable
from cachesvc.core.model import ObjectVersion
from cachesvc.gateway.s3.accounts import Accounts
from cachesvc.gateway.s3.errors import S3Error

MAX_REMEMBERED = 1 << 14
"""Answers of the source, of 1 KB for an object and 300 KB for a page of a listing."""
MAX_PAGES = 64
CALLS = 32
"""Calls at once, each on a thread: as many as boto3 keeps connections."""
_NO_PART = {400: "InvalidPart", 416: "InvalidPartNumber"}
"""How sources say that an object has fewer parts than a request names. A HEAD has no body that would."""
_T = TypeVar("_T")
_PASSED = frozenset(
    {
        "cache-control",
        "content-disposition",
        "content-encoding",
        "content-language",
        "content-type",
        "etag",
        "expires",
        "last-modified",
        "x-amz-expiration",
        "x-amz-missing-meta",
        "x-amz-mp-parts-count",
        "x-amz-server-side-encryption",
        "x-amz-storage-class",
        "x-amz-version-id",
    }
)


@dataclass(frozen=True, slots=True)
class Metadata:
    """The metadata that the source states of an object, or of one part of a multipart object."""

    version: ObjectVersion
    headers: dict[str, str]
    """Headers that go to the client as they came, by name in lower case."""
    span: tuple[int, int] | None = None
    """The bytes [begin, end) of the part that was asked for."""

    @property
    def etag(self) -> str:
        """The ETag with its quotes."""
        return self.headers.get("etag", "")


class Upstream:
    """Calls the source with the node's credentials. For one event loop."""

    def __init__(self, accounts: Accounts, fresh_s: float) -> None:
        """`fresh_s`: the greatest age of metadata and listings; 0: the source is asked each time."""
        self._accounts = accounts
        self._calls = ThreadPoolExecutor(CALLS, "source")
        self._metadata: _Remembered[Metadata] = _Remembered(MAX_REMEMBERED, fresh_s)
        self._pages: _Remembered[dict[str, Any]] = _Remembered(MAX_PAGES, fresh_s)

    async def head(self, bucket: str, key: str, part: int = 0, anew: bool = False) -> Metadata:
        """Return the metadata of an object, or of its part `part`. `anew`: ask the source now. Raises NotFound, NotAllowed,
        SourceUnavailable."""
        ask = partial(self._head, bucket, key, part)
        return await (ask() if part else self._metadata.get((bucket, key), ask, anew))

    def expected(self, bucket: str, key: str) -> ObjectVersion | None:
        """Return the version that an object has unless it has changed, by metadata that are no longer fresh or by a
        listing. None where `head` answers without the source, and where nothing is known."""
        if (found := self._metadata.last((bucket, key))) is not None:
            return None if self._metadata.is_fresh((bucket, key)) else found.version
        for name in reversed(self._pages.kept):
            page = self._pages.last(name) if name[1:2] == (bucket,) else None
            rows = page.get("Contents", ()) if page else ()
            at = bisect_left(rows, key, key=itemgetter("Key"))
            if at < len(rows) and rows[at]["Key"] == key:
                tag = rows[at].get("ETag", "").strip('"')
                return ObjectVersion(f"s3://{bucket}/{key}", rows[at]["Size"], tag)
        return None

    def forget(self, bucket: str, keys: Iterable[str]) -> None:
        """Forget metadata of objects, and the bucket's listings: a write has changed them."""
        for key in keys:
            self._metadata.forget((bucket, key))
        for page in [each for each in self._pages.kept if bucket in each]:
            self._pages.forget(page)

    async def page(self, bucket: str, second: bool, **arguments: str | int) -> dict[str, Any]:
        """Return boto3's answer to ListObjectsV2, or, unless it is the `second` version, to ListObjects. Raises as
        `head`."""
        operation = "list_objects_v2" if second else "list_objects"
        uri = f"s3://{bucket}/{arguments.get('Prefix', '')}"
        asked = partial(self._call, uri, operation, Bucket=bucket, **arguments)
        return await self._pages.get((operation, bucket, *sorted(arguments.items())), asked)

    async def bucket(self, bucket: str) -> str:
        """Return the region of a bucket, "" where the source names none. Raises as `head`."""
        asked = partial(self._call, f"s3://{bucket}/", "head_bucket", Bucket=bucket)
        found = await self._pages.get((bucket,), asked)
        return str(found["ResponseMetadata"]["HTTPHeaders"].get("x-amz-bucket-region", ""))

    async def buckets(self) -> list[str]:
        """Return the names of the buckets that the node's credentials show. Raises as `head`."""
        found = await self._pages.get((), partial(self._call, "s3://", "list_buckets"))
        return [str(each["Name"]) for each in found.get("Buckets", ())]

    async def read(self, version: ObjectVersion, begin: int, end: int) -> bytes:
        """Read bytes [begin, end) from the source itself, past the cache. Raises as `Source.read_into`."""
        body = bytearray(end - begin)

        def read() -> None:
            self._accounts.of(version.uri).source.read_into(version, begin, memoryview(body))

        await asyncio.get_running_loop().run_in_executor(self._calls, read)
        return bytes(body)

    async def _head(self, bucket: str, key: str, part: int) -> Metadata:
        uri = f"s3://{bucket}/{key}"
        stated = await (self._of_part(uri, bucket, key, part) if part else self._of_object(uri))
        if part > 1 and "content-range" not in stated:  # some answer with the whole of an object that has one
            raise S3Error("InvalidPart", f"{uri} has no part {part}")
        headers = {
            name: value
            for name, value in stated.items()
            if name in _PASSED or name.startswith(("x-amz-meta-", "x-amz-checksum-"))
        }
        size_bytes, span = int(stated["content-length"]), None
        if part:
            begin, end, size_bytes = _content_range(uri, stated.get("content-range", ""), size_bytes)
            span = begin, end
        version = ObjectVersion(uri, size_bytes, headers.get("etag", "").strip('"'))
        return Metadata(version, headers, span)

    async def _of_object(self, uri: str) -> dict[str, str]:
        def ask() -> dict[str, str]:
            return self._accounts.of(uri).source.stated(uri)

        return await asyncio.get_running_loop().run_in_executor(self._calls, ask)

    async def _of_part(self, uri: str, bucket: str, key: str, part: int) -> dict[str, str]:
        named: dict[str, str | int] = {"Bucket": bucket, "Key": key, "ChecksumMode": "ENABLED"}
        try:
            found = await self._call(uri, "head_object", PartNumber=part, **named)
        except SourceUnavailable as error:
            answer = getattr(error.__cause__, "response", {}).get("ResponseMetadata", {})
            if code := _NO_PART.get(answer.get("HTTPStatusCode")):
                raise S3Error(code, f"{uri} has no part {part}") from error
            raise
        return cast("dict[str, str]", found["ResponseMetadata"]["HTTPHeaders"])

    async def _call(self, uri: str, operation: str, **arguments: str | int) -> dict[str, Any]:
        def call() -> dict[str, Any]:
            return cast("dict[str, Any]", self._accounts.of(uri).source.call(uri, operation, **arguments))

        return await asyncio.get_running_loop().run_in_executor(self._calls, call)


def _content_range(uri: str, text: str, size_bytes: int) -> tuple[int, int, int]:
    """Return begin, end and the object's size of a part; of the whole object where the source states no range."""
    unit, _, rest = text.partition(" ")
    first, _, last = rest.partition("/")[0].partition("-")
    total = rest.partition("/")[2]
    if unit != "bytes" or not (first.isdecimal() and last.isdecimal() and total.isdecimal()):
        return 0, size_bytes, size_bytes
    if int(last) + 1 - int(first) != size_bytes:
        raise SourceChanged(f"{uri}: the source's answer contradicts itself")
    return int(first), int(last) + 1, int(total)


class _Remembered(Generic[_T]):
    """Answers by what was asked, each given for `fresh_s` from the time when it was asked for. An error is not
    remembered."""

    def __init__(self, most: int, fresh_s: float) -> None:
        self._most, self._fresh_s = most, fresh_s
        self.kept: OrderedDict[tuple[object, ...], tuple[float, asyncio.Future[_T]]] = OrderedDict()
        """The end of each answer's freshness, and the answer; the one that was asked for first comes first."""

    async def get(self, key: tuple[object, ...], ask: Callable[[], Awaitable[_T]], anew: bool = False) -> _T:
        """Return the answer to a question. `anew`: ask now, even while an answer is under way, which may be older than a
        write that has ended."""
        found = self.kept.get(key)
        if found is None or anew or time.monotonic() >= found[0]:
            found = time.monotonic() + self._fresh_s, asyncio.ensure_future(ask())
            self.kept[key] = found
            self.kept.move_to_end(key)
            while len(self.kept) > self._most:
                self.kept.popitem(last=False)
        try:
            return await asyncio.shield(found[1])
        except Exception:
            if self.kept.get(key) is found and found[1].done():
                del self.kept[key]
            raise

    def last(self, key: tuple[object, ...]) -> _T | None:
        """Return the answer that is kept, however old; None where there is none yet."""
        found = self.kept.get(key)
        done = found is not None and found[1].done() and not found[1].cancelled() and not found[1].exception()
        return found[1].result() if found is not None and done else None

    def is_fresh(self, key: tuple[object, ...]) -> bool:
        """Tell whether the answer is given without asking anew."""
        return time.monotonic() < self.kept[key][0]

    def forget(self, key: tuple[object, ...]) -> None:
        """Ask anew the next time."""
        self.kept.pop(key, None)
