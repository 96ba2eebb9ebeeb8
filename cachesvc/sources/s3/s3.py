"""The source of S3-compatible storage. boto3 does credentials, configuration, LIST and HEAD. Objects are read by signed,
ranged GETs over our own connections (`http`), with a fraction of the CPU of boto3's call.

URIs are `s3://bucket/key` with the literal key, not percent-encoded. Folder markers, empty objects whose keys end in "/",
are no objects.
"""

from __future__ import annotations

import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import botocore.exceptions

from cachesvc.config import SourceSection
from cachesvc.core.errors import CacheError, NotAllowed, NotFound, SourceUnavailable, fault_of_node
from cachesvc.core.limits import HELPER_S
from cachesvc.core.model import ObjectVersion
from cachesvc.sources import near_names
from cachesvc.sources.s3 import errors as s3_errors
from cachesvc.sources.s3 import listing as s3_listing
from cachesvc.sources.s3.addressing import (
    DIRECTORY_BUCKET,
    Addressing,
    BucketAddress,
    Target,
    split_uri,
)
from cachesvc.sources.s3.errors import EXPIRED, FAILED
from cachesvc.sources.s3.http import (
    ConnectionPool,
    HttpConnection,
    Response,
    UnexpectedResponse,
)
from cachesvc.sources.s3.identity import AccountIdentity, service_data, sign_in, tls_context
from cachesvc.sources.s3.mismatches import MismatchJudge
from cachesvc.sources.s3.proxies import proxy_of
from cachesvc.sources.s3.responses import (
    OtherVersion,
    check_no_page,
    is_strong_tag,
    receive_body,
    verify,
)
from cachesvc.sources.s3.stated_checksums import StatedChecksums
from cachesvc.sources.source import Checker, OnReceived, Send, ignore_received, send_once

_CODE = re.compile(rb"<Code>([A-Za-z0-9._-]{1,64})</Code>")
_REGION = re.compile(r"[a-z0-9-]{1,32}")
_RIGHT_REGION = re.compile(rb">AuthorizationHeaderMalformed<.*<Region>([a-z0-9-]{1,32})</Region>", re.DOTALL)
"""The error of AWS, MinIO and Garage for a request that was signed for another region than the server's."""


ALL = SourceSection("s3://")
"""The section of all buckets, which leaves everything to the AWS environment and files."""


@dataclass(frozen=True, slots=True)
class _Signer:
    """The keys and the region that a request is signed with."""

    keys: Any = field(repr=False)
    region: str


