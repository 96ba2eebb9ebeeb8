"""Help pages that list options in groups, with the defaults of the settings tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields

import click

from cachesvc import config


def write_groups(
    command: click.Command,
    ctx: click.Context,
    formatter: click.HelpFormatter,
    groups: Mapping[str, Sequence[str]],
    shown: Mapping[str, Callable[..., str]],
) -> None:
    """Write the options of a command by group, named as parameters; others come last. `shown` formats defaults of
    `config.Settings`, by field."""
    left = {str(each.name): each for each in command.get_params(ctx)}
    for title, names in groups.items():
        _write(title, [left.pop(name) for name in names if name in left], ctx, formatter, shown)
    _write("Other", list(left.values()), ctx, formatter, shown)


def _write(
    title: str,
    options: Sequence[click.Parameter],
    ctx: click.Context,
    formatter: click.HelpFormatter,
    shown: Mapping[str, Callable[..., str]],
) -> None:
    records = [(each, each.get_help_record(ctx)) for each in options]
    rows = [
        (record[0], _with_default(str(each.name), record[1], shown)) for each, record in records if record
    ]
    if rows:
        with formatter.section(title):
            formatter.write_dl(rows)


def _with_default(name: str, text: str, shown: Mapping[str, Callable[..., str]]) -> str:
    """Add the default of a setting, which is written in `config.Settings` alone."""
    if name not in shown or "[default" in text:
        return text
    field = next(each for each in fields(config.Settings) if each.name == name)
    value = field.default_factory() if callable(field.default_factory) else field.default
    return f"{text}  [default: {shown[name](value)}]"
