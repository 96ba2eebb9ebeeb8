"""Membership in etcd: each member writes its own entry under a lease, and watches the others'.

The thread of `watch` renews the lease, follows changes for a third of the lease's time, and begins again. It follows
changes from the last seen revision, so none is lost in between.

The few calls of etcd's API each have a timeout, and all are cancelled by `close`. The stubs are those of aetcd, which needs
no package beside grpcio and protobuf. Its client is not used: it has no TLS and needs an event loop. The other candidate,
etcd3gw, brings seven packages and watches on threads of its own.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import msgspec
from aetcd import rpc

from cachesvc.cluster.addresses import MAX_MEMBERS, split_address
from cachesvc.cluster.polled import Changed, LastList, Registration
from cachesvc.config import Tls
from cachesvc.core.placement.roster import Endpoint

log = logging.getLogger(__name__)
LEASE_S = 10
"""The entry of a node that dies lasts this long."""
FOLLOW_S = LEASE_S / 3
PAUSE_S = 1.0
"""The pause between servers that fail."""
VERSION = 1
"""Later versions may add fields to an entry; they change none."""


class _Entry(msgspec.Struct):
    address: str
    name: str
    zone: str
    version: int


def encode(me: Registration) -> bytes:
    """Return the entry of a member."""
    return msgspec.json.encode(_Entry(me.address, me.name, me.zone, VERSION))


def decode(value: bytes) -> Endpoint:
    """Return the member that an entry describes. Raises ValueError."""
    try:
        entry = msgspec.json.decode(value, type=_Entry)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not entry.name:
        raise ValueError("it has no name")
    split_address(entry.address)
    return Endpoint(entry.address, entry.name, entry.zone)


class Entries:
    """Members by key. After an outage the members that were known before have `grace_s` seconds to register again."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._present: dict[str, Endpoint] = {}
        self._awaited: dict[str, Endpoint] = {}
        self._awaited_until = 0.0

    def await_again(self, now: float) -> None:
        """Note the end of an outage at `now`, in seconds of any clock."""
        self._awaited = self._awaited | self._present
        self._awaited_until = now + self._grace_s

    def list(self, found: dict[str, bytes]) -> None:
        """Take all entries as they are now."""
        self._present = {}
        for key, value in found.items():
            self.put(key, value)

    def put(self, key: str, value: bytes) -> None:
        """Take a new or changed entry. An entry that is not understood is logged and left out."""
        try:
            self._present[key] = decode(value)
        except ValueError as error:
            self._present.pop(key, None)
            log.warning("an entry of the cluster is not understood", extra={"key": key, "reason": str(error)})

    def delete(self, key: str) -> None:
        """Drop an entry that its member removed, or whose lease ended."""
        self._present.pop(key, None)
        self._awaited.pop(key, None)

    def get(self, key: str) -> Endpoint | None:
        """Return the present entry of a key."""
        return self._present.get(key)

    def members(self, now: float) -> frozenset[Endpoint]:
        """Return the present members, and until the end of the grace time the awaited ones."""
        if now >= self._awaited_until:
            self._awaited = {}
        return frozenset((self._awaited | self._present).values())


