"""The formats, a row each: how one chooses its objects, how it compiles them, and which options are for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from cachesvc.catalog.compiler import Draft, Inputs, ListedObject
from cachesvc.catalog.formats import (
    arrow,
    csv_rows,
    files,
    jsonl,
    litdata,
    mds,
    objects,
    parquet,
    plain_text,
    records,
    tfrecord,
    tokens,
    webdataset,
)
from cachesvc.catalog.kinds import PARQUET, kind_of


@dataclass(frozen=True, slots=True)
class Format:
    """`select` chooses the format's objects of a listing. `options` are fields and properties of `Options` that only some
    formats have. `if_empty` follows the error for data that holds no whole sample. `file_is_sample`: each file is one."""

    select: Callable[[Sequence[ListedObject]], list[ListedObject]]
    compile: Callable[[Inputs], Draft]
    options: tuple[str, ...] = ()
    if_empty: str = ""
    file_is_sample: bool = False


def _named(extensions: Collection[str]) -> Callable[[Sequence[ListedObject]], list[ListedObject]]:
    return lambda entries: [entry for entry in entries if entry.extension in extensions]


FORMATS = {
    "files": Format(list, files.compile_files, ("labels_from", "label_kind"), file_is_sample=True),
    "objects": Format(list, objects.compile_objects, file_is_sample=True),
    "whole": Format(list, objects.compile_whole, file_is_sample=True),
    "images": Format(files.select_images, files.compile_images, file_is_sample=True),
    "webdataset": Format(
        webdataset.select, webdataset.compile_webdataset, ("labels_from", "label_kind", "on_error")
    ),
    "mds": Format(mds.select, mds.compile_mds),
    "litdata": Format(
        litdata.select,
        litdata.compile_litdata,
        ("seq_len", "overlap"),
        "; give a smaller seq_len or overlap",
    ),
    "parquet": Format(_named(PARQUET), parquet.compile_parquet),
    "arrow": Format(arrow.select, arrow.compile_arrow),
    "jsonl": Format(jsonl.select, jsonl.compile_jsonl),
    "csv": Format(
        lambda entries: [each for each in entries if kind_of(each.name) == "csv"],
        csv_rows.compile_csv,
        ("separator",),
    ),
    "text": Format(plain_text.select, plain_text.compile_text),
    "tfrecord": Format(tfrecord.select, tfrecord.compile_tfrecord),
    "documents": Format(plain_text.select, plain_text.compile_documents, file_is_sample=True),
    "records": Format(
        _named(("bin", "npy")),
        records.compile_records,
        ("dtype", "record_bytes", "header_bytes"),
        "; give a smaller record_bytes or dtype",
    ),
    "tokens": Format(
        tokens.select,
        tokens.compile_tokens,
        ("dtype", "seq_len", "overlap", "header_bytes"),
        "; give a smaller seq_len or overlap",
    ),
}
