"""Hit rates in closed form: f = cache / data, every epoch a uniform shuffle, steady state.

Tests compare the simulator with them, so they are written here and nowhere else.
"""

from __future__ import annotations

import math


def keep(f: float) -> float:
    """A fixed part is kept, or Belady's choice: f, the bound for every demand-fill policy."""
    return min(1.0, f)


def lru(f: float) -> float:
    """Least recently used: f + (1 - f) ln(1 - f)."""
    return 1.0 if f >= 1 else f + (1 - f) * math.log(1 - f)


def random_eviction(f: float) -> float:
    """A random victim: -f ln[1 - f (1 - e^(-1/f))]."""
    return 1.0 if f >= 1 else -f * math.log(1 - f * (1 - math.exp(-1 / f)))


EXPECTED = {"keep": keep, "lru": lru, "random": random_eviction, "belady": keep}
"""Hit rates by policy."""
