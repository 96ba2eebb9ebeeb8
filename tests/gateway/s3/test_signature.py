"""Signatures of version 4, as botocore makes them and as AWS documents them."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import urlsplit

import pytest
from botocore.auth import S3SigV4Auth, S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from hypothesis import given
from hypothesis import strategies as st

from cachesvc.gateway.s3 import signature
from cachesvc.gateway.s3.errors import S3Error

SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
OWN = Credentials("AKID", SECRET, "the/token+=")


def checked(method: str, url: str, headers: dict[str, str], secret: str = SECRET, now: float = 0.0) -> Any:
    """Verify a request as the service does; returns what it claims."""
    parts = urlsplit(url)
    query = signature.query_of(parts.query)
    plain = {name.lower(): value for name, value in headers.items()} | {"host": parts.netloc}
    claim = signature.claimed(plain, query, now or time.time())
    signature.check(claim, secret, method, parts.path, query, plain)
    return claim


def signed(url: str, signer: type = S3SigV4Auth, **more: Any) -> tuple[str, dict[str, str]]:
    request = AWSRequest("GET", url, headers={"Range": "bytes=0-1"})
    request.context["signing"] = {}
    signer(OWN, "s3", "eu-west-1", **more).add_auth(request)
    return str(request.url), dict(request.headers.items())


def code_of(*given: Any, **more: Any) -> str:
    with pytest.raises(S3Error) as refusal:
        checked(*given, **more)
    return refusal.value.code


def test_the_example_of_the_documentation_is_right() -> None:
    """GET Object of "Signature Calculations for the Authorization Header" in the API reference of Amazon S3."""
    headers = {
        "authorization": "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request,"
        "SignedHeaders=host;range;x-amz-content-sha256;x-amz-date,"
        "Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
        "range": "bytes=0-9",
        "x-amz-content-sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "x-amz-date": "20130524T000000Z",
    }
    url = "https://examplebucket.s3.amazonaws.com/test.txt"
    assert checked("GET", url, headers, now=1369353600).access_key == "AKIAIOSFODNN7EXAMPLE"
    assert code_of("GET", f"{url}x", headers, now=1369353600) == "SignatureDoesNotMatch"
    assert code_of("HEAD", url, headers, now=1369353600) == "SignatureDoesNotMatch"
    assert code_of("GET", url, headers | {"range": "bytes=0-10"}, now=1369353600) == "SignatureDoesNotMatch"


# An alphabet of their own: Hypothesis needs seconds to list all characters.
ODD = st.sampled_from("azAZ09-_.~!*'()/+%&=?#;:@,$\\\"<>{}|^`[] \t\n\x01\x7fäß€字😀")


@given(key=st.text(ODD, min_size=1, max_size=20), prefix=st.text(ODD, max_size=10))
def test_any_key_and_argument_that_botocore_signs_is_verified(key: str, prefix: str) -> None:
    from urllib.parse import quote

    url = f"http://127.0.0.1:9/bucket/{quote(key, '/~')}?prefix={quote(prefix, '')}&list-type=2&acl"
    assert checked("GET", *signed(url)).token == OWN.token


def test_a_wrong_secret_or_argument_does_not_match() -> None:
    url, headers = signed("http://h/b/k?prefix=a")
    assert code_of("GET", url, headers, secret="x") == "SignatureDoesNotMatch"
    assert code_of("GET", "http://h/b/k?prefix=b", headers) == "SignatureDoesNotMatch"
    assert code_of("GET", "http://other/b/k?prefix=a", headers) == "SignatureDoesNotMatch"


@pytest.mark.parametrize("off_s", [-1201, 1201])
def test_a_clock_that_is_off_is_named(off_s: float) -> None:
    url, headers = signed("http://h/b/k")
    assert code_of("GET", url, headers, now=time.time() + off_s) == "RequestTimeTooSkewed"


def test_presigned_urls_last_as_long_as_they_say() -> None:
    url, _ = signed("http://h/b/k", S3SigV4QueryAuth, expires=60)
    checked("GET", url, {"range": "bytes=0-1"})
    assert code_of("GET", url, {}, now=time.time() + 62) == "AccessDenied"
    assert code_of("GET", url, {}, now=time.time() - 1201) == "RequestTimeTooSkewed"
    assert code_of("GET", url.replace("Expires=60", "Expires=600"), {}) == "SignatureDoesNotMatch"


def test_what_is_no_signature_is_refused_by_name() -> None:
    _, headers = signed("http://h/b/k")
    malformed = "AuthorizationHeaderMalformed"
    assert code_of("GET", "http://h/b/k", {}) == "AccessDenied"
    assert code_of("GET", "http://h/b/k", {"authorization": "AWS AKID:xyz"}) == "InvalidRequest"
    assert code_of("GET", "http://h/b/k?AWSAccessKeyId=a&Signature=b&Expires=1", {}) == "InvalidRequest"
    assert code_of("GET", "http://h/b/k", headers | {"Authorization": "Bearer x"}) == malformed
    named = {name: value for name, value in headers.items() if name.lower() != "x-amz-date"}
    assert code_of("GET", "http://h/b/k", named) == malformed
    other = headers["Authorization"].replace("/s3/", "/ec2/")
    assert code_of("GET", "http://h/b/k", headers | {"Authorization": other}) == malformed
    unsigned = headers["Authorization"].replace("SignedHeaders=host;", "SignedHeaders=")
    assert code_of("GET", "http://h/b/k", headers | {"Authorization": unsigned}) == malformed
    wrong = "AuthorizationQueryParametersError"
    for query in ("X-Amz-Signature=0", "X-Amz-Signature=0&X-Amz-Algorithm=AWS4-HMAC-SHA256"):
        assert code_of("GET", f"http://h/b/k?{query}", {}) == wrong
