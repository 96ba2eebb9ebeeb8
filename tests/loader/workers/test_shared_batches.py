"""Batches of worker processes in shared memory: they are equal, live as long as they are used, and end with the
processes."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loader import DataLoader
from loader.workers.processes import WorkerPool
from loader.workers.shared_batches import EXTRA_SLOTS, FREE, SLOT_BYTES, Arena, pack_into_slot
from testbed import WAIT_S
from testbed.forked import TRAINER, ForkedProcess
from testbed.node import open_files
from tests.support import datasets
from tests.support.training.loader_fakes import MemoryLink, compiled, in_memory

COUNT = 203


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> MemoryLink:
    root = tmp_path_factory.mktemp("records")
    datasets.array_file(root / "r.bin", np.arange(COUNT * 512, dtype="<u4").reshape(COUNT, 512))
    return compiled(root / "r.bin", root, format="records", record_bytes=2048, extent_bytes=8192)


def loader(link: MemoryLink, **settings: Any) -> DataLoader:
    given: dict[str, Any] = {
        "batch_size": 8,
        "shuffle": True,
        "num_workers": 2,
        "multiprocessing_context": "fork",
    }
    return DataLoader(in_memory(link), **(given | settings))


def in_process(link: MemoryLink, **settings: Any) -> list[list[int]]:
    return [
        rows(batch) for batch in DataLoader(in_memory(link), **{"batch_size": 8, "shuffle": True} | settings)
    ]


def rows(batch: torch.Tensor) -> list[int]:
    return (batch.numpy().view("<u4")[:, 0] // 512).tolist()


class Pair(NamedTuple):
    """A user's own batch type."""

    left: Any
    right: Any


tensors = st.sampled_from(
    [torch.int64, torch.uint8, torch.float32, torch.bfloat16, torch.bool, torch.complex64]
).flatmap(
    lambda dtype: st.lists(st.integers(0, 5), max_size=3).map(
        lambda shape: torch.arange(int(np.prod(shape))).reshape(shape).to(dtype)
    )
)
leaves = (
    tensors
    | st.binary(max_size=100)
    | st.text(max_size=5)
    | st.integers()
    | st.none()
    | st.lists(st.binary(max_size=50))
    | st.builds(lambda n: np.arange(n, dtype=">i2"), st.integers(0, 9))
    | st.builds(lambda n: torch.arange(12).reshape(3, 4)[:, ::n], st.integers(1, 3))
    | st.permutations(range(4)).map(lambda order: torch.arange(120).reshape(2, 3, 4, 5).permute(order))
    | st.builds(lambda n: torch.ones(n, requires_grad=True), st.integers(0, 2))
)
batches = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        dense = b.permute(sorted(range(b.dim()), key=b.stride, reverse=True)).is_contiguous()
        laid_out = a.stride() == b.stride() or not dense
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b) and laid_out
    if isinstance(a, np.ndarray):
        # numpy unpickles in the machine's byte order
        return a.dtype.newbyteorder("=") == b.dtype.newbyteorder("=") and np.array_equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[name], b[name]) for name in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


ARENA = Arena(1, 1)


