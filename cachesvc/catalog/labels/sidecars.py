"""Labels and tags of plain files: from tables, class folders, and small `.cls`/`.json`/`.txt` sidecars.

Reading a sidecar costs one GET when the catalog is built, 16 at a time, and none afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from cachesvc.catalog.columns import Array, Ints
from cachesvc.catalog.compiler import Draft, Inputs, ListedObject
from cachesvc.catalog.labels.hive_partitions import is_partition
from cachesvc.catalog.labels.label_encoding import encode_labels, set_labels
from cachesvc.catalog.labels.label_tables import read_tables
from cachesvc.catalog.labels.sample_names import SampleNames
from cachesvc.catalog.labels.tags import SIDECAR_BYTES, SIDECARS, Tags
from cachesvc.catalog.layout import Field
from cachesvc.catalog.splits import split_of
from cachesvc.core.errors import InvalidInput

__all__ = ["SIDECARS", "Files", "annotate"]

MAX_SIDECARS = 200_000
"""Limit of sidecars. With more, none is read, since a search in a part of them would be wrong, and a note says so."""
_HASH = re.compile(r"[0-9a-f]{2,}")
_THREADS = 16
_BATCH = 1024


@dataclass(frozen=True, slots=True)
class Files:
    """The files of samples: `entry[i]` is field `field[i]` of sample `sample[i]`."""

    entry: Sequence[int]
    sample: Ints
    field: Ints
    fields: tuple[Field, ...]
    samples: int


def annotate(inputs: Inputs, draft: Draft, files: Files, table_entries: Sequence[int]) -> None:
    """Set a draft's labels and tags.

    Labels come from tables, else from `.cls` sidecars, else from the `label` of `.json` ones, else from class folders,
    unless `options.labels` names their origin. Raises InvalidInput where that origin labels nothing.
    """
    tags, wanted, kind = Tags(), inputs.options.labels_from, inputs.options.label_kind
    if table_entries:
        names = sample_names([inputs.entries[at] for at in files.entry], files.sample.tolist())
        draft.notes += read_tables(inputs, table_entries, names, tags)
        if conflicting := tags.conflicting():
            draft.notes.append(
                f"{conflicting:,} rows give a file another label than before: the last one counts"
            )
    _read_sidecars(inputs, draft, files, tags, skip_labels=wanted == "folder" or tags.labelled)
    ignored = wanted in ("folder", "none")
    labelled = tags.take_labels(files.samples, "class" if ignored else kind, inputs.uri)
    if wanted in ("", "folder") and (labelled is None or ignored):
        labelled = _folders(inputs, files, draft.notes)
    set_labels(draft, inputs, labelled)
    draft.tags = tags.columns(files.samples)
    draft.notes += tags.notes()


def sample_names(entries: Sequence[ListedObject], samples: Sequence[int]) -> SampleNames:
    """Return the samples of files by path and URI."""
    return SampleNames(
        (name, sample)
        for entry, sample in zip(entries, samples, strict=True)
        for name in (entry.path, entry.object.uri)
    )


def _folders(inputs: Inputs, files: Files, notes: list[str]) -> tuple[tuple[str, ...], Array] | None:
    """Return the classes by the first folder below the URI, or numbers where the options ask for them.

    Every file must lie in a folder, and there must be two or more, unless the options ask for folders. Adds notes on
    likely mistakes. Raises InvalidInput where the options ask for folders and a file lies in none.
    """
    requested = inputs.options.labels_from == "folder"
    paths = [inputs.entries[at].path for at in files.entry]
    beside = [path for path in paths if "/" not in path]
    outside = beside[0] if beside else None
    classes = sorted({path.partition("/")[0] for path in paths if "/" in path})
    if outside is not None and requested:
        raise InvalidInput(
            f"labels='folder': {outside!r} lies in no folder below {inputs.uri}; labels='' infers the origin"
        )
    if not requested and (any(map(is_partition, classes)) or are_hashes(classes)):
        return None
    if len(classes) < 2 and not requested:
        if split := any(path.count("/") > 1 for path in paths) and split_of("".join(classes)):
            notes.append(f"no classes: to have the folders in {classes[0]}, open it, or say split={split!r}")
        return None
    if outside is not None:
        if len(beside) < len(classes):
            notes.append(f"{outside!r} lies in no folder, so no folder names a class: keep it elsewhere")
        return None
    if not requested and all(map(split_of, classes)):
        notes.append(f"the classes are {', '.join(classes)}: to have the folders in them, open one of these")
    names, labels = class_folders(paths, files.sample, files.samples)
    if inputs.options.label_kind == "float":
        return (), encode_labels(names, "float", inputs.uri)[1][labels]
    return names, labels


def are_hashes(folders: Sequence[str]) -> bool:
    """Tell whether folders are named by the digits of a hash (`00` to `ff`): as long as each other, and some begin with a
    number and some with a letter."""
    names = [folder.lower() for folder in folders]
    alike = len({len(name) for name in names}) == 1 and all(map(_HASH.fullmatch, names))
    return alike and len({name[0].isdecimal() for name in names}) == 2


def class_folders(paths: Sequence[str], sample: Ints, samples: int) -> tuple[tuple[str, ...], Array]:
    """Return the classes in alphabetical order, and the class index of each sample: the first folder of its path."""
    classes = sorted({path.partition("/")[0] for path in paths})
    numbers = {name: number for number, name in enumerate(classes)}
    labels = np.full(samples, -1, np.int32)
    labels[sample] = [numbers[path.partition("/")[0]] for path in paths]
    return tuple(classes), labels


def _read_sidecars(inputs: Inputs, draft: Draft, files: Files, tags: Tags, skip_labels: bool) -> None:
    """Read sidecars where they lie beside data: a folder of nothing but texts is data."""
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
