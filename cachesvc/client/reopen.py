"""Opens a dataset again in a daemon that was started without it (another state directory, a new disk).

The trainer does that, within a second also while it only waits for its workers. Forked workers never call gRPC, so they
wait for the trainer, or read directly.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from cachesvc.client.grants import DaemonGrants
from cachesvc.client.keepalive import start_polling, stop_polling
from cachesvc.client.protocol import Granted, Refused
from cachesvc.core.errors import CacheError, DaemonUnavailable, NotAllowed, NotFound, SourceChanged


class ReopeningGrants:
    """The grants of a daemon that may have forgotten the dataset. Safe to share between threads."""

    def __init__(
        self, daemon: DaemonGrants, open_again: Callable[[], None], may_open: Callable[[], bool]
    ) -> None:
        """`open_again()` has the daemon compile the same version once more; `may_open()` says whether this process may."""
        self._daemon, self._open_again, self._may_open = daemon, open_again, may_open
        self._opening = threading.Lock()
        self._refusal: CacheError | None = None
        start_polling(self)

    def connect(self) -> bool:
        """Connect to a daemon that knows the dataset; True when this made a new connection. Raises DaemonUnavailable,
        and what opening raises: SourceChanged where the source has another version by now."""
        with self._opening:
            try:
                return self._daemon.connect()
            except NotFound as error:
                if not self._may_open():
                    raise DaemonUnavailable(f"{error}: the trainer does that for its workers") from None
            if self._refusal is not None:  # do not list the source again at each poll
                raise self._refusal.with_traceback(None)
            try:
                self._open_again()
            except (NotFound, NotAllowed, SourceChanged) as error:
                self._refusal = error
                raise
            return self._daemon.connect()

    def poll(self) -> None:
        """Connect again where the connection broke. See `Polled`."""
        self.connect()

    def acquire(self, extents: Sequence[int], timeout_s: float) -> list[Granted | Refused]:
        """See `Grants`. Raises what `connect` raises, too."""
        before = self._daemon.token
        try:
            return self._daemon.acquire(extents, timeout_s)
        except NotFound:
            self.connect()
            if self._daemon.token == before:
                raise  # on the same connection, NotFound is about an object of the source
        return self._daemon.acquire(extents, timeout_s)

    def release(self, extents: Sequence[int]) -> None:
        """See `Grants`."""
        self._daemon.release(extents)

    def passed(self, step: int) -> None:
        """See `Grants`."""
        self._daemon.passed(step)

    def close(self) -> None:
        """See `Grants`."""
        stop_polling(self)
        self._daemon.close()
