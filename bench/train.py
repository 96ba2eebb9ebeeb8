"""The demo's training script, as a user would write it: torchrun, two ranks, one import swapped."""

from __future__ import annotations

import argparse
import json
import logging
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.corpus import say
from cachesvc.client.control import Control
from loader import DataLoader, open_dataset


class Digits(nn.Sequential):
    """Model: an 8 x 8 image -> ten scores."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


class Bytes(nn.Module):
    """Next-byte model over a window of earlier bytes: embedding, causal convolution, projection."""

    def __init__(self, width: int = 48, reach: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.mix = nn.Conv1d(width, width, reach)
        self.out = nn.Linear(width, 256)
        self.reach = reach

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        padded = nn.functional.pad(self.embed(tokens).transpose(1, 2), (self.reach - 1, 0))
        return self.out(torch.relu(self.mix(padded)).transpose(1, 2))


def to_tensor(sample: tuple[object, int]) -> tuple[torch.Tensor, int]:
    """(PIL image, class index) -> (float tensor 8 x 8, class index)."""
    import numpy as np

    image, label = sample
    return torch.from_numpy(np.asarray(image, dtype=np.float32) / 255.0), label


def train_digits(uri: str, epochs: int, ledger: Path) -> None:
    """Train on images by class, decoded in two workers per rank."""
    train = open_dataset(uri, transform=to_tensor, image_mode="L")
    batches = DataLoader(train, batch_size=32, shuffle=True, num_workers=2)
    model = DistributedDataParallel(Digits())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def step(batch: list[torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run("digits", batches, epochs, step, ledger)


def train_bytes(uri: str, epochs: int, ledger: Path) -> None:
    """Train on token sequences, gathered in process."""
    tokens = open_dataset(uri, format="tokens", dtype="uint8", seq_len=512, overlap=1, targets="shifted")
    batches = DataLoader(tokens, batch_size=32, shuffle=True, window=4 << 20)
    model = DistributedDataParallel(Bytes())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def step(batch: list[torch.Tensor]) -> torch.Tensor:
        inputs, targets = batch
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.view(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run("stdlib", batches, epochs, step, ledger)


def source_bytes(directory: str | None = None) -> dict[str, int]:
    """Bytes that a daemon has read from the source so far, by dataset folder name. `directory` holds the daemon's
    sockets; None finds them as clients do."""
    with Control(directory) as control:
        return {Path(found.dataset.uri).name: found.source_bytes for found in control.list()}


def run(name: str, batches: DataLoader, epochs: int, step: object, ledger: Path) -> None:
    """The usual training loop, plus a ledger of the samples that this rank saw and of source bytes."""
    rank = dist.get_rank()
    for epoch in range(batches.epoch, epochs):
        started, seen, loss = time.perf_counter(), [], torch.zeros(())
        for batch in batches:
            loss = step(batch)  # type: ignore[operator]
            seen.extend(batches.indices[: batches.valid].tolist())
        wall = time.perf_counter() - started
        (ledger / f"{name}-{epoch}-{rank}.json").write_text(json.dumps(seen))
        stats = batches.stats()
        say(
            "epoch",
            dataset=name,
            epoch=epoch,
            rank=rank,
            samples=len(seen),
            wall_s=wall,
            stall_s=stats.wait_s,
            bytes_by_origin=stats.bytes_by_origin,
            loss=float(loss),
        )
        dist.barrier()
        if rank == 0:
            say("source", dataset=name, epoch=epoch, bytes=source_bytes()[name])
        dist.barrier()


def main() -> None:
    """Train on two datasets, one after the other."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    options = argparse.ArgumentParser()
    options.add_argument("--digits", required=True)
    options.add_argument("--stdlib", required=True)
    options.add_argument("--epochs", type=int, default=2)
    options.add_argument("--ledger", type=Path, required=True)
    given = options.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    train_digits(given.digits, given.epochs, given.ledger)
    train_bytes(given.stdlib, given.epochs, given.ledger)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
