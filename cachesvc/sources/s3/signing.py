"""Signs requests that their caller sends, with any body: what `S3Source` itself sends are reads."""

from __future__ import annotations

import re
import ssl
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import quote, urlsplit

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest

from cachesvc.core.errors import CacheError, NotAllowed
from cachesvc.sources.s3 import errors as s3_errors
from cachesvc.sources.s3.addressing import DIRECTORY_BUCKET
from cachesvc.sources.s3.errors import FAILED
from cachesvc.sources.s3.identity import tls_context
from cachesvc.sources.s3.s3 import S3Source

_REGION = re.compile(r"[a-z0-9-]{1,32}")
_UNRESERVED = "-_.~"


class RequestSigner:
    """Makes requests to the endpoint of a source, with its credentials. Thread-safe. Its calls may ask the server."""

    def __init__(self, source: S3Source) -> None:
        """Raises InvalidInput for certificates that cannot be read."""
        self._identity, self._call = source.identity, source.call
        self._addressing = source.addressing
        host = urlsplit(source.endpoint).hostname or ""
        self._asks_for_region = host.endswith((".amazonaws.com", ".amazonaws.com.cn"))
        self._regions: dict[str, str] = {}
        self.tls: ssl.SSLContext | None = tls_context(source.endpoint)
        """The authorities that the server's certificate is checked against; None over plain HTTP."""

    def signed(
        self,
        method: str,
        bucket: str,
        key: str,
        query: Sequence[tuple[str, str]],
        headers: dict[str, str],
        payload: str,
    ) -> tuple[str, dict[str, str], Any]:
        """Return URL and headers of a request, and the keys that it is signed with. `payload`: the SHA-256 of its body, or
        a word that stands for it.

        Raises NotAllowed for a directory bucket, whose sessions botocore alone keeps, and SourceUnavailable."""
        if bucket.endswith(DIRECTORY_BUCKET):
            raise NotAllowed(f"s3://{bucket}/{key}: a directory bucket is written at its own endpoint alone")
        keys = self._identity.signing_keys()
        try:
            address = self._addressing.of(bucket, self._region(bucket))
        except FAILED as error:
            raise s3_errors.from_botocore(error, f"s3://{bucket}/{key}") from s3_errors.without_secrets(error)
        target = address.target(key)
        text = "&".join(f"{quote(name, _UNRESERVED)}={quote(value, _UNRESERVED)}" for name, value in query)
        url = f"{target.url}?{text}" if text else target.url
        request = AWSRequest(method, url, {"Host": target.name, **headers, **self._identity.headers})
        request.context["payload"] = payload
        if keys is not None:
            _Auth(keys, address.service, address.region).add_auth(request)
        return url, dict(request.headers.items()), keys

    def renew(self, refused: Any) -> bool:
        """Replace keys that the server calls expired. Tell whether there are other keys now."""
        return self._identity.renew(refused)

    def _region(self, bucket: str) -> str:
        """Return the region of a bucket of AWS, which answers writes there alone; "" for that of the settings."""
        if self._asks_for_region and bucket not in self._regions:
            with suppress(CacheError):
                found = self._call(f"s3://{bucket}/", "head_bucket", Bucket=bucket)
                region = found["ResponseMetadata"]["HTTPHeaders"].get("x-amz-bucket-region", "")
                self._regions[bucket] = region if _REGION.fullmatch(region) else ""
        return self._regions.get(bucket, "")


class _Auth(S3SigV4Auth):
    """Signs for a body that is not here."""

    def payload(self, request: AWSRequest) -> str:
        """Return what stands for the body."""
        given: str = request.context["payload"]
        return given
