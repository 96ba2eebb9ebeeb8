"""The model that loaders are compared with: a plain walk through epochs that says which samples each rank gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset

from cachesvc.core.errors import SourceUnavailable
from loader import DataLoader, mix, pack
from loader.datasets.dataset import Dataset
from tests.support.training.loader_fakes import Holding, MemoryLink, in_memory

COUNT, WIDTH = 26, 256
FAULTS: dict[int, str] = {}
"""Faults of records at decoding, by number: "always" spoilt, spoilt "once", or "away" (an unavailable source) once."""
FIRED: list[str] = []
"""One-time faults that have occurred and were not yet raised to a caller."""


class Spoilt(Exception):
    """The error of the transform."""


@dataclass(frozen=True)
class Numbered:
    """A transform that returns a record's number with three random digits."""

    faulty: bool

    def __call__(self, record: torch.Tensor, rng: np.random.Generator) -> int:
        number = int(record[0]) // WIDTH
        fault = FAULTS.get(number) if self.faulty else None
        if fault in ("once", "away"):
            FAULTS.pop(number, None)
            FIRED.append(fault)
        if fault == "away":
            raise SourceUnavailable("away for a moment")
        if fault:
            raise Spoilt(f"record {number}")
        return number * 1000 + int(rng.integers(1000))


def number_of(value: Any) -> int:
    """Return the number of the record behind a value; -1 for a value that no transform made."""
    return value // 1000 if isinstance(value, int) else -1


def mixture(data: Dataset) -> Any:
    one, other = data.take(12), data.select(range(9, COUNT))
    mixed = mix({one: 8, other: 12}, by="choose")
    return mixed.reweighed({one: 14, other: 9}, epoch=1).reweighed({one: 10, other: 10}, epoch=3)


KINDS: dict[str, Callable[[Dataset], Any]] = {
    "plain": lambda data: data,
    "taken": lambda data: data.take(24),
    "part": lambda data: data.split({"a": 0.8, "b": 0.2}, seed=1)["a"],
    "selected": lambda data: data.where("shard == 'r.bin'").select([*range(25, 3, -1), 0]),
    "subset": lambda data: Subset(data, [7, -1, *range(20), 7]),
    "both": lambda data: ConcatDataset([data.take(11), Subset(data, range(8, 21))]),
    "part of both": lambda data: Subset(ConcatDataset([data, data.take(3)]), [*range(28, 4, -1)]),
    "held": lambda data: Holding(data.take(24)),
    "mixture": mixture,
    "records": lambda data: data,
    "mixed records": mixture,
    "packs": lambda data: pack(data, 300),
    "packs of selected": lambda data: pack(data.select([*range(25, 3, -1), 0]), 300),
}
UNDECODED = ("records", "mixed records", "packs", "packs of selected")


@cache
def made(link: MemoryLink, kind: str, faulty: bool) -> Any:
    form = {} if kind in UNDECODED else {"transform": Numbered(faulty)}
    return KINDS[kind](in_memory(link, **form))


def values(batch: Any) -> list[Any]:
    """Return the values in a batch, whether it was collated or not."""
    rows = batch["tokens"] if isinstance(batch, dict) else batch
    return [np.asarray(row["tokens"] if isinstance(row, dict) else row).tolist() for row in rows]


@cache
def straight(
    link: MemoryLink, kind: str, batch: int, epoch: int, **order: Any
) -> tuple[list[tuple[int, Any]], int]:
    """Return index and value of each sample of an epoch, in the order in which a new loader gives them; and the number of
    real ones, since repeats fill the last batch."""
    loader = DataLoader(made(link, kind, False), batch, last="pad", **order)
    loader.set_epoch(epoch)
    found: list[tuple[int, Any]] = []
    count = 0
    for each in loader:
        found += zip(loader.indices.tolist(), values(each), strict=True)
        count += loader.valid
    indices = sorted(index for index, _ in found[:count])
    assert len(set(indices)) == len(indices) >= 18, "a sample twice"
    assert "mix" in kind or indices == list(range(len(loader.dataset)))  # type: ignore[arg-type]
    return found, count


