"""Every parser of bytes of unknown origin, as a function of these bytes: for Hypothesis, atheris and the kept corpus
(tests/fuzz/corpus/<name>/).

    python -m tests.fuzz.hostile NAME SECONDS     # atheris; it writes bytes that break a target to tests/fuzz/corpus/NAME/
"""

from __future__ import annotations

import csv
import gzip
import os
import struct
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

import numpy as np
from google.protobuf.message import DecodeError
from xxhash import xxh3_64_hexdigest

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.compiler import Draft, Inputs, ListedObject
from cachesvc.catalog.formats.arrow import compile_arrow
from cachesvc.catalog.formats.csv_rows import compile_csv
from cachesvc.catalog.formats.files import compile_files
from cachesvc.catalog.formats.jsonl import compile_jsonl
from cachesvc.catalog.formats.litdata import compile_litdata
from cachesvc.catalog.formats.mds import compile_mds
from cachesvc.catalog.formats.parquet import compile_parquet
from cachesvc.catalog.formats.plain_text import compile_documents, compile_text
from cachesvc.catalog.formats.records import compile_records
from cachesvc.catalog.formats.tar import members
from cachesvc.catalog.formats.tfrecord import compile_tfrecord
from cachesvc.catalog.formats.tokens import compile_tokens
from cachesvc.catalog.formats.webdataset import compile_webdataset
from cachesvc.catalog.layout import Columns
from cachesvc.catalog.options import Options
from cachesvc.catalog.parsing.tf_example import features_of
from cachesvc.catalog.row_syntax import csv_rows, json_value
from cachesvc.catalog.validation import check_catalog
from cachesvc.client import plan_memory as plans
from cachesvc.config import Settings
from cachesvc.core import wire
from cachesvc.core.errors import CacheError, InvalidInput
from cachesvc.core.model import Extent, ExtentId, ObjectVersion
from cachesvc.daemon.control.reports import options_of
from cachesvc.daemon.grants.plan_intake import entries_of
from cachesvc.sources.decompression import CODECS, decompressed
from cachesvc.sources.framed_zstd import unpacked_chunk
from cachesvc.sources.parquet.parquet import Footer, decoding
from cachesvc.sources.parquet.recipe import recipe_of
from cachesvc.sources.uri import allowlist, canonical, expand
from cachesvc.v1 import cachesvc_pb2 as pb
from tests.support.datasets import tar_of
from tests.support.formats.tfrecords import framed

CORPUS = Path(__file__).parent / "corpus"
MAX_READ_BYTES = 8 << 20
"""No parser may ask for more than this of a file of a few KB."""
ALLOWED = allowlist(["s3://b/"])
LITDATA_INDEX = (
    b'{"chunks": [{"chunk_bytes": 9, "chunk_size": 4, "filename": "chunk-0-0.bin"}], "config": {"compression": "zstd", '
    b'"compression_level": "batch", "data_format": ["int"], '
    b'"data_spec": "[1, {\\"type\\": null, \\"children_spec\\": []}]"}}'
)
"""An index of one chunk of zstd frames."""
SETTINGS = Settings(0, (), (), "/s", "/t")


class _Store:
    """Objects in memory that assert reads within their ends."""

    def __init__(self, bodies: dict[str, bytes]) -> None:
        self.bodies = bodies
        self._extents: Sequence[Extent] = ()

    def fetch(self, version: ObjectVersion, offset: int, length: int) -> bytes:
        body = self.bodies[version.uri]
        assert 0 <= offset <= offset + length <= len(body), "a read outside the object"
        assert length <= MAX_READ_BYTES
        return body[offset : offset + length]

    def declare(self, extents: Sequence[Extent]) -> None:
        self._extents = extents

    def read(self, extent: int, offset: int, length: int) -> bytes:
        (piece,) = self._extents[extent].pieces
        assert 0 <= offset <= offset + length <= piece.length, "a read outside the extent"
        return self.fetch(piece.object, piece.offset + offset, length)


def _compiled(compile_it: Callable[[Inputs], Draft], options: Options, **bodies: bytes) -> list[Extent]:
    names = {name.replace("_", "."): body for name, body in bodies.items()}
    store = _Store({f"s3://b/{name}": body for name, body in names.items()})
    entries = [
        ListedObject(ObjectVersion(f"s3://b/{n}", len(b), xxh3_64_hexdigest(b)), n) for n, b in names.items()
    ]
    inputs = Inputs("s3://b/", entries, options, store.fetch, store, lambda done, total: None)
    try:
        draft = compile_it(inputs)
    except CacheError:
        return []
    assert (np.diff(draft.extent_first) >= 0).all()
    extents = list(draft.space.extents())
    for piece in (piece for extent in extents for piece in extent.pieces):
        assert piece.offset >= 0
        assert piece.length >= 0
        assert piece.codec or piece.offset + piece.length <= piece.object.size_bytes
        assert all(0 <= begin <= end <= piece.object.size_bytes for begin, end in piece.ranges)
    return extents


