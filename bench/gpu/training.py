"""The data's share of a training step: a small GPT in bf16 over our loader, torch's over a memmap, and no data at all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from bench.gpu.checks import EVERYTHING
from bench.gpu.data import SEQ_LEN, VOCABULARY, Data
from bench.gpu.rates import synchronize
from loader import DataLoader

BATCH, WIDTH, LAYERS, HEADS = 8, 768, 12, 12
STEPS, WARM_UP, ROUNDS = 40, 8, 3
Pair = tuple[torch.Tensor, torch.Tensor]


class Block(nn.Module):
    """Attention and a multi-layer perceptron, both with a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = (
            self.qkv(self.first(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.second(x))


class GPT(nn.Module):
    """A decoder of 124 million parameters at the sizes above."""

    def __init__(self, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))


def measure(data: Data, device: str = "cuda", small: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield a way and its step in ms, the median of rounds in which all ways take turns; at last, by which part of a step
    without data each round exceeds it."""
    width, layers, steps = (32, 1, 3) if small else (WIDTH, LAYERS, STEPS)
    model = GPT(width, layers, HEADS if not small else 2, SEQ_LEN).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
    batch = 1 if small else BATCH
    tokens = data.tokens()
    ours: dict[str, Any] = {"batch_size": batch, "shuffle": True, "epochs": None, "drop_last": True}
    if device == "cuda":
        ours["device"] = device
    ways: dict[str, Callable[[], Iterator[Any]]] = {
        "synthetic": lambda: _synthetic(batch, device),
        "ours": lambda: iter(DataLoader(tokens, **ours)),
        "torch, memmap": lambda: _torch(data, batch, device, 0),
        "torch, memmap, 4 workers, pin_memory": lambda: _torch(data, batch, device, 4),
    }
    if device == "cuda":
        ways["ours, gathered by the device"] = lambda: iter(
            DataLoader(tokens, **ours, pinned_bytes=EVERYTHING)
        )
    times: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(1 if small else ROUNDS):
        for way, begin in ways.items():
            times[way].append(_steps(model, optimizer, begin(), device, steps))
    for way, rounds in times.items():
        yield way, {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    base = statistics.median(each["step_ms"] for each in times["synthetic"])
    yield (
        "more than a step without data, by round",
        {way: [each["step_ms"] / base - 1 for each in rounds] for way, rounds in times.items()},
    )


def _steps(
    model: nn.Module, optimizer: Any, batches: Iterator[Any], device: str, steps: int
) -> dict[str, float]:
    """Run steps; the loop does not wait for the device, as training loops do not. `step_ms`: wall time per step over
    all steps, `wait_ms`: the median time that the loop waited for its next batch."""
    waits: list[float] = []
    began = 0.0
    for number in range(steps + WARM_UP):
        if number == WARM_UP:
            synchronize()
            waits.clear()
            began = time.perf_counter()
        asked = time.perf_counter()
        inputs, targets = next(batches)
        waits.append(time.perf_counter() - asked)
        with torch.autocast(device, torch.bfloat16):
            scores = model(inputs)
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    synchronize()
    return {
        "step_ms": (time.perf_counter() - began) / steps * 1e3,
        "wait_ms": statistics.median(waits) * 1e3,
        "loss": float(loss.detach()),
    }


def _synthetic(batch: int, device: str) -> Iterator[Pair]:
    tokens = torch.randint(0, VOCABULARY, (batch, SEQ_LEN + 1), device=device)
    while True:
        yield tokens[:, :-1], tokens[:, 1:]


def _torch(data: Data, batch: int, device: str, workers: int) -> Iterator[Pair]:
    """Iterate as nanoGPT's users do: int64 windows of a memmap, shuffled."""
    loader = torch.utils.data.DataLoader(
        _Windows(str(data.path("tokens"))),
        batch,
        shuffle=True,
        num_workers=workers,
        pin_memory=device == "cuda",
        drop_last=True,
    )
    while True:
        for inputs, targets in loader:
            yield inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)


class _Windows(torch.utils.data.Dataset[Pair]):
    def __init__(self, path: str) -> None:
        self._tokens = np.memmap(path, np.uint16, "r")

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // SEQ_LEN

    def __getitem__(self, index: int) -> Pair:
        row = torch.from_numpy(self._tokens[index * SEQ_LEN :][: SEQ_LEN + 1].astype(np.int64))
        return row[:-1], row[1:]
