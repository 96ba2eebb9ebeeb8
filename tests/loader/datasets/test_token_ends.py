"""Documents of token files that `eos=` finds: those of an index of the same documents."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cachesvc.core.errors import InvalidInput, OutOfSpace, StateMismatch
from loader import DataLoader, pack
from tests.support.datasets import array_file, megatron, write_files
from tests.support.training.mixtures import dataset_in

EOS, SEQ = 5, 48


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same documents with an index (`indexed`) and without one (`plain`), in three files of several extents. EOS ends
    each document but the last of a file."""
    root, draw = tmp_path_factory.mktemp("ends"), np.random.default_rng(4)
    for name in "abc":
        lengths = draw.integers(1, 90, 120)
        documents = [[*draw.integers(6, 9999, n).tolist(), EOS] for n in lengths]
        stream = megatron(root / "indexed" / name, [*documents, [7, 8, 9]])
        array_file(root / "plain" / f"{name}.bin", stream)
    return root


def plain(root: Path, **options: Any) -> Any:
    return dataset_in(root, "plain", format="tokens", dtype="uint16", seq_len=7, **options)


def batches(packs: Any, **given: Any) -> list[Any]:
    return [*DataLoader(packs, 4, shuffle=True, window=8192, seed=1, drop_last=True, **given)]


@pytest.mark.parametrize("fit", ["wrap", "best"])
@pytest.mark.parametrize("workers", [0, 2])
def test_packs_are_those_of_an_index(folders: Path, fit: Any, workers: int) -> None:
    form: dict[str, Any] = {"targets": "shifted", "fit": fit, "document_ids": True}
    indexed = dataset_in(folders, "indexed", format="tokens", seq_len=7)
    forked: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    for ours, theirs in zip(
        batches(pack(plain(folders), SEQ, eos=EOS, **form), **forked),
        batches(pack(indexed, SEQ, **form)),
        strict=True,
    ):
        assert ours.pop("max_seqlen") == theirs.pop("max_seqlen")
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_ends_are_kept_and_belong_to_the_state(folders: Path, tmp_path: Path) -> None:
    def read_bytes(data: Any) -> int:
        return sum(data.opened.origin_bytes().values())

    counts = tmp_path / "counts"
    first, again = plain(folders), plain(folders)
    found = pack(first, SEQ, eos=EOS, counts=counts)
    assert read_bytes(first) > 0
    kept = pack(again, SEQ, eos=EOS, counts=counts)
    assert read_bytes(again) == 0
    shipped = pickle.loads(pickle.dumps(kept))
    assert read_bytes(shipped.leaf) == 0
    assert found.identity == kept.identity == shipped.identity
    state = DataLoader(found).state_dict()
    for other in (pack(plain(folders), SEQ, eos=6, counts=counts), pack(plain(folders), SEQ)):
        with pytest.raises(StateMismatch):
            DataLoader(other).load_state_dict(state)
    (tmp_path / "file").touch()
    with pytest.raises(OutOfSpace, match="counts="):
        pack(plain(folders), SEQ, eos=EOS, counts=tmp_path / "file")


def test_files_that_nothing_divides_are_warned_of(folders: Path, caplog: pytest.LogCaptureFixture) -> None:
    pack(plain(folders), SEQ)
    assert (
        "has no index of documents, so each of its sequences counts as one: give pack() eos=" in caplog.text
    )
    caplog.clear()
    pack(plain(folders), SEQ, edges="join")
    pack(plain(folders), SEQ, eos=EOS)
    pack(dataset_in(folders, "indexed", format="tokens", seq_len=7), SEQ)
    assert not caplog.records
    alone = pack(plain(folders), 100, eos=1)  # no such token: a file is one document
    assert sorted({len(alone[at]["cu_seqlens"]) for at in range(len(alone))}) == [2, 3]


def test_other_data_and_tokens_are_refused(folders: Path, tmp_path: Path) -> None:
    write_files(tmp_path / "files", {"a.tok": b"1234"})
    files = dataset_in(tmp_path, "files", {"fields": ("tok",), "decode": None}, format="files")
    for data, given, says in (
        (files, {"eos": 5, "dtype": "uint16"}, "eos=5 finds documents in token files, and .* holds files"),
        (dataset_in(folders, "indexed", format="tokens", seq_len=7), {"eos": 5}, "eos=5: .* have an index"),
        (plain(folders), {"eos": 70_000}, "eos=70000: give a whole number from 0 to 65,535"),
        (plain(folders), {"eos": 5, "tokenize": len}, "eos= is for token files"),
        (plain(folders), {"eos": 5, "dtype": "int32"}, "holds uint16, not int32"),
        (plain(folders).take(50), {"eos": 5}, "a subset of sequences is not a subset of documents"),
    ):
        with pytest.raises(InvalidInput, match=says):
            pack(data, SEQ, **given)
