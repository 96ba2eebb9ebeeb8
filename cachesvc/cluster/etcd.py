"""Membership in etcd: each member writes its own entry under a lease, and watches the others'.

The thread of `watch` works by turns: it renews the lease, follows changes for a third of its time, and again. Changes are
followed from the last seen revision, so none is lost between two turns.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import zlib
from collections.abc import Sequence

import grpc

from cachesvc.cluster.entries import Entries, encode
from cachesvc.cluster.etcd_calls import Compacted, EtcdCalls
from cachesvc.cluster.last_list import LastList
from cachesvc.cluster.membership import Changed, Registration
from cachesvc.config import Tls

log = logging.getLogger(__name__)
LEASE_S = 10
"""The entry of a node that dies lasts this long."""
TURN_S = LEASE_S / 3
PAUSE_S = 1.0
"""The pause between servers that fail."""


class EtcdMembership:
    """The entries below `prefix` of the etcd servers at `hosts` (HOST:PORT), this node's own among them.

    The key of an entry is PREFIX/NAME. Of two nodes with one name the last to register is seen, and the other logs it.
    """

    def __init__(self, hosts: Sequence[str], prefix: str, me: Registration, tls: Tls | None) -> None:
        first = zlib.crc32(me.name.encode()) % len(hosts)  # members spread over the servers
        self._hosts = [*hosts[first:], *hosts[:first]]
        self._prefix, self._key, self._me, self._tls = prefix, f"{prefix}/{me.name}", me, tls
        self._entries = Entries(LEASE_S + TURN_S)
        self._closed = threading.Event()
        self._calls: EtcdCalls | None = None
        self._doubled = False

    def watch(self, changed: Changed) -> None:
        last = LastList(f"etcd {self._prefix}", changed)
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

    def close(self) -> None:
        self._closed.set()
        if self._calls is not None:
            self._calls.close()

    def _failed(self, last: LastList, reason: str) -> None:
        if not self._closed.is_set():
            last.failed(reason)
            self._closed.wait(PAUSE_S)

    def _connected(self, host: str, last: LastList) -> None:
        self._calls = calls = EtcdCalls(host, self._tls)
        if self._closed.is_set():  # `close` may have looked before
            calls.close()
        try:
            self._registered(calls, last)
        finally:
            calls.disconnect()

    def _registered(self, calls: EtcdCalls, last: LastList) -> None:
        """Register and follow changes, until the lease ends or a call fails."""
        lease = calls.grant(LEASE_S)
        try:
            calls.put(self._key, encode(self._me), lease)
            self._entries.await_again(time.monotonic())
            revision = 0
            while calls.renew(lease) and not self._closed.is_set():
                if revision and self._entries.get(self._key) is None:
                    calls.put(self._key, encode(self._me), lease)
                revision = self._turn(calls, revision, last)
        finally:
            if self._closed.is_set():
                calls.revoke(lease)

    def _turn(self, calls: EtcdCalls, revision: int, last: LastList) -> int:
        """Follow changes after `revision`, 0 for none, for a while or until this node's own entry is gone. Return the last
        revision that was seen."""
        if not revision:
            found, revision = calls.list(self._prefix)
            self._entries.list(found)
        self._tell(last)
        try:
            for seen, changes in calls.changes(self._prefix, revision, TURN_S):
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
