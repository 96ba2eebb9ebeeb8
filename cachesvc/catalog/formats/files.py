"""Compiles a folder of plain files. Files that share a stem are one sample; small ones are gathered in virtual shards.

A sample joins a bucket by the hash of its stem (of its name where other samples have that stem). A bucket that would
exceed `extent_bytes` splits by the next bit (extendible hashing), so that one more file changes one extent. A sample too
big for an extent gets extents of its own. Samples are numbered in the order of extents.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from cachesvc.catalog.address_space import AddressSpace
from cachesvc.catalog.columns import Ints, TextColumn, ints
from cachesvc.catalog.compiler import Draft, Inputs, ListedObject, paths_of, split_name
from cachesvc.catalog.kinds import IMAGES, MEDIA, PLUGIN_IMAGES, TABLES, kind_of
from cachesvc.catalog.labels import label_tables, sidecars
from cachesvc.catalog.labels.label_encoding import set_labels
from cachesvc.catalog.labels.sample_names import SampleNames
from cachesvc.catalog.layout import Field
from cachesvc.core.errors import InvalidInput, NotFound
from cachesvc.core.model import PAGE_BYTES

IMAGE_FOLDER = frozenset({"jpg", "jpeg", "png", "ppm", "bmp", "pgm", "tif", "tiff", "webp"})
"""Extensions of `torchvision.datasets.folder.IMG_EXTENSIONS`."""
_MAX_FIELDS = 16
"""With more extensions than this in one folder, a shared stem is a coincidence: each file is a sample."""
IMAGE = "image"
"""Name of the field of images with several extensions."""
_HASH_BITS = 64
_SHOWN = 4
"""Number of extensions in a note."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Files grouped to samples: file i is field `field[i]` of sample `sample[i]`. `notes`: for people."""

    names: list[str]
    sample: Ints
    field: Ints
    fields: tuple[Field, ...]
    size: Ints
    notes: tuple[str, ...] = ()


def select_images(entries: Sequence[ListedObject]) -> list[ListedObject]:
    """Choose the images that lie in a folder below the URI."""
    return [entry for entry in entries if entry.extension in IMAGE_FOLDER and "/" in entry.path]


def compile_images(inputs: Inputs) -> Draft:
    """Compile class folders as torchvision's `ImageFolder` reads them: each image is a sample of its own, and the first
    folder below the URI is its class. Raises NotFound where every image is empty."""
    paths = [entry.path for entry in inputs.entries]
    samples = _one_each(paths_of(inputs.entries), Field(IMAGE, "jpg"), _sizes(inputs.entries))
    draft, files = _draft(inputs, range(len(paths)), samples)
    set_labels(draft, inputs, sidecars.class_folders(paths, files.sample, files.samples))
    return draft


def compile_files(inputs: Inputs) -> Draft:
    """Compile a folder.

    Raises NotFound where there is no byte of data, InvalidInput for a label file that is absent or labels nothing,
    CorruptData for one that does not parse.
    """
    split = label_tables.separate_tables(inputs, cache(partial(_names_by_stem, inputs.entries)))
    rest, unrelated = split.rest, inputs.unrelated
    if inputs.found_out:
        unrelated = unrelated.union(_rows(inputs, rest))
        rest = [at for at in rest if at not in unrelated]
        beside = _beside_images(inputs, rest)
        unrelated = unrelated.union(beside)
        rest = [at for at in rest if at not in beside]
    if not rest:
        raise NotFound(f"{inputs.uri} holds no data: nothing but {inputs.options.table!r}")
    samples = _group([inputs.entries[at] for at in rest])
    draft, files = _draft(inputs, rest, samples)
    draft.notes += [*split.notes, *samples.notes]
    if inputs.found_out and samples.fields == (Field("file", ""),):
        draft.notes += _mixed([inputs.entries[at] for at in rest])
    draft.unrelated = unrelated
    sidecars.annotate(inputs, draft, files, split.tables)
    if inputs.found_out:
        draft.notes += _rare_fields(samples, "label" in draft.columns)
    return draft


