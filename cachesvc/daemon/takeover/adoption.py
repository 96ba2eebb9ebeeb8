"""The new daemon's end of a takeover: what it adopts, and how its core comes to stand where the old one's stood."""

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
from cachesvc.daemon.datasets import Dataset, Datasets
from cachesvc.daemon.grants.listening import peer_process
from cachesvc.daemon.grants.readers import Connection
from cachesvc.daemon.runner import Runner
from cachesvc.daemon.takeover import state as takeover_state
from cachesvc.daemon.takeover.takeover import Process
from cachesvc.daemon.takeover.wire import PROTOCOL, SOCKET, Word, receive, receive_state, send
from cachesvc.tiers.ram import RamTier
from cachesvc.tiers.tier import Checksums
from cachesvc.v1 import takeover_pb2 as pb

log = logging.getLogger(__name__)
ANSWER_S = 60.0
"""The old daemon ends its fills first, which takes 10 s at most."""
END_S = 10.0
"""How long an old daemon may take to end; after that it is killed."""
LINGER_S = 1.0
"""How long one that has given up its sockets may take to end; readers wait. After that nothing of it is in the way."""


@dataclass(slots=True)
class Adopted:
    """What came from the old daemon; nothing, where it died first. Descriptors belong to whoever takes them."""

    state: Any = field(default_factory=pb.TakeoverState)
    listener: socket.socket | None = None
    extents: list[int] = field(default_factory=list)
    readers: list[int] = field(default_factory=list)
    locks: list[int] = field(default_factory=list)

    def lost(self, path: str) -> bool:
        """Whether the old daemon had given up a cache directory."""
        return any(each.lost for each in self.state.directories if each.path == path)

    def mounted(self, path: str) -> bool | None:
        """Whether a disk of its own is mounted there, or was; None where the old daemon did not say so."""
        return path in self.state.mounted or None

    def locks_of(self, path: str) -> list[int]:
        """New descriptors of a cache directory's locks. Where the old daemon names no such path, it may call it
        otherwise: all that are not another's that is lost, since to look at that may hang."""
        left = iter(self.locks)
        of = {each.path: list(islice(left, each.locks)) for each in self.state.directories}
        others = [*left, *(fd for each in of for fd in of[each] if not self.lost(each))]
        return [os.dup(fd) for fd in of.get(path, others)]


class Predecessor:
    """A daemon that serves where we are to serve. Until `adopted` it goes on when we end."""

    def __init__(self, channel: socket.socket, process: Process, offer: Any, lock: int) -> None:
        self._channel = channel
        self._process = process
        self._offer = offer
        self._unreadable: dict[str, CorruptData] = {}
        self.lock = lock
        """Shared with it: of the directory with the sockets."""

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    @property
    def addresses(self) -> list[str]:
        """HOST:PORT each: what it gives up when it ends."""
        return list(self._offer.addresses)

    def prepare(self, datasets: Datasets) -> None:
        """Load what it has loaded, while it still serves."""
        loading = [(wanted, datasets.load(DatasetId(wanted))) for wanted in self._offer.datasets]
        for wanted, future in loading:
            try:
                datasets.admit(future.result())
            except CacheError as error:
                log.warning("a dataset is not taken over", extra={"dataset": wanted, "error": str(error)})
                if isinstance(error, CorruptData):  # of another release, perhaps
                    self._unreadable[wanted] = error

    def hand_over(self) -> Adopted:
        """Bring it to a standstill and receive everything. Raises DaemonUnavailable when it lives and does not,
        InvalidInput where its readers would end in errors."""
        state = pb.TakeoverState()
        try:
            send(self._channel, Word.READY)
            descriptors = receive_state(self._channel, state)
        except (OSError, ValueError) as error:
            self._channel.close()
            if not isinstance(error, ConnectionError) or not self._process.ended(END_S):
                raise DaemonUnavailable(
                    f"the daemon did not hand over ({error}); it goes on, and its log says more"
                ) from None
            log.warning("the old daemon died before it handed over; starting without what it held")
            return Adopted()
        self._check_readable(state)
        first, last = 1 + len(state.extents), 1 + len(state.extents) + len(state.readers)
        return Adopted(
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
        """Tell it that nothing can go wrong any more, and wait for its end: sockets and ports are ours then. Nothing
        to do for one that died before it handed over."""
        if self._channel.fileno() < 0:
            self._process.close()
            return
        try:
            send(self._channel, Word.ADOPTED)
        except OSError:
            log.warning("the old daemon died while it handed over; all that it held is here")
        left = self._left()
        if not self._process.ended(LINGER_S if left else END_S):
            if left:
                log.warning("the old daemon has left, but hangs in a disk; it ends when that answers")
            else:
                log.warning("the old daemon does not end by itself and is killed")
                self._process.kill(END_S)
        self._process.close()
        self._channel.close()

    def _left(self) -> bool:
        """Whether it gives up its sockets, among them the end of our channel, in time."""
        self._channel.settimeout(END_S)
        try:
            return not self._channel.recv(1)
        except TimeoutError:
            return False
        except OSError:
            return True


def meet(directory: str, state_dir: str) -> Predecessor | None:
    """The daemon that serves a directory, if one does. Raises InvalidInput, NotAllowed when it cannot be taken over
    from, DaemonUnavailable when it does not answer."""
    path = f"{directory}/{SOCKET}"
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    channel.settimeout(ANSWER_S)
    try:
        channel.connect(path)
        process = Process(peer_process(channel)[0])
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
                f"the daemon in {directory} did not let itself be taken over; its log says why"
            ) from None
        log.warning("the old daemon died before it handed over; starting without what it held")
        return None


