"""The few calls of etcd's API that membership needs, each with a timeout, and all cancelled by `close`.

The stubs are those of aetcd, which needs no package beside grpcio and protobuf. Its client is not used: it has no TLS and
needs an event loop. The other candidate, etcd3gw, brings seven packages and watches on threads of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import grpc
from aetcd import rpc

from cachesvc.cluster.addresses import MAX_MEMBERS
from cachesvc.config import Tls

CALL_S = 3.0
REVOKE_S = 1.0
_OPTIONS = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]


class Compacted(Exception):
    """etcd no longer has the changes since the revision; list the entries again."""


class EtcdCalls:
    """Calls one server at HOST:PORT. All methods but `close` run on one thread. They raise grpc.RpcError, and
    grpc.FutureCancelledError after `close`."""

    def __init__(self, address: str, tls: Tls | None, user: str = "") -> None:
        """`user`: NAME:PASSWORD where etcd demands them. Raises OSError where the files of `tls` cannot be read."""
        self._channel = _channel(address, tls)
        self._kv, self._lease = rpc.KVStub(self._channel), rpc.LeaseStub(self._channel)
        self._watch = rpc.WatchStub(self._channel)
        self._closed = threading.Event()
        self._current: Any = None
        self._user = user
        self._token: tuple[tuple[str, str], ...] = ()

    def close(self) -> None:
        """Cancel the call in progress and each later one but `revoke`. Safe on any thread."""
        self._closed.set()
        if self._current is not None:
            self._current.cancel()

    def disconnect(self) -> None:
        """Release the connection."""
        self._channel.close()

    def authenticate(self) -> None:
        """Get a token for the user, where there is one. The other calls have it from then on."""
        if self._user:
            name, _, password = self._user.partition(":")
            request = rpc.AuthenticateRequest(name=name, password=password)
            answer = self._call(rpc.AuthStub(self._channel).Authenticate, request)
            self._token = (("token", answer.token),)

    def grant(self, ttl_s: int) -> int:
        """Make a lease; return its id."""
        lease: int = self._call(self._lease.LeaseGrant, rpc.LeaseGrantRequest(TTL=ttl_s)).ID
        return lease

    def renew(self, lease: int) -> bool:
        """Renew a lease; false where it has ended."""
        requests = iter([rpc.LeaseKeepAliveRequest(ID=lease)])
        call = self._started(self._lease.LeaseKeepAlive(requests, timeout=CALL_S, metadata=self._token))
        answer = next(call, None)
        call.cancel()
        return answer is not None and answer.TTL > 0

    def revoke(self, lease: int) -> None:
        """End a lease, which removes its entries; after `close` too. Nothing is raised: a lease ends by itself."""
        with suppress(grpc.RpcError):
            self._lease.LeaseRevoke(rpc.LeaseRevokeRequest(ID=lease), timeout=REVOKE_S, metadata=self._token)

    def put(self, key: str, value: bytes, lease: int) -> None:
        """Write an entry that ends with a lease."""
        self._call(self._kv.Put, rpc.PutRequest(key=key.encode(), value=value, lease=lease))

    def list(self, prefix: str) -> tuple[dict[str, bytes], int]:
        """Return the entries below a prefix, one more than `MAX_MEMBERS` at most, and the store's revision."""
        first, end = _range(prefix)
        request = rpc.RangeRequest(key=first, range_end=end, limit=MAX_MEMBERS + 1)
        answer = self._call(self._kv.Range, request)
        return {_text(each.key): each.value for each in answer.kvs}, answer.header.revision

    def changes(
        self, prefix: str, revision: int, limit_s: float
    ) -> Iterator[tuple[int, dict[str, bytes | None]]]:
        """Yield (revision, entries by key, None for a removed one) after `revision`, for `limit_s`. Raises Compacted."""
        first, end = _range(prefix)
        create = rpc.WatchCreateRequest(key=first, range_end=end, start_revision=revision + 1)
        requests = iter([rpc.WatchRequest(create_request=create)])
        call = self._started(self._watch.Watch(requests, timeout=limit_s, metadata=self._token))
        try:
            for answer in call:
                if answer.canceled:
                    raise Compacted
                if answer.events:
                    yield (
                        max(event.kv.mod_revision for event in answer.events),
                        {_text(event.kv.key): _value(event) for event in answer.events},
                    )
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
        finally:
            call.cancel()

    def _call(self, method: Callable[..., Any], request: object) -> Any:
        return self._started(method.future(request, timeout=CALL_S, metadata=self._token)).result()  # type: ignore[attr-defined]

    def _started(self, call: Any) -> Any:
        self._current = call
        if self._closed.is_set():  # `close` sets this first and cancels then, so one of the two sees the call
            call.cancel()
        return call


def _channel(address: str, tls: Tls | None) -> grpc.Channel:
    if tls is None:
        return grpc.insecure_channel(address, options=_OPTIONS)
    ca, key, certificate = (_bytes(path) for path in (tls.ca, tls.key, tls.certificate))
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, key, certificate), options=_OPTIONS)


def _bytes(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _range(prefix: str) -> tuple[bytes, bytes]:
    """Return the first key below PREFIX/ and the first behind: "0" follows "/"."""
    return f"{prefix}/".encode(), f"{prefix}0".encode()


def _value(event: Any) -> bytes | None:
    return event.kv.value if event.type == event.PUT else None


def _text(key: bytes) -> str:
    return key.decode(errors="replace")
