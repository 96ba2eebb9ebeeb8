"""`cachesvc bypass`: have the readers of this node read from the source."""

from __future__ import annotations

import click

from cachesvc.cli import options, output
from cachesvc.client.control import Control


@click.command()
@click.argument("switch", type=click.Choice(("on", "off")))
@options.daemon
def bypass(switch: str, socket: str | None, json: bool) -> int:
    """Have this node's readers read from the source directly.

    The switch outlives restarts of the daemon. Readers share the rate CACHESVC_DIRECT_RATE. Those that must not read
    directly (CACHESVC=require) wait, and end with an error that says why. For the daemon's own user and root.
    """
    with Control(socket) as control:
        control.bypass(switch == "on")
    text = "readers read from the source directly" if switch == "on" else "readers read through the cache"
    output.report(json, text, {"event": "bypass", "on": switch == "on"})
    return 0
