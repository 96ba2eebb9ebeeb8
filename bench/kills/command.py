"""`make kills KILLS=1000 SEED=1`: run the drill and print its table.

python -m bench.kills [KILLS] [SEED]
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.kills.drill import EXTENT, FILES, NVME, RAM, RUNS, SAMPLES, Report, drill
from testbed.servers import SeaweedFS


def main(arguments: Sequence[str]) -> int:
    """Print the table; return 1 when anything was lost, duplicated, wrong or left behind, 2 when only late."""
    kills = int(arguments[0]) if arguments else 1000
    seed = int(arguments[1]) if len(arguments) > 1 else 1
    with tempfile.TemporaryDirectory(prefix="kills-") as folder, SeaweedFS() as s3:
        report = drill(Path(folder), s3, kills, seed)
    console = Console(width=140)
    console.print(_table(report, seed), highlight=False)
    for word, messages in (("FAULT", report.faults), ("LEFT", report.left), ("LATE", report.late)):
        for one in messages:
            console.print(f"{word} {one}", markup=False, highlight=False)
    return 1 if report.faults or report.left else 2 * bool(report.late)


def _table(report: Report, seed: int) -> Table:
    table = Table("killed", "times", "before it served", "starts", "median s", "longest s")
    for kind, row in sorted(report.clock.rows.items()):
        starts = (f"{row.median_s:.2f}", f"{max(row.starts_s):.2f}") if row.starts_s else ("", "")
        table.add_row(kind, f"{row.kills:,}", f"{row.early:,}", f"{len(row.starts_s):,}", *starts)
    kills = sum(row.kills for row in report.clock.rows.values())
    samples = sum(audit.samples for audit in report.audits)
    epochs = sum(len(audit.orders) for audit in report.audits)
    wrong = sum(len(audit.faults) for audit in report.audits)
    table.caption = (
        f"seed {seed}: {kills:,} SIGKILLs in {report.seconds:,.0f} s; {RUNS} runs of {SAMPLES:,} samples in {FILES}"
        f" extents, RAM {RAM // EXTENT} and NVMe {NVME // EXTENT} of them; load {os.getloadavg()[1]:.0f} on"
        f" {os.cpu_count()} cores\n"
        f"ledger: {samples:,} samples in {epochs:,} whole epochs, {wrong} faults, {report.torn} torn lines;"
        f" {len(report.faults)} faults in all, {len(report.left)} things left behind, {len(report.late)} late"
    )
    return table
