"""Moving batches to a device, as far as it can be tested without one."""

from __future__ import annotations

import multiprocessing
import threading
from collections import OrderedDict, UserDict, UserList
from contextlib import suppress
from multiprocessing.synchronize import Event
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from loader import DataLoader
from loader.batches.maker import BatchMaker
from loader.batches.turns import BatchKey
from loader.gpu.to_device import each_tensor, pinned
from loader.workers.processes import ProcessEngine
from loader.workers.settings import WorkerSettings
from testbed import WAIT_S
from tests.support import datasets
from tests.support.training.loader_fakes import MemoryLink, compiled, in_memory


class Encoding(UserDict[str, Any]):
    """A batch like a tokenizer's: its items are also attributes, and it has further attributes."""

    def __init__(self, items: dict[str, Any], lengths: tuple[int, ...]) -> None:
        super().__init__(items)
        self.lengths = lengths

    def __getattr__(self, name: str) -> Any:
        return self.data[name]


class Pair(NamedTuple):
    left: Any
    right: Any


def one_more(tensor: torch.Tensor) -> torch.Tensor:
    return tensor + 1


def test_a_batch_keeps_its_types() -> None:
    inner = Encoding({"input_ids": torch.zeros(2), "text": "a"}, (1, 1))
    batch = Pair([inner, b"raw"], OrderedDict(x=torch.zeros(1), y=(torch.ones(1), None)))
    found = each_tensor(batch, one_more)
    assert type(found) is Pair
    (encoding, raw), right = found
    assert (type(encoding), encoding.lengths, encoding.text, raw) == (Encoding, (1, 1), "a", b"raw")
    assert encoding.input_ids.tolist() == [1, 1]
    assert type(right) is OrderedDict
    assert (right["x"].item(), right["y"][0].item(), right["y"][1]) == (1, 2, None)
    assert inner.input_ids.tolist() == [0, 0]  # pinned memory is kept until the copy has ended
    assert each_tensor(MappingProxyType({"x": torch.zeros(1)}), one_more) == {"x": torch.ones(1)}


def test_the_batch_sizes_of_a_packed_sequence_stay_on_the_cpu() -> None:
    packed = pack_sequence([torch.zeros(2), torch.ones(3)], enforce_sorted=False)
    found = each_tensor({"x": packed}, lambda tensor: tensor.to("meta"))["x"]
    assert type(found) is PackedSequence
    assert (found.data.device.type, found.batch_sizes.tolist()) == ("meta", [2, 2, 1])
    for indices in (found.sorted_indices, found.unsorted_indices):
        assert indices is not None
        assert indices.device.type == "meta"


class PinnedByItself:
    """A user's batch that torch pins by its method."""

    def pin_memory(self) -> str:
        return "pinned"


def test_batches_of_any_form_are_pinned() -> None:
    own = PinnedByItself()
    batch = {
        "a": own,
        "b": [own, (own, "text")],
        "c": Pair(own, UserList([own, b"raw"])),
        "d": UserDict({"x": own}),
    }
    found = pinned(batch)
    done = PinnedByItself().pin_memory()
    assert found == {
        "a": done,
        "b": [done, (done, "text")],
        "c": Pair(done, [done, b"raw"]),
        "d": {"x": done},
    }
    assert (type(found["c"].right), type(found["d"])) == (UserList, UserDict)


@pytest.fixture
def link(tmp_path: Path) -> MemoryLink:
    datasets.array_file(tmp_path / "r.bin", np.arange(40, dtype="<i8").reshape(40, 1))
    return compiled(tmp_path / "r.bin", tmp_path, format="records", dtype="(1,)i8")


def test_a_thread_waiting_in_an_abandoned_iteration_takes_no_batch_of_the_next(link: MemoryLink) -> None:
    go: Event = multiprocessing.get_context("fork").Event()
    held = multiprocessing.get_context("fork").Event()

    def gated(sample: torch.Tensor) -> torch.Tensor:
        if sample == 8 and not held.is_set():
            held.set()
            assert go.wait(WAIT_S)
        return sample

    loader = DataLoader(in_memory(link, transform=gated), batch_size=4)
    engine = ProcessEngine(BatchMaker(loader._prepared().feed, "raise"), WorkerSettings(num_workers=1))

    def numbers(turn: int) -> list[int]:
        found: list[int] = engine.fetch(BatchKey(0, turn)).batch.flatten().tolist()
        return found

    engine.start(0, 0, 10)
    assert [numbers(turn) for turn in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]

    def waits() -> None:
        with suppress(KeyError):  # its batch was dropped with its iteration
            engine.fetch(BatchKey(0, 2))

    late = threading.Thread(target=waits)
    late.start()
    assert held.wait(WAIT_S)
    engine.start(0, 0, 10)
    before = [numbers(turn) for turn in range(4)]
    go.set()
    late.join(WAIT_S)
    after = [numbers(turn) for turn in range(4, 10)]
    engine.stop()
    assert [n for batch in before + after for n in batch] == list(range(40))
