"""The socket at which users of the node get their keys: the kernel states who asks (SO_PEERCRED).

One line of JSON each way: `{"lifetime_s": 3600}`, and the keys as the AWS SDKs take them from a `credential_process`, with
the endpoint's URL as `Endpoint`.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any

from cachesvc.config import S3_SOCKET
from cachesvc.core.errors import DaemonUnavailable, NotAllowed
from cachesvc.daemon.access.tenants import peer_of
from cachesvc.gateway.s3.keys import LIFETIME_S, Keys

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