@dataclass(frozen=True)
class Order:
    """The samples that each rank of a job must get."""

    link: MemoryLink
    kind: str
    seed: int
    shuffle: bool
    window: Any
    batch: int
    last: str
    world: int
    size: int

    def flat(self, epoch: int) -> list[tuple[int, Any]]:
        """Return the epoch's samples, and repeats up to a whole batch."""
        return self._straight(epoch)[0]

    def count(self, epoch: int) -> int:
        """Return the number of samples without the repeats."""
        return self._straight(epoch)[1]

    def _straight(self, epoch: int) -> tuple[list[tuple[int, Any]], int]:
        told = {"seed": self.seed, "shuffle": self.shuffle, "window": self.window}
        return straight(self.link, self.kind, self.batch, epoch, **told)

    @property
    def accumulate(self) -> int:
        return self.batch // (self.world * self.size)

    def turns(self, epoch: int) -> int:
        full, rest = divmod(self.count(epoch), self.batch)
        return (full + (rest > 0 and self.last in ("pad", "short"))) * self.accumulate

    def positions(self, rank: int, epoch: int, turn: int) -> tuple[list[int], int]:
        """Return the positions of a batch's samples in the flat epoch, and how many of them are real. Repeats come
        last."""
        count, (step, micro) = self.count(epoch), divmod(turn, self.accumulate)
        first, parts = step * self.batch, self.batch // self.size
        rest = min(self.batch, count - first)
        rows = self.size if self.last == "pad" else -(-rest // parts)
        batch = [*range(first, first + self.batch)]
        within = slice((rank * self.accumulate + micro) * rows, (rank * self.accumulate + micro + 1) * rows)
        return batch[within], min(max(rest - within.start, 0), rows)


@dataclass(eq=False)
class Run:
    """One `iter()` of a loader. `done`: its complete epochs. `moves`: the count of moves of the position when its epoch
    began, -1 before its first epoch. `raised`: the turn whose batch failed, until the next request."""

    batches: Any
    done: int = 0
    moves: int = -1
    raised: int | None = None


class Rank:
    """A loader and its position: `turn` batches of `epoch` were taken, after `done` complete epochs of that `iter()`.
    `kept`: the next `iter()` continues there."""

    def __init__(self, order: Order, number: int, loader: DataLoader, stood_in: dict[Any, int]) -> None:
        self.order, self.number, self.loader, self.stood_in = order, number, loader, stood_in
        self.runs: list[Run] = []
        self.newest: Run | None = None
        self.moves = 0
        self.handed: list[int] | None = None
        """All indices of this rank in the epoch so far; None if some were left out."""
        self.over: tuple[int, list[int] | None] | None = None
        self.move(0)

    def move(self, epoch: int, turn: int = 0, kept: bool = False, done: int = 0) -> None:
        self.epoch, self.turn, self.kept, self.done = epoch, turn, kept, done
        self.moves += 1
        self.latest: tuple[list[int], int] | None = [], 0

    def place(self) -> tuple[int, int]:
        epoch, turn = self.epoch, self.turn
        while turn >= self.order.turns(epoch):
            epoch, turn = epoch + 1, turn - self.order.turns(epoch)
        return epoch, turn

    def done_at(self, epoch: int) -> int:
        """Return the complete epochs of the `iter()` at an epoch; 0 if they are all."""
        done = self.done + epoch - self.epoch
        return done if self.loader.epochs is None or done < self.loader.epochs else 0

    def forget_latest(self) -> None:
        """Forget the latest batch: its repair is known only until the next batch."""
        if FAULTS or FIRED:
            self.latest = None

    def begin(self) -> None:
        self.newest = Run(iter(self.loader))
        self.runs.append(self.newest)
        if self.kept:
            epoch, turn = self.place()
            self.epoch, self.turn, self.done = epoch, turn, self.done_at(epoch)
        else:
            self.epoch, self.turn, self.done = self.epoch + (self.turn > 0), 0, 0
        self.forget_latest()

    def skip(self, batches: int) -> None:
        self.loader.skip(batches)
        if batches:
            self.turn, self.kept, self.handed = self.turn + batches, True, None

    def running(self) -> Run | None:
        return self.newest if self.newest in self.runs else None

    def due(self, run: Run) -> tuple[int, int] | None:
        """Return epoch and turn of the batch that the newest run gives next; None at its end."""
        if run.moves < 0:
            run.moves, run.done = self.moves, self.done_at(self.epoch)
            self.done = run.done
        if run.moves == self.moves and run.raised == self.turn:
            self.turn += 1
        run.raised = None
        while self.loader.epochs is None or run.done < self.loader.epochs:
            if run.moves == self.moves and self.turn < self.order.turns(self.epoch):
                return self.epoch, self.turn
            self.end_epoch(run)
            run.done, run.moves = run.done + 1, self.moves
            if self.loader.epochs is None or run.done < self.loader.epochs:
                self.done = run.done
        return None

    def end_epoch(self, run: Run) -> None:
        turns = self.order.turns(self.epoch)
        if run.moves == self.moves and self.turn >= turns:
            self.over = self.epoch, self.handed
            self.epoch, self.turn = self.epoch + 1, self.turn - turns
            self.kept, self.done = self.turn > 0, self.done + 1

    def close(self, run: Run) -> None:
        self.runs.remove(run)
        run.batches.close()
        if run is self.newest:
            self.end_epoch(run)

    def ask(self) -> None:
        """Take a batch from the newest run, and compare it."""
        run = self.running()
        if run is None:
            return
        due, on_error = self.due(run), self.loader.on_error
        bad = (
            []
            if due is None
            else [at for at in self.order.positions(self.number, *due)[0] if self.spoilt(due[0], at)]
        )
        try:
            batch = next(run.batches)
        except StopIteration:
            assert due is None, "an end too early"
            self.runs.remove(run)
            return
        except SourceUnavailable:
            assert FIRED
            FIRED.clear()
            return self.ask()  # takes the same batch
        except Spoilt:
            assert due is not None
            assert bad or FIRED
            assert on_error == "raise"
            FIRED.clear()
            run.raised, self.handed = due[1], None
            return
        assert due is not None, "a batch after the end"
        assert not bad or on_error != "raise"
        self.compare(due, batch)
        turn = due[1]
        if turn == 0:
            self.handed = []
        if self.handed is not None:
            self.handed += self.loader.indices.tolist()[: self.loader.valid]
        if FAULTS or FIRED:
            self.handed = None
        self.turn, self.kept = turn + 1, False
        self.latest = self.loader.indices.tolist(), self.loader.valid

    def spoilt(self, epoch: int, position: int) -> bool:
        return FAULTS.get(number_of(self.order.flat(epoch)[position][1])) == "always"

    def compare(self, due: tuple[int, int], batch: Any) -> None:
        """Compare a batch with the model. The substitute of a bad sample is the same at any scale."""
        flat, (positions, valid) = self.order.flat(due[0]), self.order.positions(self.number, *due)
        wanted = {at: None if self.spoilt(due[0], at) else flat[at][0] for at in positions}
        if self.loader.on_error == "skip":
            valid = sum(wanted[at] is not None for at in positions[:valid])
            wanted = {at: one for at, one in wanted.items() if one is not None} or {positions[0]: None}
        known, found = dict(flat), self.loader.indices.tolist()
        assert values(batch) == [known[index] for index in found], "not the samples that it says"
        assert isinstance(batch, list) == (self.loader.collate_fn is list)
        assert (len(found), self.loader.valid) == (len(wanted), valid)
        for index, (at, one) in zip(found, wanted.items(), strict=True):
            if one is not None:
                assert index == one
                continue
            assert FAULTS.get(number_of(known[index])) != "always"
            if positions.index(at) < valid:
                key = due[0], at, self.order.batch, tuple(sorted(FAULTS))
                assert self.stood_in.setdefault(key, index) == index

    def check(self) -> None:
        order, loader, (epoch, turn) = self.order, self.loader, self.place()
        step, micro = divmod(turn, order.accumulate)
        now = epoch if self.kept else self.epoch
        assert loader.epoch == now
        left = (loader.epochs or 1) - (self.done_at(epoch) if self.kept and loader.epochs else 0)
        before = turn if self.kept and loader.epochs not in (None, 1) else 0
        assert len(loader) == sum(order.turns(now + each) for each in range(left)) - before
        assert loader.accumulate == order.accumulate
        assert self.latest in (None, (loader.indices.tolist(), loader.valid))
        wanted = {
            "epoch": epoch,
            "step": step,
            "micro": micro,
            "steps": -(-order.turns(epoch) // order.accumulate),
            "seed": order.seed,
            "global_batch": order.batch,
            "batch_size": order.size if micro else 0,
            "world_size": order.world if micro else 0,
            "last": order.last,
            "epochs_done": self.done_at(epoch),
        }
        assert loader.state_dict() | wanted == loader.state_dict()
