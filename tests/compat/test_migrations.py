"""The scripts of docs/migrating.md run, before and after, and give the same samples."""

from __future__ import annotations

import io
import json
import re
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from testbed import ROOT
from tests.support.datasets import megatron

PAGE = (ROOT / "docs" / "migrating.md").read_text()
COUNT = 100


def blocks(title: str) -> list[str]:
    """The code blocks of a section."""
    (section,) = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
    return re.findall(r"^```\w+\n(.*?)^```$", section, re.M | re.S)


def side(diff: str, sign: str) -> str:
    """One side of a diff: "-" before, "+" after."""
    return "\n".join(line[1:] for line in diff.splitlines() if line[:1] in (sign, " ", ""))


def ran(code: str, data: Path) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "migrated"}
    exec(compile(code.replace("/data/", f"{data}/"), "migrating.md", "exec"), names)
    return names


def numbers(batches: Any) -> list[int]:
    """The samples of an epoch, sorted."""
    found: list[int] = []
    for batch in batches:
        first = (
            batch["number"]
            if isinstance(batch, dict)
            else batch[0]
            if isinstance(batch, (list, tuple))
            else batch
        )
        found += [int(each["number"] if isinstance(each, dict) else each) for each in first]
    return sorted(found)


def both(title: str, data: Path) -> tuple[list[int], list[int]]:
    """The samples before and after the change."""
    (diff,) = blocks(title)
    return numbers(ran(side(diff, "-"), data)["batches"]), numbers(ran(side(diff, "+"), data)["batches"])


def test_stateful_data_loader(tmp_path: Path) -> None:
    pytest.importorskip("torchdata", reason="`make compat` installs it")
    before, after = both("StatefulDataLoader", tmp_path)
    assert before == after == [number * number for number in range(COUNT)]


def test_webdataset(tmp_path: Path) -> None:
    pytest.importorskip("webdataset", reason="`make compat` installs it")
    (tmp_path / "tars").mkdir()
    for shard in range(2):
        with tarfile.open(tmp_path / "tars" / f"{shard:03d}.tar", "w") as tar:
            for number in range(shard * 50, shard * 50 + 50):
                for name, value in (("json", {"number": number}), ("cls", number % 7)):
                    content = json.dumps(value).encode()
                    info = tarfile.TarInfo(f"{number:05d}.{name}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    assert both("WebDataset", tmp_path) == (list(range(COUNT)), list(range(COUNT)))


def write_parquet(data: Path) -> None:
    (data / "parquet").mkdir()
    for part in range(2):
        table = pa.table({"number": list(range(part * 50, part * 50 + 50))})
        pq.write_table(table, data / "parquet" / f"{part}.parquet")


def test_hugging_face_datasets(tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="`make compat` installs it")
    write_parquet(tmp_path)
    assert both("Hugging Face datasets, streaming", tmp_path) == (list(range(COUNT)), list(range(COUNT)))


def test_mosaicml_streaming(tmp_path: Path) -> None:
    streaming = pytest.importorskip(
        "streaming", reason="install mosaicml-streaming, which refuses the hub of datasets"
    )
    with streaming.MDSWriter(out=str(tmp_path / "mds"), columns={"number": "int"}) as writer:
        for number in range(COUNT):
            writer.write({"number": number})
    before, after = both("MosaicML Streaming", tmp_path)
    assert before == after == [2 * number for number in range(COUNT)]


def test_nanogpt(tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir()
    np.arange(1000, dtype="<u2").tofile(tmp_path / "tokens" / "train.bin")
    (diff,) = blocks("nanoGPT's memmap")
    for sign in "-+":
        inputs, targets = ran(side(diff, sign), tmp_path)["get_batch"]()
        assert inputs.shape == targets.shape == (8, 16)
        assert torch.equal(inputs + 1, targets)


def test_megatron(tmp_path: Path) -> None:
    (tmp_path / "megatron").mkdir()
    documents = [[length] * length for length in range(5, 60)]
    megatron(tmp_path / "megatron" / "text", documents)
    (code,) = blocks("Megatron's indexed dataset")
    batch = next(iter(ran(code, tmp_path)["batches"]))
    assert batch["tokens"].shape == (2, 64)
    for begin, end in zip(batch["cu_seqlens"][:-1], batch["cu_seqlens"][1:], strict=True):
        assert len(set(batch["tokens"].flatten()[begin:end].tolist())) == 1


def test_back_to_torch(tmp_path: Path) -> None:
    write_parquet(tmp_path)
    (code,) = blocks("Back to torch")
    assert numbers(ran(code, tmp_path)["batches"]) == list(range(COUNT))


@pytest.mark.parametrize("title", re.findall(r"^\| \[([^]]+)\]\(#.*?\) \| \d+ \|", PAGE, re.M))
def test_the_table_counts_the_lines_that_change(title: str) -> None:
    (told,) = re.findall(rf"^\| \[{re.escape(title)}\]\(#.*?\) \| (\d+) \|", PAGE, re.M)
    (diff,) = blocks(title)
    assert sum(line.startswith("+") and len(line) > 1 for line in diff.splitlines()) == int(told)
