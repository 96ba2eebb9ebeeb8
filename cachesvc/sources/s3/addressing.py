"""Finds the address of a bucket's objects, and signs reads of them, as botocore resolves it.

botocore knows virtual hosts and paths, access points, PrivateLink, dual stack, FIPS, acceleration and directory buckets. It
is asked once for each bucket. The GETs are then signed here, with a fraction of its CPU, except those of directory buckets
(S3 Express): botocore alone renews the keys of their sessions.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest

from cachesvc.core.errors import InvalidInput

SCHEME = "s3://"
DIRECTORY_BUCKET = "--x-s3"
"""End of the names of directory buckets."""
_EXPRESS = "v4-s3express"
_ARN = re.compile(r"(arn:aws[^/]*:s3[a-z-]*:[^/]*:accesspoint[/:][^/:]+)/?(.*)", re.DOTALL)
_OWN = (
    "host",
    "user-agent",
    "range",
    "if-match",
    "amz-sdk-request",
    "amz-sdk-invocation-id",
    "accept-encoding",
)
"""Headers of botocore's requests that are not taken over: not signed, or sent by the caller."""


@dataclass(frozen=True, slots=True)
class Target:
    """The place of one object. `name`: the value of the Host header."""

    host: str
    port: int
    path: str
    url: str
    name: str


@dataclass(frozen=True, slots=True)
class BucketAddress:
    """`base`: the URL before keys, which ends in a slash. `region` and `service` are signed with. `by_session`: botocore
    signs, with keys of a session."""

    base: str
    region: str
    service: str = "s3"
    by_session: bool = False

    def target(self, key: str) -> Target:
        """Return the place of an object."""
        parts = urlsplit(self.base)
        path = parts.path + quote(key, safe="/~")
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        return Target(host, port, path, f"{parts.scheme}://{parts.netloc}{path}", parts.netloc)


class Addressing:
    """The addresses of buckets. Thread-safe. `client(region)` returns a boto3 client, "" for the region of the settings."""

    def __init__(self, client: Callable[[str], Any]) -> None:
        self._client = client
        self._known: dict[tuple[str, str], BucketAddress] = {}
        self._lock = threading.Lock()
        self._asking = threading.local()

    def of(self, bucket: str, region: str = "") -> BucketAddress:
        """Return a bucket's address, in a region that was learned, if any. Raises botocore's errors for a name that is no
        bucket's."""
        found = self._known.get((bucket, region))
        if found is None:
            said = self._stopped("sign", bucket, "k", region)
            request, signature = said["request"], said["signature_version"]
            scope = request.context.get("signing", {})
            found = BucketAddress(
                request.url.removesuffix("k"),
                scope.get("region") or said["region_name"],
                scope.get("signing_name") or said["signing_name"],
                signature == _EXPRESS,
            )
            self._known[bucket, region] = found
        return found

    def signed_headers(
        self,
        address: BucketAddress,
        target: Target,
        bucket: str,
        key: str,
        keys: Any,
        headers: dict[str, str],
        method: str = "GET",
    ) -> dict[str, str]:
        """Return `headers` and those of the signature; without `keys`, `headers` alone. For a directory bucket the method
        is GET."""
        if address.by_session:
            return self._signed_by_botocore(bucket, key, headers)
        if keys is None:
            return headers
        request = AWSRequest(method=method, url=target.url, headers={"Host": target.name, **headers})
        S3SigV4Auth(keys, address.service, address.region).add_auth(request)
        return {name: value for name, value in request.headers.items() if name != "Host"}

    def _signed_by_botocore(self, bucket: str, key: str, headers: dict[str, str]) -> dict[str, str]:
        found = self._stopped("send", bucket, key, "")["request"].headers
        texts = {
            name: value.decode() if isinstance(value, bytes) else str(value) for name, value in found.items()
        }
        return headers | {name: value for name, value in texts.items() if name.lower() not in _OWN}

    def _stopped(self, when: str, bucket: str, key: str, region: str) -> dict[str, Any]:
        """Let botocore prepare a GET, and stop it before it is signed or sent. Return what the event says."""
        client = self._client(region)
        with self._lock:  # registering an event again has no effect
            client.meta.events.register("before-sign.s3.GetObject", self._stop_at_sign, "cachesvc-sign")
            client.meta.events.register("before-send.s3.GetObject", self._stop_at_send, "cachesvc-send")
        self._asking.when = when
        try:
            client.get_object(Bucket=bucket, Key=key)
        except _Stopped as stopped:
            return stopped.said
        finally:
            self._asking.when = ""
        raise AssertionError("botocore prepares a request without an event")

    def _stop_at_sign(self, **said: Any) -> None:
        if getattr(self._asking, "when", "") == "sign":
            raise _Stopped(said)

    def _stop_at_send(self, **said: Any) -> None:
        if getattr(self._asking, "when", "") == "send":
            raise _Stopped(said)


class _Stopped(Exception):
    """Ends botocore's call with what an event said."""

    def __init__(self, said: dict[str, Any]) -> None:
        super().__init__("stopped")
        self.said = said


def split_uri(uri: str, key_needed: bool = True) -> tuple[str, str]:
    """Split `s3://bucket/key` into (bucket, key). The bucket may be the ARN of an access point. Raises InvalidInput."""
    rest = uri.removeprefix(SCHEME)
    arn = _ARN.fullmatch(rest)
    bucket, key = (arn[1], arn[2]) if arn else (rest.partition("/")[0], rest.partition("/")[2])
    if not uri.startswith(SCHEME) or not bucket or (key_needed and not key):
        raise InvalidInput(
            f"not an S3 {'object' if key_needed else 'prefix'}: {uri!r}; write s3://bucket/key"
        )
    return bucket, key
