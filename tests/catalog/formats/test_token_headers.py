"""Headers of token shards are skipped: those of llm.c, modded-nanogpt and litgpt are recognised, others are given."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cachesvc.catalog.options import Options
from cachesvc.core.errors import CacheError, CorruptData, InvalidInput
from loader import DataLoader, open_dataset, pack
from testbed.node import Daemon
from tests.support.catalog_reader import Folder, compiled, samples_of
from tests.support.datasets import megatron, write_files

GPT2, LLAMA = (20240520, 1, "<u2"), (20240801, 7, "<u4")
LITGPT = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f4", 7: "<f8", 8: "<u2"}


def stream(count: int, dtype: str, begin: int = 0) -> np.ndarray:
    return (np.arange(count) + begin).astype(dtype)


def llmc(tokens: np.ndarray, magic: int = GPT2[0], version: int = GPT2[1], count: int | None = None) -> bytes:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    return header.tobytes() + tokens.tobytes()


def litgpt(tokens: np.ndarray, code: int, version: int = 1, count: int | None = None) -> bytes:
    head = struct.pack("<7sQBQ", b"LITPKDS", version, code, len(tokens) if count is None else count)
    return head + tokens.tobytes()


def tokens_of(root: Path, **options: Any) -> np.ndarray:
    """Return all samples, concatenated."""
    catalog = compiled(root, Options(format="tokens", seq_len=64, **options))
    return np.frombuffer(b"".join(row[0] or b"" for row in samples_of(catalog)), catalog.fields[0].encoding)


@pytest.mark.parametrize(("magic", "version", "dtype"), [GPT2, LLAMA])
@pytest.mark.parametrize("stated", [True, False])
def test_headers_of_llm_c_are_skipped(
    tmp_path: Path, magic: int, version: int, dtype: str, stated: bool
) -> None:
    shards = [stream(640, dtype, begin) for begin in (0, 7, 99)]
    bodies = {f"{n}.bin": llmc(each, magic, version) for n, each in enumerate(shards)}
    write_files(tmp_path / "d", bodies)
    given = {"dtype": np.dtype(dtype).name} if stated else {}
    assert np.array_equal(tokens_of(tmp_path / "d", **given), np.concatenate(shards))


@pytest.mark.parametrize(("code", "dtype"), LITGPT.items())
def test_headers_of_litgpt_are_skipped(tmp_path: Path, code: int, dtype: str) -> None:
    write_files(tmp_path / "d", {f"{n}.bin": litgpt(stream(128, dtype, n), code) for n in range(2)})
    right = np.concatenate([stream(128, dtype, n) for n in range(2)])
    found = tokens_of(tmp_path / "d")
    assert (found.dtype, found.tolist()) == (np.dtype(dtype), right.tolist())


@pytest.mark.parametrize("header", [1, 24, 4096, 5000])
def test_a_given_header_size_is_skipped(tmp_path: Path, header: int) -> None:
    write_files(tmp_path / "d", {"0.bin": b"H" * header + stream(640, "<u2").tobytes()})
    options = {"dtype": "uint16", "header_bytes": header}
    assert np.array_equal(tokens_of(tmp_path / "d", **options), stream(640, "<u2"))
    records = compiled(tmp_path / "d", Options(format="records", record_bytes=256, header_bytes=header))
    assert b"".join(row[0] or b"" for row in samples_of(records)) == stream(640, "<u2").tobytes()


@pytest.mark.parametrize("dtype", ["uint16", "(64,)u2"])
def test_records_of_integers_recognise_the_headers(tmp_path: Path, dtype: str) -> None:
    write_files(tmp_path / "d", {"0.bin": llmc(stream(640, "<u2")), "1.bin": llmc(stream(64, "<u2"))})
    catalog = compiled(tmp_path / "d", Options(format="records", dtype=dtype))
    right = np.concatenate([stream(640, "<u2"), stream(64, "<u2")])
    assert b"".join(row[0] or b"" for row in samples_of(catalog)) == right.tobytes()


def test_a_given_header_size_overrides_a_known_header(tmp_path: Path) -> None:
    """A given size is the remedy for a damaged header or one of a later version."""
    write_files(tmp_path / "d", {"0.bin": llmc(stream(64, "<u4"), version=9, count=1)})
    assert np.array_equal(tokens_of(tmp_path / "d", dtype="uint32", header_bytes=1024), stream(64, "<u4"))


SHORT = llmc(stream(640, "<u2"))


@pytest.mark.parametrize(
    ("files", "options", "error", "says"),
    [
        ({"0.bin": SHORT[:-2]}, {}, CorruptData, "2,302 bytes, and its header .llm.c. says 2,304: 640 tokens of uint16"),
        ({"0.bin": SHORT + b"12"}, {}, CorruptData, "2,306 bytes, and its header"),
        ({"0.bin": SHORT[:900]}, {}, CorruptData, "900 bytes, and its header"),
        ({"0.bin": SHORT[:10]}, {}, CorruptData, "ends inside its header"),
        ({"0.bin": llmc(stream(64, "<u2"), count=-1)}, {}, CorruptData, "-1 tokens"),
        ({"0.bin": litgpt(stream(64, "<u2"), 8, count=2**63)}, {}, CorruptData, "its header .litgpt."),
        ({"0.bin": litgpt(stream(64, "<u2"), 8)[:20]}, {}, CorruptData, "ends inside its header"),
        ({"0.bin": litgpt(stream(64, "<u2"), 9)}, {}, InvalidInput, "type 9, which is unknown: header_bytes=24"),
        ({"0.bin": litgpt(stream(64, "<u2"), 8, 2)}, {}, InvalidInput, "version 2"),
        ({"0.bin": llmc(stream(64, "<u2"), version=2)}, {}, InvalidInput, "version 2, not 1: header_bytes=1024"),
        ({"0.bin": llmc(stream(64, "<u2"), magic=20240522)}, {}, InvalidInput, "eval format"),
        ({"0.bin": SHORT}, {"dtype": "uint32"}, InvalidInput, "<u2 by its header .llm.c., not dtype uint32"),
        ({"0.bin": SHORT}, {"dtype": ">u2"}, InvalidInput, "not dtype >u2"),
        ({"0.bin": litgpt(stream(64, "<i4"), 4)}, {"dtype": "uint16"}, InvalidInput, "<i4 by its header .litgpt."),
        ({"0.bin": SHORT, "1.bin": bytes(640)}, {"dtype": "uint16"}, InvalidInput, "0.bin begins .*1.bin does not"),
        ({"0.bin": SHORT, "1.bin": b""}, {"dtype": "uint16"}, InvalidInput, "1.bin does not"),
        ({"0.bin": SHORT, "1.bin": litgpt(stream(64, "<i4"), 4)}, {}, InvalidInput, "different types: <i4, <u2"),
        ({"0.bin": bytes(640)}, {}, InvalidInput, "raw tokens need dtype"),
        ({"0.bin": bytes(64)}, {"dtype": "uint16", "header_bytes": 65}, InvalidInput, "fewer than header_bytes 65"),
    ],
)  # fmt: skip
def test_a_contradicting_header_is_a_typed_error(
    tmp_path: Path, files: dict[str, bytes], options: dict[str, Any], error: type[CacheError], says: str
) -> None:
    write_files(tmp_path / "d", files)
    with pytest.raises(error, match=says) as caught:
        tokens_of(tmp_path / "d", **options)
    assert "\n" not in str(caught.value)


def test_header_bytes_are_refused_for_formats_with_a_header(tmp_path: Path) -> None:
    np.save(_made(tmp_path / "npy") / "0.npy", stream(640, "<u2"))
    megatron(tmp_path / "megatron" / "corpus", [[1, 2, 3]] * 100)
    write_files(tmp_path / "files", {"0.jpg": b"x"})
    for kind in ("npy", "megatron"):
        with pytest.raises(InvalidInput, match=r"header_bytes is for raw \.bin files"):
            tokens_of(tmp_path / kind, header_bytes=24)
    with pytest.raises(InvalidInput, match="header_bytes=24 is for records and tokens"):
        compiled(tmp_path / "files", Options(header_bytes=24))


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def test_opening_reads_the_head_of_each_token_file_once_and_of_no_image(tmp_path: Path) -> None:
    write_files(tmp_path / "d", {f"{n:02}.bin": llmc(stream(64, "<u2")) for n in range(40)})
    folder = Folder()
    compiled(tmp_path / "d", Options(format="tokens", seq_len=64), folder)
    assert sorted(folder.reads) == [str(tmp_path / "d" / f"{n:02}.bin") for n in range(40)]
    for dtype in ("(8,8)u1", "(16,)f4"):
        folder = Folder()
        compiled(tmp_path / "d", Options(format="records", dtype=dtype), folder)
        assert folder.reads == []


@pytest.mark.parametrize("way", ["direct", "daemon"])
def test_tokens_behind_a_header_are_read_shuffled_packed_and_as_one_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    shards = [stream(4096, "<u2", begin) for begin in (0, 4096)]
    write_files(tmp_path / "d", {f"{n}.bin": llmc(each) for n, each in enumerate(shards)})
    monkeypatch.setenv("CACHESVC", "require" if way == "daemon" else "off")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with Daemon(tmp_path / "node", ["--ram", "64MiB", "--fillers", "1"], {}) as daemon:
        monkeypatch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
        text = open_dataset(tmp_path / "d", seq_len=128, out="int64")
        assert (len(text), text[0][:3].tolist(), text[32][:3].tolist()) == (64, [0, 1, 2], [4096, 4097, 4098])
        batches = list(DataLoader(text, batch_size=8, shuffle=True, num_workers=1))
        assert sorted(token for batch in batches for token in batch.flatten().tolist()) == list(range(8192))
        packed = pack(text, seq_len=256)
        assert len(packed) == 32
        flat = open_dataset(tmp_path / "d" / "1.bin", format="records", dtype="uint16")
        if way == "daemon":  # the memory that `array` needs
            assert np.array_equal(flat.array(), shards[1])
        for each in (text, flat):
            each.close()