def _rare_fields(samples: Samples, labelled: bool) -> list[str]:
    """Return the note on a field that few samples have: it makes all samples of a labelled folder dicts."""
    counts = np.bincount(samples.field, minlength=len(samples.fields))
    rare = [at for at, count in enumerate(counts.tolist()) if 2 * count <= len(samples.names)]
    if not labelled or not rare or len(rare) == len(counts):
        return []
    first = samples.names[int(samples.sample[np.flatnonzero(samples.field == rare[0])[0]])]
    name, main = samples.fields[rare[0]].name, samples.fields[int(counts.argmax())].name
    return [
        f"{counts[rare[0]]:,} of {len(samples.names):,} samples have the field {name!r}, the first is {first}: because of "
        f"it all samples are dicts without a label; move it elsewhere, or say fields=({main!r}, 'label')"
    ]


def _names_by_stem(entries: Sequence[ListedObject]) -> SampleNames:
    """Return the names of files; those of one stem are one sample."""
    index: dict[str, int] = {}
    stems = [split_name(entry.path)[0] for entry in entries]
    return sidecars.sample_names(entries, [index.setdefault(stem, len(index)) for stem in stems])


def _draft(inputs: Inputs, rest: Sequence[int], samples: Samples) -> tuple[Draft, sidecars.Files]:
    """Lay out the samples that the entries `rest` make; return the draft, without labels, and its files.

    Raises NotFound where there is no byte of data.
    """
    if not samples.size.sum():
        raise NotFound(f"{inputs.uri} holds no data: every file is empty")
    order, firsts, space, address = _lay_out(inputs, rest, samples)
    number = np.empty(len(order), np.int64)
    number[order] = np.arange(len(order))
    shape = (len(order), len(samples.fields))
    addresses, lengths = np.zeros(shape, np.int64), np.full(shape, -1, np.int64)
    rows = number[samples.sample]
    addresses[rows, samples.field] = address
    lengths[rows, samples.field] = samples.size
    draft = Draft("rows", space, samples.fields, firsts)
    draft.columns = {"row.address": addresses.reshape(-1), "row.length": lengths.reshape(-1)}
    draft.keys = TextColumn(samples.names[sample] for sample in order)
    return draft, sidecars.Files(rest, rows, samples.field, samples.fields, len(order))


def _rows(inputs: Inputs, rest: Sequence[int]) -> list[int]:
    """Return table files that are neither about the other files nor a field of a sample.

    Raises InvalidInput where they are half of the files or more.
    """
    rows = [at for at in rest if inputs.entries[at].extension in TABLES]
    if not rows:
        return []
    others = set(rest).difference(rows)
    fields = _sharing(inputs, rows, others)
    rows = [at for at in rows if at not in fields]
    if rows and len(rows) >= len(others):
        first = inputs.entries[rows[0]]
        raise InvalidInput(
            f"{first.object.uri} holds rows, and no labels of the other files: format={str(kind_of(first.name))!r} reads "
            "its rows, format='files' reads each file as one sample of bytes"
        )
    return rows


def _beside_images(inputs: Inputs, rest: Sequence[int]) -> set[int]:
    """Return the files that are not images, except those that share an image's stem, where more than half are images."""
    others = [at for at in rest if inputs.entries[at].extension not in IMAGES]
    if not others or 2 * len(others) >= len(rest):
        return set()
    return set(others) - _sharing(inputs, others, set(rest).difference(others))


def _sharing(inputs: Inputs, few: Sequence[int], many: Iterable[int]) -> set[int]:
    """Return those of `few` entries that share their stem with one of `many`."""
    stems = {at: split_name(inputs.entries[at].object.uri)[0] for at in few}
    wanted = set(stems.values())
    shared = {stem for at in many if (stem := split_name(inputs.entries[at].object.uri)[0]) in wanted}
    return {at for at, stem in stems.items() if stem in shared}


