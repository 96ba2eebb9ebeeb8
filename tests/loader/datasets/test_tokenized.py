"""Packs of rows that are tokenised on the way: the tokens of one run, at any number of ranks and workers and after any
resume."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cachesvc.core.errors import InvalidInput, StateMismatch
from loader import DataLoader, Dataset, pack
from tests.support.datasets import write_files
from tests.support.training.loader_fakes import in_step
from tests.support.training.mixtures import dataset_in

SEQ, GLOBAL = 32, 8
END = 256
"""Ends each document; no byte of a text is 256."""


def tokens_of(row: dict[str, Any]) -> list[int]:
    """The bytes of the text, and the end of the document; nothing for an empty text."""
    return [*row["text"].encode(), END] if row["text"] else []


def words_of(row: dict[str, Any]) -> list[int]:
    return [len(word) for word in row["text"].split()] or [0]


def recorded(path: Path, row: dict[str, Any]) -> list[int]:
    """Tokenise, and note the row in a file."""
    with open(path, "a") as file:
        file.write(f"{row['n']}\n")
    return tokens_of(row)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of text in three files: some empty, one longer than several packs."""
    draw = np.random.default_rng(7)
    lengths = [*draw.integers(0, 60, 200).tolist(), 0, 0, 500, 1]
    rows = [
        {"n": n, "text": "".join(chr(97 + d) for d in draw.integers(0, 26, s))} for n, s in enumerate(lengths)
    ]
    files = {
        f"{part}.jsonl": "".join(json.dumps(row) + "\n" for row in rows[part::3]).encode()
        for part in range(3)
    }
    root = tmp_path_factory.mktemp("text")
    write_files(root / "rows", files)
    return root


def rows_in(root: Path, name: str = "rows") -> Dataset:
    return dataset_in(root, name, format="jsonl")


Batch = tuple[list[list[int]], list[int]]


def run(root: Path, world: int, stop: int, state: object = None, **more: Any) -> tuple[list[Batch], Any]:
    """Return the packs of each global batch and the lengths of their parts of documents, in the order of the ranks,
    and the state after the last one."""
    loaders = [
        DataLoader(
            pack(rows_in(root), SEQ, tokenize=tokens_of),
            batch_size=GLOBAL // world,
            shuffle=True,
            window=8192,
            seed=3,
            epochs=None,
            last="drop",
            rank=rank,
            world_size=world,
            **more,
        )
        for rank in range(world)
    ]
    steps, after = in_step(loaders, state, stop)
    found = [
        (
            [row for batch, _ in step for row in batch["tokens"].tolist()],
            [length for batch, _ in step for length in batch["cu_seqlens"].diff().tolist()],
        )
        for step in steps
    ]
    return found, after


def tokens_in(batches: Sequence[Batch]) -> Counter[int]:
    return Counter(token for rows, _ in batches for row in rows for token in row)


