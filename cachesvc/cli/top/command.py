"""The command: asks the daemon, reads keys and shows screens until `q`."""

from __future__ import annotations

import os
import select
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from cachesvc.cli import options, output
from cachesvc.client.control import Control
from cachesvc.core.errors import CacheError

if TYPE_CHECKING:
    from cachesvc.v1 import cachesvc_pb2 as pb

EVERY_S = 2.0
LOAD = 10
"""The daemon takes at most one part in so many of the time for statuses: one of a million extents takes seconds."""
WIDTH = 80
"""Without a terminal."""


@click.command()
@click.option("--once", is_flag=True, help="Print one screen and end, as without a terminal.")
@click.option("--cluster", is_flag=True, help="Show the members of the cluster, as this node sees them.")
@options.daemon
def top(once: bool, cluster: bool, socket: str | None, json: bool) -> int:
    """Show this node live: tiers, datasets, jobs, fills.

    Keys: Tab, up and down select; s sorts; Enter looks into a dataset or job; c shows the cluster; q ends. Without a
    terminal one screen is printed.
    """
    with Control(socket) as control:
        status = control.status()
        if json:
            output.emit(output.plain(status))
        elif once or not (sys.stdin.isatty() and sys.stdout.isatty()):
            _print(status, cluster)
        else:
            _show(control, status, cluster)
    return 0


def _print(status: pb.StatusReply, cluster: bool) -> None:
    from cachesvc.cli.top import screen

    width = output.terminal_columns() or WIDTH
    with output.written():
        shown = output.console(folded=False)
        for line in screen.once(status, width, cluster):
            shown.print(line, soft_wrap=True)


class Latest:
    """The latest status, asked for by a thread of its own, so that keys work while the daemon hangs."""

    def __init__(self, control: Control, status: pb.StatusReply) -> None:
        self.status, self.note = status, ""
        self.changed, self._changing = os.pipe()
        self._control = control
        threading.Thread(target=self._run, name="statuses", daemon=True).start()

    def _run(self) -> None:
        took_s = 0.0
        while True:
            time.sleep(max(EVERY_S, LOAD * took_s))
            began = time.monotonic()
            try:
                self.status, self.note = self._control.status(), ""
            except CacheError:
                self.note = "no answer: the numbers are old"
            took_s = time.monotonic() - began
            os.write(self._changing, b"1")


def _show(control: Control, status: pb.StatusReply, cluster: bool) -> None:
    from rich.console import Group
    from rich.live import Live

    from cachesvc.cli.top.place import Place, keys_of, pressed
    from cachesvc.cli.top.screen import screen

    latest, place = Latest(control, status), Place(cluster=cluster)
    console = output.console()
    with _keys() as keyboard, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            width, height = console.size
            live.update(Group(*screen(latest.status, place, width, height, latest.note)), refresh=True)
            ready, _, _ = select.select(
                [keyboard, latest.changed], [], [], 1.0
            )  # the size may change meanwhile
            if latest.changed in ready:
                os.read(latest.changed, 1024)
            if keyboard in ready:
                typed = os.read(keyboard, 1024)
                if not typed:  # the terminal is gone
                    return
                for key in keys_of(typed.decode("utf-8", "replace")):
                    following = pressed(place, key, latest.status)
                    if following is None:
                        return
                    place = following


@contextmanager
def _keys() -> Iterator[int]:
    """The terminal's descriptor, which gives each key at once and echoes none until the end."""
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    try:
        tty.setcbreak(keyboard, termios.TCSANOW)
        yield keyboard
    finally:
        termios.tcsetattr(keyboard, termios.TCSANOW, before)
