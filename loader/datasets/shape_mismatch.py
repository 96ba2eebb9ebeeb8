"""Describes which samples of a batch cannot be stacked because their values differ in shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

SampleName = Callable[[int], str]
"""Returns the name of the sample in a row of a batch."""
name_by_place: SampleName = "sample {}".format


def describe_mismatch(samples: Sequence[Any], name: SampleName) -> str:
    """Name the first sample, and the first one that differs from it in the shape of a value. Returns "" if none
    does."""
    shapes = [dict(_shapes(sample, "")) for sample in samples]
    for at, found in enumerate(shapes):
        for place, shape in found.items():
            first = shapes[0].get(place, shape)
            if shape != first:
                where = f" at {place}" if place else ""
                return f"{name(0)} has {first} and {name(at)} has {shape}{where}"
    return ""


def _shapes(value: Any, place: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        yield place, f"shape {list(value.shape)}"
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _shapes(item, f"{place}[{key!r}]")
    elif isinstance(value, (tuple, list)):
        yield place, f"length {len(value)}"
        for number, item in enumerate(value):
            yield from _shapes(item, f"{place}[{number}]")
    elif hasattr(value, "mode") and hasattr(value, "size"):  # a Pillow image; Pillow may not be installed
        yield place, f"mode {value.mode} and size {value.size}"
