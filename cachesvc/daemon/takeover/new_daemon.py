"""The new daemon's side of a takeover: what it adopts, and how its core reaches the state of the old daemon's."""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import cachesvc
from cachesvc.core import events
from cachesvc.core.errors import CacheError, CorruptData, DaemonUnavailable, InvalidInput, NotAllowed
from cachesvc.core.model import DatasetId, ExtentId, ReaderId
from cachesvc.core.node.snapshot import protecting_first
from cachesvc.daemon.datasets import Datasets, ServedDataset
from cachesvc.daemon.grants.connected_readers import HandedOverConnection
from cachesvc.daemon.grants.unix_sockets import peer_process
from cachesvc.daemon.runner import Runner
from cachesvc.daemon.takeover import state as takeover_state
from cachesvc.daemon.takeover.process_handle import ProcessHandle
from cachesvc.daemon.takeover.wire import PROTOCOL, SOCKET, MessageKind, receive, receive_state, send
from cachesvc.tiers.ram import RamTier
from cachesvc.tiers.tier import Checksums
from cachesvc.v1 import takeover_pb2 as pb

log = logging.getLogger(__name__)
ANSWER_S = 60.0
"""The wait for each answer; the old daemon ends its fills first, in at most 10 s."""
END_S = 10.0
"""The time that the old daemon has to end before it is killed."""
LINGER_S = 1.0
"""The time, while readers wait, that an old daemon without sockets has to end; after that it may hang in a disk."""


@dataclass(slots=True)
class Handover:
    """The state and descriptors from the old daemon; empty where it died first. The code that uses a descriptor owns it."""

    state: Any = field(default_factory=pb.TakeoverState)
    listener: socket.socket | None = None
    extents: list[int] = field(default_factory=list)
    readers: list[int] = field(default_factory=list)
    locks: list[int] = field(default_factory=list)

    def lost(self, path: str) -> bool:
        """Tell whether the old daemon had lost the tier in a cache directory."""
        return any(each.lost for each in self.state.directories if each.path == path)

    def mounted(self, path: str) -> bool | None:
        """True where the old daemon had found a disk mounted at the path; None where it did not say."""
        return path in self.state.mounted or None

    def locks_of(self, path: str) -> list[int]:
        """Duplicate the descriptors of a cache directory's locks.

        The old daemon may know the directory by another path. Then return all locks except those of lost directories,
        since a look at a lost one may hang.
        """
        remaining = iter(self.locks)
        of = {each.path: list(islice(remaining, each.locks)) for each in self.state.directories}
        others = [*remaining, *(fd for each in of for fd in of[each] if not self.lost(each))]
        return [os.dup(fd) for fd in of.get(path, others)]


class OldDaemon:
    """The daemon that serves the socket directory now. Until `adopted` it goes on if this process ends."""

    def __init__(self, channel: socket.socket, process: ProcessHandle, offer: Any, lock: int) -> None:
        self._channel = channel
        self._process = process
        self._offer = offer
        self._unreadable: dict[str, CorruptData] = {}
        self.lock = lock
        """The lock of the socket directory, shared with the old daemon."""

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def addresses(self) -> list[str]:
        """The addresses, HOST:PORT, that it releases when it ends."""
        return list(self._offer.addresses)

    def prepare(self, datasets: Datasets) -> None:
        """Load the datasets that it has loaded, while it still serves."""
        loading = [(wanted, datasets.load(DatasetId(wanted))) for wanted in self._offer.datasets]
        for wanted, future in loading:
            try:
                datasets.admit(future.result())
            except CacheError as error:
                log.warning("a dataset is not taken over", extra={"dataset": wanted, "error": str(error)})
                if isinstance(error, CorruptData):  # perhaps a catalog of another release
                    self._unreadable[wanted] = error

    def hand_over(self) -> Handover:
        """Stop the old daemon's loop and receive its state.

        Raises DaemonUnavailable where it does not hand over but still runs, InvalidInput where readers would get errors.
        """
        state = pb.TakeoverState()
        try:
            send(self._channel, MessageKind.READY)
            descriptors = receive_state(self._channel, state)
        except (OSError, ValueError) as error:
            self._channel.close()
            if not isinstance(error, ConnectionError) or not self._process.ended(END_S):
                raise DaemonUnavailable(
                    f"the daemon did not hand over ({error}); it goes on, and its log says more"
                ) from None
            log.warning("the old daemon died before it handed over; starting without what it held")
            return Handover()
        self._check_readable(state)
        first, last = 1 + len(state.extents), 1 + len(state.extents) + len(state.readers)
        return Handover(
            state,
            socket.socket(fileno=descriptors[0]),
            descriptors[1:first],
            descriptors[first:last],
            descriptors[last:],
        )

    def _check_readable(self, state: Any) -> None:
        for reader in state.readers:
            if reader.welcomed and (error := self._unreadable.get(reader.dataset)):
                why = error.__cause__ or error
                raise InvalidInput(
                    f"jobs read version {reader.dataset}, whose catalog this daemon cannot read ({why}); take over"
                    " when they have ended"
                )

    def adopted(self) -> None:
        """Confirm that the takeover cannot fail any more, and wait for the old daemon to release its sockets and ports.

        Does nothing where it died before it handed over.
        """
        if self._channel.fileno() < 0:
            self._process.close()
            return
        try:
            send(self._channel, MessageKind.ADOPTED)
        except OSError:
            log.warning("the old daemon died while it handed over; everything it held was received")
        released = self._released_sockets()
        if not self._process.ended(LINGER_S if released else END_S):
            if released:
                log.warning(
                    "the old daemon has closed its sockets, but hangs in a disk; it ends when that answers"
                )
            else:
                log.warning("the old daemon does not end by itself and is killed")
                self._process.kill(END_S)
        self._process.close()
        self._channel.close()

    def _released_sockets(self) -> bool:
        """Tell whether it closes its sockets in time, the other end of this channel among them."""
        self._channel.settimeout(END_S)
        try:
            return not self._channel.recv(1)
        except TimeoutError:
            return False
        except OSError:
            return True


