"""`pack`: documents of any length as samples of one length, with their boundaries. The arithmetic is in
core/order/packing.py."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset as TorchDataset

from cachesvc.core.arguments import place_of, whole_number
from cachesvc.core.errors import InvalidInput
from cachesvc.core.order.epoch_order import EpochOrder, OrderSpec
from cachesvc.core.order.packing import PackRun
from cachesvc.core.order.recent import Latest
from loader.datasets.components import IN_ORDER, component_spec, refuse_subsets
from loader.datasets.dataset import Dataset
from loader.datasets.documents import (
    Documents,
    documents_of,
    documents_of_rows,
    dtype_named,
    rows_of,
)
from loader.datasets.dtypes import DType, check_range, dtype_name, output_dtype
from loader.datasets.extent_layout import view_layout
from loader.datasets.shape_mismatch import SampleName, name_by_place
from loader.datasets.targets import DEFAULT_DTYPE, Targets, check_targets, split_targets
from loader.datasets.tokenized import Tokenize, TokenizedRows
from loader.reading.reader import Ints

_RUNS_KEPT = 4


def pack(
    dataset: Dataset,
    seq_len: int,
    *,
    dtype: DType | None = None,
    targets: Targets | None = None,
    tokenize: Tokenize | None = None,
    counts: str | os.PathLike[str] | None = None,
) -> Packed:
    """Lay documents end to end, in the shuffled order or the dataset's own, and cut them into packs of `seq_len`
    tokens.

    Documents are those of a Megatron `.idx` (open it with any `seq_len`), or the records of a dataset of integers,
    or one field of each sample as raw integers of `dtype`. A sample is {"tokens": [seq_len], "cu_seqlens": int32}.
    A batch is {"tokens": [batch, seq_len], "cu_seqlens", "max_seqlen"}. `cu_seqlens` are offsets into
    `tokens.flatten()`, from 0 to batch x seq_len, as flash-attention's varlen functions take them: each document,
    and each part of a cut one, attends only to itself. The rest of a document that does not fit begins the next
    pack. Fewer than `seq_len` tokens at the end of an epoch are left out.

    `targets`: "shifted" has "inputs" and "targets" of [seq_len] in place of "tokens", and each pack takes one more
    token of the stream. "unshifted" has "input_ids" and "labels" with equal values.

    `tokenize`: callable(sample) that returns the tokens of a sample as whole numbers, for rows of text, columns and
    files of any kind; `dtype` is their type, int64 by default. Each process that calls `pack` first tokenises all
    samples once, to count their tokens; the loader's workers tokenise them again as they are read. `counts` names a
    folder that keeps the counts: later runs begin at once, and the ranks of a node share the counting. `tokenize` must
    be a function of the sample alone, since counts are checked as samples are read, and picklable for spawned workers.

    Raises InvalidInput when the documents hold fewer than `seq_len` tokens in total, when their lengths are unknown
    and `tokenize` is not given, for a dataset with a transform or with targets of its own, and where `tokenize` gives
    no whole numbers, or other counts than before. Raises OutOfSpace where `counts` cannot be written, and, with
    `tokenize`, the errors of reading.
    """
    folder = None if counts is None else os.fspath(counts)
    if folder is not None and tokenize is None:
        raise InvalidInput("counts= keeps what tokenize= counts: give both, or neither")
    return Packed(dataset, seq_len, dtype_name("dtype", dtype) or None, targets, tokenize, folder)


class Packed(TorchDataset[Any]):
    """A dataset made by `pack`. `packs[i]` is pack i of the documents in their own order. Picklable."""

    def __init__(
        self,
        dataset: Dataset,
        seq_len: int,
        dtype: str | None,
        targets: Targets | None = None,
        tokenize: Tokenize | None = None,
        counts: str | Ints | None = None,
    ) -> None:
        """`counts`: the tokens of each row, or the folder that keeps them. Raises as `pack` does."""
        if not isinstance(dataset, Dataset):
            raise InvalidInput(f"pack() takes a dataset of open_dataset, not {type(dataset).__name__}")
        seq_len = whole_number("seq_len", seq_len, 1, 2**63 - 1)
        check_targets(targets)
        self.leaf, self.seq_len, self._dtype, self._targets = dataset, seq_len, dtype, targets
        self._length = seq_len + (targets == "shifted")
        if dataset.sample_spec.targets is not None:
            raise InvalidInput(
                "pack() makes targets of whole packs: give targets= to pack, not to open_dataset"
            )
        if dataset.sample_spec.transform is not None:
            raise InvalidInput("pack() takes tokens as they are stored: open the dataset without a transform")
        self._tokenize = tokenize
        self._counts: Ints | None = None
        self._rows: TokenizedRows | None = None
        if tokenize is not None:
            self._documents = self._rows_in(dataset, tokenize, counts)
        else:
            self._documents = documents_of(dataset, dtype)
        self._unshuffled = self._documents
        ids = dataset.ids
        if ids is not None and not view_layout(dataset, shuffle=False).parts:
            # the indices do not ascend
            self._unshuffled = self._documents.reordered(np.argsort(np.argsort(ids, kind="stable")))
        if self._length > self._documents.tokens:
            raise InvalidInput(
                f"packs of {self._length} tokens out of {self._documents.tokens}: give a smaller seq_len"
            )
        self._out = output_dtype(
            dataset.sample_spec.out or (DEFAULT_DTYPE if targets else None)
        ) or self._documents.dtype.newbyteorder("=")
        self._runs: Latest[tuple[OrderSpec, int], PackRun] = Latest(_RUNS_KEPT)

    def __getstate__(self) -> tuple[Any, ...]:
        return self.leaf, self.seq_len, self._dtype, self._targets, self._tokenize, self._counts

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def __len__(self) -> int:
        return self._documents.tokens // self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.read(np.asarray([place_of(index, len(self), "pack")], np.int64), IN_ORDER, 0)[0]

    def __repr__(self) -> str:
        return f"Packed({self.leaf!r}, {len(self):,} packs of {self.seq_len})"

    @property
    def identity(self) -> str:
        """The identity of the dataset, with the length and type of packs; with a digest of the counts, for rows that
        are tokenised."""
        packs = f"{self.leaf.identity}:{self._length}{self._documents.dtype.str}"
        if self._counts is None:
            return packs
        return f"{packs}:{hashlib.blake2b(self._counts.tobytes(), digest_size=8).hexdigest()}"

    @property
    def sample_kind(self) -> str:
        """The kind of a sample, in words."""
        return (
            f"packs of {self.seq_len} {self._out}{f' with {self._targets} targets' if self._targets else ''}"
        )

    @property
    def leaves(self) -> tuple[Dataset, ...]:
        """The dataset that is read."""
        return (self.leaf,)

    where = select = take = split = refuse_subsets("pack")

    # ---- used by the loader

    def run(self, spec: OrderSpec, epoch: int) -> PackRun:
        """Return the order of an epoch's packs."""
        return self._runs.get((component_spec(spec), epoch), self._run)

    def read(self, spots: Ints, spec: OrderSpec, epoch: int) -> list[dict[str, torch.Tensor]]:
        """Return packs, read in one pass."""
        tokens, pack_of, ends = self._read(spots, spec, epoch)
        cuts = np.searchsorted(pack_of, np.arange(len(spots) + 1)).tolist()
        return [
            {name: rows[row] for name, rows in tokens.items()}
            | {"cu_seqlens": _boundaries(ends[low:high] - row * self.seq_len)}
            for row, (low, high) in enumerate(pairwise(cuts))
        ]

    def default_batch(
        self, spots: Ints, spec: OrderSpec, epoch: int, name: SampleName = name_by_place
    ) -> dict[str, Any]:
        """Make a batch under default collation."""
        tokens, _, ends = self._read(spots, spec, epoch)
        return _batch(tokens, _boundaries(ends))

    def collate(
        self, samples: Sequence[dict[str, torch.Tensor]], name: SampleName = name_by_place
    ) -> dict[str, Any]:
        """Collate packs; see `pack`."""
        names = [name for name in samples[0] if name != "cu_seqlens"]
        tokens = {name: torch.stack([sample[name] for sample in samples]) for name in names}
        inner = [sample["cu_seqlens"][1:] + row * self.seq_len for row, sample in enumerate(samples)]
        return _batch(tokens, torch.cat([torch.zeros(1, dtype=torch.int32), *inner]))

    def _in_order_of(self, spec: OrderSpec) -> Documents:
        return self._documents if spec.shuffle else self._unshuffled

    def _run(self, key: tuple[OrderSpec, int]) -> PackRun:
        documents = self._in_order_of(key[0])
        order = EpochOrder(key[0], documents.extent_first, key[1])
        extents_known = documents is self._documents
        return PackRun(order, documents.length_of, documents.extent_tokens, self._length, extents_known)

    def _read(self, spots: Ints, spec: OrderSpec, epoch: int) -> tuple[dict[str, torch.Tensor], Ints, Ints]:
        """Return tokens by name, each [packs, seq_len]; and for each piece of a document the row of its pack and
        its end in the flattened tokens."""
        pieces = self.run(spec, epoch).pieces(spots)
        lengths, places = pieces.end - pieces.begin, self._in_order_of(spec).place_of(pieces.document)
        read = self._stored if self._rows is None else self._tokenised
        stored = read(places, pieces.begin, pieces.end)
        check_range(self._out, stored, self.leaf.catalog.uri)
        end = np.cumsum(lengths) - pieces.row * self._length
        kept = end - lengths < self.seq_len  # a piece that holds only the last target is left out
        ends = pieces.row * self.seq_len + np.minimum(end, self.seq_len)
        return self._named(stored.reshape(len(spots), self._length)), pieces.row[kept], ends[kept]

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
        samples, first = rows_of(dataset)
        dtype = dtype_named(self._dtype or DEFAULT_DTYPE)
        self._rows = TokenizedRows(dataset, samples, tokenize, dtype)
        self._counts = counts if isinstance(counts, np.ndarray) else self._rows.count(first, counts)
        return documents_of_rows(dtype, first, self._counts)

    def _named(self, tokens: np.ndarray[Any, Any]) -> dict[str, torch.Tensor]:
        if self._targets is None:
            return {"tokens": torch.from_numpy(tokens.astype(self._out, copy=False))}
        names = ("inputs", "targets") if self._targets == "shifted" else ("input_ids", "labels")
        return dict(zip(names, split_targets(tokens, self._targets, self._out), strict=True))


def _batch(tokens: dict[str, torch.Tensor], boundaries: torch.Tensor) -> dict[str, Any]:
    return tokens | {"cu_seqlens": boundaries, "max_seqlen": int(boundaries.diff().max())}


def _boundaries(ends: Ints) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(([0], ends)).astype(np.int32))
