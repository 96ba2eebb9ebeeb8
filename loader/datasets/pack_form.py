"""The form in which packs are handed over: targets, positions, boundaries of documents, and the names of other libraries.

A segment is what attends to itself alone: a document's part in one pack, or the padding at a pack's end. A batch has
these tensors, and `cu_seqlens`, the offsets of segments in the flattened rows.

    tokens                          [packs, seq_len], without targets
    inputs, targets                 [packs, seq_len], for "shifted" targets: each is the token after its input
    input_ids, labels               [packs, seq_len], for "unshifted" targets, which the model shifts
    position_ids                    [packs, seq_len] int64: the place of each token in its segment
    document_ids                    [packs, seq_len] int64: the index of each token's document, -1 for padding

Layouts, as other libraries' own code makes them:

    torchtitan    hf_datasets/text_datasets.py: ({"input", "positions"}, labels)
    transformers  DataCollatorWithFlattening(return_flash_attn_kwargs=True): all rows as one
    olmo          OLMo-core's DataCollator: its `get_labels` makes the labels, `doc_lens` the boundaries
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch

from cachesvc.core.arguments import flag, one_of
from cachesvc.core.errors import InvalidInput
from cachesvc.core.order.packing import Pieces
from loader.datasets.targets import Rows, Targets, check_targets, split_targets
from loader.reading.reader import Ints

Edges = Literal["mask", "join"]
Layout = Literal["torchtitan", "transformers", "olmo"]
IGNORED = -100
"""The target that torch's cross entropy ignores."""
NEW_RUNS: Edges = "mask"
_TARGETS_OF: dict[Layout, Targets] = {
    "torchtitan": "shifted",
    "transformers": "unshifted",
    "olmo": "unshifted",
}
Columns = dict[str, torch.Tensor]


class PackRows(NamedTuple):
    """Packs as they are read: `tokens` [packs, length], whether a segment begins at each token, and the index of each
    token's document in the dataset, -1 for padding."""

    tokens: Rows
    begins: np.ndarray[Any, np.dtype[np.bool_]]
    documents: Ints


@dataclass(frozen=True, slots=True)
class PackForm:
    """The form of packs, as the arguments of `pack` give it. `edges` None: those of the run."""

    seq_len: int
    targets: Targets | None = None
    edges: Edges | None = None
    document_ids: bool = False
    layout: Layout | None = None

    @classmethod
    def of(
        cls,
        seq_len: int,
        targets: Any = None,
        edges: Any = None,
        document_ids: Any = False,
        layout: Any = None,
    ) -> PackForm:
        """The form of checked arguments, with the targets that a layout implies. Raises InvalidInput."""
        check_targets(targets)
        one_of("edges", edges, get_args(Edges), ", or None")
        one_of("layout", layout, _TARGETS_OF, ", or None")
        if layout is not None:
            if targets not in (None, _TARGETS_OF[layout]):
                raise InvalidInput(f"layout={layout!r} has {_TARGETS_OF[layout]} targets, not {targets}")
            targets = _TARGETS_OF[layout]
        return cls(seq_len, targets, edges, flag("document_ids", document_ids), layout)

    @property
    def length(self) -> int:
        """The tokens that a pack takes: one more than `seq_len` where targets are shifted."""
        return self.seq_len + (self.targets == "shifted")

    def check_dtype(self, out: np.dtype[Any], padded: bool) -> None:
        """Raise InvalidInput for a type of targets that cannot hold the mark of ignored ones. `padded`: some packs have
        padding, whose targets are ignored."""
        if self.targets is None or out.kind != "u":
            return
        if padded:
            raise InvalidInput(
                f"out={out.name!r} cannot hold {IGNORED}, the target of padding: give a signed type as out="
            )
        if self.edges != "join":
            raise InvalidInput(
                f"out={out.name!r} cannot hold {IGNORED}, the target where a document ends: give a signed type as out=, or "
                "edges='join'"
            )

    def text(self, out: np.dtype[Any]) -> str:
        """The form in words. Packs of different words cannot be mixed."""
        words = [f"packs of {self.seq_len} {out}"]
        words += [f"with {self.targets} targets"] if self.targets else []
        words += [f"edges={self.edges!r}"] if self.edges else []
        words += ["document_ids"] if self.document_ids else []
        words += [f"layout={self.layout!r}"] if self.layout else []
        return " ".join(words)

    def columns(self, rows: PackRows, out: np.dtype[Any], run_edges: Edges) -> Columns:
        """Return the tensors of packs by name, each [packs, seq_len], of new memory. `run_edges` count where `edges` were
        not given."""
        mask = (self.edges or run_edges) == "mask"
        found = self._tokens(rows, out, mask)
        if mask or self.layout:
            places = np.arange(self.seq_len)
            begins = np.where(rows.begins[:, : self.seq_len], places, 0)
            found["position_ids"] = torch.from_numpy(places - np.maximum.accumulate(begins, axis=1))
        if self.document_ids:
            found["document_ids"] = torch.from_numpy(rows.documents[:, : self.seq_len].copy())
        return found

    def batch(self, columns: Columns, cu_seqlens: torch.Tensor) -> Any:
        """Return the batch of packs whose segments begin at `cu_seqlens` in the flattened rows, int32[segments + 1]."""
        if self.layout == "torchtitan":
            return _torchtitan(columns)
        if self.layout == "transformers":
            return _transformers(columns, cu_seqlens)
        if self.layout == "olmo":
            return _olmo(columns, cu_seqlens)
        return columns | {"cu_seqlens": cu_seqlens, "max_seqlen": int(cu_seqlens.diff().max())}

    def _tokens(self, rows: PackRows, out: np.dtype[Any], mask: bool) -> Columns:
        if self.targets is None:
            return {"tokens": torch.from_numpy(rows.tokens.astype(out, copy=False))}
        first, second = split_targets(rows.tokens, self.targets, out)
        ignored = rows.documents < 0
        if mask:
            ignored = ignored | rows.begins
        # A target is ignored where its token begins a segment. Shifted, that is the last place of a document.
        at = slice(1, None) if self.targets == "shifted" else slice(None)
        if ignored[:, at].any():
            self.check_dtype(out, padded=True)
            second.numpy()[ignored[:, at]] = IGNORED
        names = ("inputs", "targets") if self.targets == "shifted" else ("input_ids", "labels")
        return dict(zip(names, (first, second), strict=True))


