"""Gathers batches of fixed-size records by the device itself, out of the memory in which their extents are mapped.

The processor uploads 8 bytes a record, its slot; the device reads the record over the bus. Nothing is copied in host
memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch

from loader.datasets.record_form import RecordForm
from loader.datasets.samples import SampleReader
from loader.datasets.targets import target_sample
from loader.gpu.host_view import host_rows
from loader.gpu.registered_extents import RegisteredExtents, registered_extents
from loader.reading.address_range import Bytes
from loader.reading.reader import ExtentReader, Ints

MAX_UNIT = 8
"""Bytes that one thread of the device reads at once, where records are aligned to as much."""


class GatherDevice(Protocol):
    """A device that reads host memory."""

    device: torch.device

    def register(self, address: int, size_bytes: int) -> None:
        """Let the device read mapped memory at its own address."""
        ...

    def unregister(self, address: int) -> None:
        """Undo `register`."""
        ...

    def upload(self, slots: Ints) -> torch.Tensor:
        """Return int64 numbers in device memory."""
        ...

    def working(self) -> AbstractContextManager[None]:
        """Work of the body is queued beside the training stream; waits at the end until the device has done it."""
        ...


class HostRecords:
    """The records of one reader as tensors of a device, by slot."""

    def __init__(self, form: RecordForm, address: int, space_bytes: int, device: torch.device) -> None:
        """`address`, `space_bytes`: of the memory in which extents are mapped."""
        unit = math.gcd(form.stride_bytes, MAX_UNIT)
        wide_bytes = form.record_bytes // unit * unit
        tail_bytes = form.record_bytes - wide_bytes
        rows = max(0, (space_bytes - form.record_bytes) // form.stride_bytes + 1)
        self._parts = []
        self._unit = unit
        if wide_bytes:
            self._parts.append(host_rows(address, rows, form.stride_bytes, wide_bytes, unit, device))
        if tail_bytes:  # the last token of overlapping sequences, for example
            self._unit = math.gcd(tail_bytes, unit)
            at = address + wide_bytes
            self._parts.append(host_rows(at, rows, form.stride_bytes, tail_bytes, self._unit, device))

    def gather(self, slots: torch.Tensor) -> torch.Tensor:
        """Return records by slots, int64 [n] on the device, as [n, record_bytes / unit] integers."""
        kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[self._unit]
        found = [part.index_select(0, slots).view(kind) for part in self._parts]
        return found[0] if len(found) == 1 else torch.cat(found, 1)


class RecordGather:
    """Makes batches of records on a device, those in registered extents without the processor. Threads may share it.

    A batch is gathered by the processor as before when one of its extents is not in memory, or when the extents of
    the samples located together do not fit `limit_bytes`.
    """

    def __init__(
        self, samples: SampleReader, form: RecordForm, device: GatherDevice, limit_bytes: int
    ) -> None:
        self._samples, self._form, self._device, self._limit_bytes = samples, form, device, limit_bytes
        self._of_reader: tuple[ExtentReader, HostRecords, RegisteredExtents] | None = None

    def locate(self, reader: ExtentReader, ids: Ints) -> tuple[Ints, ...]:
        """See `GatherMethod`; the first of the arrays says whether the device is to gather."""
        slots, first, last = self._samples.locate(reader, ids)
        extents = _distinct(first, last)
        fits = sum(reader.place_of(extent)[1] for extent in extents) <= self._limit_bytes
        return np.full(slots.shape, fits, np.int64), slots, first, last

    def make(
        self, reader: ExtentReader, located: tuple[Ints, ...], empty: Callable[[int], Bytes] | None
    ) -> Any:
        """See `GatherMethod`."""
        fits, slots, first, last = located
        batch = self._gather(reader, slots, first, last) if len(fits) and fits[0] else None
        return self._samples.gather_batch(reader, (slots, first, last), empty) if batch is None else batch

    def _gather(self, reader: ExtentReader, slots: Ints, first: Ints, last: Ints) -> Any:
        _, records, registered = self._of(reader)
        with (
            reader.holding(first, last, len(slots) * self._form.record_bytes) as is_mapped,
            registered.using(_distinct(first, last) if is_mapped else ()) as is_registered,
        ):
            if not (is_mapped and is_registered):
                return None
            with self._device.working():
                return _batch_of(self._form, records.gather(self._device.upload(slots)))

    def _of(self, reader: ExtentReader) -> tuple[ExtentReader, HostRecords, RegisteredExtents]:
        found = self._of_reader
        if found is None or found[0] is not reader:
            device = self._device
            records = HostRecords(self._form, *reader.space, device.device)
            registered = registered_extents(reader, self._limit_bytes, device.register, device.unregister)
            found = self._of_reader = reader, records, registered
        return found


def _batch_of(form: RecordForm, records: torch.Tensor) -> Any:
    """Return a batch of gathered records, as `SampleReader.gather_batch` does."""
    rows = records.view(form.stored).view(len(records), *form.shape)
    if form.targets is None:
        return rows if form.out is None else rows.to(form.out)
    inputs, labels = (rows[:, :-1], rows[:, 1:]) if form.targets == "shifted" else (rows, rows)
    assert form.out is not None, "targets have a type"
    batch = target_sample(form.targets, *(_copy(each, form.out) for each in (inputs, labels)))
    return list(batch) if isinstance(batch, tuple) else batch


def _copy(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return contiguous rows of their own memory."""
    return rows.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _distinct(first: Ints, last: Ints) -> list[int]:
    """Return the extents that ranges of at most two extents touch."""
    if not len(first):
        return []
    low = int(first.min())
    used = np.bincount(first - low, minlength=int(last.max()) - low + 1)
    if last is not first:
        used += np.bincount(last - low, minlength=len(used))
    return [low + at for at in np.flatnonzero(used).tolist()]
