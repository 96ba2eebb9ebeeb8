"""A torch map-style Dataset over a catalog: any format, random access, exact length, search."""

from __future__ import annotations

import hashlib
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import Dataset as TorchDataset

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.layout import Fixed
from cachesvc.catalog.options import Options
from cachesvc.core.arguments import flag, place_of, places_of, shares, text, whole_number
from cachesvc.core.errors import InvalidInput
from cachesvc.core.order.permute import permute
from cachesvc.sources.uri import canonical
from loader.datasets.samples import Form, Samples
from loader.datasets.targets import Targets
from loader.job.topology import foreseen
from loader.reading.connect import connect
from loader.reading.opened_dataset import Opened
from loader.reading.reader import Ints

NOTES_SAID = 8
"""Of what was left out or found odd, at each opening: a thousand files may have a thousand tails."""
drawing: ContextVar[tuple[int, int]] = ContextVar("drawing")
"""What the loader that asks in this thread draws from, instead of a dataset's own `draw`: others may read it too."""
_log = logging.getLogger("cachesvc")


def open_dataset(
    uri: str | os.PathLike[str] | Sequence[str],
    *,
    format: str | None = None,
    fields: str | Sequence[str] | None = None,
    decode: Literal["auto"] | Callable[..., Any] | None = "auto",
    transform: Callable[..., Any] | None = None,
    version: str | None = None,
    verify: bool = False,
    dtype: str = "",
    seq_len: int = 0,
    overlap: int = 0,
    out: str | None = None,
    targets: Targets | None = None,
    record_bytes: int = 0,
    header_bytes: int = 0,
    labels: str = "",
    image_mode: Literal["RGB", "L"] | None = "RGB",
    extent_bytes: int = 0,
) -> Dataset:
    """Open a prefix, file, glob, brace range, or a list of them, as one pinned dataset version.

    `format`: "files" | "webdataset" | "mds" | "parquet" | "records" | "tokens"; None: found out from the data. `fields`:
    names of the fields that make a sample, a tuple of their values (also of one). None: (value, label) for a folder
    with labels, the value where there is a single field, else a dict by field. `decode`: "auto" (by extension or column),
    None (bytes), or callable(sample[, rng]). `image_mode`: what decoded images are converted to, "RGB", "L" (grey) or
    None (as they are in the file). `transform`: callable(sample[, rng]), called after that; `rng` is a numpy
    Generator keyed by (seed, epoch, sample). `version`: the `ds.version` of an earlier opening, which the data must still
    have. `verify`: check every read of a cached file against its checksums. `dtype`, `seq_len` and `overlap` (in tokens),
    `out` (the dtype to convert to), `record_bytes`, `header_bytes`, `labels`: see docs/data.md. `extent_bytes`: about how
    much is cached as one; 0: what the daemon was told, 64 MiB unless it was. Rank 0 logs what was left out of the data
    and what has no label. `targets`, of tokens: "shifted" makes a sample (inputs, targets), each target the token after its
    input; "unshifted" makes it {"input_ids", "labels"} with equal values, as Hugging Face's models take it. Both are
    contiguous and int64 unless `out` says otherwise.

    Raises InvalidInput, NotFound, NotAllowed, CorruptData, SourceUnavailable, SourceChanged, and
    DaemonUnavailable where CACHESVC requires a daemon.
    """
    options = Options(
        format=format or "",
        extent_bytes=extent_bytes,
        dtype=dtype,
        seq_len=seq_len,
        overlap=overlap,
        record_bytes=record_bytes,
        header_bytes=header_bytes,
        labels=labels,
    )
    version = text("version", "" if version is None else version)
    if fields is not None and not isinstance(fields, Iterable):
        raise InvalidInput(f"fields={fields!r}: give a name, or several")
    checked = flag("verify", verify)
    rank, processes = foreseen()
    link = connect(_uris(uri), options, version, processes)
    if isinstance(fields, str):
        fields = (fields,)
    form = Form(tuple(fields) if fields is not None else None, decode, transform, out, image_mode, targets)
    dataset = Dataset(Opened(link, checked), form)
    if rank == 0:
        _say(dataset.catalog.notes)
    return dataset


def key_transforms(datasets: Iterable[Dataset], seed: int, epoch: int) -> None:
    """Have the `rng` of transforms draw by these, where no loader of ours has an order of its own."""
    for dataset in datasets:
        dataset.draw = seed, epoch


