"""Sequences of calls whose results come later, written as generators that yield one step after the other.

A step's result comes back as the value of its `yield`, an error is raised there. So what happens in steps to one thing
reads from top to bottom, and its `with` and `finally` blocks release what it holds, however it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from cachesvc.core.errors import CacheError

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Step(Generic[_T]):
    """A call. `begin(then, otherwise)` makes it and later calls one of the two once, perhaps before it returns.

    `discard` releases a result that comes after the sequence was cancelled: a call under way ends on its own thread.
    """

    begin: Callable[[Callable[[_T], None], Callable[[CacheError], None]], None]
    discard: Callable[[_T], None] = lambda _: None


Steps: TypeAlias = Generator[Step[Any], Any, _T]


class Sequence:
    """Drives one generator of steps. Runs on the loop's thread."""

    def __init__(self, steps: Steps[None], ended: Callable[[], None] = lambda: None) -> None:
        """`ended` is called when the generator has returned, not when it is cancelled. An error that it does not handle is
        a programming error."""
        self._steps = steps
        self._ended = ended
        self._cancelled = False

    def start(self) -> None:
        """Run up to the first step that waits."""
        self._go_on(lambda: next(self._steps))

    def cancel(self) -> None:
        """End the generator at the step under way, whose result is discarded when it comes."""
        self._cancelled = True
        self._steps.close()

    def _go_on(self, run: Callable[[], Step[Any]]) -> None:
        try:
            step = run()
        except StopIteration:
            self._ended()
            return

        def then(result: object) -> None:
            if self._cancelled:
                step.discard(result)
            else:
                self._go_on(lambda: self._steps.send(result))

        def otherwise(error: CacheError) -> None:
            if not self._cancelled:
                self._go_on(lambda: self._steps.throw(error))

        step.begin(then, otherwise)
