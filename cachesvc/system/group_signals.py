"""Signals that launchers, schedulers and terminals send to all processes of a job. They tell its trainer to save and end.
The trainer's workers outlive them, so that it can finish its step."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

GROUP_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def outlive_group_signals() -> None:
    """Ignore these signals from now on, in the main thread of a process. Programs that it starts do not: a handler is not
    inherited, as SIG_IGN would be."""
    for number in GROUP_SIGNALS:
        signal.signal(number, stay)
        signal.siginterrupt(number, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)


@contextmanager
def held_back(*, but_ctrl_c: bool = False) -> Iterator[None]:
    """Block the signals in this thread and in the processes that it starts, which unblock them once they ignore them.

    `but_ctrl_c`: leave SIGINT as it is, where starting a process may take long.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(
            signal.SIG_BLOCK, set(GROUP_SIGNALS) - ({signal.SIGINT} if but_ctrl_c else set())
        )
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stay(number: int, frame: FrameType | None) -> None:
    """Do nothing: the signal is meant for the trainer."""
