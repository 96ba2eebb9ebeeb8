"""Loaders under any order of calls: every rank gets the batches of a plain walk through its epochs."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from cachesvc.core.errors import CacheError, InvalidInput, StateMismatch
from loader import DataLoader
from tests.support import datasets
from tests.support.training.loader_fakes import MemoryLink, compiled
from tests.support.training.loader_walk import (
    COUNT,
    FAULTS,
    FIRED,
    KINDS,
    UNDECODED,
    WIDTH,
    Order,
    Rank,
    made,
    number_of,
    straight,
)


class Cut(NamedTuple):
    """The arguments by which a job's loaders cut its global batches."""

    world: int
    size: int
    batch: int | None
    last: Any

    def own_last(self) -> str:
        return self.last or "short"


cuts = st.builds(
    Cut,
    st.integers(1, 3),
    st.sampled_from([1, 2, 3, 4, 6]),
    st.sampled_from([None, 4, 6, 12]),
    st.sampled_from([None, None, "drop", "pad", "error", "short"]),
)
whole_cuts = cuts.filter(lambda cut: (cut.batch or 12) % (cut.world * cut.size) == 0)
crews = st.sampled_from([0, 0, 1, 2])
windows = st.sampled_from([None, None, "auto", "all", 8192])
picks = st.integers(0, 1000)
endings = st.sampled_from([1, 1, 2, None])
errors = st.sampled_from(["raise", "skip", "substitute"])


