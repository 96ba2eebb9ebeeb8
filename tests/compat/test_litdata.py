"""Chunks as litData's `optimize` writes them, and as its `StreamingDataset` reads them."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loader import DataLoader, open_dataset
from tests.compat.launch import ran

litdata = pytest.importorskip("litdata", reason="no litdata here: `make compat` installs it")

COUNT = 60


def row(n: int) -> dict[str, Any]:
    from PIL import Image

    return {
        "n": n - 3,
        "half": n / 2,
        "even": n % 2 == 0,
        "text": f"ü{n} " * n,
        "raw": bytes([n]) * n,
        "flat": torch.arange(n),
        "tensor": torch.full((2, n % 3 + 1), float(n), dtype=torch.float16),
        "array": np.arange(n, dtype=np.float64),
        "matrix": np.full((2, n % 3 + 1), n, np.int16),
        "image": Image.new("RGB", (4, 5), (n, 0, 0)),
        "nested": {"x": n, "pair": (n, f"{n}"), "list": [n, f"{n}", {"deep": [n] * (n % 3)}]},
    }


def jpeg(n: int) -> tuple[int, Any]:
    from PIL import Image

    body = io.BytesIO()
    Image.new("RGB", (16, 16), (n, 2 * n, 0)).save(body, "JPEG")
    return n, litdata.Jpeg(bytes=body.getvalue()) if hasattr(litdata, "Jpeg") else Image.open(body)


def chat(n: int) -> dict[str, Any]:
    return {"text": f"ü{n} " * n, "n": n, "turns": [{"who": "x", "said": "y" * n}] * (n % 3)}


def tokens(n: int) -> Iterator[torch.Tensor]:
    yield torch.arange(100 * n, 100 * n + 100 + n, dtype=torch.int32)


def optimized(root: Path, function: str, arguments: str) -> Path:
    """Run `optimize`, which starts processes, in a program of its own."""
    program = (
        "from litdata import TokensLoader, optimize\n"
        f"from tests.compat.test_litdata import {function}\n"
        "if __name__ == '__main__':\n"
        f"    optimize(fn={function}, inputs=list(range({COUNT})), output_dir={str(root)!r}, num_workers=2, {arguments})\n"
    )
    script = root.parent / "write.py"
    script.write_text(program)
    ran(str(script), HOME=str(root.parent))
    return root


def as_text(value: Any) -> str:
    """Return a value as text, an image by its pixels, a nested value by its leaves."""
    if isinstance(value, dict):
        return " ".join(as_text(each) for each in value.values())
    if isinstance(value, tuple):
        return " ".join(map(as_text, value))
    if hasattr(value, "tobytes") and hasattr(value, "mode"):
        return f"{value.mode} {value.size} {value.tobytes()!r}"
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return f"{value.dtype} {tuple(value.shape)} {value.tolist()}"
    return repr(bytes(value) if isinstance(value, memoryview) else value)


@pytest.mark.parametrize(
    "arguments",
    [
        "chunk_bytes='6KB'",
        "chunk_bytes='6KB', compression='zstd', compression_level='chunk'",
        "chunk_bytes='6KB', compression='zstd:7'",
        "chunk_bytes='6KB', compression='zstd', compression_level='sample'",
    ],
)
def test_items_in_every_compression_are_those_of_litdata(tmp_path: Path, arguments: str) -> None:
    root = optimized(tmp_path / "d", "row", arguments)
    copied = shutil.copytree(root, tmp_path / "theirs")  # whose reader replaces compressed chunks
    theirs = litdata.StreamingDataset(str(copied))
    wanted = [as_text(theirs[n]) for n in range(len(theirs))]
    ours = open_dataset(root, image_mode=None)
    assert [as_text(each) for each in ours] == wanted
    assert sorted(wanted) == sorted(as_text(row(n)) for n in range(COUNT))
    shuffled = DataLoader(ours, 8, shuffle=True, seed=1, collate_fn=list)
    assert sorted(as_text(each) for batch in shuffled for each in batch) == sorted(wanted)


@pytest.mark.parametrize("arguments", ["chunk_bytes='3KB'", "chunk_bytes='3KB', compression='zstd'"])
def test_rows_that_litdata_stores_as_arrow_are_those_of_litdata(tmp_path: Path, arguments: str) -> None:
    root = optimized(tmp_path / "d", "chat", arguments)
    assert any(path.read_bytes().endswith(b"LDARW01\0") for path in root.glob("chunk-*"))
    theirs = litdata.StreamingDataset(str(root))
    wanted = [as_text(theirs[n]) for n in range(len(theirs))]
    assert sorted(wanted) == sorted(as_text(chat(n)) for n in range(COUNT))
    assert [as_text(each) for each in open_dataset(root)] == wanted


def test_jpegs_are_decoded(tmp_path: Path) -> None:
    root = optimized(tmp_path / "d", "jpeg", "chunk_bytes='6KB'")
    found = {each["0"]: each["1"] for each in open_dataset(root)}
    assert sorted(found) == list(range(COUNT))
    assert found[20].size == (16, 16)
    assert abs(found[20].getpixel((8, 8))[1] - 40) < 4


def test_tokens_are_the_blocks_of_tokens_loader(tmp_path: Path) -> None:
    root = optimized(tmp_path / "d", "tokens", "chunk_size=1000, item_loader=TokensLoader()")
    loader = litdata.TokensLoader(block_size=50)
    theirs = litdata.StreamingDataset(str(root), item_loader=loader)
    ours = open_dataset(root, seq_len=50)
    assert [each.tolist() for each in ours] == [theirs[n].tolist() for n in range(len(theirs))]
