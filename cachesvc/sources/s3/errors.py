"""Translates errors of S3 servers and of botocore."""

from __future__ import annotations

import re
from typing import Any

import botocore.exceptions
from botocore.parsers import ResponseParserError

from cachesvc.core.errors import (
    CacheError,
    InvalidInput,
    NotAllowed,
    NotFound,
    SourceUnavailable,
)
from cachesvc.sources.s3.http import proxy_needs_login, retry_after_s, untrusted_certificate

EXPIRED = {
    "ExpiredToken",
    "ExpiredTokenException",
    "TokenRefreshRequired",
    "InvalidToken",
    "InvalidAccessKeyId",
}
"""Codes of a 403 that newer credentials may cure. A server calls rotated keys unknown, not expired."""
_PROGRAM = "custom-process"
_BARE = re.compile(r"(?<=Invalid endpoint: )[^@]+@")
FAILED = (
    botocore.exceptions.BotoCoreError,
    ResponseParserError,
    OSError,
    ValueError,
    RuntimeError,
    TypeError,
    AttributeError,
)
"""The exceptions of botocore, with those for a malformed date or number, and for a credential process that does not start
or prints something else than the expected JSON."""
_PAGE = re.compile(rb"\s*(?:<!doctype\s+html|<html)", re.IGNORECASE)


class WebPage(RuntimeError):
    """A web page with status 200, such as a proxy sends while the server behind it is down."""


def refuse_page(response_dict: dict[str, Any], **_: object) -> None:
    """Raise WebPage for a web page in the place of an answer of S3. Called by botocore before it parses an answer: it would
    take the page for an empty listing or an error of the server."""
    # botocore has made a 500 of a 200 with a body that is no XML.
    if response_dict["status_code"] in (200, 500) and _PAGE.match(response_dict["body"]):
        kind = response_dict["headers"].get("content-type", "no content type")
        raise WebPage(f"the answer is a web page ({kind}), not one of S3")


_MISSING = {"404", "NoSuchKey", "NoSuchBucket", "NotFound"}
_FORBIDDEN = {"401", "403", "AccessDenied", "SignatureDoesNotMatch"} | EXPIRED
_REMEDIES = {
    "InvalidObjectState": "it is archived: restore it, or copy it to a storage class that is read at once",
    "RequestTimeTooSkewed": "this machine's clock is wrong: set it",
    "InvalidRequest": "an object that was encrypted with a key of the customer's (SSE-C) is not read",
    "KMS.DisabledException": "enable the KMS key that encrypts it",
    "KMS.NotFoundException": "the KMS key that encrypts it is gone or of another region",
    "KMS.KMSInvalidStateException": "the KMS key that encrypts it is disabled or due to be deleted",
}
_REFUSED = "ask the operator of the storage"
_PASSING = {
    "RequestTimeout",
    "IncompleteBody",
    "InternalError",
    "OperationAborted",
    "KMSInternalException",
    "KMS.KMSInternalException",
}
"""Codes of a 400 that the next try may not meet."""
_THROTTLED = {
    "429",
    "503",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "RequestLimitExceeded",
    "KMS.ThrottlingException",
    "TooManyRequestsException",
}
OVERWRITTEN = "it was overwritten; open the dataset again to go on with what is there now"
_NO_CREDENTIALS = (botocore.exceptions.NoCredentialsError, botocore.exceptions.PartialCredentialsError)
_UNTRUSTED = re.compile(r"(?:certificate verify failed: |(?=hostname ))(.*?)(?: \(_ssl\.c:\d+\))?$")
CREDENTIALS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or give the node a role"


def from_response(status: str, code: str, uri: str, headers: dict[str, str]) -> CacheError:
    """Return the error for a response with this status, and this code in its body."""
    said = status if code == status else f"{status} {code}".strip()
    if status == "407":
        return proxy_needs_login(uri, "http")
    if {status, code} & _FORBIDDEN:
        remedy = _REMEDIES.get(code, "check the credentials and the bucket's policy")
        return NotAllowed(f"{uri}: access refused ({said}); {remedy}")
    if {status, code} & _MISSING:
        what = (
            "its bucket does not exist"
            if code == "NoSuchBucket"
            else "no such object; check its name, or restore what was deleted"
        )
        return NotFound(f"{uri}: {what}")
    if status.startswith("3"):
        return InvalidInput(
            f"{uri}: the server sends this request elsewhere ({said}); set AWS_REGION to the bucket's region, or "
            "AWS_ENDPOINT_URL to the bucket's own endpoint"
        )
    if _is_final(status, code):
        return NotAllowed(f"{uri}: the server refuses this request ({said}); {_REMEDIES.get(code, _REFUSED)}")
    error = SourceUnavailable(f"{uri}: the server answered {said}")
    error.throttled = bool({status, code} & _THROTTLED)
    error.retry_after_s = retry_after_s(headers)
    return error


def _is_final(status: str, code: str) -> bool:
    """Tell whether the server would refuse the same request for ever. A refusal without a code, such as that of a HEAD, may
    come from a failing proxy."""
    named = not code.isdigit() and code not in _PASSING and not {status, code} & _THROTTLED
    return bool(code) and named and (status in ("400", "405", "422") or code == "NotImplemented")


def from_botocore(error: Exception, uri: str) -> CacheError:
    """Translate an exception that botocore raised for a LIST or HEAD."""
    if isinstance(error, _NO_CREDENTIALS):
        return NotAllowed(f"{uri}: no S3 credentials: {CREDENTIALS}")
    if isinstance(error, botocore.exceptions.SSLError) and (found := _UNTRUSTED.search(str(error))):
        return untrusted_certificate(uri, found[1])
    if isinstance(error, botocore.exceptions.ProxyConnectionError) and " 407" in str(error.kwargs["error"]):
        return proxy_needs_login(uri, "https")
    if isinstance(error, botocore.exceptions.MissingDependencyException):
        return InvalidInput(
            f"{uri}: botocore needs a package for it: pip install awscrt, where the daemon runs too"
        )
    if isinstance(error, botocore.exceptions.ParamValidationError):
        return InvalidInput(f"{uri}: not a valid bucket or key; write s3://bucket/key")
    if isinstance(error, WebPage):
        return SourceUnavailable(
            f"{uri}: {error}; check the endpoint (AWS_ENDPOINT_URL) and the proxies on the way"
        )
    if without_secrets(error) is None:
        inner = error.kwargs["error"]  # type: ignore[attr-defined]
        said = one_line(inner) if isinstance(inner, OSError) else type(inner).__name__
        return SourceUnavailable(f"{uri}: the request cannot be sent ({said})")
    return SourceUnavailable(
        f"{uri}: {one_line(error)}; check the endpoint (AWS_ENDPOINT_URL) and the network"
    )


def without_secrets(error: Exception) -> Exception | None:
    """Return the error if a traceback may show it; None if it may quote a header with keys and a signature."""
    return None if type(error) is botocore.exceptions.HTTPClientError else error


def one_line(error: Exception) -> str:
    """Return the error's text in one line, without the secrets that botocore quotes: the user part of an invalid
    endpoint, and the output of a credential process."""
    kwargs = getattr(error, "kwargs", {})
    if isinstance(error, botocore.exceptions.CredentialRetrievalError) and kwargs["provider"] == _PROGRAM:
        return "the credential_process failed; run it by hand to see why"
    return _BARE.sub("***@", " ".join(str(error).split()))[:300]
