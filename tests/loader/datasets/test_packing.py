"""Packs under the DataLoader: whole documents, and the same global batches at any scale and after any resume."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loader import DataLoader, Mixture, pack
from tests.support.training.loader_fakes import in_step
from tests.support.training.mixtures import (
    SEQ,
    dataset_in,
    notes,
    text,
    three_packed,
)

GLOBAL = 16


def digests(
    make: Callable[[], Any], world: int, state: object = None, stop: int = 10**9, **more: Any
) -> tuple[list[str], dict[str, Any]]:
    """Return a digest per global batch, of every token and boundary in the order of the ranks, and the state after
    it."""
    loaders = [
        DataLoader(
            make(),
            batch_size=GLOBAL // world,
            shuffle=True,
            window=8192,
            seed=3,
            last="pad",
            rank=rank,
            world_size=world,
            **more,
        )
        for rank in range(world)
    ]
    steps, after = in_step(loaders, state, stop)
    found: list[str] = []
    for step in steps:
        digest = hashlib.sha256()
        for name in ("tokens", "cu_seqlens"):
            digest.update(b"".join(row for batch, valid in step for row in per_sample(batch, name)[:valid]))
        found.append(digest.hexdigest())
    return found, after | {"digest": ""}  # ranks without a process group cannot sum it


def per_sample(batch: dict[str, Any], name: str) -> list[bytes]:
    """Return the packs of a batch one by one, since ranks hold different numbers of them."""
    if name == "tokens":
        return [row.numpy().tobytes() for row in batch["tokens"]]
    bounds = batch["cu_seqlens"].numpy()
    rows = [bounds[(bounds > at) & (bounds <= at + SEQ)] - at for at in range(0, bounds[-1], SEQ)]
    return [row.tobytes() for row in rows]


@pytest.mark.slow
def test_a_packed_filtered_mixture_is_the_same_at_any_scale_and_after_resumes(root: Path) -> None:
    def make() -> Mixture:
        return three_packed(root)

    whole, end = digests(make, 1)
    assert len(whole) == len(set(whole)) > 20
    for world in (2, 4, 8):
        assert digests(make, world) == (whole, end)
    head, state = digests(make, 8, stop=5)
    middle, state = digests(make, 2, state, 7, num_workers=2, multiprocessing_context="fork")
    rest, state = digests(make, 4, state, num_workers=1, multiprocessing_context="fork", prefetch_factor=3)
    assert head + middle + rest == whole
    assert state == end
    assert len(json.dumps(state)) < 4096


def test_packs_hold_whole_documents_in_attention_boundaries(root: Path) -> None:
    dataset = text(root, out="int64")
    stream = np.concatenate([np.fromfile(root / "text" / f"part{n}.bin", "<u2") for n in range(2)])
    bounds = dataset.catalog.documents
    assert bounds is not None
    documents = {tuple(stream[a:b]): 0 for a, b in pairwise(bounds.tolist()) if a < b}
    loader = DataLoader(pack(dataset, SEQ), batch_size=8, shuffle=True, window=8192)
    tokens, ends = list[int](), list[int]()
    for batch in loader:
        assert batch["tokens"].shape[1] == SEQ
        assert batch["tokens"].dtype == torch.int64
        assert batch["cu_seqlens"].dtype == torch.int32
        assert batch["cu_seqlens"][[0, -1]].tolist() == [0, batch["tokens"].numel()]
        assert batch["max_seqlen"] == int(batch["cu_seqlens"].diff().max()) <= SEQ
        ends += (batch["cu_seqlens"][1:] + len(tokens)).tolist()
        tokens += batch["tokens"].flatten().tolist()
    assert len(tokens) == len(stream) // SEQ * SEQ
    # Pieces that end with a pack continue in the next one. Joined, they are the documents, each as often as stored.
    begin, whole = 0, 0
    for end in ends:
        while tuple(tokens[begin:end]) in documents:
            documents[tuple(tokens[begin:end])] += 1
            begin = end
            whole += 1
    assert whole >= len(documents) - 1
    unshuffled = pack(dataset, SEQ)
    assert unshuffled[2]["tokens"].tolist() == stream[2 * SEQ : 3 * SEQ].tolist()
    assert len(unshuffled) == len(stream) // SEQ


def test_documents_of_raw_fields_and_of_records_are_packed(root: Path) -> None:
    cats = pack(notes(root).where("label == 'cat'"), 10, dtype="uint16")
    raw = b"".join(path.read_bytes() for path in sorted((root / "notes" / "cat").iterdir()))
    expected = sorted(np.frombuffer(raw, "<u2").tolist())
    seen = [n for batch in DataLoader(cats, batch_size=3) for n in batch["tokens"].flatten().tolist()]
    assert len(seen) == len(expected) // 10 * 10
    assert not set(seen) - set(expected)
    rows = np.load(root / "rows.npy")
    packed = pack(dataset_in(root, "rows.npy", format="records"), 25)
    assert np.array_equal(np.concatenate([packed[i]["tokens"] for i in range(len(packed))]), rows.reshape(-1))
    assert packed[0]["cu_seqlens"].tolist() == [0, 10, 20, 25]


@pytest.mark.parametrize("chosen", [[17, 3, 40, 3, 0, 39], range(40, -1, -1)])
def test_unshuffled_packs_keep_the_order_of_select(root: Path, chosen: Sequence[int]) -> None:
    """The order is kept under a loader, at two ranks, and after a resume."""
    documents = notes(root).select(chosen)
    tokens = np.concatenate([np.frombuffer(documents[n][0], "<u2") for n in range(len(chosen))])
    packed = pack(documents, 25, dtype="uint16")
    wanted = tokens[: len(packed) * 25].reshape(-1, 25).tolist()
    assert [packed[n]["tokens"].tolist() for n in range(len(packed))] == wanted
    first = DataLoader(packed, batch_size=1)
    assert [next(iter(first))["tokens"][0].tolist()] == wanted[:1]
    halves = [DataLoader(packed, batch_size=1, global_batch_size=2, rank=r, world_size=2) for r in (0, 1)]
    one, other = ([batch["tokens"][0].tolist() for batch in half] for half in halves)
    assert [one[0], other[0]] == wanted[:2]
    then = DataLoader(packed, batch_size=1)
    then.load_state_dict(first.state_dict())
    assert [batch["tokens"][0].tolist() for batch in then] == wanted[1:]
