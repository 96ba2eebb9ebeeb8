"""`pack`: documents of any length as samples of one length, with their boundaries. The arithmetic is in
core/order/packing.py and best_fit.py, the form of batches in pack_form.py."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch.utils.data import Dataset as TorchDataset

from cachesvc.catalog.documents import documents_ending_at, documents_of, documents_of_rows, rows_of
from cachesvc.catalog.sample_places import NamedSample, samples_with_key
from cachesvc.core.arguments import one_of, place_of, whole_number
from cachesvc.core.errors import InvalidInput
from cachesvc.core.order.best_fit import Overflow, WholePackRun, WholePacks, whole_packs
from cachesvc.core.order.digests import ContentsOf, SampleSum
from cachesvc.core.order.epoch_order import OrderSpec
from cachesvc.core.order.pack_order import Documents, PackOrder
from cachesvc.core.order.packing import PackRun
from cachesvc.core.order.permute import Mask
from cachesvc.saved_runs.data import PackSource, identity_of_packs
from cachesvc.saved_runs.stored_packs import StoredPacks
from loader.datasets.components import IN_ORDER, refuse_subsets
from loader.datasets.dataset import Dataset
from loader.datasets.dtypes import DType, check_range, dtype_name, dtype_named, output_dtype
from loader.datasets.pack_form import NEW_RUNS, Columns, Edges, Layout, PackForm, laid_out, segment_ends
from loader.datasets.shape_mismatch import SampleName, name_by_place
from loader.datasets.targets import DEFAULT_DTYPE, Targets
from loader.datasets.token_ends import places_after
from loader.datasets.tokenized import Tokenize, TokenizedRows
from loader.job.topology import rank_hint
from loader.reading.reader import Ints

Fit = Literal["wrap", "best"]
ENOUGH_REAL = 0.9
"""Packs of which a smaller share is real are warned of."""
SEQUENCES_ARE_DOCUMENTS = (
    "%s has no index of documents, so each of its sequences counts as one: give pack() eos=, the token that ends a "
    "document"
)
_log = logging.getLogger("cachesvc")


def pack(
    dataset: Dataset,
    seq_len: int,
    *,
    dtype: DType | None = None,
    targets: Targets | None = None,
    edges: Edges | None = None,
    fit: Fit = "wrap",
    overflow: Overflow = "split",
    document_ids: bool = False,
    layout: Layout | None = None,
    eos: int | None = None,
    tokenize: Tokenize | None = None,
    counts: str | os.PathLike[str] | None = None,
) -> Packed:
    """Lay documents in packs of `seq_len` tokens, in the shuffled order or the dataset's own.

    Documents are those of a Megatron `.idx` (open it with any `seq_len`), or the records of a dataset of integers,
    or one field of each sample as raw integers of `dtype`. A sample is {"tokens": [seq_len], "position_ids": [seq_len],
    "cu_seqlens": int32}. A batch has [batch, seq_len] of each, and "max_seqlen". `cu_seqlens` are offsets into
    `tokens.flatten()`, from 0 to batch x seq_len, as flash-attention's varlen functions take them: each document,
    and each part of a cut one, attends only to itself. `position_ids` begin at 0 at each of these offsets.

    `targets`: "shifted" has "inputs" and "targets" of [seq_len] in place of "tokens", and each pack takes one more
    token. "unshifted" has "input_ids" and "labels", which the model shifts.

    `edges`: "mask", the default of new runs, sets targets to -100 where the next token is of another document (for
    "unshifted" labels, at each first token). "join" leaves them, and has no `position_ids`. A run that is continued from
    a state of before version 5 joins unless this says otherwise.

    `fit`: "wrap" lays documents end to end. The rest of a document that does not fit begins the next pack, and fewer
    than `seq_len` tokens at the end of an epoch are left out. "best" puts whole documents of one extent together, once
    for all epochs, and fills the rest of a pack with zeros: a segment of its own, whose targets are -100. A document that
    is longer than a pack is cut (`overflow="split"`), loses its end ("truncate"), or is refused ("error").

    `document_ids=True` adds "document_ids" [seq_len]: the index of each token's document in the dataset, -1 for padding.
    `layout` has default batches named and shaped as a library's own: "torchtitan", "transformers" or "olmo".

    `eos`: the token that ends each document, for token files without an index (otherwise each of their sequences counts as
    a document). Each process that calls `pack` first reads all tokens once.

    `tokenize`: callable(sample) that returns the tokens of a sample as whole numbers, for rows of text, columns and
    files of any kind; `dtype` is their type, int64 by default. Each process that calls `pack` first tokenises all
    samples once, to count their tokens; the loader's workers tokenise them again as they are read. `counts` names a
    folder that keeps the counts: later runs begin at once, and the ranks of a node share the counting. `tokenize` must
    be a function of the sample alone, since counts are checked as samples are read, and picklable for spawned workers. The
    folder keeps the ends of documents that `eos` finds, too.

    Raises InvalidInput when the documents fill no pack, when their lengths are unknown and `tokenize` is not given, for a
    dataset with a transform or with targets of its own, and where `tokenize` gives no whole numbers, or other counts than
    before. Raises OutOfSpace where `counts` cannot be written, and, with `tokenize` or `eos`, the errors of reading.
    """
    folder = None if counts is None else os.fspath(counts)
    if folder is not None and tokenize is None and eos is None:
        raise InvalidInput("counts= keeps what tokenize= counts or eos= finds: give it with one of them")
    if tokenize is not None and eos is not None:
        raise InvalidInput("eos= is for token files; what tokenize= returns for a sample is one document")
    form = PackForm.of(whole_number("seq_len", seq_len, 1, 2**63 - 1), targets, edges, document_ids, layout)
    source = TokenSource(dtype_name("dtype", dtype) or None, tokenize, folder, eos)
    packed = Packed(dataset, form, _fit_of(fit, overflow), source)
    packed.report()
    return packed


@dataclass(frozen=True, slots=True)
class TokenSource:
    """The arguments of `pack` that say which tokens a dataset has. `counts`: those of each row, or the ends of
    documents; or the folder that keeps them."""

    dtype: str | None
    tokenize: Tokenize | None = None
    counts: str | Ints | None = None
    eos: int | None = None


def _fit_of(fit: Any, overflow: Any) -> Overflow | None:
    """Return how whole documents are fitted; None where they are laid end to end."""
    one_of("fit", fit, get_args(Fit))
    one_of("overflow", overflow, get_args(Overflow))
    if fit == "wrap" and overflow != "split":
        raise InvalidInput(
            f"overflow={overflow!r} is for fit='best': under fit='wrap' long documents are cut"
        )
    return overflow if fit == "best" else None


class Packed(TorchDataset[Any]):
    """A dataset made by `pack`. `packs[i]` is pack i of the documents in their own order. Picklable."""

    def __init__(
        self,
        dataset: Dataset,
        form: PackForm,
        overflow: Overflow | None,
        source: TokenSource,
        whole: WholePacks | None = None,
    ) -> None:
        """`overflow`: how whole documents are fitted; None lays documents end to end. `whole`: the packs of whole
        documents, where they are known. Raises as `pack` does."""
        if not isinstance(dataset, Dataset):
            raise InvalidInput(f"pack() takes a dataset of open_dataset, not {type(dataset).__name__}")
        self.leaf, self.form, self._overflow, self._source = dataset, form, overflow, source
        self.run_edges: Edges = NEW_RUNS
        """The edges of the run, which count unless `pack` was given some."""
        if dataset.sample_spec.targets is not None:
            raise InvalidInput(
                "pack() makes targets of whole packs: give targets= to pack, not to open_dataset"
            )
        if dataset.sample_spec.transform is not None:
            raise InvalidInput("pack() takes tokens as they are stored: open the dataset without a transform")
        if dataset.sample_spec.prepare is not None:
            raise InvalidInput("pack() takes tokens as they are stored: open the dataset without prepare=")
        self._counts: Ints | None = None
        self._rows: TokenizedRows | None = None
        if source.tokenize is not None:
            self._documents = self._rows_in(dataset, source.tokenize, source.counts)
        elif source.eos is not None:
            known = source.counts
            if not isinstance(known, np.ndarray):
                known = places_after(dataset, source.eos, source.dtype, known)
            self._counts = known
            self._documents = documents_ending_at(dataset.catalog, dataset.ids, self._counts)
        else:
            dtype = None if source.dtype is None else dtype_named(source.dtype)
            fields = dataset.sample_spec.fields or ()
            self._documents = documents_of(dataset.catalog, dataset.ids, fields, dtype)
        self._whole = None if overflow is None else whole or self._fitted(overflow)
        self._order = PackOrder(self._documents, dataset.ids, form.length, self._whole)
        rows = None if self._rows is None else self._rows.samples
        self._stored_packs = StoredPacks(dataset.catalog, self._order, rows)
        if not len(self):
            raise InvalidInput(
                f"packs of {form.length} tokens out of {self._documents.tokens}: give a smaller seq_len"
            )
        self._out = output_dtype(
            dataset.sample_spec.out or (DEFAULT_DTYPE if form.targets else None)
        ) or self._documents.dtype.newbyteorder("=")
        form.check_dtype(self._out, padded=self._whole is not None)

    def __getstate__(self) -> tuple[Any, ...]:
        source = replace(self._source, counts=self._counts)
        return self.run_edges, (self.leaf, self.form, self._overflow, source, self._whole)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        edges, arguments = state
        self.__init__(*arguments)  # type: ignore[misc]
        self.run_edges = edges

    def __len__(self) -> int:
        return self._order.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.read(np.asarray([place_of(index, len(self), "pack")], np.int64), IN_ORDER, 0)[0]

    def __repr__(self) -> str:
        return f"Packed({self.leaf!r}, {len(self):,} packs of {self.form.seq_len})"

    @property
    def seq_len(self) -> int:
        """The tokens of a pack."""
        return self.form.seq_len

    @property
    def identity(self) -> str:
        """The identity of the dataset, with the length and type of packs, and how whole documents are fitted; with a digest
        of the counts of rows that are tokenised, or of the ends of documents that `eos` found."""
        counts = None if self._counts is None else self._counts.tobytes()
        return identity_of_packs(
            self.leaf.identity, self.form.length, self._documents.dtype, counts, self._overflow
        )

    @property
    def source(self) -> PackSource:
        """The place of the data, and how it is packed: for saved states."""
        counted = self._counts is not None
        fields, dtype = tuple(self.leaf.sample_spec.fields or ()), self._source.dtype or ""
        return PackSource(
            self.leaf.source,
            self.form.length,
            dtype,
            fields,
            self._overflow or "",
            counted,
            self._source.eos,
        )

    @property
    def sample_kind(self) -> str:
        """The kind of a sample, in words."""
        return self.form.text(self._out)

    @property
    def leaves(self) -> tuple[Dataset, ...]:
        """The dataset that is read."""
        return (self.leaf,)

    @property
    def dropped_tokens(self) -> int:
        """The tokens that an epoch leaves out: the ends of truncated documents, or fewer than a pack at the end of all."""
        return self._documents.tokens - self._kept_tokens

    @property
    def real_share(self) -> float:
        """The share of tokens in packs that are no padding."""
        return self._kept_tokens / (len(self) * self.form.length)

    where = select = take = split = refuse_subsets("pack")

    def report(self) -> None:
        """Log, on rank 0, that sequences count as documents where nothing says where documents end, and how full packs of
        whole documents are; it is a warning where a tenth is padding or tokens are dropped."""
        if rank_hint()[0]:
            return
        catalog = self.leaf.catalog
        unknown = catalog.format == "tokens" and catalog.documents is None and self._source.eos is None
        if unknown and self.form.edges != "join":
            _log.warning(SEQUENCES_ARE_DOCUMENTS, catalog.uri)
        if self._whole is None:
            return
        level = (
            logging.INFO if self.real_share >= ENOUGH_REAL and not self.dropped_tokens else logging.WARNING
        )
        _log.log(
            level,
            "%s: %s packs of %s tokens, %.1f %% of them real; %s tokens are dropped",
            self.leaf.catalog.uri,
            f"{len(self):,}",
            f"{self.form.seq_len:,}",
            100 * self.real_share,
            f"{self.dropped_tokens:,}",
        )

    # ---- used by the loader

    def with_run_edges(self, edges: Edges) -> Packed:
        """Return the same packs in a run of these edges."""
        if edges == self.run_edges:
            return self
        found = object.__new__(Packed)
        vars(found).update(vars(self), run_edges=edges)
        return found

    def run(self, spec: OrderSpec, epoch: int) -> PackRun | WholePackRun:
        """Return the order of an epoch's packs."""
        return self._order.run(spec, epoch)

    def read(self, spots: Ints, spec: OrderSpec, epoch: int) -> list[dict[str, torch.Tensor]]:
        """Return packs, read in one pass."""
        columns, begins = self._read(spots, spec, epoch)
        return [
            {name: rows[row] for name, rows in columns.items()} | {"cu_seqlens": segment_ends(begins[row])}
            for row in range(len(spots))
        ]

    def left_out(self, spots: Ints, spec: OrderSpec, epoch: int) -> Mask:
        """Tell packs all of whose documents a spec excludes."""
        return self._order.left_out(spots, spec, epoch)

    def documents_with_key(self, key: str) -> Ints:
        """Return the indices of the documents of a key. Raises InvalidInput for the key of a sample of token files, whose
        documents lie otherwise."""
        found = self._stored_packs.keys.with_key(key)
        if not found.size and self._documents.of_files and samples_with_key(self.leaf.catalog, key):
            raise InvalidInput(
                f"exclude: {key[:80]!r} is a run of tokens in {self.leaf.catalog.uri}, and packs have documents: name them "
                f"as in {self._stored_packs.keys.key(0)!r}; samples_of(step) shows those of a step"
            )
        return found

    def named(self, spots: Ints, spec: OrderSpec, epoch: int) -> list[NamedSample]:
        """Return the documents of each pack, and where its tokens are stored; see `StoredPacks`."""
        return self._stored_packs.named(spots, spec, epoch)

    def sum(self, spots: Ints, spec: OrderSpec, epoch: int, contents_of: ContentsOf) -> SampleSum:
        """Return the sum over packs in a run's digest. `contents_of` gives digests of the bytes of extents."""
        return self._stored_packs.sum(spots, spec, epoch, contents_of)

    def default_batch(
        self, spots: Ints, spec: OrderSpec, epoch: int, name: SampleName = name_by_place
    ) -> Any:
        """Make a batch under default collation."""
        columns, begins = self._read(spots, spec, epoch)
        return self.form.batch(columns, segment_ends(begins))

    def collate(self, samples: Sequence[dict[str, torch.Tensor]], name: SampleName = name_by_place) -> Any:
        """Collate packs; see `pack`."""
        names = [name for name in samples[0] if name != "cu_seqlens"]
        columns = {name: torch.stack([sample[name] for sample in samples]) for name in names}
        inner = [sample["cu_seqlens"][1:] + row * self.seq_len for row, sample in enumerate(samples)]
        return self.form.batch(columns, torch.cat([torch.zeros(1, dtype=torch.int32), *inner]))

    @property
    def _kept_tokens(self) -> int:
        if self._whole is None:
            return len(self) * self.form.length
        table = self._whole
        rest = self._documents.length_of(table.document) - table.begin
        return int(np.minimum(rest, table.length).sum())

    def _fitted(self, overflow: Overflow) -> WholePacks:
        """Return the packs of whole documents. Raises InvalidInput for long documents that are to be refused."""
        documents, length = self._documents, self.form.length
        lengths = documents.length_of(np.arange(int(documents.extent_first[-1])))
        long = np.flatnonzero(lengths > length)
        if overflow == "error" and long.size:
            raise InvalidInput(
                f"{self.leaf.catalog.uri}: {long.size:,} of {lengths.size:,} documents are longer than {length:,} tokens, "
                f"up to {lengths.max():,}: give overflow='split' or 'truncate', or a larger seq_len"
            )
        return whole_packs(documents.extent_first, lengths, length, overflow)

    def _read(self, spots: Ints, spec: OrderSpec, epoch: int) -> tuple[Columns, np.ndarray[Any, Any]]:
        """Return the tensors of packs by name, and where segments begin in them: bool[packs, seq_len]."""
        pieces, documents = self._order.pieces(spots, spec, epoch), self._order.documents_in(spec)
        read = self._stored if self._rows is None else self._tokenised
        stored = read(documents.place_of(pieces.document), pieces.begin, pieces.end)
        check_range(self._out, stored, self.leaf.catalog.uri)
        pieces = pieces._replace(document=self._order.numbers(pieces.document, spec))
        rows = laid_out(len(spots), self.form.length, pieces, stored)
        return self.form.columns(rows, self._out, self.run_edges), rows.begins[:, : self.seq_len]

    def _stored(self, places: Ints, begin: Ints, end: Ints) -> np.ndarray[Any, Any]:
        """Return tokens [begin, end) of documents at addresses, one after the other."""
        width = self._documents.dtype.itemsize
        parts = self.leaf.opened.reader().read(places + begin * width, (end - begin) * width)
        return np.frombuffer(bytearray().join(part or b"" for part in parts), self._documents.dtype)

    def _tokenised(self, places: Ints, begin: Ints, end: Ints) -> np.ndarray[Any, Any]:
        """Return tokens [begin, end) of rows, one after the other; a row with several pieces is tokenised once."""
        assert self._rows is not None, "there is a function that tokenises"
        assert self._counts is not None, "the tokens of rows are counted"
        rows, row_of = np.unique(places, return_inverse=True)
        tokens = self._rows.read(rows, self._counts)
        cuts = zip(row_of.tolist(), begin.tolist(), end.tolist(), strict=True)
        parts = [tokens[row][low:high] for row, low, high in cuts]
        return np.concatenate([np.empty(0, self._documents.dtype), *parts])

    def _rows_in(self, dataset: Dataset, tokenize: Tokenize, counts: str | Ints | None) -> Documents:
        samples, first = rows_of(dataset.catalog, dataset.ids)
        dtype = dtype_named(self._source.dtype or DEFAULT_DTYPE)
        self._rows = TokenizedRows(dataset, samples, tokenize, dtype)
        self._counts = counts if isinstance(counts, np.ndarray) else self._rows.count(first, counts)
        return documents_of_rows(dtype, first, self._counts)
