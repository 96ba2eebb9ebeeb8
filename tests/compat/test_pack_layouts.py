"""Layouts of packs, beside what the libraries' own code makes of the same documents."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loader import DataLoader, Packed, open_dataset, pack
from tests.support.datasets import megatron

SEQ, BATCH = 32, 4


@pytest.fixture
def documents(tmp_path: Path) -> list[list[int]]:
    """Documents of 2 to 90 tokens, of which the last is 1."""
    draw = np.random.default_rng(3)
    found = [[*draw.integers(2, 9999, n - 1).tolist(), 1] for n in draw.integers(2, 90, 60)]
    megatron(tmp_path / "text" / "a", found)
    return found


def packed(tmp_path: Path, **form: Any) -> Packed:
    return pack(open_dataset(tmp_path / "text", format="tokens", seq_len=1), SEQ, **form)


def segments(tmp_path: Path, fit: Any, **given: Any) -> list[list[list[tuple[list[int], bool]]]]:
    """The segments of each pack of each batch, and whether they are padding, from packs without targets."""
    found = []
    for batch in DataLoader(
        packed(tmp_path, fit=fit, document_ids=True, **given), BATCH, shuffle=True, drop_last=True
    ):
        tokens, ids = batch["tokens"].reshape(-1), batch["document_ids"].reshape(-1)
        cuts = batch["cu_seqlens"].tolist()
        rows: list[list[tuple[list[int], bool]]] = [[] for _ in range(BATCH)]
        for low, high in pairwise(cuts):
            rows[low // SEQ].append((tokens[low:high].tolist(), int(ids[low]) < 0))
        found.append(rows)
    return found


def same(ours: Any, theirs: Any) -> None:
    """Assert equal names, types, shapes and values."""
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if isinstance(value, torch.Tensor):
            assert (ours[name].dtype, ours[name].shape) == (value.dtype, value.shape), name
            assert torch.equal(ours[name], value), name
        else:
            assert ours[name] == value, name


@pytest.mark.parametrize("fit", ["wrap", "best"])
@pytest.mark.parametrize("numbered", [False, True])
@pytest.mark.usefixtures("documents")
def test_transformers_collator_makes_the_same_batches(tmp_path: Path, fit: Any, numbered: bool) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="no transformers here: `make compat` installs it"
    )
    collator = transformers.DataCollatorWithFlattening(
        return_flash_attn_kwargs=True, return_seq_idx=numbered, return_tensors="pt"
    )
    packs = packed(tmp_path, fit=fit, layout="transformers", document_ids=numbered)
    batches = [*DataLoader(packs, BATCH, shuffle=True, drop_last=True)]
    plain = segments(tmp_path, fit)
    assert len(batches) == len(plain) > 5
    for batch, rows in zip(batches, plain, strict=True):
        features = [
            {"input_ids": tokens, "labels": [-100] * len(tokens) if padding else tokens}
            for row in rows
            for tokens, padding in row
        ]
        same(batch, collator(features))


@pytest.mark.parametrize("fit", ["wrap", "best"])
@pytest.mark.usefixtures("documents")
def test_olmo_cores_collator_makes_the_same_batches(tmp_path: Path, fit: Any) -> None:
    collators = pytest.importorskip(
        "olmo_core.data.collator", reason="no OLMo-core here: `make compat` installs it"
    )
    utils = pytest.importorskip("olmo_core.data.utils")
    collator = collators.DataCollator(pad_token_id=0)
    batches = [*DataLoader(packed(tmp_path, fit=fit, layout="olmo"), BATCH, shuffle=True, drop_last=True)]
    plain = segments(tmp_path, fit)
    assert len(batches) == len(plain) > 5
    for batch, rows in zip(batches, plain, strict=True):
        instances = []
        for row in rows:
            lengths = [len(tokens) for tokens, _ in row]
            mask = [place > 0 and not padding for tokens, padding in row for place in range(len(tokens))]
            tokens = torch.tensor([token for tokens, _ in row for token in tokens])
            doc_lens = torch.tensor(lengths, dtype=torch.int32)
            instances.append({"input_ids": tokens, "label_mask": torch.tensor(mask), "doc_lens": doc_lens})
        same(batch, collator(instances))
        labels = utils.get_labels(batch)
        own = [
            [[*tokens[1:], -100] if not pad else [-100] * len(tokens) for tokens, pad in row] for row in rows
        ]
        assert labels.tolist() == [[label for each in row for label in each] for row in own]
        edges = utils.get_cumulative_document_lengths(batch["doc_lens"])
        assert edges.diff().tolist() == [len(tokens) for row in rows for tokens, _ in row]


def test_torchtitans_dataset_has_the_same_targets_and_positions(
    tmp_path: Path, documents: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every pair of a token and its target is theirs: they leave out the last token of a document, whose target we mask."""
    texts = pytest.importorskip(
        "torchtitan.hf_datasets.text_datasets", reason="no torchtitan here: `make compat` installs it"
    )
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": [" ".join(map(str, each)) for each in documents]})
    config = texts.DatasetConfig(path="", loader=lambda path: rows, sample_processor=lambda row: row["text"])
    monkeypatch.setitem(texts.DATASETS, "ours", config)

    class Tokenizer:
        def encode(self, text: str, **_: bool) -> list[int]:
            return [int(word) for word in text.split()]

    theirs = texts.HuggingFaceTextDataset("ours", None, Tokenizer(), seq_len=SEQ)
    their_batches = [*torch.utils.data.DataLoader(theirs, BATCH, drop_last=True)]
    length = max(map(len, documents))
    ours = pack(
        open_dataset(tmp_path / "text", format="tokens", seq_len=1), length, fit="best", layout="torchtitan"
    )
    our_batches = [*DataLoader(ours, BATCH)]
    for (inputs, labels), (their_inputs, their_labels) in zip(our_batches, their_batches, strict=False):
        assert inputs.keys() == their_inputs.keys() == {"input", "positions"}
        found = [*inputs.values(), labels], [*their_inputs.values(), their_labels]
        assert [each.dtype for each in found[0]] == [each.dtype for each in found[1]]
        assert {each.shape for each in found[0]} == {inputs["input"].shape}

    def pairs(batches: Any) -> Counter[tuple[int, int, int]]:
        columns = [(x["input"], x["positions"], y) for x, y in batches]
        flat = [torch.cat([each[at].reshape(-1) for each in columns]).tolist() for at in range(3)]
        return Counter(pair for pair in zip(*flat, strict=True) if pair[2] != -100)

    whole = Counter(
        (now, place, after) for each in documents for place, (now, after) in enumerate(pairwise(each))
    )
    assert pairs(our_batches) == whole
    their_pairs = Counter((now, after) for now, _, after in pairs(their_batches).elements())
    assert not their_pairs - Counter((now, after) for now, _, after in whole.elements())
    shifted = pack(
        open_dataset(tmp_path / "text", format="tokens", seq_len=1), length, fit="best", targets="shifted"
    )
    for (inputs, _), batch in zip(our_batches, DataLoader(shifted, BATCH), strict=True):
        begins = (inputs["positions"] == 0).reshape(-1)  # as their masks find documents
        assert begins.nonzero().reshape(-1).tolist() == batch["cu_seqlens"][:-1].tolist()
