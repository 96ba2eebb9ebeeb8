"""Messages of the grants socket: fixed little-endian structs, one in each SOCK_SEQPACKET datagram.

Both ends import this module. A message that does not parse is a protocol error and closes the connection.

    reader -> daemon                           daemon -> reader
    HELLO   magic, dataset (16 bytes), job,    WELCOME  the connection's token, extents in the dataset, bytes that
            features                           each tier may hold
    CATALOG                                    CATALOG  + descriptor (sealed memfd)
    GET     request, extent index              GRANT    request, extent, size, digest of the bytes,
                                               "TIER kept|brief|once [peer] [holes=...]" + descriptor; holes as
                                               `core/holes.py` has them
                                               REFUSED  request, extent: read it elsewhere
                                               FAILED   request, code, message
                                               RECALL   extent index, "wrong" or "room": release it
    RELEASE extent index
    HOLD    extent index, tier: the reader still holds it from before the daemon's restart
    IDENTIFY: the caller reads nothing         WELCOME  the connection's token
    PLAN    rows, rows of the next epoch, "local" or nothing + descriptor (`client/plan_memory.py`): replaces the reader's
            earlier plan. Those of all epochs have the same extents where it is local
    PASSED  step of the reader's plan: everything before `step` has been consumed
    SUSPECT extent index: the granted bytes do not match their checksums
    WAITED  a StallReport (core/stalls.py), every few seconds
    MAKING  work, first block, digests in hex:   PREPARE work, extent index, size + writable descriptor: to a connection
            progress of a prepared extent                whose HELLO offers it, one at a time
    MADE    work, code, message: its end

A reader that identified itself reads parts of objects without a dataset. It names extents by their digests:

    READ    request, offset, size of the    GRANT    request, 0, size, digest, "TIER kept|brief|once BEGIN END AT" +
            object, "ETAG URI"                       descriptor: the object's bytes [BEGIN, END) lie at offset AT of it
    RELEASE digest
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

MAGIC = 0x43534732
MAX_MESSAGE_BYTES = 4096
MAX_TEXT_BYTES = 2048
_HEAD = struct.Struct("<BIQQ16s")
NO_DATASET = bytes(16)
HOLES = "holes="
STEP_BUCKETS = b"\1".ljust(16, b"\0")
"""The `digest` of a WELCOME by a daemon that takes reports with `StallReport.buckets`; it is zero in older releases."""
KNOWS_HOLES, CLAIMS_NOTHING, PREPARES, RESIDENT_ONLY = 1, 2, 4, 8
"""Bits of the `size` of a HELLO. Every reader knows holes since 0.2.0, whose daemons still ask for the bit. One that claims
nothing reads what others prepare from. One that prepares gets PREPARE. With RESIDENT_ONLY an extent that is not resident is
refused, and not fetched."""
DIGESTS_AT_ONCE = 120
"""Digests in a MAKING."""
LOCAL = "local"
WRONG, ROOM = "wrong", "room"
"""Why an extent is recalled: its bytes are wrong, or others need the room."""


class Op(IntEnum):
    """Message kinds, both directions."""

    HELLO = 1
    CATALOG = 2
    GET = 3
    RELEASE = 4
    HOLD = 5
    PASSED = 6
    IDENTIFY = 7
    WAITED = 8
    SUSPECT = 9
    PLAN = 10
    MAKING = 11
    MADE = 12
    READ = 13
    WELCOME = 17
    GRANT = 18
    REFUSED = 19
    FAILED = 20
    RECALL = 21
    PREPARE = 22


_OPS = {int(op): op for op in Op}
_new = tuple.__new__
"""Faster than a named tuple's constructor, which is one more Python call: each grant and its release pass here three
times."""


class Message(NamedTuple):
    """One datagram. `number`: the request (GET, READ and their answers), the work (PREPARE, MAKING, MADE), MAGIC (HELLO,
    IDENTIFY) or a count of rows (PLAN). `value`: the extent index, step, count, first block (MAKING), offset (READ), the
    bytes that an uneven extent takes (MADE), or the number that a job's readers share (HELLO; 0: none). `size`: bytes, the
    features (HELLO), the error code (FAILED, MADE), or the token (WELCOME). `digest`: the dataset (HELLO), or of a granted
    extent's bytes (`Checksums.content`), zero where the daemon does not know it."""

    op: Op
    number: int = 0
    value: int = 0
    size: int = 0
    digest: bytes = NO_DATASET
    text: str = ""


def encode(
    op: Op, number: int = 0, value: int = 0, size: int = 0, digest: bytes = NO_DATASET, text: str = ""
) -> bytes:
    """The datagram of a message's fields. Text is cut to `MAX_TEXT_BYTES`."""
    return _HEAD.pack(op, number, value, size, digest) + text.encode("utf-8", "replace")[:MAX_TEXT_BYTES]


def decode(datagram: bytes) -> Message:
    """The message of a datagram. Raises ValueError for anything that is not one."""
    if len(datagram) < _HEAD.size or len(datagram) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a grants message of {len(datagram)} bytes")
    op, number, value, size, digest = _HEAD.unpack_from(datagram)
    if op not in _OPS:
        raise ValueError(f"a grants message of kind {op}")
    text = datagram[_HEAD.size :].decode("utf-8", "replace")
    return _new(Message, (_OPS[op], number, value, size, digest, text))