def laid_out(packs: int, length: int, pieces: Pieces, stored: np.ndarray[Any, Any]) -> PackRows:
    """Lay pieces of documents, whose tokens are `stored` one after the other, in packs of `length` tokens. What they do not
    fill is padding: zeros, a segment at the end of the pack."""
    sizes = pieces.end - pieces.begin
    before = np.cumsum(sizes) - sizes
    filled = np.bincount(pieces.row, sizes, packs).astype(np.int64)
    shift = pieces.row * length - (np.cumsum(filled) - filled)[pieces.row]
    begins = np.zeros(packs * length, np.bool_)
    begins[before + shift] = True
    documents = np.repeat(pieces.document, sizes)
    if stored.size < packs * length:
        places = np.arange(stored.size) + np.repeat(shift, sizes)
        padded = np.flatnonzero(filled < length)
        begins[padded * length + filled[padded]] = True
        tokens, stored = stored, np.zeros(packs * length, stored.dtype)
        stored[places] = tokens
        owners, documents = documents, np.full(packs * length, -1)
        documents[places] = owners
    shape = packs, length
    return PackRows(stored.reshape(shape), begins.reshape(shape), documents.reshape(shape))


def segment_ends(begins: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return the offsets at which segments begin in flattened rows [packs, seq_len], and the rows' end: int32[n + 1]."""
    return torch.from_numpy(np.append(np.flatnonzero(begins), begins.size).astype(np.int32))


def _torchtitan(columns: Columns) -> Any:
    inputs = {"input": columns["inputs"], "positions": columns["position_ids"]}
    more = {"document_ids": columns["document_ids"]} if "document_ids" in columns else {}
    return inputs | more, columns["targets"]


def _transformers(columns: Columns, cu_seqlens: torch.Tensor) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: columns[name].reshape(1, -1) for name in ("input_ids", "labels", "position_ids")
    }
    lengths = cu_seqlens.diff()
    if "document_ids" in columns:
        numbers = torch.arange(len(lengths), dtype=torch.int32)
        found["seq_idx"] = numbers.repeat_interleave(lengths)[None]
    longest = int(lengths.max())
    return found | {
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens.clone(),
        "max_length_q": longest,
        "max_length_k": longest,
    }


def _olmo(columns: Columns, cu_seqlens: torch.Tensor) -> dict[str, Any]:
    input_ids = columns["input_ids"]
    segments_of_rows = torch.bincount(cu_seqlens[:-1] // input_ids.shape[1])
    lengths = cu_seqlens.diff().split(segments_of_rows.tolist())
    found = {
        "input_ids": input_ids,
        "label_mask": columns["labels"] != IGNORED,
        "doc_lens": torch.nn.utils.rnn.pad_sequence(list(lengths), batch_first=True),
        "max_doc_lens": [int(each.max()) for each in lengths],
    }
    return found | ({"document_ids": columns["document_ids"]} if "document_ids" in columns else {})
