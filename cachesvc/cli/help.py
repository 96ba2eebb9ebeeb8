"""`cachesvc help`: show the help of a verb."""

from __future__ import annotations

import click

from cachesvc.cli import output


@click.command("help")
@click.argument("verb", required=False)
@click.option("--json", is_flag=True, help="Print JSON, one object a line.")
@click.pass_context
def show_help(context: click.Context, verb: str | None, json: bool) -> None:
    """Show the help of a verb, or this page."""
    root = context.find_root()
    assert isinstance(root.command, click.Group), "verbs are of a group"
    found = root.command if verb is None else root.command.get_command(root, verb)
    if found is None:
        raise click.UsageError(f"No such command {verb!r}.", root)
    inner = root if verb is None else click.Context(found, info_name=verb, parent=root)
    text = found.get_help(inner)
    output.report(json, text, {"event": "help", "text": text})
