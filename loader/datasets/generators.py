"""The generators that are passed to a user's callables, keyed by seed, epoch and sample."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Literal

import numpy as np

from cachesvc.core.order.epoch_order import sample_key

RngParameter = Literal["nothing", "named", "second"]
"""How a user's callable takes its generator."""


def rng_parameter(function: object) -> RngParameter:
    """Return how a callable takes `rng`: by a parameter of that name, or by a second one without a default."""
    if not callable(function):
        return "nothing"
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return "nothing"  # a builtin without a signature takes only the sample
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if any(parameter.name == "rng" for parameter in positional[1:2]):
        return "second"
    given = function.keywords if isinstance(function, partial) else {}
    if any(parameter.name == "rng" for parameter in parameters) and "rng" not in given:
        return "named"
    return "second" if len([p for p in positional if p.default is p.empty]) == 2 else "nothing"


def rng_of(rng_key: tuple[int, int], sample: int) -> np.random.Generator:
    """Return the generator of a sample; `rng_key` is the (seed, epoch)."""
    return np.random.default_rng(sample_key(*rng_key, sample))
