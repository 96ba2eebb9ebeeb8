"""`cachesvc doctor`: check what a daemon needs, and advise."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click
import msgspec

from cachesvc import config
from cachesvc.cli import config_file, output
from cachesvc.cli.serve import serve, settings_of
from cachesvc.client.control import Control, find_daemon
from cachesvc.core.errors import CacheError, DaemonUnavailable
from cachesvc.core.safe_text import redacted
from cachesvc.system.memory import allowed_bytes

if TYPE_CHECKING:
    from cachesvc.cli.doctor_checks import Finding

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@click.command(cls=config_file.ConfiguredCommand)
@click.option("--endpoint", help="S3 endpoint to compare the clock with.  [default: $AWS_ENDPOINT_URL]")
@click.option(
    "--settings", is_flag=True, hidden=True, help="Check the settings that a daemon writes to stdin."
)
@click.option("--json", is_flag=True, help="Print JSON, one object a line.")
@click.pass_context
def doctor(context: click.Context, /, endpoint: str | None, settings: bool, json: bool, **given: Any) -> int:
    """Check what a daemon needs, and say what to change.

    The running daemon checks its own settings, in its environment: memory, open files, disks, state, certificate,
    credentials, clock, and one listing of each allowed prefix.

    Where no daemon answers, or with options of `serve`, the same is checked here. Exits 1 when a check fails; warnings do
    not count.
    """
    endpoint = endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    if settings:
        found = _examine(msgspec.json.decode(sys.stdin.buffer.read(), type=config.Settings), endpoint)
    else:
        socket = given.pop("socket") or find_daemon()
        found = _asked(settings_of(socket=socket, **given), endpoint, _typed(context))
    failed = False
    for finding in map(_without_secrets, found):
        failed = failed or finding.level.value == "fail"
        if json:
            row = {"check": finding.check, "level": finding.level.value}
            output.emit(row | {"text": finding.text, "mend": finding.advice})
        else:
            _show(finding)
    return 1 if failed else 0


doctor.params += [option for option in serve.params if option.name not in ("takeover", "json")]


def _typed(context: click.Context) -> bool:
    """Tell whether the command line has options of `serve`, other than the socket's directory."""
    names = {str(option.name) for option in serve.params} - {"socket", "json"}
    given = click.core.ParameterSource.COMMANDLINE
    return any(context.get_parameter_source(name) is given for name in names)


def _asked(settings: config.Settings, endpoint: str, typed: bool) -> Iterator[Finding]:
    """Ask the daemon behind the socket, or check the settings here where it does not answer, or where they are `typed`."""
    from cachesvc.cli import doctor_checks
    from cachesvc.cli.doctor_checks import Finding, Level

    of_socket = list(doctor_checks.socket(settings.socket_dir))
    here, level = "no daemon answers", Level.OK
    listens = of_socket[-1].check == "daemon"
    if listens and typed:
        here = "with the options given; without options the daemon is asked"
    elif listens:
        try:
            with Control(settings.socket_dir) as control:
                found = control.examine()
            yield Finding("asked", Level.OK, f"the daemon in {settings.socket_dir}, with its settings")
            yield from of_socket
            for each in found:
                yield Finding(each.check, Level(each.level), each.text, each.mend)
            return
        except DaemonUnavailable:
            pass  # a dead one's socket, as `of_socket` says
        except CacheError as error:
            here, level = str(error), Level.WARN
    yield Finding("asked", level, f"this shell: {here}")
    yield from of_socket
    yield from _examine(settings, endpoint)


def _examine(settings: config.Settings, endpoint: str) -> Iterator[Finding]:
    from cachesvc.cli import doctor_checks

    yield doctor_checks.kernel()
    yield (found := doctor_checks.settings(settings))
    yield doctor_checks.memory(settings, allowed_bytes())
    yield doctor_checks.open_files(settings.ram_bytes, settings.extent_bytes)
    for spec in settings.nvme:
        yield from doctor_checks.disk(spec, settings.extent_bytes)
    yield doctor_checks.state(settings.state_dir)
    if settings.tls is not None:
        yield doctor_checks.certificate(settings.tls, time.time())
    if not settings.allow or any(prefix.startswith("s3://") for prefix in settings.allow):
        yield doctor_checks.credentials()
    if found.level is doctor_checks.Level.OK:
        yield from doctor_checks.sources(settings)
    if endpoint:
        yield doctor_checks.clock(endpoint)


def _without_secrets(finding: Finding) -> Finding:
    return replace(finding, text=redacted(finding.text), advice=redacted(finding.advice))


def _show(finding: Finding) -> None:
    advice = f"; {finding.advice}" if finding.advice else ""
    from rich.text import Text

    line = Text(f"{finding.level.value:<4}", style=_STYLES[finding.level.value])
    with output.written():
        output.console().print(
            line.append(f"  {finding.check}: {finding.text}{advice}", style="default"), soft_wrap=True
        )
