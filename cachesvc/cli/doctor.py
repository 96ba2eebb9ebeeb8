"""`cachesvc doctor`: look at what a daemon needs, and say what to mend."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import click
from rich.text import Text

from cachesvc import config
from cachesvc.cli import checks, options, output
from cachesvc.cli.checks import Finding, Level
from cachesvc.cli.serve import settings_of
from cachesvc.client.control import find_daemon
from cachesvc.core.safe_text import redacted
from cachesvc.system.memory import allowed_bytes

_STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}


@click.command()
@options.sized
@options.SHARE
@click.option("--endpoint", help="S3 endpoint to compare the clock with.  [default: $AWS_ENDPOINT_URL]")
@options.daemon
def doctor(endpoint: str | None, socket: str | None, json: bool, **given: Any) -> int:
    """Check what a daemon needs, and say what to mend.

    Settings, memory, open files, disk, state, socket, credentials, clock and kernel.

    Give it those of these options, or their variables, that `serve` gets. Exits 1 when a check fails; warnings do not
    count.
    """
    settings = settings_of(socket=socket or find_daemon(), **given)
    endpoint = endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    failed = False
    for finding in map(_without_secrets, _examine(settings, endpoint)):
        failed = failed or finding.level is Level.FAIL
        if json:
            output.emit({"check": finding.check, "level": finding.level.value} | _rest(finding))
        else:
            _show(finding)
    return 1 if failed else 0


def _examine(settings: config.Settings, endpoint: str) -> Iterator[Finding]:
    yield checks.kernel()
    yield checks.settings(settings)
    yield checks.memory(settings, allowed_bytes())
    yield checks.open_files(settings.ram_bytes, settings.extent_bytes)
    for spec in settings.nvme:
        yield from checks.disk(spec, settings.extent_bytes)
    yield checks.state(settings.state_dir)
    yield from checks.socket(settings.socket_dir)
    yield checks.credentials()
    if endpoint:
        yield checks.clock(endpoint)


def _without_secrets(finding: Finding) -> Finding:
    return replace(finding, text=redacted(finding.text), mend=redacted(finding.mend))


def _rest(finding: Finding) -> dict[str, str]:
    return {"text": finding.text, "mend": finding.mend}


def _show(finding: Finding) -> None:
    mend = f"; {finding.mend}" if finding.mend else ""
    line = Text(f"{finding.level.value:<4}", style=_STYLES[finding.level])
    with output.written():
        output.console().print(
            line.append(f"  {finding.check}: {finding.text}{mend}", style="default"), soft_wrap=True
        )
