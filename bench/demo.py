"""`make demo`: the main job on real input. A real S3 server, a daemon, `cachesvc prefetch` of one dataset, and
two DDP ranks that train on both for two epochs. Nothing here is scripted output."""

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
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.corpus import digit_images, library_tokens
from bench.node import Daemon
from cachesvc.client import Control
from tests.servers import SeaweedFS

EXTENT_BYTES = 1 << 20
STDLIB_BYTES = 16 << 20
EPOCHS = 2
RANKS = 2
LIMIT_S = 240.0
console = Console(width=120)


def main() -> int:
    """Run the demo; 0 only when every claim that it prints was found true."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cachesvc-demo-") as folder:
        root = Path(folder)
        (root / "nvme").mkdir()
        with SeaweedFS(root / "s3") as s3:
            pack(s3)
            options = ["--ram", "12MiB", "--nvme", f"{root / 'nvme'}=256MiB", "--allow", "s3://demo/"]
            options += ["--extent-bytes", str(EXTENT_BYTES)]
            with Daemon(root / "node", options, s3.env()) as daemon:
                good = job(root, daemon)
    console.print(
        f"[bold]{'all of it holds' if good else 'SOMETHING ABOVE IS NOT TRUE'}[/] after "
        f"{time.monotonic() - started:.0f} s"
    )
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
    """Prefetch, train, and check what both said."""
    env = {**os.environ, **daemon.env, "OMP_NUM_THREADS": "1", "CACHESVC": "require"}
    subprocess.run([sys.executable, "-m", "cachesvc", "prefetch", "s3://demo/digits/"], env=env, check=True)
    ledger = root / "ledger"
    ledger.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    command += ["-m", "bench.train", "--digits", "s3://demo/digits/", "--stdlib", "s3://demo/stdlib/"]
    command += ["--epochs", str(EPOCHS), "--ledger", str(ledger)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as training:
        sources = follow(training, daemon, ledger)
        said = [json.loads(line) for line in (training.stdout or ()) if line.startswith("{")]
    if training.returncode:
        console.print(f"training ended with {training.returncode}; the daemon said:\n{daemon.log}")
        return False
    return report(said, sources, ledger)


def follow(training: subprocess.Popen[str], daemon: Daemon, ledger: Path) -> dict[tuple[str, int], float]:
    """S3 bytes over dataset bytes of each epoch, read from the daemon's own status between epochs."""
    ratios: dict[tuple[str, int], float] = {}
    before = {name: status.source_bytes for name, status in fetched(daemon).items()}
    deadline = time.monotonic() + LIMIT_S
    for name in ("digits", "stdlib"):
        for epoch in range(EPOCHS):
            while not (ledger / f"{name}-{epoch}.done").exists():
                if training.poll() is not None or time.monotonic() > deadline:
                    return ratios
                time.sleep(0.05)
            found = fetched(daemon)[name]
            ratios[name, epoch] = (found.source_bytes - before.get(name, 0)) / found.dataset.stored_bytes
            before[name] = found.source_bytes
            (ledger / f"{name}-{epoch}.counted").touch()
    return ratios


def fetched(daemon: Daemon) -> dict[str, Any]:
    """The daemon's status of each dataset, by the name of its folder."""
    with Control(daemon.socket_dir) as control:
        return {found.dataset.uri.rstrip("/").rpartition("/")[2]: found for found in control.list()}


def report(said: list[Mapping[str, Any]], ratios: dict[tuple[str, int], float], ledger: Path) -> bool:
    """Print a row for each epoch; True when each says what the README promises."""
    table = Table(
        "dataset", "epoch", "samples/s", "stall", "bytes by tier", "S3 / dataset", "exactly once", "loss"
    )
    good = len(said) == 2 * EPOCHS * RANKS
    for (name, epoch), ratio in ratios.items():
        rows = [row for row in said if (row["dataset"], row["epoch"]) == (name, epoch)]
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
