"""Copies batches to a CUDA device ahead of their use, from pinned memory on a side stream.

Order of events: the copy is queued on the side stream, followed by an event. The training stream waits for that
event; the processor does not. The device memory is marked as used by the training stream (record_stream). The
pinned memory is kept until the event has occurred.
"""

from __future__ import annotations

import copy
import threading
from collections import UserList, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch.nn.utils.rnn import PackedSequence

from loader.datasets.decoding.encoded_images import EncodedImages
from loader.gpu.cuda_driver import leave_captures_alone, register_host, unregister_host
from loader.gpu.image_decoder import ImageDecoder
from loader.reading.address_range import Bytes


@dataclass(frozen=True, slots=True)
class DeviceTransfer:
    """A batch under way to the device: usable once `event` has occurred."""

    batch: Any
    event: torch.cuda.Event


class DeviceMover:
    """Copies batches to one device. Several threads may call `send`; the trainer's thread calls `receive`."""

    def __init__(
        self, device: torch.device, images: Callable[[torch.device], ImageDecoder] | None = None
    ) -> None:
        """A device without a number is the current one of this thread. `images` makes the decoder of images that
        arrive encoded."""
        self.device = torch.device(
            "cuda", torch.cuda.current_device() if device.index is None else device.index
        )
        self._stream = torch.cuda.Stream(self.device)
        self._ahead = torch.cuda.Stream(self.device)
        self._images = images(self.device) if images is not None else None
        self._in_flight: deque[tuple[torch.cuda.Event, Any]] = deque()
        self._lock = threading.Lock()

    def empty(self, size_bytes: int) -> Bytes:
        """Return pinned memory to build a batch in."""
        found: Bytes = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True).numpy()
        return found

    def begin_thread(self) -> None:
        """Prepare a thread that calls `send` or works on the device. Raises CudaError."""
        leave_captures_alone()

    @contextmanager
    def working(self, ahead: bool = False) -> Iterator[None]:
        """See `GatherDevice`."""
        stream = self._ahead if ahead else self._stream
        with torch.cuda.stream(stream):
            yield
            event = torch.cuda.Event(blocking=True)
            event.record(stream)
        event.synchronize()

    register = staticmethod(register_host)
    unregister = staticmethod(unregister_host)

    def send(self, batch: Any) -> DeviceTransfer:
        """Queue the copy of every tensor in a batch, and decode its encoded images. Raises UndecodableImage."""
        if self._images is not None:
            with torch.cuda.stream(self._stream):
                batch = each_value(EncodedImages, batch, self._images.decode)
        pinned = each_tensor(batch, _pinned)
        with self._lock, torch.cuda.stream(self._stream):
            moved = each_tensor(pinned, lambda tensor: tensor.to(self.device, non_blocking=True))
            event = torch.cuda.Event()
            event.record(self._stream)
            while self._in_flight and self._in_flight[0][0].query():
                self._in_flight.popleft()
            self._in_flight.append((event, pinned))
        return DeviceTransfer(moved, event)

    def receive(self, transfer: DeviceTransfer) -> Any:
        """Return the batch for use on the current stream."""
        current = torch.cuda.current_stream(self.device)
        current.wait_event(transfer.event)

        def used(tensor: torch.Tensor) -> torch.Tensor:
            tensor.record_stream(current)
            return tensor

        return each_tensor(transfer.batch, used)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of pinned memory, or the tensor itself where it is pinned or on a device already."""
    return tensor if tensor.device.type != "cpu" or tensor.is_pinned() else tensor.pin_memory()


@runtime_checkable
class Pinnable(Protocol):
    """A tensor, or a batch of a user's own class."""

    def pin_memory(self) -> Any:
        """Return a copy in pinned memory."""
        ...


def pinned(batch: Any) -> Any:
    """Return a batch in pinned memory, as torch's `pin_memory=True` does."""
    return each_value(Pinnable, batch, lambda value: value.pin_memory())


def each_tensor(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a batch with `change` applied to every tensor; see `each_value`."""
    return each_value(torch.Tensor, batch, change)


def each_value(kind: type, batch: Any, change: Callable[[Any], Any]) -> Any:
    """Return a batch with `change` applied to every value of a kind in its tuples, lists and mappings. Other values are
    kept."""
    if isinstance(batch, kind):
        return change(batch)
    if isinstance(batch, PackedSequence):  # its batch_sizes must stay in CPU memory
        return PackedSequence(
            *(each if each is batch.batch_sizes else each_value(kind, each, change) for each in batch)
        )
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(each_value(kind, each, change) for each in batch))
    if isinstance(batch, tuple):
        return type(batch)(each_value(kind, each, change) for each in batch)
    if isinstance(batch, (list, UserList)):
        found = copy.copy(batch)
        found[:] = [each_value(kind, each, change) for each in batch]
        return found
    if isinstance(batch, Mapping):
        changed = {name: each_value(kind, each, change) for name, each in batch.items()}
        return changed if type(batch) is dict else _updated_copy(batch, changed)
    return batch


def _updated_copy(mapping: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """Return a copy of a user-defined mapping (a tokenizer's batch, say) with these values, as torch's pinning
    does. Returns the plain dict where the mapping cannot be changed."""
    if not isinstance(mapping, MutableMapping):
        return values
    found = copy.copy(mapping)
    found.update(values)
    return found
