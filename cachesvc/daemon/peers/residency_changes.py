"""Tells the peer agent what changes of what this node holds, together for one round of the event loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cachesvc.core import events
from cachesvc.core.model import ExtentId
from cachesvc.core.node.node import Node
from cachesvc.daemon.peers import messages
from cachesvc.daemon.peers.lending import Lending

STEP = 1024
"""Extents of one message about residency; together they take 2 ms of the loop's time."""
CHANGES = (
    events.Filled,
    events.FillFailed,
    events.Evicted,
    events.Corrupt,
    events.CommitFailed,
    events.FillAgain,
)


class ResidencyChanges:
    """Runs on the loop's thread. `post` has something run in the loop's next round; `send` sends a message to the agent."""

    def __init__(
        self,
        node: Node,
        lending: Lending,
        post: Callable[[Callable[[], None]], None],
        send: Callable[[messages.ToAgent], object],
    ) -> None:
        self._node, self._lending, self._post, self._send = node, lending, post, send
        self._changes: dict[ExtentId, None] = {}

    def handled(self, event: events.Event) -> None:
        """Note that an event may have changed what this node holds."""
        if isinstance(event, CHANGES):
            changed: Iterable[ExtentId] = (event.extent,)
        elif isinstance(event, (events.Recovered, events.Renewed)):
            changed = event.extents
        elif isinstance(event, (events.TierLost, events.TierBack)):
            changed = self._node.resident_in(event.tier)
        else:
            return
        self.note(changed)

    def note(self, changed: Iterable[ExtentId]) -> None:
        """Note extents that may have come or gone."""
        noted = dict.fromkeys(each for each in changed if self._lending.lends(each))
        if noted and not self._changes:
            self._post(self._tell)
        self._changes.update(noted)

    def _tell(self) -> None:
        """Tell some changes, as things are now, and the others in the next rounds of the loop."""
        changes = [self._changes.popitem()[0] for _ in range(min(STEP, len(self._changes)))]
        if self._changes:
            self._post(self._tell)
        node, filled, dropped = self._node, [], []
        for extent in changes:
            if self._lending.complete_in(extent) is not None:
                filled.append(extent)
            elif node.where(extent) is not None or not node.will_keep(extent):  # it has holes, or is gone
                dropped.append(extent)
        self._send(messages.ResidencyChanged(tuple(filled), tuple(dropped)))
