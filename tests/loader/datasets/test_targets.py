"""Tokens as (inputs, targets) and as {"input_ids", "labels"}: contiguous, and equal whether gathered or collated."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, default_collate
from torch.utils.data import DataLoader as TorchLoader

from cachesvc.core.errors import InvalidInput
from loader import DataLoader, mix, open_dataset, pack
from tests.support import datasets

COUNT, SEQ = 2001, 50
TARGETS: Any = ("shifted", "unshifted")


@pytest.fixture
def stream(home: Path) -> np.ndarray:
    return datasets.tokens(home / "t.bin", COUNT).astype(np.int64)


def open_tokens(home: Path, targets: Any, **more: Any) -> Any:
    given: dict[str, Any] = {"format": "tokens", "dtype": "uint16", "seq_len": SEQ, "overlap": 1} | more
    return open_dataset(home / "t.bin", targets=targets, **given)


def inputs_and_targets(value: Any, targets: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs and targets of a sample or batch, checked for what models require."""
    if targets == "shifted":
        first, second = value
    else:
        assert list(value) == ["input_ids", "labels"]
        first, second = value.values()
    for tensor in (first, second):
        assert tensor.dtype == torch.int64
        assert tensor.view(-1).is_contiguous()
    kept = first.clone()
    second.neg_()  # models mask labels in place
    assert torch.equal(first, kept)
    second.neg_()
    return first, second


def wanted(stream: np.ndarray, targets: Any, index: int) -> tuple[list[int], list[int]]:
    row = stream[index * SEQ : index * SEQ + SEQ + 1].tolist()
    return (row[:-1], row[1:]) if targets == "shifted" else (row, row)


WAYS: dict[str, Callable[[Any], Any]] = {
    "alone": lambda data: DataLoader(data, 8),
    "shuffled": lambda data: DataLoader(data, 8, shuffle=True, window=1 << 12),
    "processes": lambda data: DataLoader(data, 8, num_workers=2, multiprocessing_context="fork"),
    "threads": lambda data: DataLoader(data, 8, num_workers=2, worker_type="thread"),
    "pinned": lambda data: DataLoader(data, 8, pin_memory=True),
    "mending": lambda data: DataLoader(data, 8, on_error="skip"),
    "torch's": lambda data: TorchLoader(data, 8),
    "a part": lambda data: DataLoader(data.where("shard == 't.bin'").select([*range(30)]), 8),
    "a Subset": lambda data: DataLoader(Subset(data, range(20)), 8),
    "a ConcatDataset": lambda data: DataLoader(ConcatDataset([data, data]), 8),
}


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")
@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("way", WAYS)
def test_batches_are_contiguous_inputs_and_targets(
    home: Path, stream: np.ndarray, targets: Any, way: str
) -> None:
    data = open_tokens(home, targets)
    assert data.sample_reader.gather(default_collate) is not None, "no Python per sample"
    count = len(data)
    loader = WAYS[way](data)
    first, at = 0, None
    for batch in loader:
        assert type(batch) is (list if targets == "shifted" else dict), "as torch collates"
        inputs, outputs = inputs_and_targets(batch, targets)
        at = loader.indices.tolist() if isinstance(loader, DataLoader) else range(first, first + len(inputs))
        for row, index in enumerate(at):
            assert (inputs[row].tolist(), outputs[row].tolist()) == wanted(stream, targets, index % count)
        first += len(inputs)
    assert first == len(loader.dataset)


@pytest.mark.parametrize("targets", TARGETS)
def test_samples_look_like_batches(home: Path, stream: np.ndarray, targets: Any) -> None:
    data = open_tokens(home, targets)
    for index in (0, 7, len(data) - 1):
        sample = inputs_and_targets(data[index], targets)
        assert tuple(each.tolist() for each in sample) == wanted(stream, targets, index)
    assert type(data[0]) is (tuple if targets == "shifted" else dict)
    again = pickle.loads(pickle.dumps(data))
    assert inputs_and_targets(again[3], targets)[0].tolist() == wanted(stream, targets, 3)[0]


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize("targets", TARGETS)
def test_a_transform_gets_both(home: Path, targets: Any) -> None:
    def transform(sample: Any) -> Any:
        first, second = inputs_and_targets(sample, targets)
        return {"ids": first[:-1], "labels": second[:-1]}

    batch = next(iter(DataLoader(open_tokens(home, targets, transform=transform), 4)))
    assert batch["ids"].shape == batch["labels"].shape == (4, SEQ - (targets == "shifted"))


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("workers", [0, 2])
def test_mixtures_have_targets(home: Path, stream: np.ndarray, targets: Any, workers: int) -> None:
    data = open_tokens(home, targets)
    parts = [data.take(20), data.select(range(20, len(data)))]
    mixture = mix({parts[0]: 1, parts[1]: 1})
    loader = DataLoader(mixture, 8, shuffle=True, num_workers=workers, worker_type="thread")
    for batch in loader:
        inputs, outputs = inputs_and_targets(batch, targets)
        component, _, inner = mixture.locate(loader.indices)
        for row, index in enumerate((inner + 20 * component).tolist()):
            assert (inputs[row].tolist(), outputs[row].tolist()) == wanted(stream, targets, index)
    inputs_and_targets(mixture[3], targets)
    with pytest.raises(InvalidInput, match="components 0 and 1 of the mixture differ"):
        mix({data: 1, open_tokens(home, None, out="int64"): 1})


