"""A source with latency, bandwidth and faults, all drawn from one seed."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """`latency_s` is the median to the first byte, spread as `latency_s` x lognormal(0, `spread`); a transfer gets
    `connection_bytes_per_s` at most, all of them together `bytes_per_s`; a fetch fails with `fault_rate`."""

    latency_s: float = 0.02
    spread: float = 0.3
    connection_bytes_per_s: float = 500e6
    bytes_per_s: float = 2e9
    fault_rate: float = 0.0


class SimulatedSource:
    """Says when each fetch ends. The shared bandwidth is a pipe that serves in the order of first bytes."""

    def __init__(self, spec: SourceSpec, seed: int) -> None:
        self._spec = spec
        self._random = random.Random(seed)
        self._free_at = 0.0

    def fetch(self, size_bytes: int, now: float) -> tuple[float, bool]:
        """(seconds until a fetch of `size_bytes` that starts now ends, whether it fails)."""
        spec = self._spec
        first_byte = now + spec.latency_s * self._random.lognormvariate(0.0, spec.spread)
        if self._random.random() < spec.fault_rate:
            return first_byte - now, True
        self._free_at = max(first_byte, self._free_at) + size_bytes / spec.bytes_per_s
        return max(self._free_at, first_byte + size_bytes / spec.connection_bytes_per_s) - now, False
