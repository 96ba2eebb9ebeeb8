"""`cachesvc events`: print what happened on this node."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from cachesvc import config
from cachesvc.cli import options, output
from cachesvc.client.control import Control
from cachesvc.core.errors import CacheError, DaemonUnavailable
from cachesvc.core.safe_text import printable

if TYPE_CHECKING:
    from cachesvc.daemon.events.event import Event
    from cachesvc.v1 import cachesvc_pb2 as pb

AGAIN_S = 1.0
"""The pause before a follower tries to reach the next daemon."""


@click.command()
@click.option(
    "--follow", "-f", is_flag=True, help="Go on with each new event, across restarts of the daemon."
)
@click.option(
    "--since",
    type=options.DURATION,
    metavar="TIME",
    help="Only events of this last time: 1h, 30m, 2d.  [default: all that are kept]",
)
@options.setting("--state-dir", metavar="DIR", help="The daemon's state directory, where no daemon answers.")
@options.daemon
def events(follow: bool, since: float | None, state_dir: str | None, socket: str | None, json: bool) -> int:
    """Print what happened on this node.

    Openings, prefetches, refusals, errors of sources, lost tiers, restarts. The daemon keeps the latest 4,096, across
    restarts. Where none answers, they are read from its state directory. The daemon's own user sees all events; other
    users see their own, and those without a user or a dataset.
    """
    began = 0.0 if since is None else time.time() - since
    directory = state_dir or config.default_state_dir()
    for event in _followed(socket, began) if follow else _kept(socket, began, directory, json):
        output.report(json, _line(event), {"kind": event.kind, "time": event.time, **event.fields()})
    return 0


def _kept(socket: str | None, began: float, state_dir: str, json: bool) -> Iterator[Event]:
    """Yield the daemon's events, or those in its files where no daemon answers. Raises DaemonUnavailable where there are
    none either, CacheError where the files cannot be read."""
    from cachesvc.daemon.events.journal import read_events

    try:
        with Control(socket) as control:
            yield from map(_event, control.events(began))
    except DaemonUnavailable as error:
        try:
            stored = list(read_events(state_dir))
        except OSError as found:
            raise CacheError(f"the events in {state_dir} cannot be read ({found.strerror})") from None
        if not stored:
            raise
        output.print_notes([f"{error}; these are the events in {state_dir}"], json)
        yield from (event for event in stored if event.time >= began)


def _followed(socket: str | None, began: float) -> Iterator[Event]:
    """Yield events for ever. Raises DaemonUnavailable where no daemon answers at first."""
    answered = False
    while True:
        try:
            with Control(socket) as control:
                answered = bool(control.status())
                for each in control.follow_events(began):
                    began = each.time + 1e-6
                    yield _event(each)
        except DaemonUnavailable:
            if not answered:
                raise
            time.sleep(AGAIN_S)


def _event(message: pb.Event) -> Event:
    from cachesvc.daemon.events.event import Event

    return Event(**{name: getattr(message, name) for name in Event.__struct_fields__})


def _line(event: Event) -> str:
    """Format an event for people."""
    from cachesvc.daemon.events.event import KINDS

    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.time))
    given = event.fields()
    what = event.uri or event.dataset or event.node
    facts = [
        what,
        f"in {event.tier}" if what and event.tier else event.tier,
        f"{event.extents:,} extents" if event.extents else "",
        output.size(event.size_bytes) if event.size_bytes else "",
        *(f"{name} {given[name]}" for name in ("uid", "pid", "job") if name in given),
    ]
    parts = [KINDS.get(event.kind, event.kind), ", ".join(filter(None, facts)), event.error, event.why]
    more = f" ({event.left_out:,} more like it)" if event.left_out else ""
    return printable(f"{at}  {': '.join(filter(None, parts))}{more}")
