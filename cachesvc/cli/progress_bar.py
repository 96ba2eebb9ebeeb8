"""Shows progress: a bar on a terminal, which is gone at the end; else at most one line a second on stderr, where something
changed; or JSON on stdout. Nothing for one of several nodes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING

from cachesvc.cli import output

if TYPE_CHECKING:
    from rich.progress import Progress

LINE_S = 1.0
"""Interval of lines: often enough to follow, rare enough not to fill a log."""


class ProgressBar(AbstractContextManager["ProgressBar"]):
    """Shows `done` of `total` bytes of one task. `update` may be called at any rate."""

    def __init__(self, title: str, as_json: bool = False, now: Callable[[], float] = time.monotonic) -> None:
        self._title = title
        self._json = as_json
        self._now = now
        self._started = self._shown = now()
        self._first_done: int | None = None
        self._told: tuple[int, int] | None = None
        self._bar: Progress | None = None
        self._quiet = output.is_quiet() or output.is_of_node()

    def __enter__(self) -> ProgressBar:
        if not self._json and not self._quiet and sys.stderr.isatty():
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
                TransferSpeedColumn,
            )

            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                DownloadColumn(binary_units=True),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                console=output.console(to_stderr=True),
                transient=True,
            )
            self._bar.start()
            self._bar.add_task(self._title, total=None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, total: int) -> None:
        """Report that `done` of `total` bytes are done."""
        if self._quiet:
            return
        if self._first_done is None:
            self._first_done = done
        begun = done != self._first_done  # before the first extent is there the rate is unknown, and not 0
        if self._bar is not None:
            task = self._bar.tasks[0]
            if task.total is None:
                # Bytes that were done before this run must not count for its speed.
                self._bar.reset(task.id, total=total, completed=done)
            if begun:
                self._bar.update(task.id, completed=done, total=total)
            return
        now = self._now()
        if now - self._shown < LINE_S or (not self._json and (done, total) == self._told):
            return
        self._shown, self._told = now, (done, total)
        rate = max(0, done - self._first_done) / max(now - self._started, 1e-9)
        if self._json:
            output.emit(
                {
                    "event": self._title,
                    "done_bytes": done,
                    "total_bytes": total,
                    "bytes_per_s": round(rate) if begun else None,
                }
            )
        else:
            sys.stderr.write(self._line(done, total, rate if begun else 0.0))
            sys.stderr.flush()

    def _line(self, done: int, total: int, rate: float) -> str:
        of = f"{self._title}: {output.share(done, total)}, {output.size(done)} of {output.size(total)}"
        left = f", {output.size(rate)}/s, {output.duration((total - done) / rate)} left" if rate > 0 else ""
        return f"{of}{left}\n"
