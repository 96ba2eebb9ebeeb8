"""Inputs and targets of language models, made from rows of tokens."""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import torch

from cachesvc.catalog.layout import Fixed
from cachesvc.core.arguments import one_of
from cachesvc.core.errors import InvalidInput
from loader.datasets.plain_values import Empty, number_tensor

Targets = Literal["shifted", "unshifted"]
TARGETS = get_args(Targets)
DEFAULT_DTYPE = "int64"
"""The type of tokens unless `out` is given. torch's losses take targets of this type."""
Rows = np.ndarray[Any, Any]


def check_targets(targets: Any) -> None:
    """Raise InvalidInput for an unknown kind of targets."""
    one_of("targets", targets, TARGETS, ", or None")


def check_rows(targets: Targets, layout: object, gathered: bool, is_tokens: bool, uri: str) -> None:
    """Raise InvalidInput for samples that cannot have targets."""
    if not (gathered and isinstance(layout, Fixed)):
        raise InvalidInput(
            f"targets={targets!r} is for tokens as they are stored (format='tokens', or records), without fields= and"
            f" decode=; {uri} is opened differently"
        )
    dtype = np.dtype(layout.dtype)
    if dtype.kind not in "iu" or len(layout.shape) != 1:
        raise InvalidInput(
            f"targets={targets!r}: {uri} holds {dtype} of shape {list(layout.shape)}, not rows of tokens"
        )
    if targets == "shifted" and (
        layout.shape[0] < 2 or (is_tokens and layout.stride_bytes >= layout.record_bytes)
    ):
        raise InvalidInput(
            f"targets='shifted' needs the token after the last input: open {uri} with overlap=1"
        )


def split_targets(
    rows: Rows, targets: Targets, out: np.dtype[Any], empty: Empty | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of rows [n, tokens], each contiguous, in new memory or in memory that `empty`
    returns for a size in bytes. Shifted: each target is the token after its input. Unshifted: the same tokens."""
    parts = (rows[:, :-1], rows[:, 1:]) if targets == "shifted" else (rows, rows)
    first, second = (number_tensor(part, empty, out) for part in parts)
    return first, second


def target_sample(targets: Targets, inputs: Any, labels: Any) -> Any:
    """Return (inputs, targets) of a sample or batch, or a dict as Hugging Face's models take it."""
    return (inputs, labels) if targets == "shifted" else {"input_ids": inputs, "labels": labels}
