"""Tokenises rows of text for `pack`. The rows are tokenised once to count their tokens, and then again as they are read.

The counts make packs a pure function of (seed, epoch, position), as documents of stored tokens are: an exact length,
and a resume at any number of ranks and workers without state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from cachesvc.core.errors import InvalidInput
from cachesvc.saved_runs.kept_counts import KeptCounts, key_of_rows
from loader.datasets.dataset import Dataset
from loader.datasets.dtypes import check_range
from loader.job.topology import in_turns
from loader.reading.reader import Ints

Tokenize = Callable[[Any], Sequence[int]]
"""Returns the tokens of a sample: whole numbers, as a list, an array or a tensor."""
_ROWS = 256
"""Rows that are read at once: enough for one request of several extents, few enough for long documents."""
_PROBES = 16
_NO_KEY = (0, 0)  # packs take no transform, so nothing random is keyed


class TokenizedRows:
    """The tokens of a dataset's rows. `samples[i]` is the catalog's sample of row i."""

    def __init__(self, dataset: Dataset, samples: Ints, tokenize: Tokenize, dtype: np.dtype[Any]) -> None:
        """Raises InvalidInput."""
        if not callable(tokenize):
            raise InvalidInput(f"tokenize={tokenize!r} is not a function of the sample")
        if dtype.kind not in "iu":
            raise InvalidInput(f"dtype={dtype.name!r}: tokens are whole numbers; give 'int64', for example")
        self._dataset, self.samples, self._tokenize, self._dtype = dataset, samples, tokenize, dtype

    def count(self, first_of: Ints, folder: str | None) -> Ints:
        """Return the tokens of each row, int64[rows], counted an extent at a time: extent i begins at row
        `first_of[i]`. Counts are read from `folder`, where it has them undamaged, and written there. Processes that share a
        folder begin at different extents, and count each about once.

        Raises InvalidInput where the folder has the counts of another tokenizer, OutOfSpace where it cannot be
        written, and the errors of reading.
        """
        counts, kept = np.empty(len(self.samples), np.int64), KeptCounts(folder)
        for extent in in_turns(np.flatnonzero(np.diff(first_of) > 0)):
            low, high = first_of[extent : extent + 2].tolist()
            key = key_of_rows(self._dataset.identity, self._dataset.sample_spec.fields, low, high)
            counts[low:high] = kept.get(key, partial(self._counted, low, high))
        if folder is not None and len(counts):
            probes = np.unique(np.linspace(0, len(counts) - 1, _PROBES).astype(np.int64))
            self.read(probes, counts)
        return counts

    def read(self, rows: Ints, counts: Ints) -> list[np.ndarray[Any, Any]]:
        """Return the tokens of rows, in the order given. Raises InvalidInput where a row has not as many tokens as
        were counted, and the errors of reading."""
        found = list(self._arrays(rows))
        for row, tokens in zip(rows.tolist(), found, strict=True):
            if len(tokens) != counts[row]:
                raise InvalidInput(
                    f"tokenize gives {len(tokens)} tokens for {self._name(row)}, and {counts[row]} were counted before: "
                    "give a function of the sample alone, and for another tokenizer another folder of counts="
                )
        return found

    def _counted(self, low: int, high: int) -> Ints:
        """Count the tokens of rows [low, high)."""
        blocks = (np.arange(at, min(at + _ROWS, high)) for at in range(low, high, _ROWS))
        return np.fromiter(
            (len(tokens) for rows in blocks for tokens in self._arrays(rows)), "<i8", high - low
        )

    def _arrays(self, rows: Ints) -> Iterator[np.ndarray[Any, Any]]:
        samples = self._dataset.iter_samples(self.samples[rows], _NO_KEY)
        for row, sample in zip(rows.tolist(), samples, strict=True):
            tokens = np.asarray(self._tokenize(sample))
            if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
                raise InvalidInput(
                    f"tokenize returns {tokens.dtype} of shape {list(tokens.shape)} for {self._name(row)}: "
                    "return one list of whole numbers"
                )
            check_range(self._dtype, tokens, f"tokenize of {self._name(row)}")
            yield tokens.astype(self._dtype, copy=False)

    def _name(self, row: int) -> str:
        catalog, sample = self._dataset.catalog, int(self.samples[row])
        return f"{catalog.key(sample) or f'sample {sample}'} in {catalog.uri}"
