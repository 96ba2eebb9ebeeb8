"""The trainer of compose.yaml: puts random tokens into a bucket where it has none, and trains on them."""

from __future__ import annotations

import argparse

import boto3
import numpy as np
import torch

from cachesvc.torch import DataLoader
from loader import open_dataset

BUCKET, OBJECTS, TOKENS = "demo", 8, 1 << 23
VOCABULARY, WIDTH = 1 << 12, 32


def put_tokens() -> None:
    """Put OBJECTS objects of TOKENS tokens, 128 MiB in all, into the bucket."""
    s3 = boto3.client("s3")
    if BUCKET not in [bucket["Name"] for bucket in s3.list_buckets()["Buckets"]]:
        s3.create_bucket(Bucket=BUCKET)
    random = np.random.default_rng(0)
    for number in range(s3.list_objects_v2(Bucket=BUCKET)["KeyCount"], OBJECTS):
        tokens = random.integers(VOCABULARY, size=TOKENS, dtype=np.uint16)
        s3.put_object(Bucket=BUCKET, Key=f"tokens-{number}.bin", Body=tokens.tobytes())


def train(epochs: int) -> None:
    """Learn which token follows which, from the first tokens of each sequence: most bytes are only read."""
    data = open_dataset(
        f"s3://{BUCKET}/", format="tokens", dtype="uint16", seq_len=4096, overlap=1, targets="shifted"
    )
    batches = DataLoader(data, batch_size=64, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, WIDTH), torch.nn.Linear(WIDTH, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for inputs, targets in batches:
            found = model(inputs[:, :64].long()).squeeze(-1)
            loss = torch.nn.functional.mse_loss(found, targets[:, :64] / VOCABULARY)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--epochs", type=int, default=1)
    put_tokens()
    train(options.parse_args().epochs)
