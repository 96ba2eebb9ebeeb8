"""Shards of tokens by a real tokenizer: the format `tokens` reads them, and a run can be continued."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import signal
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cachesvc.core.errors import CacheError, InvalidInput, NotFound
from loader import DataLoader, open_dataset, pack
from loader.token_shards.job import Job, write_shards
from loader.token_shards.shards import shards_of
from loader.token_shards.tokenizer import Tokenizer
from loader.token_shards.workers import tokenised
from tests.support.datasets import array_file, write_files
from tests.support.formats.word_tokenizer import WORDS, word_tokenizer

TEXTS = ["a cat", "", "a dog runs", "runs " * 300, *["cat a cat"] * 60]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """Rows of text in two files, a tokenizer, and a folder that does not exist."""
    monkeypatch.setenv("CACHESVC", "off")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = [json.dumps({"n": n, "text": text}) + "\n" for n, text in enumerate(TEXTS)]
    files = {"0.jsonl": "".join(rows[:10]).encode(), "1.jsonl": "".join(rows[10:]).encode()}
    write_files(tmp_path / "src", files)
    return Job(
        source=str(tmp_path / "src"),
        folder=str(tmp_path / "dst"),
        tokenizer=str(word_tokenizer(tmp_path / "tokenizer.json")),
        format="",
        split="",
        field="",
        eos="",
        on_error="raise",
        processes=2,
        shard_bytes=1024,
    )


def run(job: Job) -> dict[str, Any]:
    """Run a job to its end, and return its result."""
    *progress, result = write_shards(job)
    done = [row["done_bytes"] for row in progress]
    assert done == sorted(done)
    assert all(row["done_bytes"] == row["total_bytes"] for row in progress[-1:])
    return result


def written(job: Job) -> dict[str, int]:
    """The files of the shards, and when each was written."""
    return {path.name: path.stat().st_mtime_ns for path in sorted(Path(job.folder).glob("tokens-*"))}


def documents(job: Job) -> list[list[int]]:
    """The documents of the shards, as our own reader of tokens finds them."""
    dataset = open_dataset(job.folder, format="tokens", seq_len=1)
    bounds, tokens = dataset.catalog.documents, [int(each) for each in dataset.take(10**6)]
    assert bounds is not None
    return [tokens[low:high] for low, high in pairwise(np.unique(bounds).tolist())]


def expected(end: list[int]) -> list[list[int]]:
    return [[WORDS.get(word, 0) for word in text.split()] + end for text in TEXTS if text]


def test_shards_hold_the_documents_of_the_rows_in_order(job: Job) -> None:
    result = run(replace(job, eos="<end>"))
    tokens = sum(len(document) for document in expected([1]))
    assert (result["rows"], result["tokens"], result["dtype"]) == (len(TEXTS), tokens, "uint16")
    assert result["shards"] == result["written_shards"] == len(written(job)) // 2 > 2
    assert documents(job) == expected([1])
    batches = DataLoader(pack(open_dataset(job.folder, format="tokens", seq_len=1), 16), batch_size=2)
    assert next(iter(batches))["cu_seqlens"].tolist()[:4] == [0, 3, 7, 16]


def test_many_tokens_are_stored_wider(job: Job, tmp_path: Path) -> None:
    word_tokenizer(Path(job.tokenizer), cat=100_000)
    assert run(job)["dtype"] == "int32"
    assert documents(job)[0] == [WORDS["a"], 100_000]


@pytest.mark.parametrize("form", ["text", "csv", "parquet"])
def test_lines_and_columns_are_text_too(job: Job, tmp_path: Path, form: str) -> None:
    texts = [text for text in TEXTS if text]
    if form == "parquet":
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        (tmp_path / form).mkdir()
        parquet.write_table(
            arrow.table({"body": texts, "n": range(len(texts))}), tmp_path / form / "a.parquet"
        )
    else:
        head = "body,n\n" if form == "csv" else ""
        lines = [f"{text},1" if form == "csv" else text for text in texts]
        write_files(tmp_path / form, {f"a.{form}": (head + "\n".join([*lines, ""])).encode()})
    field = "" if form == "text" else "body"
    run(replace(job, source=str(tmp_path / form), format=form, field=field))
    assert documents(job) == expected([])


def test_a_run_is_continued_where_a_shard_is_missing(job: Job) -> None:
    run(job)
    first = written(job)
    lost = Path(job.folder) / next(iter(first))
    lost.with_suffix(".idx").unlink()
    (Path(job.folder) / "tokens-00009.bin.tmp").write_bytes(b"of a run that was killed")
    assert run(job)["written_shards"] == 1
    again = written(job)
    assert again.keys() == first.keys()
    changed = {name for name in first if again[name] != first[name]}
    assert changed == {lost.name, lost.with_suffix(".idx").name}
    assert documents(job) == expected([])


def test_a_process_that_is_killed_is_an_error(job: Job) -> None:
    """The process waits in a shard's file, a FIFO that nothing reads, until it is killed."""
    dataset, tokenizer = open_dataset(job.source), Tokenizer(job.tokenizer, "")
    Path(job.folder).mkdir()
    shard = shards_of(dataset, job.folder, job.shard_bytes)[0]
    os.mkfifo(f"{shard.stem}.bin.tmp")
    running = tokenised(dataset, tokenizer, [shard], 1)
    assert next(running) == 0
    (child,) = multiprocessing.active_children()
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(CacheError, match="ended with exit code -9"):
        list(running)


def test_a_folder_of_something_else_is_refused(job: Job) -> None:
    write_files(Path(job.folder), {"notes.txt": b"mine"})
    with pytest.raises(InvalidInput, match=r"holds notes\.txt; name a folder that is empty"):
        run(job)
    (Path(job.folder) / "notes.txt").unlink()
    run(job)
    with pytest.raises(InvalidInput, match="holds shards of another tokenizer; name another folder"):
        run(replace(job, eos="<end>"))
    with pytest.raises(InvalidInput, match="is no folder"):
        run(replace(job, folder=job.tokenizer))
    with open(Path(job.folder) / ".tokenize.json") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(InvalidInput, match="another run writes into"):
            run(job)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"eos": "</s>"}, InvalidInput, "has no token '</s>'"),
        ({"field": "n"}, InvalidInput, "is int and no text: name a field of text by --field"),
        ({"source": "missing"}, NotFound, "missing"),
        ({"tokenizer": "src/0.jsonl"}, InvalidInput, "is no tokenizer.json"),
        ({"tokenizer": "missing.json"}, NotFound, "missing.json does not exist"),
        ({"tokenizer": "./missing"}, NotFound, "does not exist"),
        ({"tokenizer": "models/missing/tokenizer"}, NotFound, "does not exist"),
    ],
)
def test_a_wrong_argument_is_an_error(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, error: Any, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        run(replace(job, **change))


def test_rows_without_text_are_named(job: Job, tmp_path: Path) -> None:
    write_files(tmp_path / "other", {"a.jsonl": b'{"body": "a cat"}\n'})
    with pytest.raises(InvalidInput, match=r"row 0 of .* has the fields body: name one by --field"):
        run(replace(job, source=str(tmp_path / "other")))
    array_file(tmp_path / "rows.npy", np.zeros((3, 4), "<i8"))
    with pytest.raises(InvalidInput, match="is Tensor and no text"):
        run(replace(job, source=str(tmp_path / "rows.npy"), folder=str(tmp_path / "third")))
