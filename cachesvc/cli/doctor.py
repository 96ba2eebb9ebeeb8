"""`cachesvc doctor`: look at what a daemon needs, and say what to mend."""

from __future__ import annotations

import os
from collections.abc import Iterator

import click
from rich.text import Text

from cachesvc import config
from cachesvc.cli import checks, options, output
from cachesvc.cli.checks import Finding, Level
from cachesvc.core.model import EXTENT_BYTES
from cachesvc.memory import allowed_bytes

_STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}


@click.command()
@click.option("--ram", type=options.SIZE, envvar="CACHESVC_RAM", help="RAM budget to check.")
@click.option(
    "--nvme",
    type=options.NVME,
    multiple=True,
    envvar="CACHESVC_NVME",
    metavar="DIR=SIZE",
    help="Cache directories.",
)
@click.option("--endpoint", help="S3 endpoint to compare the clock with.  [default: $AWS_ENDPOINT_URL]")
@options.daemon
def doctor(
    ram: int | None, nvme: tuple[config.NvmeSpec, ...], endpoint: str | None, socket: str | None, json: bool
) -> int:
    """Check socket, disk, limits, credentials, clock and kernel, and say what to mend.

    Give it the options that `serve` gets. Exits 1 when a check fails; warnings do not count.
    """
    ram_bytes = config.default_ram_bytes() if ram is None else ram
    endpoint = endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    failed = False
    for finding in _examine(ram_bytes, nvme, endpoint, socket):
        failed = failed or finding.level is Level.FAIL
        if json:
            output.emit({"check": finding.check, "level": finding.level.value} | _rest(finding))
        else:
            _show(finding)
    return 1 if failed else 0


def _examine(
    ram_bytes: int, nvme: tuple[config.NvmeSpec, ...], endpoint: str, socket: str | None
) -> Iterator[Finding]:
    from cachesvc.client import find_daemon

    yield checks.kernel()
    yield checks.memory(ram_bytes, allowed_bytes())
    yield checks.open_files(ram_bytes, EXTENT_BYTES)
    for spec in nvme:
        yield from checks.disk(spec)
    yield from checks.socket(socket or find_daemon() or config.default_socket_dir())
    yield checks.credentials()
    if endpoint:
        yield checks.clock(endpoint)


def _rest(finding: Finding) -> dict[str, str]:
    return {"text": finding.text, "mend": finding.mend}


def _show(finding: Finding) -> None:
    mend = f"; {finding.mend}" if finding.mend else ""
    line = Text(f"{finding.level.value:<4}", style=_STYLES[finding.level])
    output.console().print(
        line.append(f"  {finding.check}: {finding.text}{mend}", style="default"), soft_wrap=True
    )
