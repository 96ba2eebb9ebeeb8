"""`python -m bench.recognised.s3torch CHECKOUT`: the case `entitlement` of AWS's s3torchbenchmarking, by its own code.

It reads objects and counts their bytes: with each of the suite's datasets from a slowed source and through our endpoint,
from plain files, and with our loader. `CHECKOUT` is a work tree of awslabs/s3-connector-for-pytorch on GitHub. The
environment has the requirements of its `s3torchbenchmarking` beside this project.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from bench.endpoint import endpoint_keys
from loader import DataLoader, open_dataset
from testbed.node import Daemon
from testbed.proxy_process import ProxyProcess
from testbed.servers import SeaweedFS, free_ports

OBJECTS, OBJECT_BYTES, BATCH, EPOCHS, WORKERS = 200, 100_000, 128, 3, 1
DELAY_MS, RATE_MB = 20, 50
"""Of the slowed source: of each request, and of each connection."""
KINDS = {"S3MapDataset": "s3mapdataset", "S3IterableDataset": "s3iterabledataset", "fsspec (s3fs)": "fsspec"}
"""The suite's datasets that speak S3."""


def _sample(body: bytes) -> tuple[int, int]:
    return len(body), 0


class Suite:
    """The suite's own datasets, loader and model."""

    def __init__(self, checkout: Path) -> None:
        sys.path.insert(0, str(checkout / "s3torchbenchmarking" / "src"))
        from omegaconf import OmegaConf
        from s3torchbenchmarking.dataset import benchmark

        self._benchmark, self._settings = benchmark, OmegaConf.create
        self._own = {name: getattr(benchmark, name) for name in ("S3MapDataset", "S3IterableDataset")}
        self._model = benchmark.Entitlement

    def at(self, endpoint: str) -> None:
        """Have its datasets ask this endpoint."""
        from fsspec import filesystem
        from s3torchconnector import S3ClientConfig

        config = S3ClientConfig(force_path_style=True)
        for name, own in self._own.items():
            made = partial(own.from_prefix, endpoint=endpoint, s3client_config=config)
            setattr(self._benchmark, name, SimpleNamespace(from_prefix=made))
        os.environ["AWS_ENDPOINT_URL_S3"] = endpoint
        filesystem("s3").clear_instance_cache()

    def loader(self, kind: str, prefix: str) -> Any:
        """Return its loader of one of its datasets."""
        reader = {"type": "sequential", "buffer_size": 8 << 20}
        config = self._settings({"kind": kind, "num_workers": WORKERS, "s3reader": reader})
        load = self._model().load_sample
        dataset = self._benchmark.make_dataset(config, False, prefix, "us-east-1", load)
        return self._benchmark.make_dataloader(dataset, WORKERS, BATCH)

    def epochs_s(self, loader: Any) -> list[float]:
        """Have its model read each epoch; return how long each took."""
        found = self._model().train(loader, EPOCHS)
        assert found["volume"] == OBJECTS * EPOCHS, found["volume"]
        return list(found["epoch_durations_s"])


def main() -> None:
    """Print MB/s of each epoch."""
    suite, rows = Suite(Path(sys.argv[1])), dict[str, list[float]]()
    (port,) = free_ports(1)
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        s3 = held.enter_context(SeaweedFS(folder / "s3"))
        bucket = s3.create_bucket("torch")  # torchdata takes a name that begins with "s3" for a URL
        files = folder / "files"
        files.mkdir()
        for number in range(OBJECTS):
            (files / f"{number:05d}.bin").write_bytes(np.random.default_rng(number).bytes(OBJECT_BYTES))
        for prefix in ("data", *KINDS.values()):  # each kind is to read objects that are not cached yet
            s3.upload(files, bucket, f"{prefix}/")
        slow = held.enter_context(
            ProxyProcess(s3.endpoint.removeprefix("http://"), delay_ms=DELAY_MS, rate_mb=RATE_MB)
        )
        options = ["--ram", "512MiB", "--allow", f"s3://{bucket}/", "--s3", f"127.0.0.1:{port}"]
        daemon = held.enter_context(Daemon(folder / "node", options, s3.env(slow.endpoint)))
        keys, prefix = endpoint_keys(daemon), f"s3://{bucket}/data/"

        def measure(name: str, made: Callable[[], Any]) -> None:
            rows[name] = suite.epochs_s(made())
            print(name, rows[name], flush=True)

        os.environ.update(s3.env(slow.endpoint), CACHESVC="require", **daemon.env)
        suite.at(slow.endpoint)
        for name, kind in KINDS.items():
            measure(f"{name}, the slowed source", partial(suite.loader, kind, prefix))
        os.environ["AWS_ACCESS_KEY_ID"] = keys["AccessKeyId"]
        os.environ["AWS_SECRET_ACCESS_KEY"] = keys["SecretAccessKey"]
        os.environ["AWS_SESSION_TOKEN"] = keys["SessionToken"]
        suite.at(keys["Endpoint"])
        for name, kind in KINDS.items():
            measure(f"{name}, our endpoint", partial(suite.loader, kind, f"s3://{bucket}/{kind}/"))
        measure("fsspec, plain files", partial(suite.loader, "fsspec", str(files)))
        opened = open_dataset(prefix, format="files", decode=None, transform=_sample)
        measure("our loader", lambda: DataLoader(opened, batch_size=BATCH, num_workers=WORKERS))
    print("| MB/s | first epoch | last epoch |\n|---|---|---|")
    for name, took in rows.items():
        first, last = (OBJECTS * OBJECT_BYTES / each / 1e6 for each in (took[0], took[-1]))
        print(f"| {name} | {first:,.0f} | {last:,.0f} |")


if __name__ == "__main__":
    main()
