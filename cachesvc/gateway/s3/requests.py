"""Requests: who asks, for which bucket and key, and with which arguments. Pure but for its reading of the request."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import unquote

from aiohttp import web

from cachesvc.daemon.access.tenants import Peer
from cachesvc.gateway.s3 import signature
from cachesvc.gateway.s3.errors import S3Error
from cachesvc.gateway.s3.keys import Keys

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,62}")
MAX_KEY_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Asked:
    """A request. `bucket` and `key`: "" where it names none. `given`: the arguments of its query. `headers`: by name in
    lower case."""

    method: str
    bucket: str
    key: str
    given: dict[str, str]
    headers: dict[str, str]
    user: Peer

    @property
    def uri(self) -> str:
        """The URI of the object, or of the bucket."""
        return f"s3://{self.bucket}/{self.key}"


def asked(request: web.BaseRequest, keys: Keys, hosts: Sequence[str], now: float) -> Asked:
    """Return what a request asks, once its signature is verified. `hosts`: names of this endpoint. Raises S3Error."""
    path, _, text = request.raw_path.partition("?")
    headers = {name.lower(): value for name, value in request.headers.items()}
    query = signature.query_of(text)
    claim = signature.claimed(headers, query, now)
    user, secret = keys.recognise(claim.access_key, claim.token, now)
    signature.check(claim, secret, request.method, path, query, headers)
    bucket, key = place(path, headers.get("host", ""), hosts)
    return Asked(request.method, bucket, key, dict(query), headers, user)


def place(path: str, host: str, hosts: Sequence[str]) -> tuple[str, str]:
    """Return the bucket and key of a path, as it was sent, or of a host `BUCKET.HOST`. Raises S3Error."""
    try:
        plain = unquote(path, errors="strict").removeprefix("/")
    except UnicodeDecodeError:
        raise S3Error("InvalidURI", "the key is not UTF-8") from None
    name = re.sub(r":\d+$", "", host).lower()
    of_host = next((name[: -len(each) - 1] for each in hosts if name.endswith(f".{each}")), "")
    if of_host and not _is_address(name):
        bucket, key = of_host, plain
    else:
        bucket, _, key = plain.partition("/")
    if bucket and not _BUCKET.fullmatch(bucket):
        raise S3Error("InvalidURI", f"{bucket[:100]!r} is no name of a bucket")
    if len(key.encode()) > MAX_KEY_BYTES:
        raise S3Error("InvalidURI", f"a key has at most {MAX_KEY_BYTES} bytes")
    return bucket, key


def _is_address(name: str) -> bool:
    try:
        ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