def grants_message(data: bytes) -> None:
    """Expect a message of `wire.decode`, or ValueError."""
    try:
        found = wire.decode(data)
    except ValueError:
        return
    assert len(wire.encode(*found)) <= wire.MAX_MESSAGE_BYTES


def open_request(data: bytes) -> None:
    """Expect only objects below the allowed prefix of a request to open a dataset, or a typed error."""
    try:
        request = pb.OpenDatasetRequest.FromString(data)
    except DecodeError:
        return
    try:
        options_of(request.options, SETTINGS.extent_bytes)
        found = expand([ALLOWED.check(uri) for uri in request.uris])
        assert all(canonical(uri).startswith("s3://b/") for uri in found)
    except CacheError:
        return


def plan_memory(data: bytes) -> None:
    """Expect ordered rows of known extents of a reader's plan, or InvalidInput."""
    rows, rest = divmod(len(data), 24)  # the rest are rows of the next epoch
    fd = os.memfd_create("plan")
    try:
        os.write(fd, data)
        found = entries_of(
            plans.read(fd, rows, rows + rest // 4), (ExtentId(b"a"), ExtentId(b"b"), ExtentId(b"c"))
        )
    except InvalidInput:
        return
    finally:
        os.close(fd)
    assert len(found.entries) == rows
    assert [first for _, first, _ in found.entries] == sorted(first for _, first, _ in found.entries)


def tar(data: bytes) -> None:
    """Expect members within the archive that never overlap."""
    store, end = _Store({"t": data}), 0
    whole = ObjectVersion("t", len(data), "e")
    try:
        for member in members("t", len(data), lambda at, length: store.fetch(whole, at, length)):
            assert end <= member.offset <= member.offset + member.size <= len(data)
            end = member.offset + member.size
    except CacheError:
        return


def webdataset(data: bytes) -> None:
    """Compile a tar shard."""
    _compiled(compile_webdataset, Options(format="webdataset", extent_bytes=4096), a_tar=data)


def label_table(data: bytes) -> None:
    """Compile files with a table beside them, as CSV and as JSONL."""
    for labels in ("", "t.csv", '{"target": ["label", "x"]}', '{"separator": "|", "target": "label"}'):
        options = Options(labels=labels, extent_bytes=4096)
        _compiled(compile_files, options, a_jpg=b"1", b_jpg=b"22", t_csv=data)
    _compiled(compile_files, Options(extent_bytes=4096), a_jpg=b"1", b_jpg=b"22", labels_jsonl=data)


def packed_tar(data: bytes) -> None:
    """Compile the bytes as a tar in gzip, and a gzip of them."""
    options = Options(format="webdataset", extent_bytes=4096)
    _compiled(compile_webdataset, options, a_tar_gz=data, b_tgz=gzip.compress(data, 1))


def compressed(data: bytes) -> None:
    """Decompress by each codec, the first byte choosing it. The bytes are read in pieces."""
    if data:
        codec, body = CODECS[data[0] % len(CODECS)], data[1:]
        with suppress(CacheError):
            parts = (body[at : at + 100] for at in range(0, len(body), 100))
            assert sum(map(len, islice(decompressed("u", codec, parts), 100))) >= 0


def jsonl(data: bytes) -> None:
    """Compile a file of JSON lines, and parse each row."""
    for row in _rows(compile_jsonl, "jsonl", data):
        with suppress(ValueError):
            json_value(row)


def csv_file(data: bytes) -> None:
    """Compile a CSV file; a row is still one row when it is read alone."""
    for row in _rows(compile_csv, "csv", data):
        with suppress(UnicodeDecodeError, csv.Error):
            assert len(list(csv_rows([row.decode()], ","))) <= 1


def text(data: bytes) -> None:
    """Compile a text file: its lines, or its one document, are all of its bytes."""
    rows, whole = _rows(compile_text, "txt", data), data.removeprefix(b"\xef\xbb\xbf")
    assert _rows(compile_documents, "txt", data) == ([whole] if rows else [])
    lines = whole.split(b"\n")
    assert not rows or rows == [line.removesuffix(b"\r") for line in (lines if lines[-1] else lines[:-1])]


def _rows(compile_it: Callable[[Inputs], Draft], name: str, body: bytes) -> list[bytes]:
    """Return the rows of the draft of a file, [] where it is refused."""
    drafts: list[Draft] = []

    def kept(inputs: Inputs) -> Draft:
        drafts.append(compile_it(inputs))
        return drafts[0]

    _compiled(kept, Options(format=name, extent_bytes=4096), **{f"a_{name}": body})
    if not drafts:
        return []
    begins, lengths = (drafts[0].columns[f"row.{which}"].tolist() for which in ("address", "length"))
    assert all(
        0 <= begin <= begin + length <= len(body) for begin, length in zip(begins, lengths, strict=True)
    )
    return [body[begin : begin + length] for begin, length in zip(begins, lengths, strict=True)]


def tfrecord(data: bytes) -> None:
    """Compile a file of records, and one record with right checksums; parse the bytes as an Example."""
    options = Options(format="tfrecord", extent_bytes=4096)
    _compiled(compile_tfrecord, options, a_tfrecord=data, b_tfrecord=framed([data]))
    with suppress(ValueError):
        features_of(data)


def litdata(data: bytes) -> None:
    """Compile an index of litData beside one chunk, and compile and decode a chunk of zstd frames."""
    options = Options(format="litdata", extent_bytes=4096)
    chunk = {"chunk-0-0.bin": struct.pack("<4I", 2, 16, 24, 32) + bytes(64)}
    _compiled(compile_litdata, options, index_json=data, **chunk)
    frames = {"chunk-0-0.bin": data}
    for extent in _compiled(compile_litdata, options, index_json=LITDATA_INDEX, **frames):
        (piece,) = extent.pieces
        with suppress(CacheError):
            done = 0
            for step in unpacked_chunk(piece.object.uri, memoryview(data)):
                done += len(step)
                if done > piece.length:
                    break


def mds(data: bytes) -> None:
    """Compile an MDS index beside one shard."""
    shard = {"shard.0.mds": bytes([2]).ljust(64, b"\0")}
    _compiled(compile_mds, Options(format="mds", extent_bytes=4096), index_json=data, **shard)


def npy(data: bytes) -> None:
    """Compile a `.npy` file as records."""
    _compiled(compile_records, Options(format="records", extent_bytes=4096), a_npy=data)


def megatron(data: bytes) -> None:
    """Compile a Megatron index over 4 KiB of tokens."""
    options = Options(format="tokens", seq_len=8, extent_bytes=4096)
    _compiled(compile_tokens, options, a_bin=bytes(4096), a_idx=data)


def datatrove(data: bytes) -> None:
    """Compile an index of datatrove, and metadata, over 4 KiB of tokens."""
    options = Options(format="tokens", seq_len=8, extent_bytes=4096)
    _compiled(
        compile_tokens, options, a_ds=bytes(4096), a_ds_index=data, a_ds_metadata=b"gpt2|2\n2048\n2.05 KT"
    )
    _compiled(compile_tokens, options, a_ds=bytes(4096), a_ds_metadata=data)


def arrow(data: bytes) -> None:
    """Compile an Arrow file or stream."""
    _compiled(compile_arrow, Options(format="arrow", extent_bytes=4096), a_arrow=data)


def parquet(data: bytes) -> None:
    """Compile a Parquet file, and decode its row groups."""
    for extent in _compiled(compile_parquet, Options(format="parquet", extent_bytes=4096), a_parquet=data):
        (piece,) = extent.pieces
        try:
            footer = Footer(piece.object.uri, data)
            run = decoding(piece, footer, lambda begin, end: data[begin:end])
            if run.size_bytes <= MAX_READ_BYTES:
                footer.decode(run, recipe_of(piece.codec), memoryview(data))
        except CacheError:
            continue


def catalog(data: bytes) -> None:
    """Open and check a catalog left beside the data."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        try:
            found = Catalog.open(file.name)
            check_catalog(found)
            if found.samples:
                some = np.arange(min(found.samples, 100))
                found.layout.rows(some) if isinstance(found.layout, Columns) else found.locate(some)
                found.key(0)
        except CacheError:
            return


TARGETS: dict[str, Callable[[bytes], None]] = {
    found.__name__: found
    for found in (
        grants_message,
        open_request,
        plan_memory,
        tar,
        webdataset,
        label_table,
        packed_tar,
        compressed,
        jsonl,
        csv_file,
        text,
        tfrecord,
        litdata,
        mds,
        npy,
        megatron,
        datatrove,
        arrow,
        parquet,
        catalog,
    )
}


def small_tar() -> bytes:
    """Return a tar of two samples, a long name and a pax header."""
    names = ("a.jpg", "a.cls", "b.jpg", "n" * 150 + ".txt", "ü.json")
    return tar_of(*((name, b"1.5") for name in names))[:8192]


def megatron_index(sequences: int = 2, documents: int = 2, lengths: Sequence[int] = (1024, 1024)) -> bytes:
    """Return a Megatron index of uint16 tokens."""
    head = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, sequences, documents)
    return head + np.asarray(lengths, "<i4").tobytes() + bytes(8 * len(lengths)) + struct.pack("<2q", 0, 2)


def seeds(name: str) -> list[bytes]:
    """Return the kept corpus of a target."""
    return [path.read_bytes() for path in sorted((CORPUS / name).iterdir()) if path.is_file()]


def main(name: str, seconds: str) -> None:
    """Fuzz one target with atheris for a time; exit 77, with the bytes in a file, when they break it."""
    import atheris

    work = tempfile.mkdtemp(prefix=f"fuzz-{name}-")
    atheris.instrument_all()
    folders = [work, str(CORPUS / name)]
    limits = [f"-max_total_time={seconds}", "-max_len=16384", "-rss_limit_mb=2048", "-timeout=10"]
    limits.append(f"-artifact_prefix={CORPUS / name}/")
    os.environ.setdefault("PYTHONHASHSEED", "0")
    atheris.Setup([sys.argv[0], *folders, *limits], TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