@settings(max_examples=100, deadline=None)
@given(batches)
@example(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
@example(["text" * 2000, torch.ones(2), [b""]])
def test_any_batch_survives_the_slot_and_frees_it(batch: Any) -> None:
    arena = ARENA
    slot = arena.free_slot(0)
    assert slot is not None
    found = arena.send(batch, slot).open()
    assert same(found, batch)
    del found
    assert (arena._states == FREE).all()


def test_a_batch_larger_than_a_slot_is_not_packed() -> None:
    arena = Arena(1, 1)
    slot = arena.free_slot(0)
    assert slot is not None
    large = torch.empty(SLOT_BYTES + 1, dtype=torch.uint8)
    assert pack_into_slot(large, slot) is large
    assert slot.used == 0


@pytest.mark.parametrize(
    "layout",
    [torch.strided, pytest.param(torch.jagged, marks=pytest.mark.slow)],  # torch imports 4 s for that
    ids=str,
)
def test_a_nested_tensor_is_not_packed(layout: torch.layout) -> None:
    slot = Arena(1, 1).free_slot(0)
    assert slot is not None
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    assert pack_into_slot([nested], slot)[0] is nested


@pytest.mark.parametrize("out", [None, "int64"])
def test_a_gathered_batch_is_built_in_its_slot(tmp_path: Path, out: str | None) -> None:
    wanted = datasets.tokens(tmp_path / "t.bin", 3000)
    options: dict[str, Any] = {"format": "tokens", "dtype": "uint16", "seq_len": 100, "overlap": 1}
    link = compiled(tmp_path / "t.bin", tmp_path, **options)
    in_process = DataLoader(in_memory(link, out=out), batch_size=4)
    feed = in_process._prepared().feed
    arena = Arena(1, 1)
    slot = arena.free_slot(0)
    assert slot is not None
    feed.empty = slot.empty
    batch = feed[0, 0]
    assert slot.place(batch.data_ptr(), batch.nbytes) == 0
    assert batch[1].tolist() == wanted[100:201].tolist()


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_only_the_place_of_a_batch_crosses_the_pipe(link: MemoryLink, context: str) -> None:
    batches = loader(link, multiprocessing_context=context, num_workers=1)
    reading = iter(batches)
    first = next(reading)
    arena = batches._source._engine.arena  # type: ignore[union-attr]
    assert not first.is_shared(), "torch would have shared it by its own means"
    assert (arena._states != FREE).any()
    assert [rows(batch) for batch in (first, *reading)] == in_process(link)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_batch_that_is_kept_is_never_overwritten(link: MemoryLink, persistent: bool) -> None:
    batches = loader(link, persistent_workers=persistent)
    wanted = in_process(link)
    kept = list(batches)  # far more batches than slots
    views = [batch[2:3] for batch in batches]
    for _ in batches:
        pass
    assert [rows(batch) for batch in kept] == wanted
    again = in_process(link, epochs=2)[len(wanted) :]
    assert [rows(view)[0] for view in views] == [batch[2] for batch in again if len(batch) > 2]


def test_abandoned_iterations_free_their_slots(link: MemoryLink) -> None:
    batches = loader(link, persistent_workers=True)
    for _ in range(4 * (2 + EXTRA_SLOTS)):
        for _ in batches:
            break
    batches.set_epoch(0)
    assert [rows(batch) for batch in batches] == in_process(link)
    reading = iter(batches)
    handed = [next(reading) for _ in range(2)]
    arena = batches._source._engine.arena  # type: ignore[union-attr]
    at_home = [slot for slot in range(len(arena._states)) if arena._states[slot] == FREE]
    assert len(handed) == 2
    assert at_home, "every slot was lost to the abandoned iterations"


def test_a_forked_child_frees_no_slot() -> None:
    arena = Arena(1, 1)
    slot = arena.free_slot(0)
    assert slot is not None
    batch = arena.send(torch.arange(9), slot).open()
    child = os.fork()
    if child == 0:
        del batch
        os._exit(0)
    os.waitpid(child, 0)
    assert (arena._states != FREE).any()
    assert batch.tolist() == list(range(9))


def test_a_dropped_arena_leaves_no_descriptor_and_no_memory() -> None:
    before = len(os.listdir("/proc/self/fd"))
    arena = Arena(2, 2)
    slot = arena.free_slot(1)
    assert slot is not None
    handed = arena.send(torch.ones(1000), slot)
    batch = handed.open()
    del arena, slot
    assert batch.sum() == 1000
    del batch
    assert len(os.listdir("/proc/self/fd")) <= before


def test_pinned_batches_are_equal(link: MemoryLink) -> None:
    assert [rows(batch) for batch in loader(link, pin_memory=True)] == in_process(link)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_killed_worker_is_replaced_and_its_batches_are_made_again(
    link: MemoryLink, persistent: bool, caplog: pytest.LogCaptureFixture
) -> None:
    batches = loader(link, persistent_workers=persistent)
    reading = iter(batches)
    kept = next(reading)
    before = rows(kept)
    victim = batches._source._engine.processes[0]  # type: ignore[union-attr]
    os.kill(victim.pid, signal.SIGKILL)
    found = [rows(batch) for batch in reading]
    assert [before, *found] == in_process(link)
    assert rows(kept) == before
    for told in caplog.messages:  # none, where the other worker had made all batches
        assert f"pid {victim.pid} is killed by signal: Killed" in told
        assert "another takes its place" in told


def call_at_next_send(
    patch: pytest.MonkeyPatch, act: Callable[[], None], during: str, late: bool
) -> threading.Event:
    """Call `act` at the next request to a worker that the function `during` causes, before or after (`late`) the
    message is sent. The event is set once that has happened."""
    request, done = WorkerPool.request, threading.Event()

    def request_and_act(pool: WorkerPool, turn: int) -> bool:
        frame, names = sys._getframe(1), []
        while frame.f_back is not None:
            names.append(frame.f_code.co_name)
            frame = frame.f_back
        now = during in names and not done.is_set()
        if now and not late:
            done.set()
            act()
        sent = request(pool, turn)
        if now and late:
            done.set()
            act()
        return sent

    patch.setattr(WorkerPool, "request", request_and_act)
    return done


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_more_batches_may_be_requested_than_fit_into_a_pipe(start: str, tmp_path: Path) -> None:
    """A pipe of 65,536 bytes holds 2,730 requests, and fewer answers."""
    datasets.array_file(tmp_path / "r.bin", np.arange(3_000 * 2, dtype="<u4"))
    data = in_memory(compiled(tmp_path / "r.bin", tmp_path, format="records", record_bytes=8))
    batches = DataLoader(data, 1, num_workers=1, prefetch_factor=3_000, multiprocessing_context=start)
    assert [batch.numpy().view("<u4")[0, 0] // 2 for batch in batches] == list(range(3_000))


def raise_timeout() -> None:
    raise TimeoutError("too late")


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("during", ["begin", "fetch"])
def test_an_error_of_a_signal_handler_during_a_request_is_raised(
    link: MemoryLink, persistent: bool, during: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler raises an Exception, as one for `signal.alarm` may, while an epoch starts and runs."""
    batches = loader(link, persistent_workers=persistent)
    list(batches)
    with monkeypatch.context() as patch:
        heard = call_at_next_send(patch, raise_timeout, during, late)
        with pytest.raises(TimeoutError):
            list(batches)
    assert heard.is_set()
    batches.set_epoch(0)
    assert [rows(batch) for batch in batches] == in_process(link)


def test_workers_that_die_between_epochs_are_replaced(link: MemoryLink) -> None:
    batches = loader(link, persistent_workers=True)
    list(batches)
    for worker in multiprocessing.active_children():
        os.kill(worker.pid or 0, signal.SIGKILL)
    batches.set_epoch(0)
    assert [rows(batch) for batch in batches] == in_process(link)


def _with_text(sample: torch.Tensor) -> dict[str, Any]:
    return {"record": sample, "text": "x" * 20_000}


@pytest.mark.parametrize("timeout", [0, 100])
def test_workers_that_die_within_a_message_are_replaced(link: MemoryLink, timeout: int) -> None:
    batches = DataLoader(in_memory(link, transform=_with_text), 8, num_workers=2, timeout=timeout)
    reading = iter(batches)
    kept = list(islice(reading, 2 * (2 + EXTRA_SLOTS)))
    time.sleep(0.5)  # no slot is free, so both workers fill a pipe, which holds less than a batch
    for worker in batches._source._engine.processes:  # type: ignore[union-attr]
        os.kill(worker.pid, signal.SIGKILL)
    found = [rows(batch["record"]) for batch in (*kept, *reading)]
    assert found == [rows(batch["record"]) for batch in DataLoader(in_memory(link, transform=_with_text), 8)]
    assert all(len(batch["text"]) == 8 for batch in kept)


def test_a_batch_whose_worker_dies_before_it_is_opened_is_made_again(link: MemoryLink) -> None:
    batches = DataLoader(in_memory(link), 8, num_workers=2)
    reading = iter(batches)
    kept = list(islice(reading, 2 * (2 + EXTRA_SLOTS)))
    time.sleep(0.5)  # no slot is free, so both workers send tensors by descriptors that only they have
    kept.append(next(reading))
    for worker in batches._source._engine.processes:  # type: ignore[union-attr]
        os.kill(worker.pid, signal.SIGKILL)
        worker.join()
    assert [rows(batch) for batch in (*kept, *reading)] == [rows(b) for b in DataLoader(in_memory(link), 8)]


@pytest.mark.slow
def test_a_loader_works_after_persistent_workers_time_out(link: MemoryLink, tmp_path: Path) -> None:
    slow = tmp_path / "slow"

    def slowly(sample: torch.Tensor) -> torch.Tensor:
        if slow.exists():
            time.sleep(0.4)
        return sample

    data = in_memory(link, transform=slowly)
    batches = DataLoader(data, 8, shuffle=True, num_workers=2, persistent_workers=True, timeout=1)
    reading = iter(batches)
    next(reading)
    slow.touch()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="timed out"):
            list(batches)
    slow.unlink()
    batches.set_epoch(0)
    assert [rows(batch) for batch in batches] == in_process(link)


def test_a_caught_error_keeps_no_memory_alive(link: MemoryLink) -> None:
    def fails(sample: torch.Tensor) -> torch.Tensor:
        raise ValueError("no sample")

    class Model:
        """An object in the frame of a caller."""

    def trained() -> weakref.ref[Model]:
        model = Model()
        batches = DataLoader(in_memory(link, transform=fails), 8, num_workers=2, persistent_workers=True)
        with contextlib.suppress(ValueError):
            list(batches)
        return weakref.ref(model)

    gc.collect()
    gc.disable()
    try:
        before = set(multiprocessing.active_children())
        assert trained()() is None
        assert set(multiprocessing.active_children()) <= before
    finally:
        gc.enable()


SCRIPT = """
import sys
from loader import DataLoader
from tests.support.training.loader_fakes import MemoryLink, in_memory
link = MemoryLink(sys.argv[1], sys.argv[2])
reading = iter(DataLoader(in_memory(link), batch_size=8, num_workers=2, multiprocessing_context="fork"))
kept = next(reading)
print(*[worker.pid for worker in reading._batches.gi_frame.f_locals["self"]._source._engine.processes], flush=True)
sys.stdin.read()
"""


def test_a_killed_trainer_leaves_neither_workers_nor_memory(link: MemoryLink) -> None:
    trainer = ForkedProcess(
        [sys.executable, "-c", SCRIPT, str(link.id), link.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        preloaded=TRAINER,
    )
    assert trainer.stdout is not None
    workers = [int(pid) for pid in trainer.stdout.readline().split()]
    assert len(workers) == 2
    trainer.kill()
    trainer.wait()
    deadline = time.monotonic() + WAIT_S
    while any(_holds_batches(pid) for pid in workers):
        assert time.monotonic() < deadline, "a worker outlived its trainer"
        time.sleep(0.01)
    trainer.close()


def _holds_batches(pid: int) -> bool:
    """Return whether a process has the batches' file open. The file has no name."""
    try:
        return any("cachesvc-batches" in name for name in open_files(pid))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False
