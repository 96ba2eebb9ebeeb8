"""Gathers batches of fixed-size records by the device itself, out of the memory in which their extents are mapped.

The device computes the order, too, so that the processor does nothing for a sample and copies nothing in host memory.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from cachesvc.core.order.epoch_order import EpochOrder
from loader.datasets.extent_layout import RecordSource
from loader.datasets.samples.records import RecordForm
from loader.datasets.targets import target_sample
from loader.gpu.device_order import DeviceOrder, shifted, upload
from loader.gpu.host_view import host_rows
from loader.gpu.registered_extents import RegisteredExtents, registered_extents
from loader.job.topology import RankShare
from loader.process.latest import Latest
from loader.reading.reader import ExtentReader, Ints

MAX_UNIT = 8
"""Bytes that one thread of the device reads at once, where records are aligned to as much."""
SLAB = 1 << 20
"""Records whose slots are computed at once: some 600 calls of torch, whatever the number, and 80 MiB of the device."""


class GatherDevice(Protocol):
    """A device that reads host memory."""

    device: torch.device

    def register(self, address: int, size_bytes: int) -> None:
        """Let the device read mapped memory at its own address."""
        ...

    def unregister(self, address: int) -> None:
        """Undo `register`."""
        ...

    def working(self, ahead: bool = False) -> AbstractContextManager[None]:
        """Work of the body is queued beside the training stream; waits at the end until the device has done it. Work that
        is done `ahead` does not wait for batches under way."""
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


class _Steps(NamedTuple):
    """The extents that the steps [first, last) may touch."""

    first: int
    last: int
    extents: Ints


@dataclass(frozen=True, slots=True)
class _OfReader:
    """The records and registered extents of one reader. The last record that begins in extent e ends in extent
    `ends_in[e]`."""

    records: HostRecords
    registered: RegisteredExtents
    ends_in: Ints


class _Epoch:
    """One rank's full batches in one epoch."""

    def __init__(
        self, order: EpochOrder, share: RankShare, source: RecordSource, device: torch.device
    ) -> None:
        self.number, self.full_steps = order.epoch, order.full_steps
        self.order = DeviceOrder(order.tables(share.low, share.high), device)
        self.run_first, self.run_shift = upload(source.run_first, device), upload(source.run_shift, device)
        self._plan = order.plan(share.low, share.high, share.accumulate) if source.extents_known else None
        self._latest = _Steps(0, 0, np.empty(0, np.int64))

    def extents(self, step: int, ends_in: Ints) -> Ints:
        """Return the extents that a step may touch; the same array while they do not change."""
        found = self._latest
        if not found.first <= step < found.last:
            found = self._latest = self._steps_at(step, ends_in)
        return found.extents

    def _steps_at(self, step: int, ends_in: Ints) -> _Steps:
        plan = self._plan
        if plan is None:
            return _Steps(0, self.full_steps, np.arange(len(ends_in)))
        begun, ended = plan.first_step <= step, plan.last_step < step
        first = max(plan.first_step[begun].max(initial=0), plan.last_step[ended].max(initial=-1) + 1)
        last = min(
            plan.first_step[~begun].min(initial=self.full_steps),
            plan.last_step[~ended].min(initial=self.full_steps - 1) + 1,
        )
        extents = plan.extent[begun & ~ended]
        spans = [np.arange(low, high + 1) for low, high in zip(extents, ends_in[extents], strict=True)]
        return _Steps(int(first), int(last), np.unique(np.concatenate(spans)))


class RecordGather:
    """Makes full batches of records on a device, without the processor. Threads may share it."""

    def __init__(
        self, source: RecordSource, share: RankShare, device: GatherDevice, limit_bytes: int
    ) -> None:
        """`limit_bytes`: extents of at most this size together are registered."""
        self._source, self._share, self._device, self._limit_bytes = source, share, device, limit_bytes
        self._of_readers, self._epochs = Latest[_OfReader](), Latest[_Epoch]()
        self._slabs = Latest[torch.Tensor]()

    def batch(self, order: EpochOrder, turn: int) -> Any | None:
        """Return the batch of a turn. Returns None, so that the processor makes it, for a partial batch, and if the
        extents that its step may touch are not all in memory or exceed the limit."""
        step, share = turn // self._share.accumulate, self._share
        if step >= order.full_steps:
            return None
        reader = self._source.reader()
        of = self._of_readers.get(reader, lambda: self._of(reader))
        epoch = self._epochs.get(order.epoch, lambda: self._begin(order))
        extents = epoch.extents(step, of.ends_in)
        size_bytes = share.batch_size * self._source.form.record_bytes
        with reader.holding(extents, extents, size_bytes) as is_mapped:
            if not is_mapped:
                return None
            with of.registered.using(extents) as is_registered:
                if not is_registered:
                    return None
                slots = self._slots(epoch, turn)
                with self._device.working():
                    made = _batch_of(self._source.form, of.records.gather(slots))
                    self._slots(epoch, turn + SLAB // 2 // share.batch_size)  # made while the device gathers
                    return made

    def _slots(self, epoch: _Epoch, turn: int) -> torch.Tensor:
        """Return the slots of a batch, on the device; no slots behind the last full batch."""
        share = self._share
        if turn >= epoch.full_steps * share.accumulate:
            return epoch.run_first[:0]
        steps = max(1, SLAB // (share.high - share.low))
        first = turn // share.accumulate // steps * steps
        slab = self._slabs.get((epoch.number, first), lambda: self._slab(epoch, first, first + steps))
        at = (turn - first * share.accumulate) * share.batch_size
        return slab[at : at + share.batch_size]

    def _slab(self, epoch: _Epoch, first: int, last: int) -> torch.Tensor:
        with self._device.working(ahead=True):
            samples = epoch.order.samples(first, min(last, epoch.full_steps))
            return shifted(samples, epoch.run_first, epoch.run_shift)

    def _begin(self, order: EpochOrder) -> _Epoch:
        with self._device.working(ahead=True):
            return _Epoch(order, self._share, self._source, self._device.device)

    def _of(self, reader: ExtentReader) -> _OfReader:
        device = self._device
        records = HostRecords(self._source.form, *reader.space, device.device)
        registered = registered_extents(reader, self._limit_bytes, device.register, device.unregister)
        return _OfReader(records, registered, self._source.ends_in(reader))


def _batch_of(form: RecordForm, records: torch.Tensor) -> Any:
    """Return a batch of gathered records, as `RecordSamples.make` does."""
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