class LoaderMachine(RuleBasedStateMachine):
    """A job of some ranks, on which each step is done one after the other."""

    link: ClassVar[MemoryLink]
    worker_type: ClassVar[Any] = "thread"

    @initialize(
        kind=st.sampled_from(sorted(KINDS)),
        seed=st.integers(0, 1),
        shuffle=st.sampled_from([True, True, False]),
        window=windows,
        elder=windows,
        cut=whole_cuts,
        workers=crews,
        persistent=st.booleans(),
        on_error=errors,
        epochs=endings,
        watched=st.booleans(),
    )
    def start(
        self,
        kind: str,
        seed: int,
        shuffle: bool,
        window: Any,
        elder: Any,
        cut: Cut,
        workers: int,
        persistent: bool,
        on_error: Any,
        epochs: int | None,
        watched: bool,
    ) -> None:
        FAULTS.clear()
        FIRED.clear()
        self.stood_in: dict[Any, int] = {}
        self.crewed = False
        """True once there were workers, which may have met a fault in a prefetched batch."""
        self.saved: list[tuple[dict[str, Any], list[int] | None, Any]] = []
        self.watched, self.on_error, self.epochs, self.persistent = watched, on_error, epochs, persistent
        cut, batch = self.possible(kind, cut), cut.batch or cut.world * cut.size
        order = Order(
            self.link, kind, seed, shuffle, window or "auto", batch, cut.own_last(), cut.world, cut.size
        )
        if cut.last == "error" and order.count(0) % batch:
            with pytest.raises(InvalidInput, match="leave"):
                len(self.loader(order, cut, 0, window, workers))
            cut, order = cut._replace(last="drop"), replace(order, last="drop")
        self.cut, self.order, self.window = cut, order, window
        self.ranks = self.job(order, cut, window, workers)
        before = self.loader(order, cut, 0, elder, 0)
        before.skip(2)
        self.saved.append((before.state_dict(), None, elder or "auto"))

    def possible(self, kind: str, cut: Cut) -> Cut:
        """The cut, without "error" for a mixture: its epochs differ in length, and some leave samples over."""
        return cut._replace(last="drop") if "mix" in kind and cut.last == "error" else cut

    def loader(self, order: Order, cut: Cut, rank: int, window: Any, workers: int) -> DataLoader:
        return DataLoader(
            made(self.link, order.kind, True),
            cut.size,
            order.shuffle,
            num_workers=workers,
            prefetch_factor=3 if workers else None,
            persistent_workers=workers > 0 and self.persistent,
            worker_type=self.worker_type,
            multiprocessing_context="fork" if workers else None,
            seed=order.seed,
            window=window,
            global_batch_size=cut.batch,
            last=cut.last,
            epochs=self.epochs,
            on_error=self.on_error,
            rank=rank,
            world_size=cut.world,
        )

    def job(self, order: Order, cut: Cut, window: Any, workers: int) -> list[Rank]:
        self.crewed |= workers > 0
        return [
            Rank(order, rank, self.loader(order, cut, rank, window, workers), self.stood_in)
            for rank in range(cut.world)
        ]

    @rule(
        workers=st.none() | crews,
        collate=st.sampled_from([None, None, list, torch.utils.data.default_collate]),
        on_error=st.none() | errors,
        epochs=st.just(0) | endings,
        older=st.booleans(),
    )
    def begin(
        self, workers: int | None, collate: Any, on_error: Any, epochs: int | None, older: bool
    ) -> None:
        """Begin an iteration, after attributes that apply to it are set."""
        self.on_error = on_error or self.on_error
        self.epochs = self.epochs if epochs == 0 else epochs
        self.crewed |= bool(workers)
        for rank in self.ranks:
            loader = rank.loader
            if workers is not None and not loader.persistent_workers:
                loader.num_workers = workers
            loader.collate_fn = collate or loader.collate_fn
            loader.on_error, loader.epochs = self.on_error, self.epochs
            rank.begin()
        if older:
            self.use_older_iterations()

    @rule(count=st.integers(1, 5), skip=st.booleans())
    def take(self, count: int, skip: bool) -> None:
        """Take batches; one that cannot be made may be skipped after its error."""
        for rank in self.ranks:
            if rank.running() is None:
                rank.begin()
        for _ in range(count):
            for rank in self.ranks:
                rank.ask()
                run = rank.running()
                if run is not None and run.raised is not None and skip:
                    rank.skip(1)
                if not self.crewed:
                    assert not FIRED or (self.on_error != "raise" and FIRED == ["once"]), "an error was lost"
                    FIRED.clear()
            self.settle()

    @rule(epochs=st.integers(1, 2))
    def run_to_the_end(self, epochs: int) -> None:
        self.take(epochs * self.order.turns(self.ranks[0].epoch) + 1, False)

    @rule(older=st.booleans())
    def take_the_rest_without_another_fetch(self, older: bool) -> None:
        if older and self.ranks[0].running():
            self.begin(None, None, None, 0, False)
        first = self.ranks[0]
        self.take(max(1, self.order.turns(first.epoch) - (first.turn if first.running() else 0)), False)
        if older:
            self.use_older_iterations()

    def settle(self) -> None:
        """Check that all ranks together got each sample of an ended epoch once."""
        if all(rank.over is not None for rank in self.ranks):
            over = [rank.over for rank in self.ranks if rank.over is not None]
            for rank in self.ranks:
                rank.over = None
            epoch, parts = over[0][0], [handed for _, handed in over]
            if all(of == epoch for of, _ in over) and None not in parts:
                wanted = [index for index, _ in self.order.flat(epoch)[: self.order.count(epoch)]]
                if self.order.last == "drop":
                    del wanted[len(wanted) // self.order.batch * self.order.batch :]
                assert sorted(index for part in parts for index in part or []) == sorted(wanted)

    @rule(pick=picks)
    def abandon(self, pick: int) -> None:
        for rank in self.ranks:
            if rank.runs:
                rank.close(rank.runs[pick % len(rank.runs)])

    @rule()
    def use_older_iterations(self) -> None:
        for rank in self.ranks:
            loader = rank.loader
            before = loader.stats().steps, loader.indices.tolist(), loader.valid
            for run in [run for run in rank.runs if run is not rank.newest]:
                with pytest.raises(InvalidInput, match="a newer iteration"):
                    next(run.batches)
                with pytest.raises(CacheError, match="has ended with an error"):
                    next(run.batches)
                rank.runs.remove(run)
            assert (loader.stats().steps, loader.indices.tolist(), loader.valid) == before

    @rule(batches=st.integers(0, 4) | st.integers(0, 60))
    def skip(self, batches: int) -> None:
        for rank in self.ranks:
            rank.skip(batches)

    @rule(epoch=st.integers(0, 4), same=st.booleans())
    def set_epoch(self, epoch: int, same: bool) -> None:
        for rank in self.ranks:
            now = rank.place()[0] if rank.kept else rank.epoch
            wanted = now if same else epoch
            rank.loader.set_epoch(wanted)
            if not (rank.kept and wanted == now):
                rank.move(wanted)

    @rule()
    def save(self) -> None:
        for rank in self.ranks:
            rank.check()
        if len({rank.place() for rank in self.ranks}) == 1:
            state, *others = (json.loads(json.dumps(rank.loader.state_dict())) for rank in self.ranks)
            assert all(other == state for other in others)
            parts = [rank.handed for rank in self.ranks]
            handed = None if None in parts else [index for part in parts for index in part or []]
            self.saved.append((state, handed, self.order.window))

    @rule(pick=st.just(-1) | picks, cut=st.none() | cuts | whole_cuts, window=windows, workers=crews)
    def load(self, pick: int, cut: Cut | None, window: Any, workers: int) -> None:
        """Load a state into these loaders, or into those of a job with another cut; the current state, or an older one."""
        if pick < 0:
            self.save()
        state, handed, of_state = self.saved[pick % len(self.saved)]
        cut = self.possible(self.order.kind, cut or self.cut)
        window = self.window if cut == self.cut else window
        order = self.resumed(state, of_state, cut, window)
        ranks = self.ranks if cut == self.cut else self.job(self.order, cut, window, workers)
        for rank in ranks:
            if not isinstance(order, Order):
                with pytest.raises(order):
                    rank.loader.load_state_dict(state)
                continue
            rank.loader.load_state_dict(state)
            rank.order = order
            turn = state["step"] * order.accumulate + state["micro"]
            rank.move(state["epoch"], min(turn, order.turns(state["epoch"])), True, state["epochs_done"])
            rank.handed = (
                None if handed is None or order.last != state["last"] else [*handed] * (rank is ranks[0])
            )
            rank.over = None
        if isinstance(order, Order):
            if ranks is not self.ranks:
                self.end()
            self.ranks, self.cut, self.order, self.window = ranks, cut, order, window

    def resumed(self, state: dict[str, Any], window: Any, cut: Cut, given: Any) -> Order | type[CacheError]:
        """The order of a continued run, or the error; `given` is the window of its loaders."""
        kept = state["last"] != "error" and cut.own_last() != "error"
        saved = state["global_batch"], window, state["last"] if kept else cut.own_last()
        batch, window, last = cut.batch or saved[0], given or window, cut.last or saved[2]
        if (state["step"] or state["micro"]) and (batch, window, last) != saved:
            return StateMismatch
        order = replace(self.order, window=window, batch=batch, last=last, world=cut.world, size=cut.size)
        if batch % (cut.world * cut.size) or (last == "error" and order.count(state["epoch"]) % batch):
            return InvalidInput
        if state["micro"] and (state["world_size"], state["batch_size"]) != (cut.world, cut.size):
            return StateMismatch
        return order

    @rule(
        change=st.sampled_from(
            [{"seed": 9}, {"samples": 3}, {"version": 1}, {"step": -1}, {"dataset": "another"}]
        )
    )
    def load_what_is_refused(self, change: dict[str, Any]) -> None:
        """Load a wrong state, which changes nothing."""
        for rank in self.ranks:
            with pytest.raises(StateMismatch):
                rank.loader.load_state_dict(rank.loader.state_dict() | change)

    @rule(
        how=st.sampled_from([copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))]),
        stray=st.booleans(),
    )
    def continue_with_copies(self, how: Callable[[DataLoader], DataLoader], stray: bool) -> None:
        """Continue with copies, which the original loaders do not disturb."""
        for rank in self.ranks:
            twin = how(rank.loader)
            if stray and not FAULTS:
                list(islice(rank.loader, 2))
            for run in rank.runs:
                run.batches.close()
            rank.runs, rank.newest, rank.loader = [], None, twin
            rank.moves += 1
            rank.forget_latest()

    @rule(
        numbers=st.sets(st.integers(0, COUNT - 1), max_size=8), once=st.sampled_from([None, "once", "away"])
    )
    def spoil(self, numbers: set[int], once: str | None) -> None:
        """Spoil some records, or one of them once; batches that workers have prefetched are not affected."""
        if self.worker_type == "process":
            return
        for rank in self.ranks:
            for run in [*rank.runs]:
                rank.close(run)
        FAULTS.clear()
        FIRED.clear()
        FAULTS.update(dict.fromkeys(list(numbers)[:1] if once else numbers, once or "always"))
        for rank in self.ranks:
            rank.handed, rank.latest = None, None

    @rule(once=st.sampled_from([None, "once", "away"]), then=st.sampled_from(["ask", "skip", "begin"]))
    def meet_a_bad_sample(self, once: str | None, then: str) -> None:
        """Spoil a sample of the very next batch, and take it."""
        if self.worker_type == "process" or self.order.kind in UNDECODED:
            return
        self.spoil(set(), None)
        self.begin(None, None, "raise", 0, False)
        first = self.ranks[0]
        epoch, turn = first.place()
        at = self.order.positions(0, epoch, turn)[0][0]
        FAULTS[number_of(self.order.flat(epoch)[at][1])] = once or "always"
        self.take(1, then == "skip")
        if then == "begin":
            self.begin(None, None, None, 0, True)
        self.take(1, False)

    @rule(pick=st.just(0) | picks, count=st.integers(0, 2))
    def load_in_mid_iteration(self, pick: int, count: int) -> None:
        """Load a state in mid-iteration, or between `iter()` and its first batch."""
        self.begin(None, None, None, 2, False)
        self.take(count, False)
        self.load(pick, None, None, 0)
        self.take(2, False)

    @invariant()
    def loaders_state_their_position(self) -> None:
        if hasattr(self, "ranks") and self.watched:
            for rank in self.ranks:
                rank.check()

    def end(self) -> None:
        for rank in self.ranks:
            for run in rank.runs:
                run.batches.close()

    def teardown(self) -> None:
        if hasattr(self, "ranks"):
            self.end()


class ProcessMachine(LoaderMachine):
    """A LoaderMachine with worker processes."""

    worker_type = "process"


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MemoryLink]:
    root: Path = tmp_path_factory.mktemp("records")
    datasets.array_file(root / "r.bin", np.arange(COUNT * WIDTH, dtype="<i4").reshape(COUNT, WIDTH))
    LoaderMachine.link = compiled(
        root / "r.bin", root, format="records", dtype=f"({WIDTH},)i4", extent_bytes=4096
    )
    yield LoaderMachine.link
    made.cache_clear()
    straight.cache_clear()


def walked(machine: type[LoaderMachine], examples: int, seed: int | None = None) -> None:
    if seed is not None:
        machine = hypothesis.seed(seed)(machine)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            derandomize=seed is None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.slow
def test_ranks_get_the_batches_of_a_plain_walk(link: MemoryLink) -> None:
    walked(LoaderMachine, 50)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_many_walks(link: MemoryLink, seed: int) -> None:
    walked(LoaderMachine, 600, seed)


@pytest.mark.slow
def test_walks_with_worker_processes(link: MemoryLink) -> None:
    walked(ProcessMachine, 30, 0)
