"""Requests that the source itself answers: writes, where settings allow them, and versions of objects by their ids."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from urllib.parse import quote, unquote
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from aiohttp import web

from cachesvc.daemon.access.tenants import Tenants
from cachesvc.gateway.s3.errors import S3Error
from cachesvc.gateway.s3.passing import UNSIGNED, Passing, invite
from cachesvc.gateway.s3.requests import Asked
from cachesvc.sources.files import under

MAX_DOCUMENT_BYTES = 2 << 20
"""A thousand keys of 1,024 bytes each, with their tags."""
_ENDS = {"\r": "&#13;"}
"""Parsers of XML take a carriage return for a line feed."""
_PARTS = frozenset({"partNumber", "uploadId"})
_OPERATIONS = {
    ("PUT", frozenset[str]()),
    ("PUT", _PARTS),
    ("POST", frozenset({"uploads"})),
    ("POST", frozenset({"uploadId"})),
    ("GET", frozenset({"uploadId"})),
    ("DELETE", frozenset[str]()),
    ("DELETE", frozenset({"uploadId"})),
    ("DELETE", frozenset({"versionId"})),
}
"""Methods and arguments of PutObject, CopyObject, UploadPart, UploadPartCopy, CreateMultipartUpload,
CompleteMultipartUpload, ListParts, DeleteObject and AbortMultipartUpload."""


class Writes:
    """Checks what a user may write, and passes it on."""

    def __init__(
        self,
        passing: Passing,
        tenants: Tenants,
        writers: Tenants | None,
        forget: Callable[[str, Iterable[str]], None],
    ) -> None:
        """`tenants`: who may read; `writers`: who may write there too, None where nobody may. `forget` is called for the
        bucket and keys of objects that change."""
        self._passing, self._tenants, self._writers, self._forget = passing, tenants, writers, forget

    async def version(self, request: web.BaseRequest, ask: Asked) -> web.StreamResponse:
        """Answer a read of one version by its id, which the source alone knows. The user may read the object."""
        return await self._passing.passed(request, ask, lambda: None, {})

    async def answer(self, request: web.BaseRequest, ask: Asked, named: frozenset[str]) -> web.StreamResponse:
        """Answer a request that changes objects. `named`: the arguments that choose the operation. Raises S3Error, and as
        `Passing.passed`."""
        if self._writers is None:
            raise S3Error(
                "MethodNotAllowed",
                f"{request.method} is refused: this endpoint of cachesvc is read-only; write to the source's endpoint, or"
                " have the daemon started with --s3-writes",
                Allow="GET, HEAD",
            )
        if ask.method == "POST" and ask.bucket and not ask.key and named == {"delete"}:
            return await self._delete_many(request, ask)
        if ask.method == "PUT" and not ask.key and not named and self._writes_below(ask):
            raise S3Error(
                "BucketAlreadyOwnedByYou", f"{ask.bucket} is there"
            )  # some create it before each write
        if not ask.key or (ask.method, named) not in _OPERATIONS:
            what = f"{ask.method} {','.join(sorted(named))}".strip()
            raise S3Error("NotImplemented", f"{what} is not served here: ask the source's endpoint")
        self._check(ask, ask.key)
        changed: dict[str, str] = {}
        if copied := ask.headers.get("x-amz-copy-source", ""):
            changed["x-amz-copy-source"] = self._copied(ask, copied)
        return await self._passing.passed(request, ask, lambda: self._forget(ask.bucket, [ask.key]), changed)

    def _writes_below(self, ask: Asked) -> bool:
        """Tell whether the user may write something in the bucket."""
        assert self._writers is not None, "checked before"
        return any(under(each, (f"s3://{ask.bucket}",)) for each in self._writers.prefixes(ask.user))

    def _check(self, ask: Asked, key: str) -> None:
        """Raises S3Error for an object that the user may not write."""
        assert self._writers is not None, "checked before"
        uri = f"s3://{ask.bucket}/{key}"
        if not (self._tenants.may_read(uri, ask.user) and self._writers.may_read(uri, ask.user)):
            raise S3Error("AccessDenied", f"{uri} is not below a prefix that you may write (--s3-writes)")

    def _copied(self, ask: Asked, text: str) -> str:
        """Return the header that names what is copied. Raises S3Error where the user may not read it."""
        path, mark, version = text.partition("?versionId=")
        place = unquote(path, errors="surrogateescape").removeprefix("/")
        if not self._tenants.may_read(f"s3://{place}", ask.user):
            raise S3Error("AccessDenied", f"s3://{place} is not below a prefix that you may use")
        return f"{quote(place, '/-_.~', errors='surrogateescape')}{mark}{version}"

    async def _delete_many(self, request: web.BaseRequest, ask: Asked) -> web.StreamResponse:
        """Answer DeleteObjects, whose body names the keys. The source gets them as they were understood here."""
        await invite(request)
        body = bytearray()
        while data := await request.content.readany():
            body += data
            if len(body) > MAX_DOCUMENT_BYTES:
                raise S3Error("MalformedXML", f"the body has more than {MAX_DOCUMENT_BYTES} bytes")
        if ask.payload not in (UNSIGNED, hashlib.sha256(body).hexdigest()):
            raise S3Error("InvalidRequest", "the body has another SHA-256 than x-amz-content-sha256")
        document, keys = deletion(bytes(body))
        for key in keys:
            self._check(ask, key)
        md5 = base64.b64encode(hashlib.md5(document, usedforsecurity=False).digest()).decode()
        plain = {name: text for name, text in ask.headers.items() if "checksum" not in name}
        return await self._passing.passed(
            request,
            replace(ask, headers=plain),
            lambda: self._forget(ask.bucket, keys),
            {"content-md5": md5},
            document,
        )


def deletion(body: bytes) -> tuple[bytes, list[str]]:
    """Return a document of DeleteObjects in plain form, and its keys. Raises S3Error: MalformedXML."""
    try:
        text = body.decode()
        if "<!" in text:  # entities and other ways to say a key twice
            raise ValueError
        root = ElementTree.fromstring(text)
    except (ValueError, ElementTree.ParseError):
        raise S3Error("MalformedXML", "the body is no plain XML document") from None
    keys, rows = [], []
    for entry in root:
        fields = {each.tag.rpartition("}")[2]: each.text or "" for each in entry}
        if entry.tag.rpartition("}")[2] == "Object":
            keys.append(fields.get("Key", ""))
            rows.append("".join(f"<{name}>{escape(value, _ENDS)}</{name}>" for name, value in fields.items()))
    if not keys or not all(keys):
        raise S3Error("MalformedXML", "the body names no key")
    quiet = any(each.tag.endswith("Quiet") and each.text == "true" for each in root)
    head = '<?xml version="1.0" encoding="UTF-8"?><Delete xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
    objects = "".join(f"<Object>{row}</Object>" for row in rows)
    return f"{head}{objects}<Quiet>{str(quiet).lower()}</Quiet></Delete>".encode(), keys
