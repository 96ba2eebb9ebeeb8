"""`cachesvc tokenize`, with a real tokenizer: its shards are read by the format `tokens`, and a run can be continued."""

from __future__ import annotations

import fcntl
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cachesvc.__main__ import run
from loader import DataLoader, open_dataset, pack
from tests.support.datasets import write_files

tokenizers = pytest.importorskip("tokenizers")
WORDS = {"[UNK]": 0, "<end>": 1, "a": 2, "cat": 3, "runs": 4}
TEXTS = ["a cat", "", "a dog runs", "runs " * 300, *["cat a cat"] * 60]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tokenizer of words, and rows of text in two files."""
    monkeypatch.setenv("CACHESVC", "off")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, "[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.enable_truncation(2)
    made.save(str(tmp_path / "tokenizer.json"))
    rows = [json.dumps({"n": n, "text": text}) + "\n" for n, text in enumerate(TEXTS)]
    write_files(
        tmp_path / "src",
        {"0.jsonl": "".join(rows[:10]).encode(), "1.jsonl": "".join(rows[10:]).encode()},
    )
    return tmp_path


def tokenize(root: Path, *more: str, source: str = "src") -> int:
    words = ["--tokenizer", str(root / "tokenizer.json"), "--processes", "2", *more]
    return run(["tokenize", str(root / source), str(root / "dst"), *words])


def shards(root: Path) -> dict[str, int]:
    """The files of the shards, and when each was written."""
    return {path.name: path.stat().st_mtime_ns for path in sorted((root / "dst").glob("tokens-*"))}


def documents(root: Path) -> list[list[int]]:
    """The documents of the shards, as our own reader of tokens finds them."""
    dataset = open_dataset(root / "dst", format="tokens", seq_len=1)
    bounds, tokens = dataset.catalog.documents, [int(each) for each in dataset.take(10**6)]
    assert bounds is not None
    return [tokens[low:high] for low, high in pairwise(np.unique(bounds).tolist())]


def expected(end: list[int]) -> list[list[int]]:
    texts = [text.split() for text in TEXTS if text]
    return [[WORDS.get(word, 0) for word in words] + end for words in texts]


def test_shards_hold_the_documents_of_the_rows_in_order(root: Path, capsys: Any) -> None:
    assert tokenize(root, "--eos", "<end>", "--shard-bytes", "1KiB", "--json") == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (row["rows"], row["dtype"], row["shards"]) == (len(TEXTS), "uint16", len(shards(root)) // 2)
    assert row["shards"] > 2
    assert documents(root) == expected([1])
    assert row["tokens"] == sum(len(each) for each in expected([1]))
    packs = DataLoader(pack(open_dataset(root / "dst", format="tokens", seq_len=1), 16), batch_size=2)
    assert next(iter(packs))["cu_seqlens"].tolist()[:4] == [0, 3, 7, 16]


def test_a_run_is_continued_where_a_shard_is_missing(root: Path, capsys: Any) -> None:
    assert tokenize(root, "--shard-bytes", "1KiB") == 0
    first = shards(root)
    left = root / "dst" / next(iter(first))
    left.with_suffix(".idx").unlink()
    (root / "dst" / "tokens-00009.bin.tmp").write_bytes(b"of a run that was killed")
    assert tokenize(root, "--shard-bytes", "1KiB") == 0
    assert "1 of them written now" in capsys.readouterr().out
    again = shards(root)
    assert again.keys() == first.keys()
    assert {name for name in first if again[name] != first[name]} == {
        left.name,
        left.with_suffix(".idx").name,
    }
    assert documents(root) == expected([])


def test_a_folder_of_something_else_is_refused_in_one_line(root: Path, capsys: Any) -> None:
    write_files(root / "dst", {"notes.txt": b"mine"})
    assert tokenize(root) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"cachesvc: {root}/dst holds notes.txt;")
    (root / "dst" / "notes.txt").unlink()
    assert tokenize(root) == 0
    assert tokenize(root, "--eos", "<end>") == 2
    assert "holds shards of another tokenizer; name another folder" in capsys.readouterr().err
    with open(root / "dst" / ".tokenize.json") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert tokenize(root) == 2
    assert "another run writes into" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (["--eos", "</s>"], 2, "has no token '</s>'"),
        (["--field", "n"], 2, "is int and no text: name a field of text by --field"),
        (["--format", "csv"], 4, ""),
        (["--tokenizer", "src/0.jsonl"], 2, "is no tokenizer.json"),
    ],
)
def test_wrong_arguments_end_with_one_line(
    root: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, more: list[str], code: int, message: str
) -> None:
    monkeypatch.chdir(root)
    assert tokenize(root, *more) == code
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_source_that_does_not_exist_and_a_remote_folder_are_errors(root: Path, capsys: Any) -> None:
    assert tokenize(root, source="none") == 4
    assert run(["tokenize", str(root / "src"), "s3://bucket/dst", "--tokenizer", "x"]) == 2
    assert "is no folder" in capsys.readouterr().err
