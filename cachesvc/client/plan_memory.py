"""A reader's plan as memory that the reader hands to the daemon: four columns, one after the other.

extents      uint32 [rows]       indexes, in order of first need
first steps  uint64 [rows]       the step that needs an extent first
last steps   uint64 [rows]       the step after which an extent is not needed again
following    uint32 [more rows]  extents of the next epoch, in order, where that is known
"""

from __future__ import annotations

import fcntl
import os
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cachesvc.core.errors import InvalidInput
from cachesvc.core.model import MAX_EXTENTS
from cachesvc.core.order.epoch_order import Plan

MAX_ROWS = MAX_EXTENTS
_EXTENT_BYTES, _STEP_BYTES = 4, 8


class PlanColumns(NamedTuple):
    """The columns of a plan; all but `following` have one length."""

    extents: Sequence[int]
    first_steps: Sequence[int]
    last_steps: Sequence[int]
    following: Sequence[int]


def write(plan: Plan) -> tuple[int, int, int]:
    """A descriptor of the memory, which the caller closes, and the numbers of rows and of following rows. Raises
    InvalidInput for more than `MAX_ROWS`, OSError without a descriptor or memory for it."""
    following = () if plan.following is None else plan.following
    rows, more = len(plan.extent), len(following)
    if max(rows, more) > MAX_ROWS:
        raise InvalidInput(
            f"a plan has at most {MAX_ROWS:,} extents, not {max(rows, more):,}: raise extent_bytes="
        )
    fd = os.memfd_create("cachesvc-plan", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as memory:
            memory.write(np.asarray(plan.extent, "<u4").tobytes())
            memory.write(np.asarray(plan.first_step, "<u8").tobytes())
            memory.write(np.asarray(plan.last_step, "<u8").tobytes())
            memory.write(np.asarray(following, "<u4").tobytes())
    except BaseException:
        os.close(fd)
        raise
    return fd, rows, more


def read(fd: int, rows: int, more: int) -> PlanColumns:
    """Read a plan from memory that another process wrote; the descriptor stays the caller's. Raises InvalidInput for a
    descriptor that is not memory of exactly that size."""
    size = rows * (_EXTENT_BYTES + 2 * _STEP_BYTES) + more * _EXTENT_BYTES
    if max(rows, more) > MAX_ROWS:
        raise InvalidInput(f"a plan of {max(rows, more):,} rows exceeds the limit of {MAX_ROWS:,}")
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)  # fails for anything but memory, so that no read blocks
        raw = memoryview(os.pread(fd, size + 1, 0))
    except OSError as error:
        raise InvalidInput(f"a plan whose descriptor is not readable memory: {error.strerror}") from None
    if len(raw) != size:
        raise InvalidInput(f"a plan of {len(raw)} bytes, not {size}")
    extents, steps = _EXTENT_BYTES * rows, _STEP_BYTES * rows
    return PlanColumns(
        array("I", raw[:extents].tobytes()),
        array("Q", raw[extents : extents + steps].tobytes()),
        array("Q", raw[extents + steps : extents + 2 * steps].tobytes()),
        array("I", raw[extents + 2 * steps :].tobytes()),
    )
