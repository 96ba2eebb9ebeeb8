"""Containers of many samples that are not read: how to recognise each, and what to convert it to."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import pairwise

from cachesvc.core.errors import InvalidInput
from cachesvc.core.safe_text import printable

HEAD_BYTES = 512
"""The first bytes of an object, enough to recognise every container below by its content."""
COMPRESSIONS = frozenset({"gz", "gzip", "bz2", "xz", "zst", "zstd", "lz4", "br", "snappy"})
"""Last extensions of names such as `train.jsonl.gz`; the extension before names the compressed format."""


@dataclass(frozen=True, slots=True)
class Container:
    """A container format. `extensions`: of its files, in lower case. `magic`: (offset, bytes) pairs; each alone
    identifies it. `way_out`: the advice that follows the name in the refusal."""

    name: str
    extensions: tuple[str, ...]
    magic: tuple[tuple[int, bytes], ...]
    way_out: str


_KEY_CHARS = 64
_NOT_READ = "which is not read: "
_TO_PARQUET = f"{_NOT_READ}convert it to Parquet"
_TO_SHARDS = f"{_NOT_READ}write its samples as WebDataset tars, MDS shards or Parquet"
_TO_ARRAYS = f"{_NOT_READ}save its arrays as .npy files"
_UNPACK = f"{_NOT_READ}unpack it, or pack its files as a tar"
_TOKENS = "which needs format='tokens' and seq_len="
_NAME = "which needs a name that ends with "

TFRECORD = Container("TFRecord", (), (), f"{_NAME}.tfrecord, or format='tfrecord'")
LITDATA = Container("litData", (), (), "which needs its index.json, and names like chunk-0-0.bin")
ZARR = Container("Zarr", ("zarr",), (), _TO_ARRAYS)
ARROW = Container("Arrow", (), ((0, b"ARROW1"), (0, b"FEA1")), f"{_NAME}.arrow")
IDX = Container("idx (as MNIST has it)", (), (), _TO_ARRAYS)
PICKLE = Container(
    "a pickle",
    (),
    (),
    "which can run code when it is read: save its arrays as .npy files, or its samples as Parquet",
)
CONTAINERS = (
    TFRECORD,
    LITDATA,
    ZARR,
    ARROW,
    Container("HDF5", ("h5", "hdf5", "hdf", "he5"), ((0, b"\x89HDF\r\n\x1a\n"),), _TO_ARRAYS),
    Container("LMDB", ("lmdb", "mdb"), ((16, b"\xde\xc0\xef\xbe"),), _TO_SHARDS),
    Container("npz", ("npz",), (), _TO_ARRAYS),
    Container("safetensors", ("safetensors",), ((6, b'\0\0{"'),), _TO_ARRAYS),
    Container("zip", ("zip",), ((0, b"PK\x03\x04"), (0, b"PK\x05\x06")), _UNPACK),
    Container("7z", ("7z",), ((0, b"7z\xbc\xaf\x27\x1c"),), _UNPACK),
    Container("RAR", ("rar",), ((0, b"Rar!\x1a\x07"),), _UNPACK),
    Container("RecordIO", ("rec",), ((0, b"\x0a\x23\xd7\xce"),), _TO_SHARDS),
    Container("FFCV", ("beton",), (), _TO_SHARDS),
    Container("Avro", ("avro",), ((0, b"Obj\x01"),), _TO_PARQUET),
    Container("ORC", ("orc",), ((0, b"ORC"),), _TO_PARQUET),
    Container("ArrayRecord", ("array_record", "arrayrecord"), (), _TO_SHARDS),
    IDX,
    PICKLE,
    Container("Lance", ("lance",), (), _TO_PARQUET),
    Container("SQLite", ("sqlite", "sqlite3", "db"), ((0, b"SQLite format 3\0"),), _TO_PARQUET),
    Container("Parquet", (), ((0, b"PAR1"),), f"{_NAME}.parquet"),
    Container("tar", (), ((257, b"ustar"),), f"{_NAME}.tar"),
    Container("NumPy", (), ((0, b"\x93NUMPY"),), f"{_NAME}.npy"),
    Container(
        "tokens of llm.c", (), ((0, struct.pack("<i", 20240520)), (0, struct.pack("<i", 20240801))), _TOKENS
    ),
    Container("tokens of LitGPT", (), ((0, b"LITPKDS"),), _TOKENS),
)
"""One row for each container; add a row to recognise another."""
BY_EXTENSION = {extension: each for each in CONTAINERS for extension in each.extensions}
_PACKED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
}


def by_content(head: bytes, size_bytes: int) -> Container | None:
    """Return the container of a binary file that begins with these `HEAD_BYTES`, None for an unknown one."""
    for each in CONTAINERS:
        if any(head.startswith(magic, at) for at, magic in each.magic):
            return each
    looks = (
        (TFRECORD, _is_tfrecord),
        (LITDATA, _is_litdata),
        (ARROW, _is_arrow_stream),
        (PICKLE, _is_pickle),
    )
    return next((each for each, is_one in looks if len(head) >= 12 and is_one(head, size_bytes)), None)


def json_list(key: str) -> Container:
    """Return the container of a JSON list, or of a JSON object that holds a list at a key."""
    name = f"a JSON object with rows in {printable(key[:_KEY_CHARS])!r}" if key else "a JSON list"
    return Container(name, (), (), f"{_NOT_READ}{one_a_line(key)}")


def one_a_line(key: str = "") -> str:
    """Return the advice for a JSON list, or for a list at a key of a JSON object."""
    step = key if not key or key.isidentifier() else f'"{printable(key[:_KEY_CHARS])}"'
    return f"write each item on a line of a .jsonl file (jq -c '.{step}[]' x.json > x.jsonl)"


def compression_of(head: bytes) -> str:
    """Return the compression of an object by its first bytes, "" for none."""
    return next((name for magic, name in _PACKED.items() if head.startswith(magic)), "")


def refusal(uri: str, found: Container, count: int = 1) -> InvalidInput:
    """Return the error for a dataset of `count` such files; `uri` is the first."""
    files = f"{uri} is" if count == 1 else f"{uri} and {count - 1:,} more are"
    return InvalidInput(
        f"{files} {found.name}, {found.way_out}; format='files' reads each file as one sample of bytes"
    )


def _is_tfrecord(head: bytes, size_bytes: int) -> bool:
    """Tell whether it begins with a record: its length, 8 bytes, and their masked CRC-32C."""
    length, masked = struct.unpack_from("<QI", head)
    crc = _crc32c(head[:8])
    return 16 + length <= size_bytes and bool(masked == masked_crc(crc))


def masked_crc(crc: int) -> int:
    """Return a checksum as TFRecord stores it."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ 0x82F63B78 * (crc & 1)
    return crc ^ 0xFFFFFFFF


def _is_litdata(head: bytes, size_bytes: int) -> bool:
    """Tell whether it begins as a chunk: u32 number of items, then the u32 offset of each, the first directly behind."""
    items, first = struct.unpack_from("<II", head)
    begins: tuple[int, ...] = struct.unpack_from(f"<{min(items + 1, len(head) // 4 - 1)}I", head, 4)
    rising = all(low <= high for low, high in pairwise(begins))
    return bool(items and first == 4 * (items + 2) and rising and begins[-1] <= size_bytes)


def _is_arrow_stream(head: bytes, size_bytes: int) -> bool:
    """Tell whether it begins with a message: 0xFFFFFFFF, the length of its metadata, and an offset into that."""
    mark, length, root = struct.unpack_from("<IiI", head)
    return bool(mark == 0xFFFFFFFF and 0 < root < length < size_bytes and length % 8 == 0)


def _is_pickle(head: bytes, size_bytes: int) -> bool:
    """Tell whether it begins as a pickle of protocols 2 to 5: the protocol, then a frame, or a usual first object."""
    return head[0] == 0x80 and 2 <= head[1] <= 5 and head[2] in b"\x95}](){cNKJXU\x8c\x88\x89"
