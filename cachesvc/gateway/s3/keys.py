"""Short-lived keys of users: an access key, a secret and a session token, derived from the node's own secret.

The token states the user and the end of the keys, and carries a MAC. So nothing is stored for a key, and keys outlive a
restart of this process. `Keys` is pure: the time is an argument.

Users of the node get theirs at a socket, where the kernel states who asks (SO_PEERCRED). One line of JSON each way:
`{"lifetime_s": 3600}`, and the keys as the AWS SDKs take them from a `credential_process`, with the endpoint's URL as
`Endpoint`.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import lru_cache
from typing import Any

from cachesvc.config import S3_SOCKET
from cachesvc.core.errors import DaemonUnavailable, NotAllowed
from cachesvc.daemon.access.tenants import Peer, peer_of
from cachesvc.gateway.s3.errors import S3Error

SECRET_BYTES = 32
LIFETIME_S, MAX_LIFETIME_S = 3600, 12 * 3600
"""An hour, which clients with a `credential_process` renew; twelve, for those that read variables once."""
_MAC_BYTES = 16
KNOWN = 256
"""Tokens of this node that are not read anew for each request."""


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
        self._user_of = lru_cache(KNOWN)(self._read_token)

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
        user, own_key, secret_key, expires_at = self._user_of(token)
        if not hmac.compare_digest(access_key, own_key):
            raise S3Error("InvalidAccessKeyId", "the access key and the session token do not belong together")
        if now >= expires_at:
            raise S3Error("ExpiredToken", "the keys have expired: ask for new ones (cachesvc credentials)")
        return user, secret_key

    def _read_token(self, token: str) -> tuple[Peer, str, str, int]:
        """Return user, access key, secret key and end of a token. Raises S3Error: InvalidToken."""
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
        return Peer(uid, frozenset(gids)), self._access_key(said), self._secret_key(said), expires_at

    def _access_key(self, said: bytes) -> str:
        return f"CSVC{base64.b32encode(self._derived('id', said)[:10]).decode()}"

    def _secret_key(self, said: bytes) -> str:
        return base64.urlsafe_b64encode(self._derived("secret", said)).decode().rstrip("=")

    def _derived(self, kind: str, said: bytes) -> bytes:
        return hmac.digest(self._secret, kind.encode() + b"\0" + said, "sha256")


MAX_LINE_BYTES = 4096
ANSWER_S = 10.0


async def serve_credentials(directory: str, mode: int, keys: Keys, endpoint: str) -> asyncio.Server:
    """Answer at the socket below `directory`, of this file mode, until the server is closed. Raises OSError."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, ValueError, asyncio.TimeoutError, asyncio.IncompleteReadError):
            line = await asyncio.wait_for(reader.readuntil(), ANSWER_S)
            lifetime_s = int(json.loads(line)["lifetime_s"])
            user = peer_of(writer.get_extra_info("socket"))
            issued = keys.issue(user, lifetime_s, time.time())
            ends = datetime.fromtimestamp(issued.expires_at, timezone.utc)
            found = {
                "Version": 1,
                "AccessKeyId": issued.access_key,
                "SecretAccessKey": issued.secret_key,
                "SessionToken": issued.token,
                "Expiration": ends.strftime("%Y-%m-%dT%H:%M:%SZ"),
                "Endpoint": endpoint,
            }
            writer.write(json.dumps(found).encode() + b"\n")
            await asyncio.wait_for(writer.drain(), ANSWER_S)
        writer.close()

    path = f"{directory}/{S3_SOCKET}"
    with suppress(FileNotFoundError):
        os.unlink(path)
    before = os.umask(0o177)  # others can never connect before the chmod
    try:
        server = await asyncio.start_unix_server(answer, path, limit=MAX_LINE_BYTES)
    finally:
        os.umask(before)
    os.chmod(path, mode)
    return server


def ask_for_keys(directory: str, lifetime_s: int = LIFETIME_S) -> dict[str, Any]:
    """Return the keys of this user, as the socket below `directory` gives them. Raises DaemonUnavailable, NotAllowed."""
    path = f"{directory}/{S3_SOCKET}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as channel:
        channel.settimeout(ANSWER_S)
        try:
            channel.connect(path)
            channel.sendall(json.dumps({"lifetime_s": lifetime_s}).encode() + b"\n")
            with channel.makefile("rb") as answers:
                found: dict[str, Any] = json.loads(answers.readline(MAX_LINE_BYTES))
            return found
        except PermissionError:
            raise NotAllowed(f"{path} is not open to user {os.geteuid()}; see --socket-mode") from None
        except (OSError, ValueError):
            raise DaemonUnavailable(
                f"no S3 endpoint answers at {path}; start the daemon with one: cachesvc serve --s3 127.0.0.1:9000"
            ) from None