def _greeted(channel: socket.socket, process: Process, directory: str, state_dir: str) -> Predecessor:
    """Raises ConnectionError where it died, or ended the connection."""
    offer = pb.TakeoverOffer()
    try:
        send(channel, Word.HELLO, pb.TakeoverHello(protocol=PROTOCOL, version=cachesvc.__version__))
        log.info("asked the daemon that serves here to hand over", extra={"pid": process.pid})
        (lock,) = receive(channel, Word.OFFER, offer)
    except (TimeoutError, ValueError) as error:
        raise DaemonUnavailable(
            f"the daemon in {directory} does not let itself be taken over ({error}); stop it, or see its log"
        ) from None
    if not offer.refused and offer.state_dir == os.path.realpath(state_dir):
        return Predecessor(channel, process, offer, lock)
    os.close(lock)
    if offer.refused:
        raise InvalidInput(f"the daemon in {directory} cannot be taken over: {offer.refused}; stop it first")
    raise InvalidInput(
        f"the daemon in {directory} keeps its state in {offer.state_dir}; give --state-dir {offer.state_dir}"
    )


def fill_ram(tier: RamTier, budget_bytes: int, adopted: Adopted) -> events.Recovered:
    """Take what the budget holds, of the most useful first; the rest is given up."""
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
    return events.Recovered(tier.name, dict(reversed(fitting)))  # the core wants the oldest first


def restore(adopted: Adopted, runner: Runner) -> None:
    """Go on with the readers: their connections, claims, leases, plans, and what they wait for. Before the loop
    runs."""
    assert runner.grants is not None
    known: dict[int, Dataset] = {}
    for reader, fd in zip(adopted.state.readers, adopted.readers, strict=True):
        dataset = _dataset(reader.dataset, runner.datasets) if reader.welcomed else None
        given = Connection(
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
    told = takeover_state.taken(adopted.state, known.get, grants.job_of, grants.user_of)
    for event in protecting_first(runner.node, told):
        if isinstance(event, events.Planned):
            grants.adopt_plan(event)
        runner.handle(event)
    if adopted.listener is not None:
        extents, readers = len(adopted.state.extents), len(adopted.state.readers)
        log.info("took over", extra={"extents": extents, "readers": readers})


def _dataset(wanted: str, datasets: Datasets) -> Dataset | None:
    try:
        return datasets.admit(datasets.load(DatasetId(wanted)).result())
    except CacheError as error:
        log.warning("a dataset is not taken over", extra={"dataset": wanted, "error": str(error)})
        return None
