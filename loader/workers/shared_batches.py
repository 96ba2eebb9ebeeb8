"""Hands batches of worker processes over in shared memory: only their place crosses the pipe.

One anonymous file holds a few slots per worker. The worker builds a batch in a free slot. The trainer's tensors are
views of the slot, which becomes free when the last view dies, so a batch that the user keeps is never overwritten.
If no slot is free, because the user keeps batches, torch's own pickling sends a batch through the pipe. The file has no
name and disappears with its processes. A forked child of the trainer sees its parent's batches as long as the
parent keeps them.

A slot's state is one byte, written by one side at a time: FREE -> SENT by the worker, SENT -> HELD -> FREE by the
trainer. Slots that an abandoned iteration left SENT are freed by the worker when the first batch of the next run is
requested: the trainer has then dropped everything of the run before.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from loader.process.pickled import pickled, unpickled
from loader.reading.address_range import Bytes

SLOT_BYTES = 1 << 30
"""Address space of a slot in a sparse file; memory is used as far as batches reach. Larger batches go through the
pipe."""
EXTRA_SLOTS = 3
"""Besides the prefetched batches: the batch in use, the previous one, and the one being built."""
ALIGNED = 64
INLINE_BYTES = 4096
"""What is pickled of a batch goes through the pipe up to this size, and through the slot beyond it: a worker that fills a
pipe waits for the trainer."""
FREE, SENT, HELD = 0, 1, 2
IDLE, NOTHING = 1 << 62, -1
MAX_DEADLY = 64
"""Samples that may end workers. Data with more of them is not read."""

_arenas: weakref.WeakValueDictionary[int, Arena] = weakref.WeakValueDictionary()
_tokens = count()


class Arena:
    """The slots of all workers of one loader. The trainer makes it; a worker inherits it or unpickles it."""

    def __init__(self, workers: int, prefetch_factor: int) -> None:
        self._workers, self._each = workers, prefetch_factor + EXTRA_SLOTS
        self._slots = workers * self._each
        self.token = next(_tokens)
        self._open(os.memfd_create("cachesvc-batches", os.MFD_CLOEXEC))
        self._turns[:], self._samples[:], self._deadly[:] = IDLE, NOTHING, NOTHING
        _arenas[self.token] = self

    def __getstate__(self) -> tuple[int, int, int, int, Any]:
        return self._workers, self._each, self._slots, self.token, DupFd(self._fd)

    def __setstate__(self, state: tuple[int, int, int, int, Any]) -> None:
        self._workers, self._each, self._slots, self.token, fd = state
        self._open(fd.detach())

    def _open(self, fd: int) -> None:
        self._fd = fd
        weakref.finalize(self, os.close, fd)
        numbers_at, numbers = -(-self._slots // ALIGNED) * ALIGNED, 1 + 2 * self._workers + MAX_DEADLY
        self._first = -(-(numbers_at + 8 * numbers) // mmap.PAGESIZE) * mmap.PAGESIZE
        size = self._first + self._slots * SLOT_BYTES
        os.ftruncate(fd, size)
        self._memory = mmap.mmap(fd, size)
        self._states = np.frombuffer(self._memory, np.uint8, self._slots)
        found = np.frombuffer(self._memory, np.int64, numbers, numbers_at)
        cuts = 1, 1 + self._workers, 1 + 2 * self._workers
        self._runs, self._turns, self._samples, self._deadly = np.split(found, cuts)

    def begin_run(self, run: int) -> None:
        """Note, in the trainer, that requests of earlier runs are not to be answered."""
        self._runs[0] = run

    def runs(self, run: int) -> bool:
        """Tell, in a worker, whether a request's run goes on."""
        return bool(self._runs[0] == run)

    def begin(self, worker: int, turn: int) -> None:
        """Note, in a worker, which turn it makes now."""
        self._samples[worker] = NOTHING
        self._turns[worker] = turn

    def begin_sample(self, worker: int, sample: int) -> None:
        """Note, in a worker, which sample of its turn it makes now."""
        self._samples[worker] = sample

    def end(self, worker: int) -> None:
        """Note, in a worker, that it makes nothing now."""
        self._turns[worker] = IDLE

    def maker_of(self, turn: int) -> int:
        """Return the worker that makes a turn, or the one that began longest ago where none does yet."""
        return int(np.argmin(np.where(self._turns == turn, -1, self._turns)))

    def making(self, worker: int) -> tuple[int | None, int | None]:
        """Return the turn that a worker makes, or made when it died, and the sample if that is known."""
        turn, sample = int(self._turns[worker]), int(self._samples[worker])
        if turn == IDLE:
            return None, None
        return turn, None if sample == NOTHING else sample

    def deadly(self) -> npt.NDArray[np.int64]:
        """Return the samples that end workers, [count]."""
        return self._deadly[: np.count_nonzero(self._deadly != NOTHING)]

    def add_deadly(self, sample: int) -> bool:
        """Note, in the trainer, that a sample ends workers. Returns False where there is room for no more."""
        known = len(self.deadly())
        if known == MAX_DEADLY:
            return False
        self._deadly[known] = sample
        return True

    def slots_of(self, worker: int) -> range:
        """Return the slots of one worker."""
        return range(worker * self._each, (worker + 1) * self._each)

    def take_back(self, worker: int) -> None:
        """Free the slots, in a worker when a new run begins, that will not be opened any more."""
        own = self._states[self.slots_of(worker).start : self.slots_of(worker).stop]
        own[own == SENT] = FREE

    def free_slot(self, worker: int) -> Slot | None:
        """Return a free slot, in a worker, or None. It is the lowest one, so that memory in use is used again."""
        for slot in self.slots_of(worker):
            if self._states[slot] == FREE:
                start = self._first + slot * SLOT_BYTES
                return Slot(slot, np.frombuffer(self._memory, np.uint8, SLOT_BYTES, start))
        return None

    def send(self, batch: Any, slot: Slot | None) -> SentBatch:
        """Hand a batch over to the trainer, in a worker, with the slot in which it was built. Raises what pickling it
        raises."""
        if slot is None:
            return SentBatch([pickled(batch)])
        packed = pack_into_slot(batch, slot)
        tree = [pickled(packed if slot.used else batch)]
        if len(tree[0]) > INLINE_BYTES:
            tree = pack_into_slot(tree, slot)
        if not slot.used:
            return SentBatch(tree)
        sent = SentBatch(tree, (self.token, slot.number, slot.used))
        self._states[slot.number] = SENT
        return sent

    def lease(self, slot: int, size_bytes: int) -> Bytes:
        """Return the bytes in a slot, in the trainer. The slot becomes free when the last view of them dies."""
        self._states[slot] = HELD
        view = np.frombuffer(self._memory, np.uint8, size_bytes, self._first + slot * SLOT_BYTES)
        weakref.finalize(view, _free, self._states, slot, os.getpid()).atexit = False
        return view


