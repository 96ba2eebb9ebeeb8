"""Errors of S3: a code, a status of HTTP and words, as AWS's clients expect them."""

from __future__ import annotations

from xml.sax.saxutils import escape

from cachesvc.core.errors import CacheError, NotAllowed, NotFound, SourceChanged

_STATUS = {
    "NotModified": 304,
    "AuthorizationHeaderMalformed": 400,
    "AuthorizationQueryParametersError": 400,
    "ExpiredToken": 400,
    "IncompleteBody": 400,
    "InvalidArgument": 400,
    "InvalidPart": 400,
    "InvalidRequest": 400,
    "InvalidToken": 400,
    "InvalidURI": 400,
    "MalformedXML": 400,
    "AccessDenied": 403,
    "InvalidAccessKeyId": 403,
    "RequestTimeTooSkewed": 403,
    "SignatureDoesNotMatch": 403,
    "NoSuchBucket": 404,
    "NoSuchKey": 404,
    "MethodNotAllowed": 405,
    "BucketAlreadyOwnedByYou": 409,
    "PreconditionFailed": 412,
    "InvalidPartNumber": 416,
    "InvalidRange": 416,
    "InternalError": 500,
    "NotImplemented": 501,
    "ServiceUnavailable": 503,
}
"""The codes that are answered, and their statuses. Clients of AWS try 500 and 503 again, and no other."""


class S3Error(Exception):
    """A refusal. `code` is one of S3's."""

    def __init__(self, code: str, message: str, **headers: str) -> None:
        """`headers`: more headers of the response; underscores stand for hyphens."""
        super().__init__(message)
        self.code, self.status = code, _STATUS[code]
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    def body(self, resource: str, request: str) -> bytes:
        """Return the document that states the error."""
        return (
            f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{self.code}</Code><Message>{escape(str(self))}</Message>'
            f"<Resource>{escape(resource)}</Resource><RequestId>{request}</RequestId></Error>"
        ).encode("utf-8", "replace")


def translated(error: CacheError, missing: str = "NoSuchKey") -> S3Error:
    """Return S3's error for one of ours. `missing`: the code for what does not exist."""
    if isinstance(error, NotFound):
        return S3Error(missing, str(error))
    if isinstance(error, NotAllowed):
        return S3Error("AccessDenied", str(error))
    if isinstance(error, SourceChanged):
        return S3Error("ServiceUnavailable", f"{error}; it changes while it is read: try again")
    return S3Error("ServiceUnavailable", str(error), Retry_After="1")
