"""`cachesvc doctor`: check what a daemon needs, and advise."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from cachesvc import config
from cachesvc.cli import options, output
from cachesvc.cli.serve import settings_of
from cachesvc.client.control import find_daemon
from cachesvc.core.safe_text import redacted
from cachesvc.system.memory import allowed_bytes

if TYPE_CHECKING:
    from cachesvc.cli.doctor_checks import Finding

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@click.command()
@options.node_settings
@options.cluster_settings
@click.option("--endpoint", help="S3 endpoint to compare the clock with.  [default: $AWS_ENDPOINT_URL]")
@options.daemon
def doctor(endpoint: str | None, socket: str | None, json: bool, **given: Any) -> int:
    """Check what a daemon needs, and say what to change.

    Settings, memory, open files, disk, state, socket, certificate, credentials, clock and kernel.

    Give it the same options, or variables, as `serve`. Exits 1 when a check fails; warnings do not count.
    """
    settings = settings_of(socket=socket or find_daemon(), **given)
    endpoint = endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    failed = False
    for finding in map(_without_secrets, _examine(settings, endpoint)):
        failed = failed or finding.level.value == "fail"
        if json:
            row = {"check": finding.check, "level": finding.level.value}
            output.emit(row | {"text": finding.text, "mend": finding.advice})
        else:
            _show(finding)
    return 1 if failed else 0


def _examine(settings: config.Settings, endpoint: str) -> Iterator[Finding]:
    from cachesvc.cli import doctor_checks

    yield doctor_checks.kernel()
    yield doctor_checks.settings(settings)
    yield doctor_checks.memory(settings, allowed_bytes())
    yield doctor_checks.open_files(settings.ram_bytes, settings.extent_bytes)
    for spec in settings.nvme:
        yield from doctor_checks.disk(spec, settings.extent_bytes)
    yield doctor_checks.state(settings.state_dir)
    yield from doctor_checks.socket(settings.socket_dir)
    if settings.tls is not None:
        yield doctor_checks.certificate(settings.tls, time.time())
    yield doctor_checks.credentials()
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
