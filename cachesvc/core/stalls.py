"""What training steps waited for, as a rank tells its node's daemon: counts since it last told, and quantiles."""

from __future__ import annotations

from dataclasses import dataclass, field

CAUSES = ("source", "peer", "disk", "decode", "hand-over", "transfer")
"""`source`, `peer`: an extent had to come from the source, or from another node. `disk`: reading it here.
`decode`: making samples and batches of bytes that are there (gather, decode, transform, collate). `hand-over`:
from the worker that made the batch to the training step. `transfer`: pinning it and queuing its copy to the device."""
QUANTILES = ("0.5", "0.95", "0.99")
_MOST = 1 << 63


@dataclass(frozen=True, slots=True)
class StallReport:
    """`steps` batches were handed over; `waited_us` for them by `CAUSES`; `quantiles_us` of a step's wait in the
    epoch so far, by `QUANTILES`."""

    steps: int
    waited_us: tuple[int, ...]
    quantiles_us: tuple[int, ...]

    def encode(self) -> str:
        """For the grants wire."""
        return " ".join(map(str, (self.steps, *self.waited_us, *self.quantiles_us)))

    @staticmethod
    def decode(text: str) -> StallReport:
        """Raises ValueError for anything that `encode` does not write."""
        steps, *rest = (int(word) for word in text.split(" "))
        if len(rest) != len(CAUSES) + len(QUANTILES) or not all(0 <= each < _MOST for each in (steps, *rest)):
            raise ValueError("not a report of stalls")
        return StallReport(steps, tuple(rest[: len(CAUSES)]), tuple(rest[len(CAUSES) :]))


@dataclass(slots=True)
class Stalls:
    """Sums of one dataset's reports, and the quantiles of the latest."""

    steps: int = 0
    waited_us: list[int] = field(default_factory=lambda: [0] * len(CAUSES))
    quantiles_us: tuple[int, ...] = (0,) * len(QUANTILES)

    def add(self, report: StallReport) -> None:
        """A rank has reported."""
        self.steps += report.steps
        self.waited_us = [sum(pair) for pair in zip(self.waited_us, report.waited_us, strict=True)]
        self.quantiles_us = report.quantiles_us
