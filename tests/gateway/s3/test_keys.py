"""Keys of users: what they say, and that nobody else can make them."""

from __future__ import annotations

import base64

import pytest

from cachesvc.daemon.access.tenants import Peer
from cachesvc.gateway.s3.errors import S3Error
from cachesvc.gateway.s3.keys import MAX_LIFETIME_S, Keys

USER = Peer(1000, frozenset({1000, 27}))


def code_of(keys: Keys, access_key: str, token: str, now: float) -> str:
    with pytest.raises(S3Error) as refusal:
        keys.recognise(access_key, token, now)
    return refusal.value.code


def test_keys_say_who_has_them_until_they_end() -> None:
    keys = Keys(b"s" * 32)
    issued = keys.issue(USER, 3600, 1000.5)
    assert keys.recognise(issued.access_key, issued.token, 4599.0) == (USER, issued.secret_key)
    assert Keys(b"s" * 32).recognise(issued.access_key, issued.token, 0) == (USER, issued.secret_key)
    assert code_of(keys, issued.access_key, issued.token, 4600.0) == "ExpiredToken"
    assert keys.issue(USER, 1 << 40, 0).expires_at == MAX_LIFETIME_S


def test_keys_of_others_and_changed_ones_are_refused() -> None:
    keys = Keys(b"s" * 32)
    issued, other = keys.issue(USER, 3600, 0), keys.issue(Peer(0, frozenset({0})), 3600, 0)
    assert code_of(keys, other.access_key, issued.token, 0) == "InvalidAccessKeyId"
    assert code_of(Keys(b"t" * 32), issued.access_key, issued.token, 0) == "InvalidToken"
    raw = base64.urlsafe_b64decode(issued.token)
    root = base64.urlsafe_b64encode(raw.replace(b"[1000,", b"[0000,", 1)).decode()
    for token in (root, issued.token[:-4], "x", "%%%", "é", "AAAA" * 4):
        assert code_of(keys, issued.access_key, token, 0) == "InvalidToken"
    assert code_of(keys, "AKIAIOSFODNN7EXAMPLE", "", 0) == "InvalidAccessKeyId"
