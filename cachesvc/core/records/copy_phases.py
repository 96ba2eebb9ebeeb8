"""The life of a copy: an extent's bytes in one tier. `TRANSITIONS` holds every move; `Copies.move` makes and asserts it.

An extent has one copy, or two while RAM reads ahead of NVMe.

- A fill begins when its bytes are reserved. They stay reserved until the executor answers.
- `FILLED` grants the extent to every waiter. `FILL_FAILED` frees the bytes: waiters wait for a retry, get `Fail`, or,
  where the tier failed, are placed elsewhere or get `Refuse`.
- A lease begins in the same step as the demand that it answers. It ends with `Released`, `ReaderGone` or `NotGranted`.
- A copy that is corrupt, has holes that may be filled now, or could not be committed has `EVICTION_DUE`: it is never
  granted again, and evicted as soon as it is idle.
- Only idle copies are evicted. Their bytes are free after `Evicted`, not before.
- A lost tier that comes back with another directory drops all its copies.
"""

from __future__ import annotations

from enum import IntEnum


class Phase(IntEnum):
    """The phase of a copy's life. An absent copy has no record, or has just left the records."""

    ABSENT = 0
    FILLING = 1
    RESIDENT = 2
    EVICTING = 3


class CopyEvent(IntEnum):
    """An event of one copy."""

    RESERVED = 1
    RECOVERED = 2
    FILLED = 3
    FILL_FAILED = 4
    LEASED = 5
    LEASE_ENDED = 6
    EVICTION_DUE = 7
    EVICTION_BEGUN = 8
    EVICTED = 9
    DIRECTORY_REPLACED = 10


TRANSITIONS: dict[tuple[Phase, CopyEvent], Phase] = {
    (Phase.ABSENT, CopyEvent.RESERVED): Phase.FILLING,
    (Phase.ABSENT, CopyEvent.RECOVERED): Phase.RESIDENT,
    (Phase.FILLING, CopyEvent.FILLED): Phase.RESIDENT,
    (Phase.FILLING, CopyEvent.FILL_FAILED): Phase.ABSENT,
    (Phase.RESIDENT, CopyEvent.LEASED): Phase.RESIDENT,
    (Phase.RESIDENT, CopyEvent.LEASE_ENDED): Phase.RESIDENT,
    (Phase.RESIDENT, CopyEvent.EVICTION_DUE): Phase.RESIDENT,
    (Phase.RESIDENT, CopyEvent.EVICTION_BEGUN): Phase.EVICTING,
    (Phase.RESIDENT, CopyEvent.DIRECTORY_REPLACED): Phase.ABSENT,
    (Phase.EVICTING, CopyEvent.EVICTED): Phase.ABSENT,
    (Phase.EVICTING, CopyEvent.DIRECTORY_REPLACED): Phase.ABSENT,
}
