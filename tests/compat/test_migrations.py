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


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CACHESVC", "off")
    return tmp_path


def both(title: str, data: Path) -> tuple[list[int], list[int]]:
    """The samples before and after the change."""
    (diff,) = blocks(title)
    return numbers(ran(side(diff, "-"), data)["batches"]), numbers(ran(side(diff, "+"), data)["batches"])


def test_stateful_data_loader(data: Path) -> None:
    pytest.importorskip("torchdata", reason="`make compat` installs it")
    before, after = both("StatefulDataLoader", data)
    assert before == after == [number * number for number in range(COUNT)]


def test_webdataset(data: Path) -> None:
    pytest.importorskip("webdataset", reason="`make compat` installs it")
    (data / "tars").mkdir()
    for shard in range(2):
        with tarfile.open(data / "tars" / f"{shard:03d}.tar", "w") as tar:
            for number in range(shard * 50, shard * 50 + 50):
                for name, value in (("json", {"number": number}), ("cls", number % 7)):
                    content = json.dumps(value).encode()
                    info = tarfile.TarInfo(f"{number:05d}.{name}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    assert both("WebDataset", data) == (list(range(COUNT)), list(range(COUNT)))


def write_parquet(data: Path) -> None:
    (data / "parquet").mkdir()
    for part in range(2):
        table = pa.table({"number": list(range(part * 50, part * 50 + 50))})
        pq.write_table(table, data / "parquet" / f"{part}.parquet")


def test_hugging_face_datasets(data: Path) -> None:
    pytest.importorskip("datasets", reason="`make compat` installs it")
    write_parquet(data)
    assert both("Hugging Face datasets, streaming", data) == (list(range(COUNT)), list(range(COUNT)))


def test_mosaicml_streaming(data: Path) -> None:
    streaming = pytest.importorskip(
        "streaming", reason="install mosaicml-streaming, which refuses the hub of datasets"
    )
    with streaming.MDSWriter(out=str(data / "mds"), columns={"number": "int"}) as writer:
        for number in range(COUNT):
            writer.write({"number": number})
    before, after = both("MosaicML Streaming", data)
    assert before == after == [2 * number for number in range(COUNT)]


def test_nanogpt(data: Path) -> None:
    (data / "tokens").mkdir()
    np.arange(1000, dtype="<u2").tofile(data / "tokens" / "train.bin")
    (diff,) = blocks("nanoGPT's memmap")
    for sign in "-+":
        inputs, targets = ran(side(diff, sign), data)["get_batch"]()
        assert inputs.shape == targets.shape == (8, 16)
        assert torch.equal(inputs + 1, targets)


def test_megatron(data: Path) -> None:
    (data / "megatron").mkdir()
    documents = [[length] * length for length in range(5, 60)]
    megatron(data / "megatron" / "text", documents)
    (code,) = blocks("Megatron's indexed dataset")
    batch = next(iter(ran(code, data)["batches"]))
    assert batch["tokens"].shape == (2, 64)
    for begin, end in zip(batch["cu_seqlens"][:-1], batch["cu_seqlens"][1:], strict=True):
        assert len(set(batch["tokens"].flatten()[begin:end].tolist())) == 1


def test_back_to_torch(data: Path) -> None:
    write_parquet(data)
    (code,) = blocks("Back to torch")
    assert numbers(ran(code, data)["batches"]) == list(range(COUNT))


@pytest.mark.parametrize("title", re.findall(r"^\| \[([^]]+)\]\(#.*?\) \| \d+ \|", PAGE, re.M))
def test_the_table_counts_the_lines_that_change(title: str) -> None:
    (told,) = re.findall(rf"^\| \[{re.escape(title)}\]\(#.*?\) \| (\d+) \|", PAGE, re.M)
    (diff,) = blocks(title)
    assert sum(line.startswith("+") and len(line) > 1 for line in diff.splitlines()) == int(told)
