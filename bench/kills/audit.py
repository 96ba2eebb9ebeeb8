"""Check each run's ledger: every sample exactly once, with the right bytes, in the same order, whatever was killed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.kills.ledger import Entry, digest


@dataclass(slots=True)
class Audit:
    """Audit of one run. `truth[i]` is the digest of sample i; every violation goes to `faults`."""

    run: str
    truth: Sequence[str]
    epoch: int = 0
    samples: int = 0
    faults: list[str] = field(default_factory=list)
    orders: list[str] = field(default_factory=list)
    """A digest of the sample order of each complete epoch."""
    _order: list[int] = field(default_factory=list)

    def add(self, entry: Entry) -> None:
        """Check the next batch that the run committed."""
        if entry.epoch != self.epoch:
            self._fault(f"went to epoch {entry.epoch} after {len(self._order):,} samples")
            self.epoch, self._order = entry.epoch, []
        for index, found in zip(entry.indices, entry.digests, strict=True):
            if found != self.truth[index]:
                self._fault(f"sample {index} has other bytes")
        self._order += entry.indices
        self.samples += len(entry.indices)
        if len(self._order) >= len(self.truth):
            self._end_epoch()

    @property
    def between_epochs(self) -> bool:
        """True when no sample of an unfinished epoch was consumed."""
        return not self._order

    def _end_epoch(self) -> None:
        if sorted(self._order) != list(range(len(self.truth))):
            twice = len(self._order) - len(set(self._order))
            missing = len(self.truth) - len(set(self._order))
            self._fault(f"{twice} samples twice, {missing} never")
        self.orders.append(digest(repr(self._order).encode()))
        self.epoch, self._order = self.epoch + 1, []

    def _fault(self, what: str) -> None:
        self.faults.append(f"{self.run}, epoch {self.epoch}: {what}")


def differing(audits: Sequence[Audit]) -> list[str]:
    """One fault for each epoch whose order differs between runs. Runs of one seed must see the same order."""
    faults = []
    for epoch in range(max(len(audit.orders) for audit in audits)):
        seen = {audit.orders[epoch] for audit in audits if epoch < len(audit.orders)}
        if len(seen) > 1:
            faults.append(f"epoch {epoch} came in {len(seen)} orders")
    return faults
