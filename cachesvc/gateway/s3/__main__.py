"""The process of the S3 endpoint: `python -m cachesvc.gateway.s3 FD`. It ends when the channel FD to its parent closes."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import signal
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from cachesvc.client.object_reads import ObjectReads
from cachesvc.config import Settings, is_loopback, parse_allow
from cachesvc.core.errors import CacheError, InvalidInput
from cachesvc.daemon.access.tenants import Tenants
from cachesvc.daemon.processes.logs import configure_logging
from cachesvc.gateway.s3.accounts import Accounts
from cachesvc.gateway.s3.bodies import Bodies
from cachesvc.gateway.s3.keys import SECRET_BYTES, Keys, serve_credentials
from cachesvc.gateway.s3.passing import Passing
from cachesvc.gateway.s3.service import Service
from cachesvc.gateway.s3.upstream import Upstream
from cachesvc.gateway.s3.writes import Writes
from cachesvc.sources.uri import allowlist
from cachesvc.system.memory import raise_open_files

log = logging.getLogger(__name__)
BIND_PAUSE_S = 0.2
"""Between two tries to bind the port: the process before this one ends."""
OPEN_FILES = 8192
RENEW_S = 60.0
"""How often the files of the certificate are looked at."""
SECRET_FILE = "s3.key"


def node_secret(state_dir: str) -> bytes:
    """Return the secret that keys are derived from, made at the first use. Raises OSError."""
    path = Path(state_dir, SECRET_FILE)
    with suppress(FileNotFoundError):
        found = path.read_bytes()
        if len(found) == SECRET_BYTES:
            return found
    made, part = secrets.token_bytes(SECRET_BYTES), f"{path}.{os.getpid()}"
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        file.write(made)
        file.flush()
        os.fsync(fd)
    os.replace(part, path)
    return made


def writers(typed: Sequence[str]) -> Tenants | None:
    """Return who may write below the prefixes of `--s3-writes`; None for nobody. Raises InvalidInput."""
    parsed = [parse_allow(text, "--s3-writes") for text in typed]
    if not parsed:
        return None
    rules = [rule for _, rule in parsed if rule is not None]
    return Tenants(allowlist([prefix for prefix, _ in parsed]), rules)


def host_names(address: str) -> list[str]:
    """Return the names that may follow a bucket in a request's host."""
    host = address.rpartition(":")[0].strip("[]").lower()
    return [*dict.fromkeys((host, "localhost", socket.gethostname().lower()))]