def find_old_daemon(directory: str, state_dir: str) -> OldDaemon | None:
    """Connect to the daemon that serves a directory; None where none does.

    Raises InvalidInput or NotAllowed where it cannot be taken over, DaemonUnavailable where it does not answer.
    """
    path = f"{directory}/{SOCKET}"
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    channel.settimeout(ANSWER_S)
    try:
        channel.connect(path)
        process = ProcessHandle(peer_process(channel)[0])
    except (FileNotFoundError, ConnectionRefusedError, ProcessLookupError):
        channel.close()
        log.info("there is no daemon to take over from", extra={"socket": directory})
        return None
    except PermissionError:
        channel.close()
        raise NotAllowed(
            f"{path} is not open to user {os.geteuid()}; start as the user of the daemon that runs"
        ) from None
    except OSError as error:
        channel.close()
        raise InvalidInput(
            f"the daemon at {path} cannot be taken over ({error.strerror}); both must be in one PID namespace"
        ) from None
    try:
        return _greeted(channel, process, directory, state_dir)
    except (CacheError, ConnectionError) as error:
        channel.close()
        if isinstance(error, CacheError):
            raise
        if not process.ended(END_S):
            raise DaemonUnavailable(
                f"the daemon in {directory} refused to hand over; its log says why"
            ) from None
        log.warning("the old daemon died before it handed over; starting without what it held")
        return None


def _greeted(channel: socket.socket, process: ProcessHandle, directory: str, state_dir: str) -> OldDaemon:
    """Raises CacheError where it refuses or does not answer, ConnectionError where it died or closed the connection."""
    offer = pb.TakeoverOffer()
    try:
        send(channel, MessageKind.HELLO, pb.TakeoverHello(protocol=PROTOCOL, version=cachesvc.__version__))
        log.info("asked the daemon that serves here to hand over", extra={"pid": process.pid})
        (lock,) = receive(channel, MessageKind.OFFER, offer)
    except (TimeoutError, ValueError) as error:
        raise DaemonUnavailable(
            f"the daemon in {directory} does not hand over ({error}); stop it, or see its log"
        ) from None
    if not offer.refused and offer.state_dir == os.path.realpath(state_dir):
        return OldDaemon(channel, process, offer, lock)
    os.close(lock)
    if offer.refused:
        raise InvalidInput(f"the daemon in {directory} cannot be taken over: {offer.refused}; stop it first")
    raise InvalidInput(
        f"the daemon in {directory} keeps its state in {offer.state_dir}; give --state-dir {offer.state_dir}"
    )


def fill_ram(tier: RamTier, budget_bytes: int, adopted: Handover) -> events.Recovered:
    """Adopt the extents that fit into the budget, the most useful first, and close the others."""
    fitting: list[tuple[ExtentId, int]] = []
    for extent, fd in zip(adopted.state.extents, adopted.extents, strict=True):
        try:
            if extent.size_bytes > budget_bytes:
                os.close(fd)
                continue
            tier.adopt(ExtentId(extent.extent), fd, Checksums(extent.size_bytes, extent.digests))
        except CacheError as error:
            log.warning("an extent is not taken over", extra={"error": str(error)})
            os.close(fd)
            continue
        budget_bytes -= extent.size_bytes
        fitting.append((ExtentId(extent.extent), extent.size_bytes))
    return events.Recovered(tier.name, dict(reversed(fitting)))  # the core expects the oldest first


def restore(adopted: Handover, runner: Runner) -> None:
    """Restore the readers' connections, claims, leases, plans and waiting demands, before the loop runs."""
    assert runner.grants is not None
    known: dict[int, ServedDataset] = {}
    for reader, fd in zip(adopted.state.readers, adopted.readers, strict=True):
        dataset = _dataset(reader.dataset, runner.datasets) if reader.welcomed else None
        given = HandedOverConnection(
            ReaderId(reader.id),
            reader.token,
            fd,
            reader.greeted,
            DatasetId(reader.dataset),
            reader.welcomed,
            reader.launch,
            reader.knows_holes,
        )
        if runner.grants.adopt(given, dataset) and dataset is not None:
            known[reader.id] = dataset
            runner.declare(reader.id, dataset)
    grants = runner.grants
    told = takeover_state.read_events(adopted.state, known.get, grants.job_of, grants.user_of)
    for event in protecting_first(runner.node, told):
        if isinstance(event, events.Planned):
            grants.adopt_plan(event)
        runner.handle(event)
    if adopted.listener is not None:
        extents, readers = len(adopted.state.extents), len(adopted.state.readers)
        log.info("took over", extra={"extents": extents, "readers": readers})


def _dataset(wanted: str, datasets: Datasets) -> ServedDataset | None:
    try:
        return datasets.admit(datasets.load(DatasetId(wanted)).result())
    except CacheError as error:
        log.warning("a dataset is not taken over", extra={"dataset": wanted, "error": str(error)})
        return None
