"""Connected readers, and what they are told. A reader that does not read its replies is disconnected."""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cachesvc.core import commands, wire
from cachesvc.core.errors import DaemonUnavailable
from cachesvc.core.model import ExtentId, ReaderId
from cachesvc.core.wire import Message, Op
from cachesvc.daemon.access.tenants import Peer
from cachesvc.daemon.datasets import ServedDataset
from cachesvc.daemon.grants.plan_intake import ReceivedPlan
from cachesvc.system import datagrams

log = logging.getLogger(__name__)


@dataclass(slots=True)
class ConnectedReader:
    """One connection to the grants socket."""

    id: ReaderId
    channel: socket.socket
    peer: Peer
    token: int = field(repr=False)
    """Identifies the caller at the control API. Only this connection is told the token, so it is never logged."""
    gone: bool = False
    greeted: bool = False
    dataset: ServedDataset | None = None
    plan: ReceivedPlan | None = None
    """The plan that is being read. Later messages of this reader wait until that is done."""
    knows_holes: bool = False
    """Its release does not take the bytes of a hole for data."""
    job: int = 0
    """The fair queue's key for its demands: its user and launch. 0: the reader alone."""

    def join_job(self, launch: int) -> None:
        """Join the readers of one job, which send the same `launch`."""
        self.job = (self.peer.uid + 1) << 64 | launch if launch else 0


class Replies:
    """Sends to the readers of a table, without waiting."""

    def __init__(
        self, readers: Mapping[ReaderId, ConnectedReader], lost: Callable[[ConnectedReader], None]
    ) -> None:
        """`lost` is called with a reader whose connection is broken, or whose send buffer is full: that bounds its
        queue."""
        self._readers = readers
        self._lost = lost

    def grant(self, command: commands.Grant, fd: int, holes: str) -> bool:
        """Send a descriptor, which stays the caller's to close. False, and nothing is sent, where the kernel carries no
        more descriptors, or the extent has holes and the reader's release does not know them."""
        reader = self._readers.get(command.reader)
        if reader is None or reader.dataset is None:
            return True
        if holes and not reader.knows_holes:
            return False
        dataset, extent = reader.dataset, command.extent
        index = dataset.index_of[extent]
        more = " peer" * command.from_peer + (f" {wire.HOLES}{holes}" if holes else "")
        text = f"{command.tier} {command.stay}{more}"
        message = wire.encode(Op.GRANT, command.request, index, dataset.sizes[index], extent, text)
        return self.send(reader, message, fd)

    def recall(self, to: ReaderId, extent: ExtentId, wrong: bool) -> None:
        """Ask for the release of a granted extent."""
        self._about(to, Op.RECALL, 0, extent, text=wire.WRONG if wrong else wire.ROOM)

    def refuse(self, to: ReaderId, request: int, extent: ExtentId) -> None:
        """Tell a reader to read an extent elsewhere."""
        self._about(to, Op.REFUSED, request, extent)

    def fail(self, to: ReaderId, request: int, extent: ExtentId, code: int, message: str) -> None:
        """Tell a reader why it cannot have an extent."""
        self._about(to, Op.FAILED, request, extent, code, message)

    def catalog(self, reader: ConnectedReader, message: Message) -> None:
        """Send the catalog of a reader's dataset."""
        assert reader.dataset is not None
        if not self.send(reader, wire.encode(Op.CATALOG, message.number), reader.dataset.catalog_fd):
            text = "too many descriptors that readers have not taken are under way; try again"
            self.send(reader, wire.encode(Op.FAILED, message.number, 0, DaemonUnavailable.code, text=text))

    def send(self, reader: ConnectedReader, message: bytes, fd: int | None = None) -> bool:
        """Send one message. False where the kernel carries no more of the daemon's descriptors."""
        try:
            datagrams.send(reader.channel, message, fd)
        except OSError as error:
            if error.errno == errno.ETOOMANYREFS:
                return False
            self._lost(reader)
        return True

    def _about(
        self, to: ReaderId, op: Op, request: int, extent: ExtentId, code: int = 0, text: str = ""
    ) -> None:
        reader = self._readers.get(to)
        if reader is not None and reader.dataset is not None:
            index = reader.dataset.index_of[extent]
            self.send(reader, wire.encode(op, request, index, code, extent, text))
