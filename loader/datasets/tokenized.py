"""Tokenises rows of text for `pack`. The rows are tokenised once to count their tokens, and then again as they are read.

The counts make packs a pure function of (seed, epoch, position), as documents of stored tokens are: an exact length,
and a resume at any number of ranks and workers without state.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from cachesvc.core.errors import InvalidInput, OutOfSpace
from loader.datasets.dataset import Dataset
from loader.datasets.dtypes import check_range
from loader.job.topology import rank_hint
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
        self._dataset, self._samples, self._tokenize, self._dtype = dataset, samples, tokenize, dtype

    def count(self, first_of: Ints, folder: str | None) -> Ints:
        """Return the tokens of each row, int64[rows], counted an extent at a time: extent i begins at row
        `first_of[i]`. Counts are read from `folder`, where it has them undamaged, and written there. Processes that share a
        folder begin at different extents, and count each about once.

        Raises InvalidInput where the folder has the counts of another tokenizer, OutOfSpace where it cannot be
        written, and the errors of reading.
        """
        counts = np.empty(len(self._samples), np.int64)
        extents = np.flatnonzero(np.diff(first_of) > 0)
        rank, processes = rank_hint()
        for extent in np.roll(extents, -(len(extents) * rank // processes)).tolist():
            low, high = first_of[extent : extent + 2].tolist()
            counts[low:high] = self._counted(low, high, folder)
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

    def _counted(self, low: int, high: int, folder: str | None) -> Ints:
        """Return the counts of rows [low, high)."""
        path = None if folder is None else os.path.join(folder, self._file_name(low, high))
        stored = None if path is None else _read(path, high - low)
        if stored is not None:
            return stored
        blocks = (np.arange(at, min(at + _ROWS, high)) for at in range(low, high, _ROWS))
        counts = np.fromiter(
            (len(tokens) for rows in blocks for tokens in self._arrays(rows)), "<i8", high - low
        )
        if path is not None:
            _write(path, counts)
        return counts

    def _file_name(self, low: int, high: int) -> str:
        """Name the file of counts after the rows and the fields that it counts."""
        key = f"{self._dataset.identity} {self._dataset.sample_spec.fields} {low} {high}"
        return f"{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}.counts"

    def _arrays(self, rows: Ints) -> Iterator[np.ndarray[Any, Any]]:
        samples = self._dataset.iter_samples(self._samples[rows], _NO_KEY)
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
        catalog, sample = self._dataset.catalog, int(self._samples[row])
        return f"{catalog.key(sample) or f'sample {sample}'} in {catalog.uri}"


def _read(path: str, rows: int) -> Ints | None:
    """Read counts; None for a file that is absent, damaged, or of a release before files had a checksum."""
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError:
        return None
    kept, checksum = content[: 8 * rows], content[8 * rows :]
    return np.frombuffer(kept, "<i8") if checksum == _checksum(kept) else None


def _checksum(counts: bytes) -> bytes:
    return hashlib.blake2b(counts, digest_size=16).digest()


def _write(path: str, counts: Ints) -> None:
    """Write counts and their checksum, as a file that is complete or absent."""
    content = counts.astype("<i8").tobytes()
    folder = os.path.dirname(path)
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".counts-", delete=False) as file:
            file.write(content + _checksum(content))
        os.replace(file.name, path)
    except OSError as error:
        raise OutOfSpace(f"counts={folder!r} cannot be written: {error.strerror or error}") from error
