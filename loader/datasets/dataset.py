"""A torch map-style dataset over a catalog: any format, random access, exact length, search."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch.utils.data import Dataset as TorchDataset

from cachesvc.catalog.layout import Fixed
from cachesvc.catalog.options import Options, fields_text, labels_text
from cachesvc.core.arguments import flag, place_of, places_of, shares, text, whole_number
from cachesvc.core.errors import InvalidInput
from cachesvc.core.order.parts import random_parts
from cachesvc.saved_runs.data import DataSource, Pick, identity_of, selected
from loader.datasets.dtypes import DType, dtype_name
from loader.datasets.generators import RngKey
from loader.datasets.preparing import MAX_BYTES, PreparingSource, open_prepared
from loader.datasets.samples.kinds import SampleReader, sample_reader
from loader.datasets.samples.sample_form import SampleSpec
from loader.datasets.targets import Targets
from loader.job.topology import rank_hint
from loader.reading.connect import canonical_uris, connect
from loader.reading.opened_dataset import OpenedDataset
from loader.reading.reader import Ints

NOTES_LOGGED = 8
"""Notes on the data logged per opening. A thousand files may have a thousand trailing parts."""
current_rng_key: ContextVar[tuple[int, int]] = ContextVar("current_rng_key")
"""The (seed, epoch) for transforms, set by the loader that reads in this thread. It takes precedence over
`Dataset.rng_key`, which other loaders share."""
_log = logging.getLogger("cachesvc")


def open_dataset(
    uri: str | os.PathLike[str] | Sequence[str],
    *,
    format: str | None = None,
    split: str | None = None,
    fields: str | Sequence[str] | None = None,
    decode: Literal["auto", "cuda"] | Callable[..., Any] | None = "auto",
    transform: Callable[..., Any] | None = None,
    prepare: Callable[[Any], Any] | None = None,
    prepare_name: str = "",
    prepare_max_bytes: int = 0,
    version: str | None = None,
    verify: bool = False,
    dtype: DType = "",
    seq_len: int = 0,
    overlap: int = 0,
    out: DType | None = None,
    targets: Targets | None = None,
    record_bytes: int = 0,
    header_bytes: int = 0,
    labels: str | Mapping[str, Any] = "",
    image_mode: Literal["RGB", "L"] | None = "RGB",
    on_error: Literal["raise", "skip"] = "raise",
    separator: str = "",
    extent_bytes: int = 0,
) -> Dataset:
    """Open a prefix, file, glob, brace range, or a list of them, as one pinned dataset version.

    - `format`: "files" | "objects" | "whole" | "webdataset" | "mds" | "litdata" | "parquet" | "arrow" | "jsonl" | "csv"
      | "text" | "documents" | "tfrecord" | "records" | "tokens"; None detects it from the data, but never "objects",
      "whole", "text" and "documents".
    - `split`: "train", "validation", "test" or another split that the names of folders and files tell; "all" reads all
      of them as one dataset. Several splits are an error without it. `ds.split()` makes parts at random instead.
    - `fields`: names of the fields that make a sample, which is then a tuple of their values; or one name, and a sample
      is that field's value. Besides stored fields: "label", "key", and columns of a table beside the data.
      None: (value, label) for a folder with labels, the value of a single field, otherwise a dict by field.
    - `decode`: "auto" (by extension or column), None (bytes), callable(sample[, rng]), or "cuda": as "auto", but images
      stay encoded until a DataLoader with `device=` decodes those of a batch together, to a list of uint8 tensors.
    - `image_mode`: the mode that decoded images are converted to: "RGB", "L" (grey), or None (the mode of the
      file).
    - `prepare`: a deterministic callable(sample), called after decoding, whose results a daemon keeps. `prepare_name`
      names it in place of a digest of its code. `prepare_max_bytes`: where its results have unlike shapes, the most bytes
      that one has. See `Dataset.prepared`.
    - `transform`: callable(sample[, rng]), called after these. `rng` is a numpy Generator keyed by (seed, epoch,
      sample), or by torch's generator under a loader other than cachesvc's.
    - `version`: the `ds.version` of an earlier opening, or `state["dataset"]` of a saved state. Nothing is asked of the
      source where its catalog is kept here; reads of objects that were overwritten since raise SourceChanged. Elsewhere
      the data must still have that version.
    - `verify`: check every read of a cached file against its checksums.
    - `dtype`, `seq_len` and `overlap` (in tokens), `out` (the dtype to convert to), `record_bytes`, `header_bytes`,
      `labels`: see docs/data.md.
    - `targets`, for tokens: "shifted" makes samples (inputs, targets), where each target is the token after its
      input. "unshifted" makes {"input_ids", "labels"} with equal values, as Hugging Face's models take them. Both
      are contiguous, and int64 unless `out` is given.
    - `on_error`: "skip" leaves out damaged tars, which are an error otherwise. All are named at once.
    - `separator`: the character between the cells of CSV, where it is not `,`, `;`, a tab or `|`.
    - `extent_bytes`: approximate size of the pieces that are cached; 0 is the daemon's setting, 64 MiB by default.

    Rank 0 logs which data was left out or has no label. Raises InvalidInput, NotFound, NotAllowed, CorruptData,
    SourceUnavailable, SourceChanged, and DaemonUnavailable where CACHESVC requires a daemon.
    """
    if fields is not None and not isinstance(fields, Iterable):
        raise InvalidInput(f"fields={fields!r}: give a name, or several")
    bare = isinstance(fields, str)
    if fields is not None:
        fields = (fields,) if isinstance(fields, str) else tuple(fields)
    options = Options(
        format=format or "",
        extent_bytes=extent_bytes,
        dtype=dtype_name("dtype", dtype),
        seq_len=seq_len,
        overlap=overlap,
        record_bytes=record_bytes,
        header_bytes=header_bytes,
        labels=labels_text(labels) if isinstance(labels, Mapping) else labels,
        on_error=on_error,
        fields=fields_text(fields) if fields is not None else "",
        split=split or "",
        separator=separator,
    )
    version = text("version", "" if version is None else version).partition(":")[0]  # `identity` of a subset
    verify = flag("verify", verify)
    rank, processes = rank_hint()
    link = connect(canonical_uris(uri), options, version, processes)
    spec = SampleSpec(fields, decode, transform, dtype_name("out", out) or None, image_mode, targets, bare)
    dataset = Dataset(OpenedDataset(link, verify), spec)
    if rank == 0:
        _log_notes(dataset.catalog.notes)
    return dataset if prepare is None else dataset.prepared(prepare, prepare_name, prepare_max_bytes)


def key_transforms(datasets: Iterable[Dataset], seed: int, epoch: int) -> None:
    """Set the (seed, epoch) that the `rng` of transforms is keyed by, for loaders of other kinds."""
    for dataset in datasets:
        dataset.rng_key = seed, epoch


def _log_notes(notes: Sequence[str]) -> None:
    for note in notes[:NOTES_LOGGED]:
        _log.warning("%s", note)
    if len(notes) > NOTES_LOGGED:
        _log.warning("and %d notes more, in ds.catalog.notes", len(notes) - NOTES_LOGGED)


class Dataset(TorchDataset[Any]):
    """A dataset made by `open_dataset`. It works under any torch DataLoader; cachesvc's own also orders and shards
    it.

    Picklable for spawned workers, which open the same version again. A forked worker makes a connection of its own.
    """

    def __init__(
        self,
        opened: OpenedDataset,
        sample_spec: SampleSpec,
        ids: Ints | None = None,
        picks: tuple[Pick, ...] = (),
        source: PreparingSource | None = None,
    ) -> None:
        self.opened, self.sample_spec, self._picks, self.preparing = opened, sample_spec, picks, source
        self.ids = ids
        """The catalog's sample id of each index; None if they are equal."""
        self._bind()
        self._seed: int | None = None
        """The seed of the generators; None until a loader of ours, or `set_epoch`, sets their key."""
        self._epoch: list[int] | torch.Tensor = [0]
        self._identity = ""

    def _bind(self) -> None:
        self.catalog = (self.preparing or self.opened).catalog
        """The catalog of its samples; where the daemon keeps them prepared, that of their source."""
        self.sample_reader: SampleReader = (
            sample_reader(self.catalog, self.sample_spec)
            if self.preparing is None
            else self.preparing.reader_of(self.opened, self.sample_spec)
        )

    def __len__(self) -> int:
        return self.catalog.samples if self.ids is None else len(self.ids)

    def __getitem__(self, index: int) -> Any:
        """Return one sample. Raises IndexError, TypeError for anything but an integer (for several samples use
        `select` or `take`), and the errors of reading."""
        place = place_of(index, len(self), "sample")
        return self._take(np.asarray([place], np.int64))[0]

    if TYPE_CHECKING:  # Python iterates by index; a type checker looks for this method

        def __iter__(self) -> Iterator[Any]: ...

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return samples in the order given, read in one pass. Raises as `[]` does."""
        if self.has_own_getitem:
            return [self[index] for index in indices]
        return self._take(places_of(indices, len(self), "sample"))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("catalog", "sample_reader")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._bind()
        if isinstance(self._epoch, list):
            self._epoch = [*self._epoch]

    def __repr__(self) -> str:
        return (
            f"Dataset({self.catalog.uri!r}, {self.catalog.format}, {len(self):,} samples, {self.version[:8]})"
        )

    @property
    def version(self) -> str:
        """The pinned dataset version; of prepared samples, that of their source."""
        return str(self.catalog.id)

    @property
    def identity(self) -> str:
        """The version, with a digest of the indices for a subset. A saved run belongs to one identity."""
        if not self._identity:
            self._identity = identity_of(self.version, self.ids)
        return self._identity

    @property
    def source(self) -> DataSource:
        """The place of the data, and the part of it that this is: for saved states."""
        link = self.opened.link
        # a daemon's default may change
        options = replace(link.options, extent_bytes=self.catalog.extent_bytes)
        return DataSource(self.version, link.uris, options, self._picks)

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names; () if labels are numbers or absent."""
        return self.catalog.classes

    @property
    def via(self) -> str:
        """The way in which data is read, in words."""
        if not self.opened.link.daemon:
            return "direct reads" + ", prepared here" * (self.sample_spec.prepare is not None)
        return "daemon" + ", prepared" * (self.preparing is not None)

    @property
    def rng_key(self) -> RngKey:
        """The key of the generators that transforms get, unless the reading loader sets its own."""
        return None if self._seed is None else (self._seed, int(self._epoch[0]))

    @rng_key.setter
    def rng_key(self, rng_key: tuple[int, int]) -> None:
        self._seed, self._epoch[0] = rng_key

    def set_epoch(self, epoch: int) -> None:
        """Key the `rng` of transforms by this epoch, under a loader of another kind; its workers follow, persistent ones
        too."""
        self.share_epoch()
        self.rng_key = self._seed or 0, epoch

    def share_epoch(self) -> None:
        """Let processes that start from now on see later changes of the epoch."""
        if isinstance(self._epoch, list):
            self._epoch = torch.tensor(self._epoch).share_memory_()

    def where(self, expression: str) -> Dataset:
        """Return the samples that an expression over key, label and tags selects, e.g. "label == 'cat'". No data is
        rewritten.

        Raises InvalidInput for a bad expression or one that selects nothing.
        """
        if not isinstance(expression, str):
            raise InvalidInput(f"where() takes an expression as text, not {type(expression).__name__}")
        found = np.asarray(self.catalog.find(expression), np.int64)
        ids = found if self.ids is None else self.ids[np.isin(self.ids, found)]
        if not len(ids):
            raise InvalidInput(f"{expression!r} selects none of the {len(self)} samples")
        return self._subset(ids, {"where": expression})

    def prepared(self, prepare: Callable[[Any], Any], name: str = "", max_bytes: int = 0) -> Dataset:
        """Return what a deterministic function makes of each sample, before `transform`. The samples, their order and the
        states of a loader are those of this dataset.

        With a daemon each sample of a node is prepared once for all epochs, processes and jobs of this user. An edited
        function prepares anew; with a `name` its edit is an error. The function returns a tensor, an array or a number, or
        a tuple, list or dict of these, with one shape and dtype for all samples. Raises InvalidInput otherwise.

        With `max_bytes` shapes may differ, and values may be bytes or text; all values of one sample together take at most
        so many bytes. A sample with more is InvalidInput when it is read.
        """
        if self.sample_spec.prepare is not None:
            raise InvalidInput("this dataset is prepared already: call both functions in one")
        name, spec = text("prepare_name", name), replace(self.sample_spec, prepare=prepare)
        max_bytes = whole_number("prepare_max_bytes", max_bytes, 0, MAX_BYTES)
        if not self.opened.link.daemon:
            return Dataset(self.opened, spec, self.ids, self._picks)
        unclaimed = OpenedDataset(replace(self.opened.link, claims=False), self.opened.verify)
        source = Dataset(unclaimed, replace(spec, transform=None))
        opened, form = open_prepared(unclaimed.link, source, source.sample_spec, name, max_bytes, self.ids)
        return Dataset(opened, spec, self.ids, self._picks, PreparingSource(source, form))

    def select(self, ids: Sequence[int] | Ints) -> Dataset:
        """Return the samples of these indices, in that order. Raises InvalidInput for an index out of range."""
        try:
            given = np.asarray(ids).reshape(-1)
        except ValueError as error:
            raise InvalidInput(f"select() takes one list of indices: {error}") from None
        if len(given) and given.dtype.kind not in "iu":
            raise InvalidInput(
                f"select() takes indices, not {given.dtype}; np.flatnonzero(mask) converts a mask"
            )
        wrong = given[(given < 0) | (given >= len(self))]
        if len(wrong):
            raise InvalidInput(f"sample {int(wrong[0])} of {len(self)} does not exist")
        places = given.astype(np.int64)
        return self._subset(self.ids_of(places), selected(places))

    def take(self, count: int) -> Dataset:
        """Return the first `count` samples, or all if there are fewer."""
        return self.select(np.arange(min(whole_number("take", count, 0, 2**63 - 1), len(self))))

    def split(self, fractions: Mapping[str, float], seed: int = 0) -> dict[str, Dataset]:
        """Return disjoint random parts by fractions of at most 1 in total. The parts are the same in every process
        and run. Warns of a part that is empty because there are too few samples, as torch's random_split does.
        Raises InvalidInput, also for a seed outside 0 to 2^64 - 1."""
        given, seed = shares("fractions", fractions), whole_number("seed", seed, 0, 2**64 - 1)
        if not given or sum(given) > 1 + 1e-9:
            raise InvalidInput(f"fractions {dict(fractions)}: give at least one, and at most 1 in total")
        named = {str(name): share for name, share in zip(fractions, given, strict=True)}
        places = zip(fractions, random_parts(len(self), given, seed), strict=True)
        parts = {
            name: self._subset(self.ids_of(part), {"split": str(name), "of": named, "seed": seed})
            for name, part in places
        }
        empty = [repr(name) for name, share in zip(parts, given, strict=True) if share and not parts[name]]
        if empty and len(self):
            warnings.warn(
                f"{len(self)} samples are too few for {', '.join(empty)} of {dict(fractions)}: give larger fractions",
                stacklevel=2,
            )
        return parts

    def array(self) -> np.ndarray[Any, Any]:
        """Return records of one size as one read-only array [len, *shape] of the stored dtype, in their order: a
        replacement for np.memmap. It is the cache's own memory if the records lie there without gaps. It is a copy
        for a subset, for records of several files, and for a record size that does not divide 2 MiB.

        Raises InvalidInput for samples of other formats, and OutOfSpace when the dataset is not completely in
        memory.
        """
        layout = self.catalog.layout
        if self.preparing is not None or not isinstance(layout, Fixed):
            raise InvalidInput(
                "array() takes only records of one size; read samples with a DataLoader or dataset[i]"
            )
        item = np.empty(layout.shape, layout.dtype)
        flat, strides = self.opened.reader().array(), (layout.stride_bytes, *item.strides)
        if self.ids is None and len(layout.runs_first) == 1:
            shape, begin = (len(self), *item.shape), int(layout.runs_slot[0]) * layout.stride_bytes
            whole: np.ndarray[Any, Any] = np.ndarray(shape, item.dtype, flat, begin, strides)
            return whole
        slots = layout.slots(self.ids_of(np.arange(len(self))))
        rows = np.ndarray((int(slots.max(initial=-1)) + 1, *item.shape), item.dtype, flat, 0, strides)
        found: np.ndarray[Any, Any] = rows[slots]
        found.flags.writeable = False
        return found

    # ---- used by the loader

    def ids_of(self, indices: Ints) -> Ints:
        """Return the catalog's sample ids of indices of this view."""
        return indices if self.ids is None else self.ids[indices]

    @property
    def has_own_getitem(self) -> bool:
        """A subclass makes samples in its own way, from indices of this dataset."""
        return type(self).__getitem__ is not Dataset.__getitem__

    @property
    def leaves(self) -> tuple[Dataset, ...]:
        """The datasets whose extents are read."""
        return (self,)

    @property
    def summed(self) -> OpenedDataset:
        """The dataset whose bytes a run's digest sums: of samples that a daemon keeps prepared, their source."""
        return self.opened if self.preparing is None else self.preparing.opened

    @property
    def sample_kind(self) -> str:
        """The kind of a sample, in words; "" if user callables decide it."""
        callables = self.sample_spec.transform is not None or callable(self.sample_spec.decode)
        return "" if callables else self.sample_reader.sample_kind

    def iter_samples(self, ids: Ints, rng_key: RngKey) -> Iterator[Any]:
        """Make samples by catalog id one at a time; see `SampleReader.iter_samples`."""
        return self.sample_reader.iter_samples(self.opened.reader(), ids, rng_key)

    def close(self) -> None:
        """Release leases, mappings and the connection. The next use connects again."""
        if self.preparing is not None:
            self.preparing.close()
        self.opened.close()

    def _take(self, indices: Ints) -> list[Any]:
        return list(self.iter_samples(self.ids_of(indices), current_rng_key.get(self.rng_key)))

    def _subset(self, ids: Ints, pick: Pick) -> Dataset:
        found = Dataset(self.opened, self.sample_spec, ids, (*self._picks, pick), self.preparing)
        if self.rng_key is not None:
            found.rng_key = self.rng_key
        return found
