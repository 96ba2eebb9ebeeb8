"""Rows of text as Hugging Face `datasets` reads them: it writes JSONL and CSV, and both read the same rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loader import open_dataset

hf = pytest.importorskip("datasets", reason="no datasets here: `make compat` installs it")

ROWS = 500
COLUMNS: dict[str, list[Any]] = {
    "text": [f'line "{n}", ü\n\u2028 and more' * (n % 5) + "." for n in range(ROWS)],
    "n": [n - 9 for n in range(ROWS)],
    "half": [n / 2 for n in range(ROWS)],
    "some": [n if n % 3 else None for n in range(ROWS)],
}
CHATS = [
    [{"role": "user", "content": f"{n}"}, {"role": "assistant", "content": "ü" * n}] for n in range(ROWS)
]


def as_text(rows: Any) -> list[str]:
    return sorted(json.dumps(row, sort_keys=True) for row in rows)


@pytest.mark.parametrize("compression", [None, "gzip", "bz2"])
def test_json_lines_of_datasets_are_its_rows(tmp_path: Path, compression: str | None) -> None:
    written = hf.Dataset.from_dict(COLUMNS | {"messages": CHATS})
    ending = {None: "", "gzip": ".gz", "bz2": ".bz2"}[compression]
    path = tmp_path / "d" / f"train.jsonl{ending}"
    path.parent.mkdir()
    written.to_json(path, compression=compression)
    theirs = hf.load_dataset("json", data_files=str(path), split="train", cache_dir=str(tmp_path / "hf"))
    assert as_text(open_dataset(path.parent)) == as_text(theirs) == as_text(written)


def test_csv_of_datasets_is_its_rows(tmp_path: Path) -> None:
    written = hf.Dataset.from_dict(COLUMNS)
    (tmp_path / "d").mkdir()
    for shard in range(3):
        written.shard(3, shard).to_csv(tmp_path / "d" / f"{shard}.csv", index=False)
    theirs = hf.load_dataset(str(tmp_path / "d"), split="train", cache_dir=str(tmp_path / "hf"))
    ours = list(open_dataset(tmp_path / "d"))
    assert {type(row["some"]) for row in ours} == {int, type(None)}
    # datasets reads CSV by pandas, which makes floats of whole numbers where some are missing.
    as_floats = [row | {"some": row["some"] and float(row["some"])} for row in ours]
    assert as_text(as_floats) == as_text(theirs)


def test_lines_of_text_are_those_of_datasets(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\n twö \r\nlast", newline="")
    theirs = hf.load_dataset(
        "text", data_files=str(tmp_path / "a.txt"), split="train", cache_dir=str(tmp_path / "hf")
    )
    assert list(open_dataset(tmp_path / "a.txt", format="text")) == theirs["text"]