def _free(states: Bytes, slot: int, process: int) -> None:
    if os.getpid() == process:  # a forked child has the same views: its parent may still use them
        states[slot] = FREE


class Slot:
    """Memory in which a worker builds one batch."""

    def __init__(self, number: int, memory: Bytes) -> None:
        self.number, self._memory = number, memory
        self._home = memory.ctypes.data
        self.used = 0

    def empty(self, size_bytes: int) -> Bytes:
        """Return new bytes in the slot, or elsewhere if they do not fit."""
        start = -(-self.used // ALIGNED) * ALIGNED
        if start + size_bytes > len(self._memory):
            return np.empty(size_bytes, np.uint8)
        self.used = start + size_bytes
        return self._memory[start : self.used]

    def place(self, address: int, size_bytes: int) -> int | None:
        """Return the offset of memory in the slot; None for memory elsewhere."""
        offset = address - self._home
        return offset if offset >= 0 and offset + size_bytes <= self.used else None


@dataclass(frozen=True, slots=True)
class SentBatch:
    """The message that crosses the pipe: the structure of a batch, pickled, in a list of one that may be packed itself, and
    the place of its memory: the token of its arena, a slot and the bytes in it. None for a batch without such memory."""

    tree: Any
    place: tuple[int, int, int] | None = None

    @property
    def size_bytes(self) -> int:
        """The bytes in a slot."""
        return self.place[2] if self.place is not None else 0

    def open(self) -> Any:
        """Return the batch, in the trainer, once. Its tensors are views of the slot. Raises what unpickling it raises."""
        if self.place is None:
            return unpickled(self.tree[0])
        token, slot, size_bytes = self.place
        memory = _arenas[token].lease(slot, size_bytes)
        (tree,) = _unpacked(self.tree, memory)
        return _unpacked(unpickled(tree), memory)


@dataclass(frozen=True, slots=True)
class _TensorAt:
    offset: int
    size_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def open(self, memory: Bytes) -> torch.Tensor:
        raw = torch.from_numpy(memory[self.offset : self.offset + self.size_bytes])
        return raw.view(self.dtype).as_strided(self.shape, self.strides)


@dataclass(frozen=True, slots=True)
class _ArrayAt:
    offset: int
    size_bytes: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def open(self, memory: Bytes) -> np.ndarray[Any, Any]:
        return memory[self.offset : self.offset + self.size_bytes].view(self.dtype).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class _BytesAt:
    """A list or tuple of bytes objects, stored back to back."""

    offset: int
    sizes: tuple[int, ...]
    kind: type[list[bytes]] | type[tuple[bytes, ...]]

    def open(self, memory: Bytes) -> Sequence[bytes]:
        return self.kind(self._cut(memory.data))

    def _cut(self, memory: memoryview) -> Iterator[bytes]:
        at = self.offset
        for size in self.sizes:
            yield bytes(memory[at : at + size])
            at += size


def pack_into_slot(value: Any, slot: Slot) -> Any:
    """Return the batch with its tensors, arrays and lists of bytes placed in the slot. Other values are kept."""
    kind = type(value)
    if kind is torch.Tensor:
        return _tensor_in(value, slot)
    if kind is np.ndarray:
        return _array_in(value, slot)
    if kind in (list, tuple) and value and all(type(each) is bytes for each in value):
        return _bytes_in(value, slot)
    return _with_parts(value, lambda each: pack_into_slot(each, slot))


def _unpacked(tree: Any, memory: Bytes) -> Any:
    """Reverse `pack_into_slot`."""
    if type(tree) in (_TensorAt, _ArrayAt, _BytesAt):
        return tree.open(memory)
    return _with_parts(tree, lambda each: _unpacked(each, memory))


def _with_parts(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a dict, list or tuple with its parts changed; another value as it is."""
    kind = type(value)
    if kind is dict:
        return {name: change(each) for name, each in value.items()}
    if kind is list or kind is tuple:
        return kind(map(change, value))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*map(change, value))
    return value


def _tensor_in(value: torch.Tensor, slot: Slot) -> Any:
    plain = value.device.type == "cpu" and value.layout == torch.strided
    plain = plain and not (value.is_quantized or value.is_nested)
    if not plain or value.requires_grad or value.is_conj() or value.is_neg() or not value.numel():
        return value
    size = value.numel() * value.element_size()
    strides = _strides(value)
    at = slot.place(value.data_ptr(), size) if value.is_contiguous() else None
    if at is None:
        memory = slot.empty(size)
        at = slot.place(memory.ctypes.data, size)
        if at is None:
            return value
        stored = torch.from_numpy(memory).view(value.dtype).as_strided(value.shape, strides)
        stored.copy_(value)
    return _TensorAt(at, size, value.dtype, tuple(value.shape), strides)


def _strides(value: torch.Tensor) -> tuple[int, ...]:
    """Return the tensor's own strides if its elements are dense in some order of dimensions (channels last, for
    example), otherwise contiguous strides."""
    if value.is_contiguous():
        return tuple(value.stride())
    outer_first = sorted(range(value.dim()), key=value.stride, reverse=True)
    dense = value.permute(outer_first).is_contiguous()
    return tuple(value.stride()) if dense else torch.empty(value.shape, device="meta").stride()


def _array_in(value: np.ndarray[Any, Any], slot: Slot) -> Any:
    if value.dtype.hasobject or not value.size:
        return value
    memory = slot.empty(value.nbytes)
    at = slot.place(memory.ctypes.data, value.nbytes)
    if at is None:
        return value
    memory.view(value.dtype).reshape(value.shape)[...] = value
    return _ArrayAt(at, value.nbytes, value.dtype, value.shape)


def _bytes_in(values: list[bytes] | tuple[bytes, ...], slot: Slot) -> Any:
    sizes = tuple(map(len, values))
    memory = slot.empty(sum(sizes))
    at = slot.place(memory.ctypes.data, len(memory))
    if at is None:
        return values
    target, end = memory.data, 0
    for value, size in zip(values, sizes, strict=True):
        target[end : end + size] = value
        end += size
    return _BytesAt(at, sizes, type(values))
