"""`cachesvc tokenize` from its arguments to its last line; what it writes is tested in tests/loader/token_shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cachesvc.__main__ import run
from loader import open_dataset
from tests.support.datasets import write_files
from tests.support.formats.word_tokenizer import word_tokenizer


@pytest.fixture
def arguments(tmp_path: Path, direct: None) -> list[str]:
    write_files(tmp_path / "src", {"0.jsonl": b'{"text": "a cat runs"}\n{"text": "a"}\n'})
    tokenizer = word_tokenizer(tmp_path / "tokenizer.json")
    return [str(tmp_path / "src"), str(tmp_path / "dst"), "--tokenizer", str(tokenizer), "--processes", "1"]


@pytest.mark.slow
def test_shards_are_written_and_counted(arguments: list[str], capsys: Any) -> None:
    assert run(["tokenize", *arguments, "--eos", "<end>", "--json"]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (row["event"], row["folder"]) == ("tokenized", arguments[1])
    assert (row["rows"], row["tokens"], row["dtype"], row["written_shards"]) == (2, 6, "uint16", 1)
    assert len(open_dataset(arguments[1], format="tokens", seq_len=1)) == 6


@pytest.mark.slow
def test_an_error_of_the_run_is_one_line_and_its_code(arguments: list[str], capsys: Any) -> None:
    assert run(["tokenize", *arguments, "--eos", "</s>"]) == 2
    assert "has no token '</s>'" in capsys.readouterr().err.splitlines()[-1]


def test_a_remote_folder_is_refused(arguments: list[str], capsys: Any) -> None:
    assert run(["tokenize", arguments[0], "s3://bucket/dst", *arguments[2:]]) == 2
    assert (
        capsys.readouterr().err
        == "cachesvc: s3://bucket/dst is no folder: write the shards to a folder, and copy that\n"
    )
