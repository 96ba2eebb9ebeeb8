"""`cachesvc why`: what a job waits for, and the change that would help most."""

from __future__ import annotations

import os
import time
from dataclasses import asdict

import click

from cachesvc.cli import options, output
from cachesvc.client.control import Control
from cachesvc.core.errors import NotFound

BETWEEN_S = 5.0
"""The time between the two statuses that are compared: ranks report every 5 s."""


@click.command()
@click.argument("job", required=False)
@options.daemon
def why(job: str | None, socket: str | None, json: bool) -> int:
    """Say what a job waits for, and what would help.

    JOB is the beginning of an id in `cachesvc top`; without one, all jobs of this node. Takes 5 seconds.
    """
    from cachesvc.cli.diagnosis import Situation, diagnose

    with Control(socket) as control:
        before = control.status()
        time.sleep(BETWEEN_S if before.jobs else 0)
        now = control.status()
    if now.bypassed:
        output.print_notes(
            ["an operator bypasses the cache of this node; `cachesvc bypass off` ends it"], json
        )
    wanted = [each for each in now.jobs if each.id.startswith(job or "")]
    if not wanted:
        known = " ".join(each.id for each in now.jobs) or "none"
        raise NotFound(
            f"there is no job {job} on this node (jobs: {known})" if job else "no job reads on this node"
        )
    for each in wanted:
        found = diagnose(Situation(before, now, each, len(os.sched_getaffinity(0))))
        head = f"job {each.id} {found.says}: {100 * found.part:.0f} % of its time"
        lines = [head, *(f"  {line}" for line in found.evidence if line), f"  change: {found.change}"]
        output.report(json, "\n".join(lines), {"job": each.id} | asdict(found))
    return 0
