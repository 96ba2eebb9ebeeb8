"""Token files of OLMo (`.npy` without a header) and of datatrove (`.ds` with an index), and tokens that are cut off."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cachesvc.core.errors import CorruptData, InvalidInput
from loader import DataLoader, open_dataset, pack
from tests.support.catalog_reader import samples_of
from tests.support.datasets import write_files
from tests.support.folders import opened, refusal

pytestmark = pytest.mark.usefixtures("direct")
SEQ = 64
TOKENS = np.random.default_rng(0).integers(0, 50_000, 6400)


def tokens_of(root: Path, files: dict[str, bytes], **options: Any) -> tuple[list[int], tuple[str, ...]]:
    """Return the tokens of all samples, and the notes."""
    catalog = opened(root, files, seq_len=SEQ, **options)
    assert catalog.format == "tokens"
    raw = b"".join(row[0] or b"" for row in samples_of(catalog))
    return np.frombuffer(raw, catalog.fields[0].encoding).tolist(), catalog.notes


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_npy_files_without_a_header_are_read_with_a_dtype(tmp_path: Path, dtype: str) -> None:
    body = TOKENS.astype(dtype).tobytes()
    files = {"part-0-00000.npy": body, "part-1-00000.npy": body}
    assert tokens_of(tmp_path / "d", files, dtype=dtype) == ([*TOKENS.tolist()] * 2, ())
    with pytest.raises(CorruptData, match=r"part-.*\.npy has a broken \.npy header.* dtype="):
        opened(tmp_path / "d", {}, seq_len=SEQ)
    np.save(tmp_path / "d/part-1-00000.npy", TOKENS.astype(dtype))
    assert tokens_of(tmp_path / "d", {}, dtype=dtype)[0] == [*TOKENS.tolist()] * 2


def datatrove(stem: str, lengths: list[int], width: int = 2) -> dict[str, bytes]:
    ends = np.cumsum(lengths)
    body = TOKENS[: ends[-1]].astype(f"<u{width}").tobytes()
    metadata = f"HuggingFaceTB/SmolLM|{width}\n{ends[-1]}\n{ends[-1] / 1000:.2f} KT"
    return {
        f"{stem}.ds": body,
        f"{stem}.ds.index": ends.astype("<u8").tobytes(),
        f"{stem}.ds.metadata": metadata.encode(),
    }


@pytest.mark.parametrize("width", [2, 4])
def test_datatrove_states_its_type_and_documents(tmp_path: Path, width: int) -> None:
    files = datatrove("0/000_00000", [100, 0, 200, 340], width) | datatrove("2/000_00001", [5, 59], width)
    files |= datatrove("1/000_00000", [5, 3], width)  # too short for a sample
    right = [*TOKENS[:640].tolist(), *TOKENS[:64].tolist()]
    found, (note,) = tokens_of(tmp_path / "d", files)
    assert (found, "1/000_00000.ds: the last" in note) == (right, True)
    dataset = open_dataset(tmp_path / "d", seq_len=SEQ)
    assert [row.tolist() for row in dataset] == np.reshape(right, (-1, SEQ)).tolist()
    whole = [TOKENS[low:high].tolist() for low, high in ((0, 100), (100, 300), (300, 640), (0, 5), (5, 64))]
    (packs,) = DataLoader(pack(dataset, 704), batch_size=1)
    parts = np.split(packs["tokens"][0].numpy(), packs["cu_seqlens"].numpy()[1:-1])
    assert sorted(part.tolist() for part in parts) == sorted(whole)


def test_datatrove_without_its_metadata_needs_a_dtype(tmp_path: Path) -> None:
    files = datatrove("000_00000", [100, 156])
    alone = {"000_00000.ds": files["000_00000.ds"]}
    assert "000_00000.ds does not say of what type" in refusal(tmp_path / "alone", alone, seq_len=SEQ)
    assert tokens_of(tmp_path / "alone", {}, dtype="uint16") == (TOKENS[:256].tolist(), ())
    assert "need seq_len" in refusal(tmp_path / "d", files)
    with pytest.raises(CorruptData, match=r"\.ds\.index does not end .* 128 tokens .* uint32"):
        tokens_of(tmp_path / "d", {}, dtype="uint32")


@pytest.mark.parametrize(
    "index", [b"", b"1234567", struct.pack("<2Q", 300, 256), struct.pack("<2Q", 2**64 - 1, 256)]
)
def test_a_wrong_index_of_datatrove_is_an_error(tmp_path: Path, index: bytes) -> None:
    files = datatrove("000_00000", [100, 156]) | {"000_00000.ds.index": index}
    with pytest.raises(
        CorruptData, match=r"000_00000\.ds\.index does not end its documents at the 256 tokens"
    ):
        tokens_of(tmp_path / "d", files)


def test_a_token_that_is_cut_off_is_noted(tmp_path: Path) -> None:
    body = TOKENS.astype("<u2").tobytes()
    found, notes = tokens_of(tmp_path / "d", {"a.bin": body + b"\1"}, dtype="uint16")
    assert found == TOKENS.tolist()
    assert notes == (f"{tmp_path}/d/a.bin: the last 1 bytes are no whole sample and left out",)


@pytest.mark.parametrize("more", [2, 6])
def test_tokens_of_another_width_are_refused(tmp_path: Path, more: int) -> None:
    write_files(tmp_path / "d", {"a.bin": TOKENS.astype("<u2").tobytes() + bytes(more)})
    with pytest.raises(InvalidInput, match=r"a\.bin has 12,80\d bytes, no whole number of uint32 tokens"):
        tokens_of(tmp_path / "d", {}, dtype="uint32")