def _uris(given: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[str]:
    """One URI or several, canonical, `~` expanded as the commands do. Raises InvalidInput for what is none."""
    several = isinstance(given, Iterable) and not isinstance(given, (str, bytes, os.PathLike))
    uris: list[Any] = list(given) if several else [given]  # type: ignore[arg-type]
    for one in uris:
        if not isinstance(one, (str, os.PathLike)):
            raise InvalidInput(f"{one!r} is no URI; give open_dataset a str, a path, or a list of them")
    return [canonical(os.path.expanduser(os.fsdecode(one))) for one in uris]


def _say(notes: Sequence[str]) -> None:
    for note in notes[:NOTES_SAID]:
        _log.warning("%s", note)
    if len(notes) > NOTES_SAID:
        _log.warning("and %d notes more, in ds.catalog.notes", len(notes) - NOTES_SAID)


class Dataset(TorchDataset[Any]):
    """Made by `open_dataset`. Works under any torch DataLoader; under ours it also orders and shards.

    Picklable for spawned workers, which open the same version again; a forked worker connects by itself.
    """

    def __init__(self, opened: Opened, form: Form, ids: Ints | None = None) -> None:
        self.opened, self._form, self._ids = opened, form, ids
        self._catalog = opened.catalog
        self.samples = Samples(opened.catalog, form)
        self._seed = 0
        self._epoch: list[int] | torch.Tensor = [0]
        self._identity = ""

    def __len__(self) -> int:
        return self._catalog.samples if self._ids is None else len(self._ids)

    def __getitem__(self, index: int) -> Any:
        """One sample. Raises IndexError, TypeError for what is no whole number (a slice would be samples, or a
        dataset: `select` and `take` say which), and what reading raises."""
        place = place_of(index, len(self), "sample")
        return self.take_ids(self.ids_of(np.asarray([place], np.int64)))[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Samples in the order asked, read in one pass. Raises as `[]` does."""
        return self.take_ids(self.ids_of(places_of(indices, len(self), "sample")))

    def __getstate__(self) -> tuple[Any, ...]:
        return self.opened, self._form, self._ids, self._seed, self._epoch

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        opened, form, ids, seed, epoch = state
        self.__init__(opened, form, ids)  # type: ignore[misc]
        self._seed, self._epoch = seed, [*epoch] if isinstance(epoch, list) else epoch

    def __repr__(self) -> str:
        return f"Dataset({self._catalog.uri!r}, {self._catalog.format}, {len(self):,} samples, {self.version[:8]})"

    @property
    def version(self) -> str:
        """The dataset version that is pinned."""
        return str(self.opened.link.id)

    @property
    def identity(self) -> str:
        """The version, and of a subset also a digest of its indices: what a saved run belongs to."""
        if self._ids is not None and not self._identity:
            digest = hashlib.blake2b(np.ascontiguousarray(self._ids).data, digest_size=8).hexdigest()
            self._identity = f"{self.version}:{digest}"
        return self._identity or self.version

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names, () where labels are numbers or there are none."""
        return self._catalog.classes

    @property
    def catalog(self) -> Catalog:
        """The sample index."""
        return self._catalog

    @property
    def via(self) -> str:
        """How the data comes, in words."""
        return "daemon" if self.opened.link.daemon else "direct reads"

    @property
    def draw(self) -> tuple[int, int]:
        """The (seed, epoch) that `rng` of transforms is keyed by, where no loader of ours has an order of its own."""
        return self._seed, int(self._epoch[0])

    @draw.setter
    def draw(self, draw: tuple[int, int]) -> None:
        self._seed, self._epoch[0] = draw

    def set_epoch(self, epoch: int) -> None:
        """Key the `rng` of transforms by this epoch, under a loader that is not ours."""
        self._epoch[0] = epoch

    def share_epoch(self) -> None:
        """Have processes that are started from now on hear of epochs that come later."""
        if isinstance(self._epoch, list):
            self._epoch = torch.tensor(self._epoch).share_memory_()

    def where(self, expression: str) -> Dataset:
        """Samples that an expression over key, label and tags selects, e.g. "label == 'cat'"; costs no rewrite.

        Raises InvalidInput for a bad expression or one that selects nothing.
        """
        if not isinstance(expression, str):
            raise InvalidInput(f"where() takes an expression as text, not {type(expression).__name__}")
        found = np.asarray(self._catalog.find(expression), np.int64)
        ids = found if self._ids is None else self._ids[np.isin(self._ids, found)]
        if not len(ids):
            raise InvalidInput(f"{expression!r} selects none of the {len(self)} samples")
        return self._subset(ids)

    def select(self, ids: Sequence[int] | Ints) -> Dataset:
        """The samples of these indices, in that order. Raises InvalidInput for one that does not exist."""
        try:
            given = np.asarray(ids).reshape(-1)
        except ValueError as error:
            raise InvalidInput(f"select() takes one list of indices: {error}") from None
        if len(given) and given.dtype.kind not in "iu":
            raise InvalidInput(
                f"select() takes indices, not {given.dtype}; np.flatnonzero(mask) makes them of a mask"
            )
        wrong = given[(given < 0) | (given >= len(self))]
        if len(wrong):
            raise InvalidInput(f"sample {int(wrong[0])} of {len(self)} does not exist")
        return self._subset(self.ids_of(given.astype(np.int64)))

    def take(self, count: int) -> Dataset:
        """The first `count` samples, or all where there are fewer."""
        return self.select(np.arange(min(whole_number("take", count, 0, 2**63 - 1), len(self))))

    def split(self, fractions: Mapping[str, float], seed: int = 0) -> dict[str, Dataset]:
        """Disjoint random parts; fractions of at most 1 in total. The same for every process and run. Warns of a part that
        too few samples leave empty, as torch's random_split does. Raises InvalidInput, also for a seed outside 0 to
        2^64 - 1."""
        given, seed = shares("fractions", fractions), whole_number("seed", seed, 0, 2**64 - 1)
        if not given or sum(given) > 1 + 1e-9:
            raise InvalidInput(f"fractions {dict(fractions)} are not shares of 1")
        shuffled = permute(np.arange(len(self)), max(1, len(self)), seed).astype(np.int64)
        bounds = [round(share * len(self)) for share in np.cumsum([0.0, *given]).tolist()]
        parts = {
            name: self.select(np.sort(shuffled[low:high]))
            for name, low, high in zip(fractions, bounds, bounds[1:], strict=False)
        }
        empty = [
            repr(name) for name, share in zip(fractions, given, strict=True) if share and not parts[name]
        ]
        if empty and len(self):
            warnings.warn(
                f"{len(self)} samples leave none for {', '.join(empty)} of {dict(fractions)}: give larger shares",
                stacklevel=2,
            )
        return parts

    def array(self) -> np.ndarray[Any, Any]:
        """Records of one size as one read-only array [len, *shape] of the stored dtype, in their order: the swap for
        np.memmap. It is the cache's own memory where the records lie there without a gap. It is a copy for a subset, for
        records of several files, and where their size does not divide 2 MiB.

        Raises InvalidInput for samples of other formats, OutOfSpace when the dataset is not all in memory.
        """
        layout = self._catalog.layout
        if not isinstance(layout, Fixed):
            raise InvalidInput(
                "only records of one size make one array; ask for samples, by a DataLoader or dataset[i]"
            )
        item = np.empty(layout.shape, layout.dtype)
        flat, strides = self.opened.reader().array(), (layout.stride_bytes, *item.strides)
        if self._ids is None and len(layout.runs_first) == 1:
            shape, begin = (len(self), *item.shape), int(layout.runs_slot[0]) * layout.stride_bytes
            whole: np.ndarray[Any, Any] = np.ndarray(shape, item.dtype, flat, begin, strides)
            return whole
        slots = layout.slots(self.ids_of(np.arange(len(self))))
        rows = np.ndarray((int(slots.max(initial=-1)) + 1, *item.shape), item.dtype, flat, 0, strides)
        found: np.ndarray[Any, Any] = rows[slots]
        found.flags.writeable = False
        return found

    # ---- for the loader

    def ids_of(self, indices: Ints) -> Ints:
        """Indices of this view -> sample ids of the catalog."""
        return indices if self._ids is None else self._ids[indices]

    @property
    def ids(self) -> Ints | None:
        """The catalog's sample id of each index; None where they are the same."""
        return self._ids

    @property
    def leaves(self) -> tuple[Dataset, ...]:
        """The datasets whose extents are read."""
        return (self,)

    @property
    def looks(self) -> str:
        """What a sample looks like, in words; "" where only the user's callables know."""
        callables = self._form.transform is not None or callable(self._form.decode)
        return "" if callables else self.samples.looks

    @property
    def form(self) -> Form:
        """What the user asked a sample to look like."""
        return self._form

    def take_ids(self, ids: Ints) -> list[Any]:
        """Samples of the catalog by id."""
        return list(self.drawn(ids))

    def drawn(self, ids: Ints) -> Iterator[Any]:
        """The same one by one; see `Samples.drawn`."""
        return self.samples.drawn(self.opened.reader(), ids, drawing.get(self.draw))

    def close(self) -> None:
        """Give back leases, mappings and the connection; the next use connects again."""
        self.opened.close()

    def _subset(self, ids: Ints) -> Dataset:
        found = Dataset(self.opened, self._form, ids)
        found.draw = self.draw
        return found
