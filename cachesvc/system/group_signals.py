"""Signals that launchers, schedulers and terminals send to all processes of a job. They tell its trainer to save and end.
The trainer's workers outlive them, so that it can finish its step."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

GROUP_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_HELD_BACK = frozenset(GROUP_SIGNALS) - {signal.SIGINT}
"""Ctrl-C stays possible while a process starts its workers."""


def outlive_group_signals() -> None:
    """Ignore these signals from now on, in the main thread of a process. Programs that it starts do not: a handler is not
    inherited, as SIG_IGN would be."""
    for number in GROUP_SIGNALS:
        signal.signal(number, stay)
        signal.siginterrupt(number, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)


@contextmanager
def held_back() -> Iterator[None]:
    """Block the signals in this thread and in the processes that it starts, which unblock them once they ignore them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stay(number: int, frame: FrameType | None) -> None:
    """Do nothing: the signal is meant for the trainer."""
