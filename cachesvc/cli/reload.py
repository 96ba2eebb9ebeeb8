"""`cachesvc reload`: have the daemon read its settings again."""

from __future__ import annotations

import click

from cachesvc.cli import options, output
from cachesvc.client.control import Control


@click.command()
@options.daemon
def reload(socket: str | None, json: bool) -> int:
    """Have the daemon read its configuration files again.

    It takes allowed prefixes, sources, quotas, budgets of tiers and the level of the log; other settings wait for the next
    start.
    Wrong settings change nothing, and end with the code that `serve` would end with.
    """
    with Control(socket) as control:
        reply = control.reload()
    text = f"changed: {', '.join(reply.taken)}" if reply.taken else "nothing changed"
    if reply.waiting:
        text += f"; needs a restart: {', '.join(reply.waiting)}"
    output.report(json, text, output.plain(reply))
    return 0
