"""What files say about other files: class folders, CSV/JSONL tables, and small `.cls`/`.json`/`.txt`
sidecars.

Reading a sidecar costs one GET when the catalog is built, 16 at a time, and none afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from cachesvc.catalog.columns import Ints
from cachesvc.catalog.inputs import Draft, Inputs
from cachesvc.catalog.layout import Field
from cachesvc.catalog.tags import SIDECAR_BYTES, SIDECARS, Tags, table_rows
from cachesvc.core.errors import InvalidInput

__all__ = ["SIDECARS", "Files", "annotate", "tables"]

MAX_SIDECARS = 200_000
"""Sidecars read at most; with more, none is (a partial index would search wrongly) and a note says so."""
_MAX_TABLES = 16
_TABLE_BYTES = 256 << 20
_THREADS = 16
_BATCH = 1024


@dataclass(frozen=True, slots=True)
class Files:
    """Files of samples: `entry[i]` is field `field[i]` of sample `sample[i]`."""

    entry: Sequence[int]
    sample: Ints
    field: Ints
    fields: tuple[Field, ...]
    samples: int


def tables(inputs: Inputs) -> tuple[list[int], list[int]]:
    """Entries that may be tables about the other files, and the other entries. A table lies directly below
    the URI: `labels.*`, `metadata.*`, any `.csv`, or the one that `options.labels` names."""
    asked = inputs.options.labels if inputs.options.labels not in ("", "folder", "none") else ""
    found = [at for at, entry in enumerate(inputs.entries) if _may_be_table(entry.path, asked)]
    if asked and not any(inputs.entries[at].path == asked for at in found):
        raise InvalidInput(
            f"{inputs.uri} has no label file {asked!r} (labels: folder, none, or a .csv/.jsonl)"
        )
    kept = [at for at in found if _names_files(inputs, at)] if len(found) <= _MAX_TABLES else []
    if len(kept) == len(inputs.entries):
        kept = []
    taken = set(kept)
    return kept, [at for at in range(len(inputs.entries)) if at not in taken]


def _may_be_table(path: str, asked: str) -> bool:
    stem, _, extension = path.rpartition(".")
    known = extension == "csv" or (extension == "jsonl" and stem in ("labels", "metadata"))
    return path == asked or (known and "/" not in path)


def _names_files(inputs: Inputs, at: int) -> bool:
    version = inputs.entries[at].object
    if version.size_bytes > _TABLE_BYTES:
        return False
    body = inputs.fetch(version, 0, version.size_bytes)
    return table_rows(inputs.entries[at].name, body) is not None


def annotate(inputs: Inputs, draft: Draft, files: Files, table_entries: Sequence[int]) -> None:
    """Give a draft its labels and tags: tables first, then `.cls` sidecars, then class folders. The first of
    these that labels anything decides."""
    tags, wanted = Tags(), inputs.options.labels
    _read_tables(inputs, files, table_entries, tags)
    _read_sidecars(inputs, draft, files, tags, skip_labels=wanted == "folder")
    labelled = tags.take_labels(files.samples)
    if wanted in ("", "folder") and (labelled is None or wanted == "folder"):
        labelled = _folders(inputs, files)
    if labelled is not None and wanted != "none":
        draft.classes, draft.columns["label"] = labelled
    draft.tags = tags.columns(files.samples)
    if tags.dropped:
        draft.notes.append(f"{len(tags.dropped)} tags beyond the first ones are not searchable")


def _folders(
    inputs: Inputs, files: Files
) -> tuple[tuple[str, ...], np.ndarray[tuple[int], np.dtype[np.int32]]] | None:
    """Classes from the first folder below the URI, where every file lies in one and there are two or more."""
    parts = [inputs.entries[at].path.partition("/") for at in files.entry]
    classes = sorted({folder for folder, _, _ in parts})
    if len(classes) < 2 or not all(slash for _, slash, _ in parts):
        return None
    numbers = {name: number for number, name in enumerate(classes)}
    labels = np.full(files.samples, -1, np.int32)
    labels[files.sample] = [numbers[folder] for folder, _, _ in parts]
    return tuple(classes), labels


def _read_tables(inputs: Inputs, files: Files, table_entries: Sequence[int], tags: Tags) -> None:
    if not table_entries:
        return
    sample_of: dict[str, int] = {}
    for at, sample in zip(files.entry, files.sample.tolist(), strict=True):
        path = inputs.entries[at].path
        sample_of[path] = sample
        sample_of.setdefault(path.rpartition(".")[0], sample)
    for at in table_entries:
        version = inputs.entries[at].object
        body = inputs.fetch(version, 0, version.size_bytes)
        for file, values in table_rows(inputs.entries[at].name, body) or ():
            sample = sample_of.get(file.removeprefix("./"))
            if sample is None:
                continue
            for name, value in values.items():
                tags.add(sample, name, value)


def _read_sidecars(inputs: Inputs, draft: Draft, files: Files, tags: Tags, skip_labels: bool) -> None:
    """Only where they exist beside data: a folder of nothing but texts is data."""
    encodings = [field.encoding for field in files.fields]
    if set(encodings) <= set(SIDECARS):
        return
    wanted = np.isin(files.field, [at for at, encoding in enumerate(encodings) if encoding in SIDECARS])
    chosen = [at for at in np.flatnonzero(wanted).tolist() if _size(inputs, files, at) <= SIDECAR_BYTES]
    if len(chosen) > MAX_SIDECARS:
        draft.notes.append(f"{len(chosen)} sidecars are more than {MAX_SIDECARS}: they are not searchable")
        return
    for at, body in _bodies(inputs, files, chosen):
        encoding = encodings[int(files.field[at])]
        if not (skip_labels and encoding == "cls"):
            tags.add_sidecar(int(files.sample[at]), encoding, body)


def _size(inputs: Inputs, files: Files, at: int) -> int:
    return inputs.entries[files.entry[at]].object.size_bytes


def _bodies(inputs: Inputs, files: Files, chosen: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    def body(at: int) -> bytes:
        return inputs.fetch(inputs.entries[files.entry[at]].object, 0, _size(inputs, files, at))

    with ThreadPoolExecutor(_THREADS, "sidecars") as pool:
        for begin in range(0, len(chosen), _BATCH):
            batch = chosen[begin : begin + _BATCH]
            yield from zip(batch, pool.map(body, batch), strict=True)