def _group(entries: Sequence[ListedObject]) -> Samples:
    names = paths_of(entries)
    split, notes = _coincidences_apart(names)
    split = _alike(split)
    extensions = sorted({extension for _, extension in split}, key=_data_first)
    alone = len(extensions) > _MAX_FIELDS or len({stem for stem, _ in split}) == len(entries)
    size = _sizes(entries)
    if alone:
        only = _only_field(sorted({extension.lower() for extension in extensions}))
        return replace(_one_each(names, only, size), notes=notes)
    split, image = _one_image_field(split)
    extensions = sorted({extension for _, extension in split}, key=_data_first)
    index: dict[str, int] = {}
    sample = ints(array("q", [index.setdefault(stem, len(index)) for stem, _ in split]))
    at = {extension: number for number, extension in enumerate(extensions)}
    bare = "file"  # the field of names without an extension
    while bare in extensions:
        bare = "_" + bare
    fields = tuple(
        Field(extension or bare, image if extension == IMAGE else extension.lower())
        for extension in extensions
    )
    return Samples(list(index), sample, ints([at[extension] for _, extension in split]), fields, size, notes)


def _one_each(names: list[str], field: Field, size: Ints) -> Samples:
    """Make each file a sample of one field."""
    numbers = np.arange(len(names))
    return Samples(names, numbers, np.zeros_like(numbers), (field,), size)


def _sizes(entries: Sequence[ListedObject]) -> Ints:
    return ints(array("q", [entry.object.size_bytes for entry in entries]))


def _coincidences_apart(names: Sequence[str]) -> tuple[list[tuple[str, str]], tuple[str, ...]]:
    """Return stems and extensions, and notes. Two encodings of one stem (`3.jpg`, `3.png`) are samples of their own.

    They are fields of one sample, such as a picture and its mask, only where most samples have both.
    """
    split, notes = [split_name(name) for name in names], list[str]()
    for extensions in MEDIA:
        first: dict[str, int] = {}
        seconds = [
            at
            for at, (stem, extension) in enumerate(split)
            if extension.lower() in extensions and first.setdefault(stem, at) != at
        ]
        if not seconds or 2 * len({split[at][0] for at in seconds}) > len(first):
            continue
        for at in seconds:
            split[at] = names[at], split[at][1]
        notes.append(
            f"{len(seconds):,} of {len(names):,} files share a stem with another and are samples of their own, as most "
            f"samples have no such pair: the first is {names[seconds[0]]}"
        )
    return split, tuple(notes)


def _one_image_field(split: list[tuple[str, str]]) -> tuple[list[tuple[str, str]], str]:
    """Give images of several extensions one, `IMAGE`, unless a stem has two of them, such as a picture and its mask.

    Returns one of their extensions too, as the encoding of the field.
    """
    given = {extension for _, extension in split}
    images = sorted(extension for extension in given if extension.lower() in IMAGES)
    stems = [stem for stem, extension in split if extension in images]
    if len(images) < 2 or IMAGE in given or len(set(stems)) < len(stems):
        return split, IMAGE
    joined = [(stem, IMAGE if extension in images else extension) for stem, extension in split]
    return joined, _encoding({extension.lower() for extension in images})


def _only_field(extensions: Sequence[str]) -> Field:
    """Return the field of samples of one file each, by their extensions."""
    if len(extensions) == 1:
        return Field(extensions[0] or "file", extensions[0])
    return Field(IMAGE, _encoding(extensions)) if IMAGES.issuperset(extensions) else Field("file", "")


def _encoding(extensions: Collection[str]) -> str:
    """Return the extension of images that stands for all of these: one that every Pillow reads, if there is one."""
    return min(extensions, key=lambda extension: (extension in PLUGIN_IMAGES, extension))


def _mixed(entries: Sequence[ListedObject]) -> list[str]:
    """Return the note that images are not decoded because other files are among them."""
    counts = Counter(entry.extension for entry in entries)
    if IMAGES.isdisjoint(counts):
        return []
    named = ", ".join(f"{count:,} .{extension}" for extension, count in counts.most_common(_SHOWN))
    return [
        f"files of several kinds ({named}) are one field of bytes: open the images apart to have them decoded"
    ]


