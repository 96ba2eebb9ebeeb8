"""Verifies signatures of requests: AWS Signature Version 4, in the header or in the query of a presigned URL.

Pure: the time and the secret are arguments. See "Authenticating Requests (AWS Signature Version 4)" in the API reference of
Amazon S3.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import lru_cache
from urllib.parse import quote, unquote

from cachesvc.gateway.s3.errors import S3Error

ALGORITHM = "AWS4-HMAC-SHA256"
SKEW_S = 900.0
"""The most that a client's clock may differ, as AWS has it."""
MAX_EXPIRES_S = 7 * 86_400
KEYS = 256
"""Keys of users and dates that are not derived anew for each request."""
EMPTY = hashlib.sha256(b"").hexdigest()
_HEADER = re.compile(
    rf"{ALGORITHM} +Credential=([^, ]+), *SignedHeaders=([^, ]+), *Signature=([0-9a-f]{{64}})"
)
_SIGNATURE = "X-Amz-Signature"
_UNRESERVED = "-_.~"


@dataclass(frozen=True, slots=True)
class Claimed:
    """A signature as its request states it. `scope`: date, region, service and the word `aws4_request`."""

    access_key: str
    token: str
    scope: tuple[str, ...]
    time: str
    """As ISO 8601, `YYYYMMDDTHHMMSSZ`."""
    headers: tuple[str, ...]
    """Names of the signed headers, in lower case."""
    signature: str
    payload: str
    """The SHA-256 of the body, or a word that stands for it."""


Query = Sequence[tuple[str, str]]
"""Decoded names and values."""


def claimed(headers: Mapping[str, str], query: Query, now: float) -> Claimed:
    """Return what a request claims. `headers`: by name in lower case. `now`: seconds of Unix time.

    Raises S3Error: AccessDenied without a signature, RequestTimeTooSkewed, and for a malformed one.
    """
    given = dict(query)
    if _SIGNATURE in given:
        return _presigned(given, now)
    stated = headers.get("authorization", "")
    if "Signature" in given or stated.startswith("AWS "):
        raise S3Error("InvalidRequest", f"signatures of version 2 are not read: sign with {ALGORITHM}")
    if not stated:
        raise S3Error(
            "AccessDenied", "the request is not signed; `cachesvc env` prints what a client needs to sign"
        )
    found = _HEADER.fullmatch(stated.strip())
    if found is None:
        raise S3Error("AuthorizationHeaderMalformed", f"only {ALGORITHM} is read")
    key, scope = _credential(found[1], "AuthorizationHeaderMalformed")
    time = headers.get("x-amz-date", "")
    late_s = abs(now - _seconds(time, scope, "AuthorizationHeaderMalformed"))
    if late_s > SKEW_S:
        raise S3Error(
            "RequestTimeTooSkewed", f"the clocks of client and node differ by {late_s:.0f} s: set the clock"
        )
    payload = headers.get("x-amz-content-sha256", EMPTY)
    token = headers.get("x-amz-security-token", "")
    signed = tuple(found[2].split(";"))
    if "host" not in signed:
        raise S3Error("AuthorizationHeaderMalformed", "the header host is not signed")
    return Claimed(key, token, scope, time, signed, found[3], payload)


def _presigned(given: Mapping[str, str], now: float) -> Claimed:
    wrong = "AuthorizationQueryParametersError"
    if given.get("X-Amz-Algorithm") != ALGORITHM:
        raise S3Error(wrong, f"only {ALGORITHM} is read")
    key, scope = _credential(given.get("X-Amz-Credential", ""), wrong)
    expires = given.get("X-Amz-Expires", "")
    if not expires.isdecimal() or not 0 < int(expires[:8]) <= MAX_EXPIRES_S:
        raise S3Error(wrong, f"X-Amz-Expires must be 1 to {MAX_EXPIRES_S} seconds")
    time = given.get("X-Amz-Date", "")
    age_s = now - _seconds(time, scope, wrong)
    if age_s > int(expires):
        raise S3Error("AccessDenied", "the URL has expired")
    if age_s < -SKEW_S:
        raise S3Error("RequestTimeTooSkewed", "the URL was signed in the future: set the clock")
    headers = tuple(given.get("X-Amz-SignedHeaders", "").split(";"))
    if "host" not in headers:
        raise S3Error(wrong, "the header host is not signed")
    token = given.get("X-Amz-Security-Token", "")
    return Claimed(key, token, scope, time, headers, given[_SIGNATURE], "UNSIGNED-PAYLOAD")


