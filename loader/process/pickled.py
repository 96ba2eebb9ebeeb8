"""Pickles what crosses from a worker to its trainer, in the worker itself: the queue's thread would drop what does not
pickle, and the trainer would wait for ever."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from typing import Any


def pickled(value: Any) -> bytes:
    """Return a value as the queues of multiprocessing send it. Raises whatever the value raises."""
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(value)
    return buffer.getvalue()


def unpickled(data: bytes) -> Any:
    """Return the value, once: shared memory is handed over with it. Raises whatever the value raises."""
    return ForkingPickler.loads(data)


@contextmanager
def sendable_errors() -> Iterator[None]:
    """Raise a RuntimeError in place of an error whose class does not pickle, such as one that a function defines."""
    try:
        yield
    except Exception as error:
        try:
            pickled(type(error))
        except Exception:  # noqa: BLE001  a class may raise anything
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        raise
