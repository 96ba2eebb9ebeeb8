"""The generators that are passed to a user's callables, keyed by seed, epoch and sample, or by torch's generator."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from cachesvc.catalog.catalog import Catalog
from cachesvc.core.errors import InvalidInput
from cachesvc.core.order.epoch_order import sample_key

_TYPE_ERRORS = (TypeError, AttributeError, ValueError)
RngParameter = Literal["nothing", "named", "second"]
"""How a user's callable takes its generator."""
RngKey = tuple[int, int] | None
"""The (seed, epoch) of generators; None where no loader has set it, as under torch's own."""


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


def rng_of(rng_key: RngKey, sample: int) -> np.random.Generator:
    """Return the generator of a sample. Without a key each call draws one from torch's generator of this process, which
    torch seeds anew in each worker and epoch, so the numbers of a transform differ from epoch to epoch."""
    key = int(torch.randint(2**63 - 1, ())) if rng_key is None else sample_key(*rng_key, sample)
    return np.random.default_rng(key)


def _mistaken(row: Any, function: Callable[..., Any], error: Exception) -> InvalidInput | None:
    """Return the error for a function that failed because it got a tuple or a dict, as far as its own error tells."""
    kind = type(row).__name__
    takes_whole = getattr(function, "takes_whole", False)
    if (
        takes_whole
        or kind not in ("tuple", "dict")
        or kind not in str(error)
        or not isinstance(error, _TYPE_ERRORS)
    ):
        return None
    if kind == "tuple":
        values = ", ".join(type(value).__name__ for value in row)
        what = f"the pair ({values})" if len(row) == 2 else f"the tuple ({values})"
        mend = "take its values there"
    else:
        what, mend = (
            f"the dict of {', '.join(map(str, row))}",
            "take its values there, or choose one by fields=",
        )
    folder = ". cachesvc.torch.ImageFolder passes the image alone" if kind == "tuple" else ""
    found = InvalidInput(
        f"prepare=, transform= and decode= get the whole sample, here {what}: {mend}{folder}. "
        f"{type(error).__name__}: {' '.join(str(error).split())}"
    )
    found.of_object = True  # the function itself may have chosen this sample's error
    return found


def call_user(
    catalog: Catalog,
    function: Callable[..., Any],
    parameter: RngParameter,
    row: Any,
    sample: int,
    rng_key: RngKey,
) -> Any:
    """Call a user's function with a sample. Its errors pass unchanged, with a note that names the sample (Python 3.11
    and later). Raises InvalidInput for a function that takes the whole sample for one of its values."""
    try:
        if parameter == "nothing":
            return function(row)
        rng = rng_of(rng_key, sample)
        return function(row, rng=rng) if parameter == "named" else function(row, rng)
    except Exception as error:
        mistaken = _mistaken(row, function, error)
        if mistaken is not None:
            raise mistaken from error
        if hasattr(error, "add_note"):
            error.add_note(f"in sample {catalog.key(sample)} of {catalog.uri}")
        raise