def _alike(split: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return stems and extensions, with extensions that differ only in case joined (`x.JPG` and `y.jpg` are one field).

    They are not joined where one stem has both.
    """
    given = {extension for _, extension in split}
    lowered = [(stem, extension.lower()) for stem, extension in split]
    same = len({extension.lower() for extension in given}) == len(given)
    return split if same or len(set(lowered)) < len(split) else lowered


def _data_first(extension: str) -> tuple[bool, str]:
    return extension in sidecars.SIDECARS, extension


def _hashes(names: Sequence[str], grouped: bool) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Hash each stem, or the whole name where samples share a stem, since equal hashes cannot be split."""
    stems = names if grouped else [split_name(name)[0] for name in names]
    shared, raw = Counter(stems), bytearray()
    for name, stem in zip(names, stems, strict=True):
        text = name if shared[stem] > 1 else stem
        raw += hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return np.frombuffer(raw, ">u8").astype(np.uint64)


def buckets(hashes: np.ndarray, sizes: Ints, limit: int) -> list[tuple[int, int]]:
    """Return runs [low, high) of hash-sorted samples, none without a byte.

    A run has at most `limit` bytes unless its hashes are all equal. The run that a sample joins depends only on the samples
    that share its prefix.
    """
    total = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    runs: list[tuple[int, int]] = []
    stack = [(0, len(hashes), 0)]
    while stack:
        low, high, depth = stack.pop()
        if high - low <= 1 or depth == _HASH_BITS or total[high] - total[low] <= limit:
            if low < high:
                runs.append((low, high))
            continue
        bit = 1 << (_HASH_BITS - 1 - depth)
        prefix = int(hashes[low]) & ~(2 * bit - 1)
        middle = low + int(np.searchsorted(hashes[low:high], np.uint64(prefix | bit)))
        stack += [(middle, high, depth + 1), (low, middle, depth + 1)]
    return _with_bytes(runs, total)


def _with_bytes(runs: Sequence[tuple[int, int]], total: Ints) -> list[tuple[int, int]]:
    """Join runs of empty files with the run before, or at the beginning with the run after."""
    kept: list[tuple[int, int]] = []
    for low, high in runs:
        if kept and (total[low] == total[high] or total[kept[-1][0]] == total[kept[-1][1]]):
            kept[-1] = (kept[-1][0], high)
        else:
            kept.append((low, high))
    return kept


def _lay_out(inputs: Inputs, rest: Sequence[int], samples: Samples) -> tuple[Ints, Ints, AddressSpace, Ints]:
    """Return the sample order, the first sample of each extent, the address space, and each file's address."""
    limit = inputs.options.extent_bytes // PAGE_BYTES * PAGE_BYTES
    bytes_of = np.bincount(samples.sample, samples.size, len(samples.names)).astype(np.int64)
    grouped = len(samples.fields) > 1
    hashes = _hashes(samples.names, grouped)
    by_hash = np.argsort(hashes, kind="stable")
    small = by_hash[bytes_of[by_hash] <= limit]
    big = np.flatnonzero(bytes_of > limit)
    order = np.concatenate([small, big])
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    files = np.lexsort((samples.field, rank[samples.sample]))
    begins = np.searchsorted(rank[samples.sample][files], np.arange(len(order) + 1))
    space, address = AddressSpace([entry.object for entry in inputs.entries]), np.zeros(len(files), np.int64)
    firsts, layer = array("q"), _Layer(space, rest, samples.size, address)
    runs = buckets(hashes[small], bytes_of[small], limit)
    if len(small) and not bytes_of[small].sum():
        runs, firsts = [], array("q")
    for low, high in runs:
        firsts.append(low)
        layer.bucket(files[begins[low] : begins[high]])
        inputs.progress(high, len(order))
    for at in range(len(small), len(order)):
        before = len(space)
        layer.alone(files[begins[at] : begins[at + 1]], limit)
        firsts.extend([at, *[at + 1] * (len(space) - before - 1)])
    if firsts:
        firsts[0] = 0
    return order, ints([*firsts, len(order)]), space, address


@dataclass(frozen=True, slots=True)
class _Layer:
    """Puts files (by their index in `rest`) into extents and records their addresses."""

    space: AddressSpace
    rest: Sequence[int]
    size: Ints
    address: Ints

    def bucket(self, files: Ints) -> None:
        """Add one extent of whole files."""
        full = files[self.size[files] > 0]
        start = self.space.add((self.rest[at], 0, int(self.size[at])) for at in full.tolist())
        ends = np.cumsum(self.size[files])
        self.address[files] = start + ends - self.size[files]

    def alone(self, files: Ints, cut: int) -> None:
        """Add extents of one big sample, each file as a run of its own."""
        for at in files.tolist():
            self.address[at] = self.space.add_run(self.rest[at], 0, int(self.size[at]), cut)
