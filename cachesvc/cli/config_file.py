"""The configuration file of `serve`: TOML whose keys are the options without their dashes.

click looks up an option on the command line, then in its variable, then in the context's `default_map`, which this module
fills from the files. So options, their types and their order of precedence are stated once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import click

from cachesvc.config import Origin
from cachesvc.config_files import SECTION_KEYS, candidates, nearest, parse_source, read_file
from cachesvc.core.errors import InvalidInput, NotFound

FILES, CANDIDATES, ARGUMENTS = "cachesvc.files", "cachesvc.candidates", "cachesvc.arguments"
"""Keys in a context's `meta`: the file that gave each parameter, the files that were looked for, and the arguments."""
NOT_IN_FILES = frozenset({"config", "json", "takeover", "help", "endpoint", "settings"})
"""Options of one command, and not of a node."""


class ConfiguredCommand(click.Command):
    """A command that keeps its arguments, so that its settings can be resolved again."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments."""
        ctx.meta[ARGUMENTS] = tuple(args)
        return super().parse_args(ctx, args)


def origin(context: click.Context) -> Origin:
    """Return where the settings of a context come from."""
    return Origin(context.meta[ARGUMENTS], context.meta[CANDIDATES])


def keys(command: click.Command) -> dict[str, click.Option]:
    """Return the options that a file may set, by key: `extent-bytes` for `--extent-bytes`."""
    named = {
        option.opts[0].removeprefix("--"): option
        for option in command.params
        if isinstance(option, click.Option)
    }
    return {key: option for key, option in named.items() if option.name not in NOT_IN_FILES}


def load(context: click.Context, _: click.Parameter, given: str | None) -> None:
    """Read the files into the context: the callback of `--config`, which click calls before it looks at other options.

    Raises NotFound for a file that is named and not there, NotAllowed for one that cannot be read, InvalidInput for
    anything in a file that is no setting.
    """
    values: dict[str, object] = {}
    files: dict[str, str] = {}
    for path in candidates(given):
        found = _read(path, context.command, context)
        if found is None and given:
            raise NotFound(
                f"there is no configuration file {path}; name another with --config or CACHESVC_CONFIG"
            )
        values |= found or {}
        files |= dict.fromkeys(found or {}, path)
    context.meta[CANDIDATES] = tuple(map(os.path.abspath, candidates(given)))
    context.default_map = values
    context.meta[FILES] = files


def _read(path: str, command: click.Command, context: click.Context) -> dict[str, object] | None:
    """Return the values of a file by the names of their parameters; None where there is no file."""
    found = read_file(path)
    if found is None:
        return None
    known = keys(command)
    values: dict[str, object] = {}
    for key, value in found.items():
        if key not in known:
            raise InvalidInput(f"{path}: {key} is no setting{nearest(key, known, 'settings')}")
        try:
            values[str(known[key].name)] = _checked(known[key], value, context)
        except (click.BadParameter, InvalidInput) as error:
            why = error.message if isinstance(error, click.BadParameter) else str(error)
            raise InvalidInput(f"{path}: {key}: {why}") from None
    return values


def _checked(option: click.Option, value: object, context: click.Context) -> object:
    """Return a value as click takes it from a variable, once the option's type accepts it. Raises InvalidInput or
    BadParameter."""
    if option.multiple:
        if not isinstance(value, list):
            raise InvalidInput("write a list")
        sections = option.type.name == "source"
        given: object = [parse_source(each) if sections else _text(each, option) for each in value]
    else:
        given = _text(value, option)
    option.type_cast_value(context, given)
    return given


def _text(value: object, option: click.Option) -> str:
    """Return a value as it is typed on the command line."""
    if option.is_flag:
        if not isinstance(value, bool):
            raise InvalidInput(f"{value!r} is neither true nor false")
        return str(value).lower()
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and option.type.name == "octal":
        raise InvalidInput('write a file mode as text: "660"')
    if not number and not isinstance(value, str):
        raise InvalidInput(f"{value!r} is neither text nor a number")
    if isinstance(value, float) and value.is_integer():
        return str(int(value))  # Helm writes the number 4 as 4.0
    return str(value)


def schema(command: click.Command) -> dict[str, Any]:
    """Return the JSON schema of a file, for editors."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "cachesvc serve",
        "type": "object",
        "additionalProperties": False,
        "properties": {key: _property(option) for key, option in keys(command).items()},
    }


def _property(option: click.Option) -> dict[str, Any]:
    one: dict[str, Any] = {"type": ["string", "number"] if option.type.name != "octal" else "string"}
    if option.type.name == "source":
        keys_of_one: dict[str, Any] = {key: {} for key in SECTION_KEYS}
        one = {
            "type": "object",
            "properties": keys_of_one,
            "required": ["prefix"],
            "additionalProperties": False,
        }
        one = {"anyOf": [{"type": "string"}, one]}
    if option.is_flag:
        one = {"type": "boolean"}
    if isinstance(option.type, click.Choice):
        one = {"enum": list(option.type.choices)}
    about = {"description": option.help or ""}
    return {"type": "array", "items": one, **about} if option.multiple else {**one, **about}


def described(context: click.Context) -> Sequence[tuple[str, object, str]]:
    """Return each key that is set, its value, and where it comes from: a flag, a variable, or a file."""
    files: Mapping[str, str] = context.meta[FILES]
    sources = click.core.ParameterSource
    rows = []
    for key, option in keys(context.command).items():
        name = str(option.name)
        origin = context.get_parameter_source(name)
        if origin is sources.COMMANDLINE:
            rows.append((key, context.params[name], f"--{key}"))
        elif origin is sources.ENVIRONMENT:
            rows.append((key, context.params[name], str(option.envvar)))
        elif origin is sources.DEFAULT_MAP:
            rows.append((key, context.params[name], files[name]))
    return rows
