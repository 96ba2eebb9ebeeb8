"""Judges a response that does not match the listing. One HEAD tells an overwritten object from a server that contradicts
itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from cachesvc.core.errors import CacheError, CorruptData, NotAllowed, SourceChanged, SourceUnavailable
from cachesvc.core.model import ObjectVersion
from cachesvc.sources.s3 import listing as s3_listing
from cachesvc.sources.s3.addressing import split_uri
from cachesvc.sources.s3.errors import OVERWRITTEN
from cachesvc.sources.s3.http import parse_number
from cachesvc.sources.s3.responses import (
    OtherVersion,
    RepeatedFaults,
    check_no_page,
    encoding_of,
    same_tag,
)

_BETWEEN = "a proxy or gateway on the way changes answers: set AWS_ENDPOINT_URL to the storage itself"


class MismatchJudge:
    """Judges the responses of one server. Thread-safe. `call(uri, operation, **arguments)` sends one request through boto3.

    A contradiction is SourceUnavailable the first time, since the next try may be right. The second time in a row for the
    same bytes it is CorruptData, since further tries would not end it.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self._repeated = RepeatedFaults()

    def head(self, version: ObjectVersion, **arguments: str) -> dict[str, str]:
        """Send a HEAD, and return its headers if they name this version.

        Raises SourceChanged for an overwritten object, CorruptData when the server still lists it as that version,
        SourceUnavailable for a response without a tag, and what the HEAD raises."""
        bucket, key = split_uri(version.uri)
        said = self._call(version.uri, "head_object", Bucket=bucket, Key=key, **arguments)
        headers: dict[str, str] = said["ResponseMetadata"]["HTTPHeaders"]
        check_no_page(version.uri, headers)
        etag = headers.get("etag", "")
        if version.etag and not etag:
            raise SourceUnavailable(
                f"{version.uri}: an answer without an ETag, so not of the server that lists it; check the endpoint "
                "(AWS_ENDPOINT_URL) and the proxies on the way"
            )
        if version.etag and not same_tag(etag, version.etag):
            raise self._changed(version, f"ETag {etag}")
        return headers

    def judge_version(self, version: ObjectVersion, offset: int, error: OtherVersion) -> None:
        """Judge a response that seems to be of another version. Raises as `head`, or `error` itself. Returns if the object
        is that version and the server merely refuses its own tag in If-Match."""
        headers = self.head(version)
        if not error.conditional:
            self._contradicts(version, offset, error, headers)

    def judge_form(self, version: ObjectVersion, offset: int, error: CacheError) -> NoReturn:
        """Judge a response of another form than was requested. Raises as `head`, CorruptData that names an encoding, or
        `error` itself."""
        headers = self.head(version)
        if encoding := encoding_of(headers):
            raise CorruptData(
                f"{version.uri} is stored with Content-Encoding: {encoding}, and the server decodes it instead of sending "
                "what is stored; store it again without that, or with Cache-Control: no-transform"
            ) from error
        self._contradicts(version, offset, error, headers)

    def succeeded(self, version: ObjectVersion, offset: int) -> None:
        """Note that a read at this offset succeeded."""
        self._repeated.succeeded(version.uri, offset)

    def _contradicts(
        self, version: ObjectVersion, offset: int, error: CacheError, headers: dict[str, str]
    ) -> NoReturn:
        if parse_number(headers.get("content-length", "")) not in (None, version.size_bytes):
            raise self._changed(version, f"{headers['content-length']} bytes")
        if self._repeated.failed(version.uri, offset):
            raise CorruptData(f"{error}, twice, and its HEAD says otherwise; {_BETWEEN}") from error
        raise error

    def _changed(self, version: ObjectVersion, now: str) -> CacheError:
        """Return the error for an object that differs from the listing; CorruptData if a new listing still does not
        agree."""
        bucket, key = split_uri(version.uri)
        rows: s3_listing.Rows = []
        with suppress(NotAllowed):  # a policy may allow reads alone
            _, rows = s3_listing.ask(
                self._call, version.uri, "list_objects_v2", Bucket=bucket, Prefix=key, MaxKeys=1
            )
        for row in rows:
            listed = row["Key"] == key and row["Size"] == version.size_bytes
            if listed and version.etag and same_tag(row.get("ETag", ""), version.etag):
                return CorruptData(
                    f"{version.uri} is listed with ETag {version.etag} and {version.size_bytes} bytes, and served with "
                    f"{now}: its version is unknown. Listings that lag behind agree later; else repair the server"
                )
        return SourceChanged(
            f"{version.uri} is no longer the version {version.etag} (now {now}): {OVERWRITTEN}"
        )