@pytest.mark.parametrize("seed", range(3))
def test_tokens_are_those_of_one_run_after_resumes_at_other_scales(root: Path, seed: int) -> None:
    """Each run is cut twice, at random places of two epochs, into parts of other numbers of ranks and workers."""
    steps = 2 * (len(pack(rows_in(root), SEQ, tokenize=tokens_of)) // GLOBAL)
    whole, end = run(root, 1, stop=steps)
    draw = np.random.default_rng(seed)
    cuts = [0, *sorted(draw.choice(np.arange(1, steps), 2, replace=False).tolist()), steps]
    found = list[Batch]()
    state: Any = None
    for low, high in pairwise(cuts):
        world, workers = int(draw.choice([1, 2, 4, 8])), int(draw.integers(0, 3))
        forked: Any = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
        part, state = run(root, world, high - low, state, **forked)
        found += part
    assert found == whole
    assert state | {"digest": ""} == end | {"digest": ""}
    assert tokens_in(found) == tokens_in(whole)


def test_an_epoch_has_each_document_once_with_its_boundaries(root: Path) -> None:
    rows = rows_in(root)
    documents = Counter(tuple(tokens_of(row)) for row in rows)
    packed = pack(rows, SEQ, tokenize=tokens_of)
    loader = DataLoader(packed, batch_size=4, shuffle=True, window="all", last="short")
    stream, ends = list[int](), set[int]()
    for batch in loader:
        assert batch["tokens"].dtype == torch.int64
        assert batch["cu_seqlens"][[0, -1]].tolist() == [0, batch["tokens"].numel()]
        real = loader.valid * SEQ
        ends |= {len(stream) + cut for cut in batch["cu_seqlens"].tolist() if cut <= real}
        stream += batch["tokens"].flatten().tolist()[:real]
    total = sum(len(document) * count for document, count in documents.items())
    assert len(stream) == len(packed) * SEQ == total // SEQ * SEQ
    bounds = [0, *(at + 1 for at, token in enumerate(stream) if token == END)]
    seen = Counter(tuple(stream[low:high]) for low, high in pairwise(bounds))
    assert not seen - documents
    assert ends == {*bounds, *range(0, len(stream) + 1, SEQ)}
    missing = documents - seen
    assert sum(len(document) * count for document, count in missing.items()) < SEQ + 502


def test_packs_by_index_and_of_parts_keep_the_order_of_rows(root: Path) -> None:
    rows = rows_in(root)
    for chosen in (rows, rows.select(range(len(rows) - 1, -1, -3)), rows.take(50)):
        stream = [token for n in range(len(chosen)) for token in tokens_of(chosen[n])]
        packed = pack(chosen, 50, tokenize=tokens_of, dtype="uint16", targets="shifted")
        assert len(packed) == len(stream) // 51
        assert packed[3]["inputs"].tolist() == stream[153:203]
        wanted = [-100 if now == END else after for now, after in pairwise(stream[153:204])]
        assert packed[3]["targets"].tolist() == wanted


def test_counts_are_kept_and_checked(root: Path, tmp_path: Path) -> None:
    """Kept counts serve a second run, another part of the rows has its own, and another tokenizer is an error."""
    seen, rows = tmp_path / "seen", rows_in(root)
    tokenize = partial(recorded, seen)
    first = pack(rows, SEQ, tokenize=tokenize, counts=tmp_path / "counts")
    assert len(seen.read_text().splitlines()) == len(rows) + 16
    seen.unlink()
    again = pack(rows, SEQ, tokenize=tokenize, counts=tmp_path / "counts")
    assert len(seen.read_text().splitlines()) == 16
    assert again.identity == first.identity
    pack(rows.take(50), SEQ, tokenize=tokenize, counts=tmp_path / "counts")
    with pytest.raises(InvalidInput, match="another folder of counts="):
        pack(rows, SEQ, tokenize=words_of, counts=tmp_path / "counts")


def swapped(kept: bytes) -> bytes:
    return kept[8:16] + kept[:8] + kept[16:]


@pytest.mark.parametrize(
    "damage",
    [
        lambda kept: bytes(len(kept)),
        lambda kept: kept[: len(kept) // 2] + bytes(len(kept) - len(kept) // 2),
        lambda kept: bytes([kept[0] ^ 1]) + kept[1:],
        lambda kept: kept[:-1] + bytes([kept[-1] ^ 1]),
        swapped,
        lambda kept: b"",
        lambda kept: kept[:-16],
        lambda kept: kept + b"more",
    ],
    ids=["zeros", "half", "bit", "checksum", "swapped", "empty", "older release", "longer"],
)
def test_damaged_counts_are_made_again(root: Path, tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    """A power loss may leave zeros. https://github.com/grantjenks/python-diskcache/issues/164"""
    rows, folder = rows_in(root), tmp_path / "counts"
    wanted = pack(rows, SEQ, tokenize=tokens_of, counts=folder).identity
    kept = {path: path.read_bytes() for path in folder.iterdir()}
    for path, content in kept.items():
        path.write_bytes(damage(content))
    assert pack(rows, SEQ, tokenize=tokens_of, counts=folder).identity == wanted
    assert {path: path.read_bytes() for path in folder.iterdir()} == kept


def test_a_state_of_another_tokenizer_is_refused(root: Path) -> None:
    state = DataLoader(pack(rows_in(root), SEQ, tokenize=tokens_of)).state_dict()
    with pytest.raises(StateMismatch):
        DataLoader(pack(rows_in(root), SEQ, tokenize=words_of)).load_state_dict(state)


def test_pickled_packs_do_not_count_again(root: Path, tmp_path: Path) -> None:
    packed = pack(rows_in(root), SEQ, tokenize=partial(recorded, tmp_path / "seen"))
    (tmp_path / "seen").unlink()
    copy = pickle.loads(pickle.dumps(packed))
    assert not (tmp_path / "seen").exists()
    assert copy[2]["tokens"].tolist() == packed[2]["tokens"].tolist()


def test_a_function_that_is_no_tokenizer_is_an_error(root: Path) -> None:
    rows, calls = rows_in(root), list[int]()

    def differs(row: dict[str, Any]) -> list[int]:
        calls.append(1)
        return [0] * (len(calls) % 7 + 1)

    with pytest.raises(InvalidInput, match="tokenize=5 is not a function"):
        pack(rows, SEQ, tokenize=5)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="return one list of whole numbers"):
        pack(rows, SEQ, tokenize=lambda row: [0.5])  # type: ignore[list-item]
    with pytest.raises(InvalidInput, match="holds 300"):
        pack(rows, SEQ, tokenize=lambda row: [300], dtype="uint8")
    with pytest.raises(InvalidInput, match="tokens are whole numbers"):
        pack(rows, SEQ, tokenize=tokens_of, dtype="float32")
    with pytest.raises(InvalidInput, match="give it with one of them"):
        pack(rows, SEQ, counts="counts")
    with pytest.raises(InvalidInput, match="a function that returns the tokens of a row"):
        pack(rows, SEQ)
    packed = pack(rows, SEQ, tokenize=differs)
    with pytest.raises(InvalidInput, match="were counted before"):
        [packed[index] for index in range(len(packed))]