class S3Source:
    """A `Source` for one endpoint and one set of credentials."""

    def __init__(self, identity: AccountIdentity, tls: ssl.SSLContext | None) -> None:
        client = identity.client
        self._identity, self._addressing = identity, Addressing(identity.client_in)
        self._endpoint = urlsplit(client.meta.endpoint_url)
        host = self._endpoint.hostname or ""
        self._aws = host.endswith((".amazonaws.com", ".amazonaws.com.cn"))
        self._ask_for_stored = host.endswith(".googleapis.com")
        self._if_match = True
        self._mismatches = MismatchJudge(self.call)
        self._regions: dict[str, str] = {}
        self._checksums = StatedChecksums(tags_are_md5=self._aws)
        self._proxy = proxy_of(client.meta.endpoint_url)
        self._pool = ConnectionPool(tls, self._proxy)
        self._active: dict[int, HttpConnection] = {}
        self._lock = threading.Lock()

    @property
    def identity(self) -> AccountIdentity:
        """The credentials that requests are signed with."""
        return self._identity

    @property
    def addressing(self) -> Addressing:
        """The addresses of buckets. A client must have only one of these."""
        return self._addressing

    @property
    def endpoint(self) -> str:
        """The endpoint's URL. Another endpoint may have other buckets of the same names."""
        return str(self._endpoint.geturl())

    def list(self, prefix: str) -> Iterator[ObjectVersion]:
        """Yield every object below `prefix`, in key order, or the one object of exactly that name."""
        return self.list_by(prefix, send_once)

    def list_by(self, prefix: str, send: Send) -> Iterator[ObjectVersion]:
        """List with `send` for each request. See `Paged`."""
        bucket, key = split_uri(prefix, key_needed=False)
        if key and not key.endswith("/"):
            exact = self._exactly(prefix, bucket, key, send)
            if exact is not None:
                yield exact
                return
            key += "/"
        found: dict[bytes, ObjectVersion] = {}
        for row in s3_listing.rows(self.call, send, prefix, bucket, key):
            if row["Size"] or not row["Key"].endswith("/"):
                version = _version(bucket, row)
                name = row["Key"].encode()
                if found.setdefault(name, version) != version:  # overwritten while it was listed
                    found[name] = send(partial(self.head, version.uri))
        if not found and (meant := self._near(prefix, bucket, key)):
            raise NotFound(near_names.hint(f"{prefix} holds no data", f"s3://{bucket}/{meant}"))
        # Sorted: S3 lists in key order, S3 Express and SeaweedFS do not.
        for name in sorted(found):
            yield found[name]

    def _exactly(self, uri: str, bucket: str, key: str, send: Send) -> ObjectVersion | None:
        """Return the object of exactly this name, or None. Raises as `list`.

        A policy may allow LIST only below `key/`, or not at all: then a HEAD tells, which needs the right to read the
        object. Without that right the HEAD of a missing object is refused, too."""
        if not bucket.endswith(DIRECTORY_BUCKET):  # which lists only prefixes that end in a slash
            with suppress(NotAllowed):
                exactly: dict[str, Any] = {"Bucket": bucket, "Prefix": key, "MaxKeys": 1}
                _, first = send(partial(s3_listing.ask, self.call, uri, "list_objects_v2", **exactly))
                return _version(bucket, first[0]) if first and first[0]["Key"] == key else None
        with suppress(NotFound, NotAllowed):
            return send(partial(self.head, uri))
        return None

    def head(self, uri: str) -> ObjectVersion:
        """Return the object's current version. Raises NotFound, NotAllowed, SourceUnavailable."""
        bucket, key = split_uri(uri)
        found = self.call(uri, "head_object", Bucket=bucket, Key=key)
        headers: dict[str, str] = found["ResponseMetadata"]["HTTPHeaders"]
        check_no_page(uri, headers)
        return ObjectVersion(uri, found["ContentLength"], found.get("ETag", "").strip('"'))

    def stated(self, uri: str) -> dict[str, str]:
        """Return the headers that the server states of an object, checksums among them; names in lower case. Takes a fifth
        of the CPU of boto3's call, which finds regions and new credentials where the plain request fails. Raises as
        `head`."""
        bucket, key = split_uri(uri)
        with suppress(SourceUnavailable, *FAILED):
            address = self._addressing.of(bucket, self._regions.get(bucket, ""))
            target, keys = address.target(key), self._identity.signing_keys()
            if not address.by_session:
                headers = {**self._identity.headers, "x-amz-checksum-mode": "ENABLED"}
                headers = self._addressing.signed_headers(address, target, bucket, key, keys, headers, "HEAD")
                request = self._head_of_request("HEAD", target, [], headers)
                with self._pool.request(target.host, target.port, request) as (response, _):
                    if response.status == 200 and response.length is not None:
                        check_no_page(uri, response.headers)
                        return response.headers
                    if response.status == 404:
                        raise self._error("404", "404", uri, response.headers)
        said = self.call(uri, "head_object", Bucket=bucket, Key=key, ChecksumMode="ENABLED")
        return dict(said["ResponseMetadata"]["HTTPHeaders"])

    def _near(self, prefix: str, bucket: str, key: str) -> str:
        """Return the key or prefix beside an empty prefix that was perhaps meant; "" for none."""
        folder, slash, name = key.strip("/").rpartition("/")
        with suppress(CacheError):  # perhaps nothing beside it may be listed
            beside: dict[str, Any] = {"Bucket": bucket, "Prefix": folder + slash, "MaxKeys": near_names.MOST}
            page, rows = s3_listing.ask(self.call, prefix, "list_objects_v2", Delimiter="/", **beside)
            keys = [row["Key"] for row in rows]
            keys += [row["Prefix"] for row in page.get("CommonPrefixes", ())]
            found = near_names.near(name, [each.removeprefix(folder + slash) for each in keys])
            return f"{folder}{slash}{found}" if name and found else ""
        return ""

    def call(self, uri: str, operation: str, **arguments: str | int) -> Any:
        """Return boto3's answer to a LIST or HEAD, which is sent again with new credentials if the old ones have expired.
        Raises NotFound, NotAllowed, SourceUnavailable."""
        used, renewed = self._identity.signing_keys(), False
        while True:
            try:
                return getattr(self._identity.client, operation)(**arguments)
            except botocore.exceptions.ClientError as error:
                code = error.response.get("Error", {}).get("Code", "")
                # A HEAD has no body that would state a code.
                expired = code in EXPIRED or (operation == "head_object" and code in ("400", "403"))
                expired = expired or (used is None and code == "AccessDenied")
                if renewed or not expired or not self._identity.renew(used):
                    raise self._translated(error, uri) from error
                renewed = True
            except CacheError:
                raise
            except FAILED as error:
                raise self._translated(error, uri) from s3_errors.without_secrets(error)

    def read_into(
        self, version: ObjectVersion, offset: int, into: memoryview, received: OnReceived = ignore_received
    ) -> None:
        """Send one ranged GET with If-Match; check status, Content-Range, length and ETag.

        A response of another form is requested again with Accept-Encoding, for the stored bytes: the server may decode
        them. If the next response does not match the listing either, a HEAD decides which error it is."""
        if not len(into):
            return
        stored = self._ask_for_stored
        for _ in range(5):  # at most another region, new credentials, no If-Match, and stored bytes
            try:
                if self._read(version, offset, into, received, stored):
                    return self._mismatches.succeeded(version, offset)
            except UnexpectedResponse as error:
                if stored:
                    self._mismatches.judge_form(version, offset, error)
                stored = True
            except OtherVersion as error:
                self._mismatches.judge_version(version, offset, error)
                self._if_match = False
        raise SourceUnavailable(f"{version.uri} is redirected in a circle; set AWS_REGION")

    def checker(self, version: ObjectVersion) -> Checker | None:
        """Return a comparison with the checksum or MD5 that a HEAD states; None over TLS. Raises as `head`, and
        SourceChanged."""
        if self._endpoint.scheme == "https" or not self._checksums.worth_a_head(version):
            return None
        return partial(self._checksums.check, version, self._mismatches.head(version, ChecksumMode="ENABLED"))

    def interrupt(self, thread: int) -> None:
        """Make a read that runs in that thread (`threading.get_ident()`) fail now."""
        with self._lock:  # later the connection may serve another thread
            connection = self._active.get(thread)
            if connection is not None:
                connection.interrupt()

    def close(self) -> None:
        """Close every connection."""
        self._pool.close()
        self._identity.client.close()

    def _read(
        self, version: ObjectVersion, offset: int, into: memoryview, received: OnReceived, stored: bool
    ) -> bool:
        """Send one GET, and again when a kept connection was stale. Return False to send it anew with another region or new
        credentials, known by then. `stored`: request stored bytes from a server that decodes."""
        bucket, key = split_uri(version.uri)
        keys = self._identity.signing_keys()
        try:
            address = self._addressing.of(bucket, self._regions.get(bucket, ""))
            span = (offset, offset + len(into) - 1)
            request = self._signed(address, bucket, key, keys, version, span, stored)
        except CacheError:
            raise
        except FAILED as error:
            raise self._translated(error, version.uri) from s3_errors.without_secrets(error)
        signer, target = _Signer(keys, address.region), address.target(key)
        with self._pool.request(target.host, target.port, request, self._use) as (response, connection):
            before = connection.received_bytes
            try:
                if response.status not in (200, 206):
                    body, conditional = connection.read_error(response), b"\r\nIf-Match: " in request
                    return self._refused(version, signer, response, body, conditional)
                verify(version, offset, len(into), response)
                receive_body(connection, response, into, received)
                if b"Accept-Encoding" in request and "content-encoding" in response.headers:
                    self._ask_for_stored = True
                # The tags of a directory bucket are no MD5.
                if len(into) == version.size_bytes and not bucket.endswith(DIRECTORY_BUCKET):
                    self._checksums.check(version, response.headers, (into,))
            except CacheError as error:
                error.received_bytes = connection.received_bytes - before
                raise
        return True

    def _use(self, connection: HttpConnection | None) -> None:
        """Note the connection of this thread, or that it has none any more."""
        with self._lock:
            if connection is not None:
                self._active[threading.get_ident()] = connection
            else:
                self._active.pop(threading.get_ident(), None)

    def _refused(
        self, version: ObjectVersion, signer: _Signer, response: Response, body: bytes, conditional: bool
    ) -> bool:
        """Return False if another region or new credentials, known by then, may help; else raise the typed error."""
        if self._learned(version, signer, response, body):
            return False
        if response.status in (412, 416):
            seems = OtherVersion(
                f"{version.uri} is no longer the version that was listed ({response.status})"
            )
            seems.conditional = conditional and response.status == 412
            raise seems
        raise self._error(str(response.status), _code(body), version.uri, response.headers)

    def _learned(self, version: ObjectVersion, signer: _Signer, response: Response, body: bytes) -> bool:
        """Learn the bucket's region, or renew credentials, from a refusal. Tell whether there is something new."""
        bucket, _ = split_uri(version.uri)
        region = response.headers.get("x-amz-bucket-region", "") if self._aws else ""
        if found := _RIGHT_REGION.search(body):
            region = found[1].decode()
        if _REGION.fullmatch(region) and region != signer.region:
            self._regions[bucket] = region
            return True
        expired = _code(body) in EXPIRED or (signer.keys is None and response.status == 403)
        return expired and self._identity.renew(signer.keys)

    def _error(self, status: str, code: str, uri: str, headers: dict[str, str]) -> CacheError:
        if code in EXPIRED and self._identity.refreshable:
            return fault_of_node(f"{uri}: the credentials have expired, and there are no new ones yet")
        if self._identity.anonymous and status in ("401", "403"):
            return NotAllowed(
                f"{uri} is not public ({status} {code}), and {self._identity.anonymous}: {s3_errors.CREDENTIALS}"
            )
        return s3_errors.from_response(status, code, uri, headers)

    def _translated(self, error: Exception, uri: str) -> CacheError:
        if isinstance(error, botocore.exceptions.ClientError):
            meta = error.response.get("ResponseMetadata", {})
            code = error.response.get("Error", {}).get("Code", "")
            return self._error(str(meta.get("HTTPStatusCode", "")), code, uri, meta.get("HTTPHeaders", {}))
        return s3_errors.from_botocore(error, uri)

    def _signed(
        self,
        address: BucketAddress,
        bucket: str,
        key: str,
        keys: Any,
        version: ObjectVersion,
        span: tuple[int, int],
        stored: bool,
    ) -> bytes:
        """Return the request head. Range and If-Match need no signature, since the response is checked against both.
        Accept-Encoding must not be signed, since Google's front end changes it. A whole object is requested without a
        range: with one, S3 states no checksum."""
        target, lines = address.target(key), list[str]()
        headers = self._identity.headers.copy()
        if span == (0, version.size_bytes - 1):
            headers["x-amz-checksum-mode"] = "ENABLED"
        else:
            lines.append(f"Range: bytes={span[0]}-{span[1]}")
        if self._if_match and is_strong_tag(version.etag):
            lines.append(f'If-Match: "{version.etag}"')
        if stored:
            lines.append("Accept-Encoding: gzip")
        signed = self._addressing.signed_headers(address, target, bucket, key, keys, headers)
        return self._head_of_request("GET", target, lines, signed)

    def _head_of_request(
        self, method: str, target: Target, lines: Sequence[str], headers: dict[str, str]
    ) -> bytes:
        first = [f"{method} {target.path} HTTP/1.1", f"Host: {target.name}"]
        if self._proxy is not None and self._endpoint.scheme == "http":
            first[0] = f"{method} {target.url} HTTP/1.1"
            first += filter(None, [self._proxy.authorization])
        text = [*first, *lines, *(f"{name}: {value}" for name, value in headers.items()), "", ""]
        return "\r\n".join(text).encode()


def open_s3(
    section: SourceSection = ALL, clock: Callable[[], float] = time.monotonic, helper_s: float = HELPER_S
) -> S3Source:
    """Open a source from a section and the AWS environment. Raises InvalidInput for wrong settings, SourceUnavailable when
    this process is at a limit."""
    identity = sign_in(section, clock, helper_s)
    return S3Source(identity, tls_context(identity.client.meta.endpoint_url))


def prepare_s3() -> None:
    """Load the files of botocore that every `open_s3` needs, for processes forked from this one. Reads no files of the
    user, which may lie on a mount that hangs."""
    with suppress(*FAILED):  # other releases of botocore have other files
        for name in ("endpoints", "partitions", "sdk-default-configuration"):
            service_data().load_data(name)
        for kind in ("service-2", "endpoint-rule-set-1"):
            service_data().load_service_model("s3", kind)


def _code(body: bytes) -> str:
    found = _CODE.search(body)
    return found[1].decode() if found else ""


def _version(bucket: str, found: dict[str, Any]) -> ObjectVersion:
    return ObjectVersion(f"s3://{bucket}/{found['Key']}", found["Size"], found.get("ETag", "").strip('"'))
