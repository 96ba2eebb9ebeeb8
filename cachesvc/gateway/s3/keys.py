"""Short-lived keys of users: an access key, a secret and a session token, derived from the node's own secret.

The token states the user and the end of the keys, and carries a MAC. So nothing is stored for a key, and keys outlive a
restart of this process. Pure: the time is an argument.
"""

from __future__ import annotations

import base64
import hmac
import json
from dataclasses import dataclass

from cachesvc.daemon.access.tenants import Peer
from cachesvc.gateway.s3.errors import S3Error

SECRET_BYTES = 32
LIFETIME_S, MAX_LIFETIME_S = 3600, 12 * 3600
"""An hour, which clients with a `credential_process` renew; twelve, for those that read variables once."""
_MAC_BYTES = 16


@dataclass(frozen=True, slots=True)
class Issued:
    """Keys, and when they end, in seconds of Unix time."""

    access_key: str
    secret_key: str
    token: str
    expires_at: int


class Keys:
    """Issues keys, and recognises them."""

    def __init__(self, secret: bytes) -> None:
        """`secret`: the node's own, of `SECRET_BYTES`."""
        self._secret = secret

    def issue(self, user: Peer, lifetime_s: int, now: float) -> Issued:
        """Return keys of a user for `lifetime_s` seconds, 12 hours at most."""
        expires_at = int(now) + max(1, min(lifetime_s, MAX_LIFETIME_S))
        said = json.dumps([user.uid, sorted(user.gids), expires_at], separators=(",", ":")).encode()
        token = base64.urlsafe_b64encode(self._derived("token", said)[:_MAC_BYTES] + said).decode()
        return Issued(self._access_key(said), self._secret_key(said), token, expires_at)

    def recognise(self, access_key: str, token: str, now: float) -> tuple[Peer, str]:
        """Return the user of an access key and its token, and the secret key.

        Raises S3Error: InvalidAccessKeyId for a key of another service, InvalidToken, ExpiredToken.
        """
        if not token:
            raise S3Error(
                "InvalidAccessKeyId",
                "this key is none of this node's (they have session tokens); `cachesvc env` prints some",
            )
        try:
            raw = base64.urlsafe_b64decode(token.encode())
        except ValueError:
            raw = b""
        mac, said = raw[:_MAC_BYTES], raw[_MAC_BYTES:]
        if not said or not hmac.compare_digest(mac, self._derived("token", said)[:_MAC_BYTES]):
            raise S3Error(
                "InvalidToken", "the session token is none of this node's; `cachesvc env` prints one"
            )
        uid, gids, expires_at = json.loads(said)
        if not hmac.compare_digest(access_key, self._access_key(said)):
            raise S3Error("InvalidAccessKeyId", "the access key and the session token do not belong together")
        if now >= expires_at:
            raise S3Error("ExpiredToken", "the keys have expired: ask for new ones (cachesvc credentials)")
        return Peer(uid, frozenset(gids)), self._secret_key(said)

    def _access_key(self, said: bytes) -> str:
        return f"CSVC{base64.b32encode(self._derived('id', said)[:10]).decode()}"

    def _secret_key(self, said: bytes) -> str:
        return base64.urlsafe_b64encode(self._derived("secret", said)).decode().rstrip("=")

    def _derived(self, kind: str, said: bytes) -> bytes:
        return hmac.digest(self._secret, kind.encode() + b"\0" + said, "sha256")
