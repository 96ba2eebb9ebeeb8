"""Samples that a run leaves out from one of its data steps on; documents, where samples are packs.

They keep their places in the order, so nothing else moves. A batch with such a sample has a repeat in its place, which
does not count as valid. A pack keeps its other documents.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from cachesvc.core.errors import InvalidInput
from cachesvc.core.order.permute import I64, Mask

MAX_EXCLUDED = 5000
"""Samples that a run leaves out: a state names each, and has 64 KiB. For more, read a part of the dataset (`where`)."""
_MOST = 2**63 - 1
_NEVER = _MOST


class Excluded:
    """Numbers of samples and the data step from which each is left out. Immutable."""

    __slots__ = ("_samples", "_since", "steps")

    def __init__(self, since: Mapping[int, int]) -> None:
        """`since`: a data step for each sample. Raises InvalidInput for too many."""
        if len(since) > MAX_EXCLUDED:
            raise InvalidInput(
                f"{len(since):,} samples to exclude: {MAX_EXCLUDED:,} are the most; read a part of the dataset (where)"
            )
        self._samples = np.array(sorted(since), np.int64)
        self._since = np.array([since[each] for each in self._samples.tolist()], np.int64)
        self.steps = sorted({*since.values()})
        """The data steps from which some sample is left out, ascending."""

    def __bool__(self) -> bool:
        return self._samples.size > 0

    @property
    def since(self) -> dict[int, int]:
        """The data step from which each sample is left out."""
        return dict(zip(self._samples.tolist(), self._since.tolist(), strict=True))

    @property
    def text(self) -> str:
        """The samples as a state has them, e.g. `0:17,42;5200:9`: 17 and 42 from data step 0 on, 9 from 5,200 on."""
        groups: dict[int, list[int]] = {}
        for sample, step in self.since.items():
            groups.setdefault(step, []).append(sample)
        return ";".join(f"{step}:{','.join(map(str, groups[step]))}" for step in sorted(groups))

    @property
    def samples(self) -> I64:
        """The samples, ascending."""
        return self._samples

    def among(self, samples: I64) -> Mask:
        """Tell which of `samples` are left out from some step on."""
        if not self:
            return np.zeros(samples.shape, np.bool_)
        at = np.searchsorted(self._samples, samples)
        at[at == self._samples.size] = 0
        found: Mask = self._samples[at] == samples
        return found

    def until(self, step: int) -> Excluded:
        """Those that are left out in a data step."""
        return Excluded({sample: since for sample, since in self.since.items() if since <= step})

    def with_more(self, samples: Mapping[int, int]) -> Excluded:
        """These and more samples. One that is excluded already keeps its step."""
        return Excluded({**samples, **self.since})


@lru_cache(64)
def parse_excluded(text: str) -> Excluded:
    """The inverse of `Excluded.text`. Raises InvalidInput for anything else."""
    since: dict[int, int] = {}
    try:
        for group in text.split(";") if text else ():
            step, _, samples = group.partition(":")
            since |= {int(sample): int(step) for sample in samples.split(",")}
    except ValueError:
        since = {-1: 0}
    if any(not 0 <= number <= _MOST for pair in since.items() for number in pair):
        raise InvalidInput(f"excluded samples {text[:80]!r}: write a step and samples as 5200:9,17")
    return Excluded(since)


def excluded_at(text: str, step: int) -> str:
    """The samples that are left out in a data step."""
    steps = parse_excluded(text).steps
    begun = bisect_right(steps, step)
    return text if begun == len(steps) else _excluded_until(text, steps[begun - 1] if begun else -1)


@lru_cache(64)
def _excluded_until(text: str, step: int) -> str:
    return parse_excluded(text).until(step).text


@lru_cache(64)
def excluded_in(text: str, component: int, components: int) -> str:
    """The samples of one of `components` that are mixed: sample n of component c of m has the number n * m + c."""
    since = parse_excluded(text).since
    return Excluded(
        {number // components: step for number, step in since.items() if number % components == component}
    ).text


def repaired(rows: I64, valid: I64, bad: Mask) -> tuple[I64, I64]:
    """Replace samples in batches: `rows` int64[batches, rows], of which the first `valid[i]` of row i are real.

    Returns rows and valid counts in which the real samples that are not `bad` come first, and repeats of them follow. A row
    without any is returned as it is, with a count of 0.
    """
    rows, valid = rows.copy(), valid.copy()
    for batch in np.flatnonzero(bad.any(axis=1)).tolist():
        real = np.arange(rows.shape[1]) < valid[batch]
        kept = rows[batch][real & ~bad[batch]]
        valid[batch] = kept.size
        if not kept.size:
            kept = rows[batch][~bad[batch]]  # repeats
        if kept.size:
            rows[batch] = np.resize(kept, rows.shape[1])
    return rows, valid