def test_no_token_is_lost_or_predicted_twice(home: Path, stream: np.ndarray) -> None:
    targets = [token for _, after in open_tokens(home, "shifted") for token in after.tolist()]
    assert targets == stream[1 : 1 + COUNT // SEQ * SEQ].tolist()


def test_records_of_tokens_have_targets(home: Path) -> None:
    rows = datasets.array_file(home / "r.npy", np.arange(60, dtype="<i4").reshape(10, 6))
    inputs, targets = next(iter(DataLoader(open_dataset(home / "r.npy", targets="shifted"), 10)))
    assert (inputs.tolist(), targets.tolist()) == (rows[:, :-1].tolist(), rows[:, 1:].tolist())
    assert open_dataset(home / "r.npy", targets="unshifted", out="int32")[0]["labels"].dtype == torch.int32


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("workers", [0, 1])
def test_packs_that_join_have_targets(home: Path, stream: np.ndarray, targets: Any, workers: int) -> None:
    """Documents of 50 tokens in packs of 120; attention boundaries are those of the inputs."""
    documents = open_tokens(home, None, overlap=0)
    packs, length = pack(documents, 120, targets=targets, edges="join"), 120 + (targets == "shifted")
    assert len(packs) == len(documents) * SEQ // length
    loader = DataLoader(packs, 4, num_workers=workers, worker_type="thread")
    names = ["inputs", "targets"] if targets == "shifted" else ["input_ids", "labels"]
    for step, batch in enumerate(loader):
        assert list(batch) == [*names, "cu_seqlens", "max_seqlen"]
        edges = []
        for row in range(len(batch[names[0]])):
            first = (4 * step + row) * length
            piece = stream[first : first + length].tolist()
            inputs, after = (piece[:-1], piece[1:]) if targets == "shifted" else (piece, piece)
            assert [batch[name][row].tolist() for name in names] == [inputs, after]
            cuts = {at - first for at in range(0, len(stream), SEQ) if first < at < first + 120}
            edges += [row * 120 + cut for cut in sorted({0} | cuts)]
        assert batch["cu_seqlens"].tolist() == [*edges, batch[names[0]].numel()]
        assert batch["max_seqlen"] == max(
            end - begin for begin, end in pairwise(batch["cu_seqlens"].tolist())
        )
        assert all(batch[name].is_contiguous() and batch[name].dtype == torch.int64 for name in names)
    assert packs[1][names[0]].tolist() == stream[length : length + 120].tolist()
    assert pickle.loads(pickle.dumps(packs))[0][names[1]].shape == (120,)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"targets": "next"}, r"targets='next': give one of 'shifted', 'unshifted'"),
        ({"targets": "shifted", "overlap": 0}, "targets='shifted' needs the token after .* with overlap=1"),
        ({"targets": "unshifted", "decode": None}, "targets='unshifted' is for tokens as they are stored"),
        (
            {"targets": "unshifted", "fields": "tokens"},
            "targets='unshifted' is for tokens as they are stored",
        ),
        ({"targets": "shifted", "dtype": "float16"}, "holds float16 of shape .*, not rows of tokens"),
    ],
)
@pytest.mark.usefixtures("stream")
def test_data_without_targets_is_refused_at_opening(home: Path, given: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        open_tokens(home, **given)


@pytest.mark.usefixtures("stream")
def test_targets_of_other_data_are_refused(home: Path) -> None:
    datasets.array_file(home / "r.npy", np.zeros((10, 6, 2), "<i4"))
    datasets.tar_shards(home / "tars", 1, 5, 100)
    for path in ("r.npy", "tars"):
        with pytest.raises(InvalidInput, match="targets='unshifted'"):
            open_dataset(home / path, targets="unshifted")
    with pytest.raises(InvalidInput, match="give targets= to pack"):
        pack(open_tokens(home, "unshifted", overlap=0), 100)
    with pytest.raises(InvalidInput, match="targets='both'"):
        pack(open_tokens(home, None, overlap=0), 100, targets="both")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="packs of 2001 tokens out of 2000"):
        pack(open_tokens(home, None, overlap=0), 2000, targets="shifted")
