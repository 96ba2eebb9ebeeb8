"""A source with latency, bandwidth and faults, all from one seed."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """The time to the first byte is `latency_s` x lognormal(0, `spread`). A transfer gets at most `connection_bytes_per_s`,
    all transfers together `bytes_per_s`. A fetch fails with probability `fault_rate`."""

    latency_s: float = 0.02
    spread: float = 0.3
    connection_bytes_per_s: float = 500e6
    bytes_per_s: float = 2e9
    fault_rate: float = 0.0


class SimulatedSource:
    """Computes when each fetch ends. The shared bandwidth serves transfers in the order of their first bytes."""

    def __init__(self, spec: SourceSpec, seed: int) -> None:
        self._spec = spec
        self._random = random.Random(seed)
        self._free_at = 0.0

    def fetch(self, size_bytes: int, now: float) -> tuple[float, bool]:
        """The seconds until a fetch of `size_bytes` that starts now ends, and whether it fails."""
        spec = self._spec
        first_byte = now + spec.latency_s * self._random.lognormvariate(0.0, spec.spread)
        if self._random.random() < spec.fault_rate:
            return first_byte - now, True
        self._free_at = max(first_byte, self._free_at) + size_bytes / spec.bytes_per_s
        return max(self._free_at, first_byte + size_bytes / spec.connection_bytes_per_s) - now, False


class SimulatedLink:
    """One direction of a node's network link, which serves transfers one after another."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def carry(self, size_bytes: int, now: float) -> float:
        """Add a transfer that starts now; the time when it ends, in seconds."""
        self._free_at = max(now, self._free_at) + size_bytes / self._bytes_per_s
        return self._free_at
