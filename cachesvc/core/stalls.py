"""Reports of a rank to its daemon on what its training steps waited for: counts since the last report, and quantiles."""

from __future__ import annotations

from dataclasses import dataclass, field

from cachesvc.core.histogram import BUCKETS

CAUSES = ("source", "peer", "disk", "decode", "hand-over", "transfer")
"""Causes of a wait. `source`, `peer`: an extent came from the source, or from another node. `disk`: reading it on this
node. `decode`: making samples and batches (gather, decode, transform, collate). `hand-over`: moving a batch from its
worker to the training step. `transfer`: pinning a batch and queuing its copy to the device."""
QUANTILES = ("0.5", "0.95", "0.99")
_MOST = 1 << 63


@dataclass(frozen=True, slots=True)
class StallReport:
    """A count of `steps` (batches handed over), the microseconds that they waited for each of `CAUSES`, and the
    `QUANTILES` of a step's wait in the epoch so far, in microseconds."""

    steps: int
    waited_us: tuple[int, ...]
    quantiles_us: tuple[int, ...]
    buckets: tuple[int, ...] = ()
    """The steps by how long each waited, in the buckets of `histogram.BOUNDS_S`; empty from a rank of a release that does
    not count them."""

    def encode(self, buckets: bool = True) -> str:
        """The report as text for the grants wire, without `buckets` for a daemon of a release that does not know them."""
        return " ".join(map(str, (self.steps, *self.waited_us, *self.quantiles_us, *self.buckets * buckets)))

    @staticmethod
    def decode(text: str) -> StallReport:
        """Parse what `encode` writes. Raises ValueError for anything else."""
        steps, *rest = (int(word) for word in text.split(" "))
        counts = len(CAUSES) + len(QUANTILES)
        if len(rest) not in (counts, counts + BUCKETS) or not all(
            0 <= each < _MOST for each in (steps, *rest)
        ):
            raise ValueError("not a report of stalls")
        waited, quantiles = tuple(rest[: len(CAUSES)]), tuple(rest[len(CAUSES) : counts])
        return StallReport(steps, waited, quantiles, tuple(rest[counts:]))


@dataclass(slots=True)
class Stalls:
    """The sums of one dataset's reports, and the quantiles of the latest report."""

    steps: int = 0
    waited_us: list[int] = field(default_factory=lambda: [0] * len(CAUSES))
    quantiles_us: tuple[int, ...] = (0,) * len(QUANTILES)

    def add(self, report: StallReport) -> None:
        """Add a rank's report."""
        self.steps += report.steps
        self.waited_us = [sum(pair) for pair in zip(self.waited_us, report.waited_us, strict=True)]
        self.quantiles_us = report.quantiles_us
