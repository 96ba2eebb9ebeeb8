"""Descriptors that readers were sent and have not taken.

The kernel counts them by sender and carries no more of them than its limit of open files (to one without
CAP_SYS_RESOURCE), and they stay until their reader takes them or closes its end, whatever becomes of ours. So a user
has no more than twice what it leaves free (see `daemon/control/call_quota.py`; dynamic thresholds: Choudhury and Hahne,
IEEE/ACM Transactions on Networking 6(2), 1998)."""

from __future__ import annotations

import fcntl
import socket
import struct
import termios
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import islice

from cachesvc.core.model import ReaderId
from cachesvc.daemon.grants.readers import Reader

LEAST_BYTES = 768
"""What the kernel counts for the smallest datagram."""
LOOKS = 16
"""Readers looked at in one go: 10 us."""
_INT = struct.Struct("i")


class Unread:
    """How many each user has. Who leaves before it has taken its own is closed when it has: nobody could count them
    then."""

    def __init__(self, most: int, end: Callable[[Reader], None]) -> None:
        """`most`: the limit of open files. `end` closes the socket of a reader that left."""
        self._most = most
        self._end = end
        self._by_user: Counter[int] = Counter()
        self._have: dict[int, dict[ReaderId, Reader]] = {}
        """By user, those that may have some; who was looked at last is the last."""
        self._left: dict[ReaderId, Reader] = {}

    def may_send(self, reader: Reader) -> bool:
        """Whether one more may be under way to a reader's user."""
        user = reader.peer.uid
        if self._admits(user):
            return True
        # Who is counted with the most may have taken them, and said nothing since.
        for each in (user, max(self._by_user, key=self._by_user.__getitem__, default=user)):
            self._look_at_some(self._have.get(each, {}))
        return self._admits(user)

    def sent(self, reader: Reader, count: int = 1) -> None:
        """So many more are under way."""
        user = reader.peer.uid
        reader.unread += count
        self._by_user[user] += count
        self._have.setdefault(user, {})[reader.id] = reader

    def adopt(self, reader: Reader) -> None:
        """Another daemon may have sent it some."""
        self.sent(reader, -(-_unread_bytes(reader.channel) // LEAST_BYTES))

    def look(self, reader: Reader) -> None:
        """Count again: who has read all that it was sent has taken them."""
        if reader.unread and not _unread_bytes(reader.channel):
            self.taken(reader)

    def taken(self, reader: Reader) -> None:
        """It has taken them, or is dead."""
        user = reader.peer.uid
        self._by_user[user] -= reader.unread
        reader.unread = 0
        self._have.get(user, {}).pop(reader.id, None)
        if not self._by_user[user]:
            del self._by_user[user]
            self._have.pop(user, None)
        if self._left.pop(reader.id, None):
            self._end(reader)

    def leave(self, reader: Reader) -> None:
        """End its connection, now or when it has taken what it was sent."""
        self._look_at_some(self._left)
        self.look(reader)
        if not reader.unread:
            self._end(reader)
            return
        self._left[reader.id] = reader
        with suppress(OSError):  # it did so itself
            reader.channel.shutdown(socket.SHUT_RDWR)

    def held(self, user: int) -> int:
        """Connections of a user that ended, and are open for what it has not taken."""
        return sum(reader.peer.uid == user for reader in self._left.values())

    def count(self) -> int:
        """Of all users."""
        self._look_at_some(self._left)
        return len(self._left)

    def close(self) -> None:
        """Nobody counts any more."""
        for reader in list(self._left.values()):
            self.taken(reader)

    def _admits(self, user: int) -> bool:
        return self._by_user[user] < 2 * (self._most - self._by_user.total())

    def _look_at_some(self, readers: dict[ReaderId, Reader]) -> None:
        for number in list(islice(readers, LOOKS)):
            readers[number] = reader = readers.pop(number)
            self.look(reader)


def _unread_bytes(channel: socket.socket) -> int:
    """What was sent and not read, as the kernel counts it (SIOCOUTQ)."""
    return int(_INT.unpack(fcntl.ioctl(channel, termios.TIOCOUTQ, bytes(_INT.size)))[0])