async def serve(settings: Settings, ends: asyncio.Event) -> None:
    """Serve until `ends` is set. Raises CacheError where the endpoint cannot be opened."""
    allowed = allowlist([prefix for prefix in settings.allow if prefix.startswith("s3://")])
    if settings.allow and not allowed.typed:
        log.warning("no allowed prefix is of S3: the S3 endpoint serves nothing")
    rules = [rule for rule in settings.rules if rule.prefix in allowed.typed]
    keys = Keys(node_secret(settings.state_dir))
    accounts = Accounts([each for each in settings.source if each.prefix.startswith("s3://")])
    upstream, tenants = Upstream(accounts, settings.s3_fresh_s), Tenants(allowed, rules)
    reads, passing = ObjectReads(settings.socket_dir), Passing(accounts)
    service = Service(
        keys,
        tenants,
        allowed.prefixes or (),
        host_names(settings.s3),
        upstream,
        Bodies(reads, upstream, settings.s3_part_bytes),
        Writes(passing, tenants, writers(settings.s3_writes), upstream.forget),
    )
    tls = None if is_loopback(settings.s3) else _tls(settings)
    scheme = "http" if tls is None else "https"
    gc.freeze()  # after boto3 has read its models: a collection that walks them takes tens of milliseconds
    loop = asyncio.get_running_loop()
    connections = Connections(service.handle, raise_open_files(OPEN_FILES) // 4)
    host, _, port = settings.s3.rpartition(":")
    listener = await _bound(partial(loop.create_server, connections, host.strip("[]"), int(port), ssl=tls))
    named = socket.gethostname() if host in ("0.0.0.0", "[::]") else host
    endpoint = f"{scheme}://{named}:{port}"
    asking = await serve_credentials(settings.socket_dir, settings.socket_mode, keys, endpoint)
    log.info("the S3 endpoint serves", extra={"endpoint": endpoint, "pid": os.getpid()})
    renewing = asyncio.ensure_future(_renew(settings, tls)) if tls is not None else None
    try:
        await ends.wait()
    finally:
        if renewing is not None:
            renewing.cancel()
        for server in (listener, asking):
            server.close()
        await connections.close()
        await passing.close()
        reads.close()


async def _bound(bind: partial[object]) -> asyncio.Server:
    told = False
    while True:
        try:
            return await bind()  # type: ignore[misc,no-any-return]
        except OSError as error:
            if not told:
                log.warning("the S3 endpoint cannot be bound yet", extra={"error": str(error)})
            told = True
            await asyncio.sleep(BIND_PAUSE_S)


def _tls(settings: Settings) -> ssl.SSLContext:
    assert settings.tls is not None, "validated"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(settings.tls.certificate, settings.tls.key, password="")
    except (OSError, ssl.SSLError) as error:
        raise InvalidInput(f"{settings.tls.certificate} or its key cannot be used ({error})") from None
    return context


async def _renew(settings: Settings, context: ssl.SSLContext) -> None:
    """Use new certificates for new connections once their files are replaced."""
    assert settings.tls is not None, "validated"
    while True:
        await asyncio.sleep(RENEW_S)
        with suppress(OSError, ssl.SSLError):  # one of them is not written yet
            context.load_cert_chain(settings.tls.certificate, settings.tls.key, password="")


async def _run(settings: Settings, channel: socket.socket) -> None:
    ends, loop = asyncio.Event(), asyncio.get_running_loop()
    channel.setblocking(False)
    loop.add_reader(channel, ends.set)  # the parent sends nothing: it has closed its end
    loop.add_signal_handler(signal.SIGTERM, ends.set)
    await serve(settings, ends)


def main() -> int:
    """Run the endpoint of the settings in CACHESVC_GIVEN; return the exit code."""
    settings = msgspec.json.decode(os.environ.pop("CACHESVC_GIVEN"), type=Settings)
    configure_logging(settings.log_format, settings.log)
    logging.getLogger("aiohttp").setLevel(logging.CRITICAL)  # each malformed request would be a traceback
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    try:
        asyncio.run(_run(settings, socket.socket(fileno=int(sys.argv[1]))))
    except CacheError as error:
        log.error("the S3 endpoint cannot be opened", extra={"error": str(error)})
        return error.code
    return 0


IDLE_S = 60.0
"""A connection without a whole request for so long is closed."""
LINE_BYTES, FIELD_BYTES = 16 << 10, 16 << 10
"""The longest request line, with a presigned query, and the longest header."""
END_S = 2.0
"""The time that answers under way get when the endpoint ends."""


class Connections:
    """Makes the protocol of each connection; the most that there may be are `most`, and others are closed at once."""

    def __init__(self, handle: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], most: int) -> None:
        self._most = most
        self._server = web.Server(
            handle,
            access_log=None,
            keepalive_timeout=IDLE_S,
            max_line_size=LINE_BYTES,
            max_field_size=FIELD_BYTES,
            lingering_time=0.0,
            auto_decompress=False,
        )
        self._full = False

    def __call__(self) -> asyncio.Protocol:
        """Return the protocol of a new connection."""
        full = len(self._server.connections) >= self._most
        if full and not self._full:
            log.warning("too many connections to the S3 endpoint", extra={"most": self._most})
        self._full = full
        return _Closed() if full else self._server()

    @property
    def open(self) -> list[RequestHandler]:
        """The connections."""
        return list(self._server.connections)

    async def close(self) -> None:
        """End all connections."""
        await self._server.shutdown(END_S)


class _Closed(asyncio.Protocol):
    """A connection that is one too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Close it."""
        transport.close()


if __name__ == "__main__":
    sys.exit(main())
