"""Pickles what crosses from a worker to its trainer: batches, and errors with their tracebacks."""

from __future__ import annotations

import io
import traceback
from dataclasses import dataclass
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


class _Text(str):
    """A text whose lines stay lines in the text of a KeyError, which shows the repr of its argument."""

    __repr__ = str.__str__


@dataclass(frozen=True, slots=True)
class CaughtError:
    """An error of a worker without its frames, in torch's words. It pickles whatever the error's class: one that does not
    pickle, such as a class that a function defines, becomes RuntimeError."""

    kind: type[BaseException]
    text: str

    @classmethod
    def of(cls, error: BaseException, where: str) -> CaughtError:
        """Return an error that was caught `where`, with its traceback."""
        lines = "".join(traceback.format_exception(error))
        return cls(type(error), f"Caught {type(error).__name__} {where}.\nOriginal {lines}")

    def __reduce__(self) -> tuple[type[CaughtError], tuple[type[BaseException], str]]:
        try:
            pickled(self.kind)
        except Exception:  # noqa: BLE001  a class may raise anything
            return CaughtError, (RuntimeError, self.text)
        return CaughtError, (self.kind, self.text)

    def to_raise(self) -> BaseException:
        """Return an error of the same class; a RuntimeError if the class does not take a text."""
        text = _Text(self.text)
        try:
            return self.kind(text)
        except Exception:  # noqa: BLE001  a class may raise anything
            return RuntimeError(text)
