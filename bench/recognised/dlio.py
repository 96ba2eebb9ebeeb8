"""`python -m bench.recognised.dlio`: DLIO with its own loader over plain files, and with ours.

Files of 8 MiB in `.npz`, as of its workload unet3d, three epochs, one process, one reader, no time of computation. It is
DLIO-based, and not an MLPerf result. It runs in an environment that has a checkout of argonne-lcf/dlio_benchmark on GitHub
beside this project: the release 2.0.0 of PyPI loads TensorFlow, DALI and a former pydftracer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from testbed.node import Daemon
from testbed.proxy_process import ProxyProcess
from testbed.servers import SeaweedFS

FILES, FILE_BYTES, BATCH, EPOCHS = 32, 8 << 20, 4, 3
DELAY_MS, RATE_MB = 20, 50
"""Of the slowed source: of each request, and of each connection."""


def run(folder: Path, name: str, environ: Mapping[str, str], *given: str) -> list[float]:
    """Run DLIO; return samples a second of each epoch, none where it trains nothing."""
    out = folder / name
    workload = {
        "dataset.data_folder": folder / "data",
        "dataset.format": "npz",
        "dataset.num_files_train": FILES,
        "dataset.num_files_eval": 0,
        "dataset.num_samples_per_file": 1,
        "dataset.record_length_bytes": FILE_BYTES,
        "dataset.record_length_bytes_stdev": 0,
        "dataset.record_length_bytes_resize": 1 << 20,
        "reader.batch_size": BATCH,
        "reader.read_threads": 1,
        "reader.multiprocessing_context": "fork",
        "train.epochs": EPOCHS,
        "train.computation_time": 0.0,
        "workflow.checkpoint": False,
        "workflow.evaluation": False,
    }
    command = [sys.executable, "-m", "dlio_benchmark.main", "workload=unet3d_v100", f"hydra.run.dir={out}"]
    command += [f"++workload.{key}={value}" for key, value in workload.items()]
    command += [f"++workload.{each}" for each in given]
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])
    subprocess.run(command, check=True, env={**os.environ, **environ, "PYTHONPATH": path})
    summary = out / "summary.json"
    found = json.loads(summary.read_text())["metric"] if summary.exists() else {}
    return list(map(float, found.get("train_throughput_samples_per_second", ())))


def main() -> None:
    """Print MB/s of each epoch."""
    ours = (
        "reader.data_loader_classname=dlio_loader.CachedDataLoader",
        "reader.data_loader_sampler=iterative",
    )
    with tempfile.TemporaryDirectory() as name, SeaweedFS(Path(name) / "s3") as s3:
        folder, bucket = Path(name), s3.create_bucket("dlio")
        run(folder, "made", {}, "workflow.generate_data=True", "workflow.train=False")
        s3.upload(folder / "data", bucket, "data/")
        rows = {"its own loader, plain files": run(folder, "plain", {}, *_training())}
        with ProxyProcess(s3.endpoint.removeprefix("http://"), delay_ms=DELAY_MS, rate_mb=RATE_MB) as slow:
            options = ["--ram", "1GiB", "--allow", f"s3://{bucket}/", "--allow", f"{folder}/"]
            for source in (f"s3://{bucket}/data", str(folder / "data")):
                with Daemon(folder / f"node-{len(rows)}", options, s3.env(slow.endpoint)) as daemon:
                    environ = {**daemon.env, "CACHESVC": "require", "DLIO_URI": source}
                    called = "a slowed S3 source" if source.startswith("s3") else "plain files"
                    found = run(folder, f"ours-{len(rows)}", environ, *_training(), *ours)
                    rows[f"our loader, {called}"] = found
    print(f"| MB/s, epochs 1 to {EPOCHS} |" + " | ".join(str(n + 1) for n in range(EPOCHS)) + " |")
    for row, rates in rows.items():
        print(f"| {row} | " + " | ".join(f"{rate * FILE_BYTES / 1e6:,.0f}" for rate in rates) + " |")


def _training() -> Sequence[str]:
    return ("workflow.generate_data=False", "workflow.train=True")


if __name__ == "__main__":
    main()
