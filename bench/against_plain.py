"""The four lines that end `make demo`: a plain DataLoader and ours over the same bucket, and a daemon that is killed."""

from __future__ import annotations

import argparse
import io
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import boto3
import torch
from PIL import Image

from bench.train import source_bytes, to_tensor
from cachesvc.torch import DataLoader, open_dataset
from testbed.node import Daemon

EXTENT_BYTES = 1 << 20
BATCH = 32
WORKERS = 2


class PlainPictures(torch.utils.data.Dataset[tuple[torch.Tensor, int, int]]):
    """Pictures of an S3 prefix as a script without cachesvc reads them: one GET by boto3 for each. A sample is (tensor,
    class index, bytes read)."""

    def __init__(self, bucket: str, prefix: str) -> None:
        pages = boto3.client("s3").get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        self._bucket = bucket
        self._keys = sorted(item["Key"] for page in pages for item in page["Contents"])
        self._classes = sorted({key.split("/")[-2] for key in self._keys})
        self._client: Any = None

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        self._client = self._client or boto3.client("s3")  # one for each worker
        key = self._keys[index]
        body = self._client.get_object(Bucket=self._bucket, Key=key)["Body"].read()
        label = self._classes.index(key.split("/")[-2])
        return *to_tensor((Image.open(io.BytesIO(body)), label)), len(body)


def read_plain() -> tuple[list[float], int]:
    """Return the seconds of two epochs, the first with the listing, and the bytes read."""
    started, times, read_bytes = time.perf_counter(), [], 0
    batches = torch.utils.data.DataLoader(
        PlainPictures("demo", "digits/"), batch_size=BATCH, shuffle=True, num_workers=WORKERS
    )
    for _ in range(2):
        for _, _, sizes in batches:
            read_bytes += int(sizes.sum())
        times.append(time.perf_counter() - started)
        started = time.perf_counter()
    return times, read_bytes


def read_cached() -> tuple[list[float], int]:
    """Return the seconds of two epochs through the daemon, the first with the opening, and the source bytes."""
    started, times = time.perf_counter(), []
    pictures = open_dataset("s3://demo/digits/", transform=to_tensor, image_mode="L")
    batches = DataLoader(pictures, batch_size=BATCH, shuffle=True, num_workers=WORKERS)
    for _ in range(2):
        for _ in batches:
            pass
        times.append(time.perf_counter() - started)
        started = time.perf_counter()
    return times, source_bytes()["digits"]


def survive(daemon: Daemon) -> tuple[bool, str]:
    """Kill the daemon in the middle of an epoch and start it again. Return whether every sample came once, and a line."""
    tokens = open_dataset("s3://demo/stdlib/", format="tokens", dtype="uint8", seq_len=512)
    batches = DataLoader(tokens, batch_size=BATCH, shuffle=True, window=EXTENT_BYTES)
    seen: list[int] = []
    longest_s = 0.0
    restart = threading.Thread(target=daemon.start)
    arrived = time.perf_counter()
    for step, _ in enumerate(batches):
        longest_s = max(longest_s, time.perf_counter() - arrived)
        seen.extend(batches.indices[: batches.valid].tolist())
        arrived = time.perf_counter()
        if step == len(batches) // 2:
            daemon.kill()
            restart.start()
    restart.join()
    once = sorted(seen) == list(range(len(tokens)))
    line = f"daemon killed in mid-epoch: {'each' if once else 'NOT EACH'} of {len(tokens):,} samples came exactly once; "
    return once, line + f"the longest wait was {longest_s:.1f} s"


def main() -> int:
    """Print the four lines; return 0 only when what they claim holds."""
    options = argparse.ArgumentParser()
    options.add_argument("root", type=Path)
    root = options.parse_args().root
    plain, plain_bytes = read_plain()
    given = ["--ram", "64MiB", "--allow", "s3://demo/", "--extent-bytes", str(EXTENT_BYTES)]
    with Daemon(root, given) as daemon:
        os.environ.update(daemon.env, CACHESVC="require")
        ours, our_bytes = read_cached()
        once, survived = survive(daemon)
    for name, (first_s, next_s) in (("plain DataLoader", plain), ("cachesvc", ours)):
        print(f"{name + ':':<18}first epoch {first_s:.1f} s, second epoch {next_s:.1f} s")
    data_bytes = plain_bytes // 2
    print(
        f"source bytes:     plain {plain_bytes / data_bytes:.2f} x the data, cachesvc {our_bytes / data_bytes:.2f} x"
    )
    print(survived)
    return 0 if once and our_bytes == data_bytes else 1


if __name__ == "__main__":
    sys.exit(main())
