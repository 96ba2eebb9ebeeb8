"""`make demo`: the main job on real input: an S3 server, a daemon, `cachesvc prefetch` of one of two datasets, and
two DDP ranks that train on both for two epochs. Then the lines of `against_plain.py`. No output is scripted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from bench.corpus import digit_images, library_tokens
from bench.train import source_bytes
from cachesvc.client.control import Control
from testbed.node import Daemon
from testbed.servers import SeaweedFS, free_ports

EXTENT_BYTES = 1 << 20
STDLIB_BYTES = 8 << 20
EPOCHS = 2
RANKS = 2
LIMIT_S = 600.0
"""Time limit of the prefetch, of the training, and of the comparison."""
console = Console(width=120)


def main() -> int:
    """Run the demo; return 0 only when every printed claim was checked and holds."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cachesvc-demo-") as folder:
        root = Path(folder)
        (root / "nvme").mkdir()
        with SeaweedFS(root / "s3") as s3:
            pack(s3)
            options = ["--ram", "6MiB", "--nvme", f"{root / 'nvme'}=256MiB", "--allow", "s3://demo/"]
            (port,) = free_ports(1)
            options += ["--extent-bytes", str(EXTENT_BYTES), "--metrics", f"127.0.0.1:{port}"]
            with Daemon(root / "node", options, s3.env()) as daemon:
                console.print(f"look at it meanwhile: http://127.0.0.1:{port}/")
                good = job(root, daemon)
            ending = [sys.executable, "-m", "bench.against_plain", str(root / "other")]
            lines = run(ending, {**os.environ, **s3.env()}, stdout=subprocess.PIPE) if good else None
    good = lines is not None
    console.print(
        f"[bold]{'every check passed' if good else 'A CHECK FAILED'}[/] after "
        f"{time.monotonic() - started:.0f} s"
    )
    print(lines or "", end="")
    return 0 if good else 1


def pack(s3: SeaweedFS) -> None:
    """Put both datasets into a bucket."""
    client = s3.client()
    s3.create_bucket("demo")
    client.put_object(Bucket="demo", Key="stdlib/tokens.bin", Body=library_tokens(STDLIB_BYTES).tobytes())
    images = list(digit_images())
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda kv: client.put_object(Bucket="demo", Key=f"digits/{kv[0]}", Body=kv[1]), images))
    console.print(
        f"packed {len(images):,} digits and {STDLIB_BYTES:,} bytes of the standard library into s3://demo/"
    )


def job(root: Path, daemon: Daemon) -> bool:
    """Prefetch and train; return whether the output of both keeps the promises."""
    env = {**os.environ, **daemon.env, "OMP_NUM_THREADS": "1", "CACHESVC": "require"}
    if run([sys.executable, "-m", "cachesvc", "prefetch", "s3://demo/digits/"], env) is None:
        return False
    before = {"digits": source_bytes(daemon.socket_dir)["digits"]}
    ledger = root / "ledger"
    ledger.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    command += ["-m", "bench.train", "--digits", "s3://demo/digits/", "--stdlib", "s3://demo/stdlib/"]
    command += ["--epochs", str(EPOCHS), "--ledger", str(ledger)]
    printed = run(command, env, stdout=subprocess.PIPE)
    if printed is None:
        console.print(f"the daemon's log:\n{daemon.log}")
        return False
    said = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    return report(said, ratios(said, before, daemon), ledger)


def run(command: list[str], env: Mapping[str, str], stdout: int | None = None) -> str | None:
    """Run one step and return its output ("" where `stdout` is not a pipe). Returns None, and prints the reason, when
    the step fails or takes longer than `LIMIT_S`. Its processes have ended in every case."""
    with subprocess.Popen(command, env=env, stdout=stdout, text=True) as process:
        try:
            printed, _ = process.communicate(timeout=LIMIT_S)
        except BaseException as error:
            for each in psutil.Process(process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    each.kill()
            process.kill()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            console.print(f"{' '.join(command[2:4])} did not end within {LIMIT_S:.0f} s")
            return None
    if process.returncode:
        console.print(f"{' '.join(command[2:4])} ended with {process.returncode}")
        return None
    return printed or ""


def ratios(
    said: list[dict[str, Any]], before: dict[str, int], daemon: Daemon
) -> dict[tuple[str, int], float]:
    """Source bytes / stored bytes of each epoch, from the daemon's counts `before` the training and after each epoch."""
    with Control(daemon.socket_dir) as control:
        stored = {Path(found.dataset.uri).name: found.dataset.stored_bytes for found in control.list()}
    found: dict[tuple[str, int], float] = {}
    for row in said:
        if row["event"] == "source":
            name = row["dataset"]
            found[name, row["epoch"]] = (row["bytes"] - before.get(name, 0)) / stored[name]
            before[name] = row["bytes"]
    return found


def report(said: list[Mapping[str, Any]], ratios: dict[tuple[str, int], float], ledger: Path) -> bool:
    """Print a row per epoch; return True when no row is missing and each keeps the README's promises."""
    table = Table(
        "dataset", "epoch", "samples/s", "stall", "bytes by tier", "S3 / dataset", "exactly once", "loss"
    )
    epochs = [row for row in said if row["event"] == "epoch"]
    good = len(epochs) == 2 * EPOCHS * RANKS and len(ratios) == 2 * EPOCHS
    for (name, epoch), ratio in ratios.items():
        rows = [row for row in epochs if (row["dataset"], row["epoch"]) == (name, epoch)]
        seen: Counter[int] = Counter()
        for rank in range(RANKS):
            seen.update(json.loads((ledger / f"{name}-{epoch}-{rank}.json").read_text()))
        once = bool(seen) and set(seen) == set(range(len(seen))) and set(seen.values()) == {1}
        tiers: Counter[str] = Counter()
        for row in rows:
            tiers.update(row["bytes_by_origin"])
        wall = max(row["wall_s"] for row in rows)
        expected = 1.0 if (name, epoch) == ("stdlib", 0) else 0.0
        good = good and once and abs(ratio - expected) < 0.005
        table.add_row(
            name,
            str(epoch),
            f"{sum(row['samples'] for row in rows) / wall:,.0f}",
            f"{sum(row['stall_s'] for row in rows) / sum(row['wall_s'] for row in rows):.1%}",
            ", ".join(f"{origin} {size / 1e6:,.1f} MB" for origin, size in tiers.items() if size),
            f"{ratio:.2f}",
            f"yes ({len(seen):,})" if once else "NO",
            f"{rows[0]['loss']:.3f}",
        )
    console.print(table)
    return good


if __name__ == "__main__":
    sys.exit(main())