def _credential(text: str, wrong: str) -> tuple[str, tuple[str, ...]]:
    key, *scope = text.split("/")
    if len(scope) != 4 or scope[2] != "s3" or scope[3] != "aws4_request":
        raise S3Error(wrong, "the credential scope is not DATE/REGION/s3/aws4_request")
    return key, tuple(scope)


def _seconds(time: str, scope: tuple[str, ...], wrong: str) -> float:
    try:
        found = datetime.strptime(time, "%Y%m%dT%H%M%SZ").replace(tzinfo=timezone.utc)
    except ValueError:
        raise S3Error(wrong, "X-Amz-Date is missing, or not YYYYMMDDTHHMMSSZ") from None
    if time[:8] != scope[0]:
        raise S3Error(wrong, "the credential scope has another date than the request")
    return found.timestamp()


def check(
    claim: Claimed, secret: str, method: str, path: str, query: Query, headers: Mapping[str, str]
) -> None:
    """Compare a request with its signature. `path`: as it was sent, encoded. Raises SignatureDoesNotMatch."""
    usual = quote(unquote(path, errors="surrogateescape"), "/" + _UNRESERVED, errors="surrogateescape")
    for each in dict.fromkeys((usual, path)):  # some clients encode more than they need to
        if hmac.compare_digest(_signature(claim, secret, method, each, query, headers), claim.signature):
            return
    raise S3Error("SignatureDoesNotMatch", "the signature is not that of this request; check the secret key")


def _signature(
    claim: Claimed, secret: str, method: str, path: str, query: Query, headers: Mapping[str, str]
) -> str:
    canonical = "\n".join(
        [
            method,
            path,
            "&".join(sorted(_encoded(name, value) for name, value in query if name != _SIGNATURE)),
            *(f"{name}:{' '.join(headers.get(name, '').split())}" for name in claim.headers),
            "",
            ";".join(claim.headers),
            claim.payload,
        ]
    )
    digest = hashlib.sha256(canonical.encode("utf-8", "surrogateescape")).hexdigest()
    return _signed(_key(claim.scope, secret), [ALGORITHM, claim.time, "/".join(claim.scope), digest])


@lru_cache(KEYS)
def _key(scope: tuple[str, ...], secret: str) -> bytes:
    key = f"AWS4{secret}".encode()
    for part in scope:
        key = hmac.digest(key, part.encode("utf-8", "surrogateescape"), "sha256")
    return key


def _signed(key: bytes, lines: Sequence[str]) -> str:
    return hmac.digest(key, "\n".join(lines).encode("utf-8", "surrogateescape"), "sha256").hex()


class ChunkSignatures:
    """Verifies the signatures of a body's chunks and trailers, each of which covers the one before it."""

    def __init__(self, claim: Claimed, secret: str) -> None:
        self._key, self._before = _key(claim.scope, secret), claim.signature
        self._head = [claim.time, "/".join(claim.scope)]

    def check_chunk(self, digest: str, stated: str) -> None:
        """Verify a chunk with this SHA-256. Raises S3Error: SignatureDoesNotMatch."""
        self._check([f"{ALGORITHM}-PAYLOAD", *self._head, self._before, EMPTY, digest], stated)

    def check_trailers(self, trailers: bytes, stated: str) -> None:
        """Verify trailers, lines of `name:value`. Raises S3Error: SignatureDoesNotMatch."""
        digest = hashlib.sha256(trailers).hexdigest()
        self._check([f"{ALGORITHM}-TRAILER", *self._head, self._before, digest], stated)

    def _check(self, lines: Sequence[str], stated: str) -> None:
        if not hmac.compare_digest(_signed(self._key, lines).encode(), stated.encode()):
            raise S3Error("SignatureDoesNotMatch", "a chunk of the body has another signature")
        self._before = stated


def _encoded(name: str, value: str) -> str:
    return f"{quote(name, _UNRESERVED, errors='surrogateescape')}={quote(value, _UNRESERVED, errors='surrogateescape')}"


def query_of(text: str) -> list[tuple[str, str]]:
    """Return the names and values of a query as it was sent. A `+` is itself, as in the API reference."""
    pairs = (part.partition("=") for part in text.split("&") if part)
    return [
        (unquote(name, errors="surrogateescape"), unquote(value, errors="surrogateescape"))
        for name, _, value in pairs
    ]