class EtcdMembership:
    """The entries below `prefix` of the etcd servers at `hosts` (HOST:PORT), this node's own among them.

    The key of an entry is PREFIX/NAME. Of two nodes with one name the last to register is seen, and the other logs it.
    """

    def __init__(
        self, hosts: Sequence[str], prefix: str, me: Registration, tls: Tls | None, user: str = ""
    ) -> None:
        """`user`: NAME:PASSWORD where etcd demands them."""
        first = zlib.crc32(me.name.encode()) % len(hosts)  # members spread over the servers
        self._hosts = [*hosts[first:], *hosts[:first]]
        self._prefix, self._key, self._me, self._tls = prefix, f"{prefix}/{me.name}", me, tls
        self._user = user
        self._entries = Entries(LEASE_S + FOLLOW_S)
        self._last = LastList(f"etcd {prefix}")
        self._closed = threading.Event()
        self._calls: EtcdCalls | None = None
        self._doubled = self._read_once = False

    def watch(self, changed: Changed) -> None:
        last = self._last
        last.changed = changed
        for host in itertools.cycle(self._hosts):
            if self._closed.is_set():
                return
            try:
                self._connected(host, last)
            except grpc.FutureCancelledError:
                pass  # by `close`
            except grpc.RpcError as error:
                self._failed(last, f"{host}: {error.details() or error.code().name}")
            except OSError as error:
                self._failed(last, str(error))

    @property
    def trouble(self) -> str:
        """Why etcd failed the last time."""
        return self._last.trouble

    def close(self) -> None:
        self._closed.set()
        if self._calls is not None:
            self._calls.close()

    def _failed(self, last: LastList, reason: str) -> None:
        if not self._closed.is_set():
            last.failed(reason)
            self._closed.wait(PAUSE_S)

    def _connected(self, host: str, last: LastList) -> None:
        self._calls = calls = EtcdCalls(host, self._tls, self._user)
        if self._closed.is_set():  # `close` may have looked before
            calls.close()
        try:
            self._registered(calls, last)
        finally:
            calls.disconnect()

    def _registered(self, calls: EtcdCalls, last: LastList) -> None:
        """Register and follow changes, until the lease ends or a call fails."""
        calls.authenticate()
        lease = calls.grant(LEASE_S)
        try:
            revision = self._read(calls)
            self._entries.put(self._key, encode(self._me))
            if not self._read_once:
                self._tell(last)  # this node knows the others before they see it, also where it may not write
            self._read_once = True
            calls.put(self._key, encode(self._me), lease)
            while calls.renew(lease) and not self._closed.is_set():
                if revision and self._entries.get(self._key) is None:
                    calls.put(self._key, encode(self._me), lease)
                revision = self._follow(calls, revision, last)
        finally:
            if self._closed.is_set():
                calls.revoke(lease)

    def _read(self, calls: EtcdCalls) -> int:
        """Read all entries after an outage; return the revision."""
        self._entries.await_again(time.monotonic())
        entries, revision = calls.list(self._prefix)
        self._entries.list(entries)
        return revision

    def _follow(self, calls: EtcdCalls, revision: int, last: LastList) -> int:
        """Follow changes after `revision`, 0 for none, for a while or until this node's own entry is gone. Return the last
        revision that was seen."""
        if not revision:
            entries, revision = calls.list(self._prefix)
            self._entries.list(entries)
        self._tell(last)
        try:
            for seen, changes in calls.changes(self._prefix, revision, FOLLOW_S):
                revision = seen
                self._take(changes)
                if self._entries.get(self._key) is None:
                    break
                self._tell(last)
        except Compacted:
            return 0
        return revision

    def _take(self, changes: dict[str, bytes | None]) -> None:
        for key, value in changes.items():
            if value is None:
                self._entries.delete(key)
            else:
                self._entries.put(key, value)

    def _tell(self, last: LastList) -> None:
        mine = self._entries.get(self._key)
        if mine is None:
            return  # this node is a member: its entry is about to be written again
        last.found(self._entries.members(time.monotonic()))
        doubled = mine.address != self._me.address
        if doubled and not self._doubled:
            log.warning(
                "another node has registered under this node's name; give each its own --node-name",
                extra={"node": self._me.name, "address": mine.address},
            )
        self._doubled = doubled


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
    ca, key, certificate = (Path(path).read_bytes() for path in (tls.ca, tls.key, tls.certificate))
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, key, certificate), options=_OPTIONS)


def _range(prefix: str) -> tuple[bytes, bytes]:
    """Return the first key below PREFIX/ and the first behind: "0" follows "/"."""
    return f"{prefix}/".encode(), f"{prefix}0".encode()


def _value(event: Any) -> bytes | None:
    return event.kv.value if event.type == event.PUT else None


def _text(key: bytes) -> str:
    return key.decode(errors="replace")
