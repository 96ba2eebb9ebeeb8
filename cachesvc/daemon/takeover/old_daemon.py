"""The old daemon's side of a takeover: end the fills, stop the loop, hand over everything, and end.

The order of events, and the effect when a daemon dies after each:
  1. the new daemon connects and loads the datasets      either dies: the other serves or starts as usual
  2. fills under way end; none begins                    new dies: fills begin again. Old dies: as a crash
  3. the loop stops; messages of readers wait in their sockets, which stay open
  4. the state and the descriptors are handed over       new dies: the loop goes on. Old dies: as a crash
  5. the new daemon confirms that it has everything      new dies: as a crash. Old dies: no effect
  6. this process closes its sockets, so that a thread that hangs in a disk blocks nothing, and ends

No decision depends on a timeout alone: in 4, a new daemon that does not go on is killed before the old one goes on, so
two daemons never serve. Each cache directory stays locked throughout, since the lock's descriptor is handed over. A lost
tier is handed over as lost, so no step waits for a disk that hangs.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import cachesvc
from cachesvc.config import Settings
from cachesvc.core.errors import CacheError, InvalidInput
from cachesvc.core.model import RAM, ExtentId, ReaderId, TierName
from cachesvc.core.node import snapshot as replay
from cachesvc.daemon.grants.connected_readers import HandedOverConnection
from cachesvc.daemon.grants.unix_sockets import bind, identity, peer_process, remove
from cachesvc.daemon.ports import addresses
from cachesvc.daemon.runner import Runner
from cachesvc.daemon.takeover import state as takeover_state
from cachesvc.daemon.takeover.process_handle import ProcessHandle
from cachesvc.daemon.takeover.wire import (
    MAX_DATASETS,
    PROTOCOL,
    SOCKET,
    MessageKind,
    receive,
    send,
    send_state,
)
from cachesvc.tiers.ram import RamTier
from cachesvc.v1 import takeover_pb2 as pb

log = logging.getLogger(__name__)
HELLO_S = 10.0
PREPARE_S = 120.0
"""The new daemon loads catalogs meanwhile, without effect on readers."""
DRAIN_S = 10.0
"""The longest wait of readers for fills to end; the new daemon starts the unfinished ones again."""
DRAIN_POLL_S = 0.01
ADOPT_S = 60.0
"""Readers wait meanwhile. Listing a million extents in a cache directory takes 8 s."""
KILLED_S = 10.0


class TakeoverListener:
    """Listens for a new daemon of the same user, and hands over to at most one at a time, on a thread of its own."""

    def __init__(
        self, settings: Settings, lock: int, ram: RamTier, runner: Runner, end: Callable[[], None]
    ) -> None:
        """`end` ends this process without an orderly close, since the new daemon has the sockets, locks and memory."""
        self._path = f"{settings.socket_dir}/{SOCKET}"
        self._state_dir = os.path.realpath(settings.state_dir)
        self._addresses = list(addresses(settings).values())
        self._lock = lock
        self._ram = ram
        self._runner = runner
        self._loop = runner.loop
        self._end = end
        self._busy = False
        self._bind()

    def is_in_place(self) -> bool:
        """Tell whether the socket's path still leads to this listener."""
        return self._file is not None and identity(self._path) == self._file

    def bind_again(self) -> None:
        """Listen at a new socket, since the file of the old one was removed. Raises as `bind`."""
        before = self._listener
        self._bind()
        self._loop.unwatch(before.fileno())
        before.close()

    def close(self) -> None:
        """Stop listening."""
        self._loop.unwatch(self._listener.fileno())
        self._listener.close()
        remove(self._path, self._file)

    def _bind(self) -> None:
        self._listener = bind(self._path, 0o600)
        self._file = identity(self._path)
        self._loop.watch(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            channel, _ = self._listener.accept()
        except OSError as error:
            log.warning("a new daemon cannot be accepted", extra={"error": error.strerror})
            return
        pid, uid = peer_process(channel)
        channel.settimeout(HELLO_S)
        if uid != os.geteuid() or self._busy:
            log.warning("a takeover is refused", extra={"peer_uid": uid, "busy": self._busy})
            channel.close()
            return
        try:
            threading.Thread(target=self._run, args=(channel, pid), name="takeover", daemon=True).start()
        except RuntimeError as error:
            log.warning("a takeover is refused", extra={"peer_uid": uid, "error": str(error)})
            channel.close()
        else:
            self._busy = True  # until `_resume`, which runs on this thread

    def _run(self, channel: socket.socket, pid: int) -> None:
        """Run the protocol on the takeover thread; the loop's thread does the hand-over itself."""
        try:
            with channel, ProcessHandle(pid) as other:
                self._offer(channel, pid)
                self._loop.call(self._runner.fills.pause)
                self._drain()
                self._loop.call(lambda: self._hand_over(channel, other))
        except (OSError, ValueError, CacheError) as error:
            log.warning(
                "a takeover was given up; this daemon goes on", extra={"by": pid, "error": str(error)}
            )
        self._loop.post(self._resume)

    def _resume(self) -> None:
        self._runner.fills.resume()
        self._busy = False

    def _offer(self, channel: socket.socket, pid: int) -> None:
        """Exchange HELLO, OFFER and READY. Raises InvalidInput for another protocol; the OFFER tells the new daemon."""
        hello = pb.TakeoverHello()
        receive(channel, MessageKind.HELLO, hello)
        offer = pb.TakeoverOffer(version=cachesvc.__version__, state_dir=self._state_dir)
        offer.addresses.extend(self._addresses)
        if hello.protocol != PROTOCOL:
            offer.refused = (
                f"{cachesvc.__version__} speaks protocol {PROTOCOL}, {hello.version} speaks {hello.protocol}"
            )
        known = self._loop.call(self._runner.listed)
        offer.datasets.extend(dataset.id for dataset in known[-MAX_DATASETS:])
        send(channel, MessageKind.OFFER, offer, [self._lock])
        if offer.refused:
            raise InvalidInput(offer.refused)
        log.info("a new daemon prepares to take over", extra={"by": pid, "version": hello.version})
        channel.settimeout(PREPARE_S)
        receive(channel, MessageKind.READY)

    def _drain(self) -> None:
        deadline = time.monotonic() + DRAIN_S
        while not self._loop.call(self._is_quiet) and time.monotonic() < deadline:
            time.sleep(DRAIN_POLL_S)  # the loop serves grants meanwhile

    def _is_quiet(self) -> bool:
        tiers = self._runner.node.policy.tiers.values()
        busy = self._runner.fills.under_way or self._runner.plans.under_way
        return not busy and not any(tier.evicting_bytes for tier in tiers if not tier.lost)

    def _hand_over(self, channel: socket.socket, other: ProcessHandle) -> None:
        """Hand over on the loop's thread, where nothing else runs meanwhile.

        Raises OSError, ValueError or CacheError where the new daemon gave up or was killed; this daemon goes on then.
        """
        channel.settimeout(ADOPT_S)
        assert self._runner.grants is not None
        listener, connections = self._runner.grants.handed_over()
        locks = {name: disk.locks() for name, disk in self._runner.disks.items()}
        state = self._state(connections, locks)

        def descriptors() -> Iterator[int]:
            yield os.dup(listener)
            for extent in state.extents:
                yield self._ram.open(ExtentId(extent.extent))[0]
            yield from (os.dup(each.descriptor) for each in connections)
            yield from map(os.dup, chain.from_iterable(locks.values()))

        try:
            send_state(channel, state, descriptors())
            receive(channel, MessageKind.ADOPTED)
        except (ConnectionError, CacheError):
            raise  # the new daemon gave up, or an extent cannot be handed over
        except (OSError, ValueError):
            other.kill(KILLED_S)
            raise
        finally:
            for fd in chain.from_iterable(locks.values()):
                os.close(fd)
        log.info("taken over", extra={"extents": len(state.extents), "readers": len(connections)})
        self._end()

    def _state(
        self, connections: Sequence[HandedOverConnection], locks: Mapping[TierName, Sequence[int]]
    ) -> Any:
        node, datasets = self._runner.node, self._runner.datasets
        state = pb.TakeoverState(locks=sum(map(len, locks.values())), next_id=self._runner.next_id())
        for name, disk in self._runner.disks.items():
            lost = node.policy.tiers[name].lost
            state.directories.add(path=str(disk.path), lost=lost, locks=len(locks[name]))
            if disk.mounted:
                state.mounted.append(str(disk.path))
        if RAM in node.policy.tiers:
            for extent, size_bytes in replay.best_first(node, RAM):
                if self._runner.hole_records.of(extent, RAM).ranges:
                    continue  # the new daemon fetches it from the source
                digests = self._ram.checksums(extent).digests
                state.extents.add(extent=extent, size_bytes=size_bytes, digests=digests)
        for each in connections:
            state.readers.add(
                id=each.id,
                token=each.token,
                greeted=each.greeted,
                welcomed=each.welcomed,
                dataset=each.wanted,
                launch=each.launch,
                knows_holes=each.knows_holes,
            )
        known = {each.id: datasets.known(each.wanted) for each in connections if each.welcomed}
        takeover_state.write_events(
            state,
            replay.replay(node, self._runner.granting.unsent()),
            lambda reader: known.get(ReaderId(reader)),
        )
        return state
