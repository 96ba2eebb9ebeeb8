"""Values of samples that the catalog holds: the label, the key, and the columns of tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from xxhash import xxh3_64_hexdigest

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.columns import Array
from cachesvc.catalog.labels.label_encoding import ABSENT
from cachesvc.catalog.labels.tags import tag_name
from cachesvc.core.errors import InvalidInput

LABEL, KEY = "label", "key"
ValueOf = Callable[[int], Any]
"""Returns the value of a sample of the catalog."""


def _value_names(catalog: Catalog) -> list[str]:
    """Return the names of the values."""
    tags = [str(name) for name, _ in catalog.columns.head["tags"]]
    return [*([LABEL] if catalog.labels is not None else []), KEY, *tags]


def value_of(catalog: Catalog, name: str) -> ValueOf | None:
    """Return the function that gives the value of a sample; None for an unknown name.

    - The label: a class index or float. Of several values, a float32 tensor.
    - The key: text.
    - A column of a table, by its name there or as a tag. Numbers are ints where all samples have a whole one, otherwise
      floats, NaN for none. Texts are "" for none.
    """
    if name == LABEL and catalog.labels is not None:
        return _label_of(catalog.labels)
    if name == KEY:
        return catalog.key
    found = catalog.tag(name)
    found = catalog.tag(tag_name(name)) if found is None else found
    if found is None:
        return None
    if not isinstance(found, tuple):
        return _number_of(found)
    codes, texts = found
    return lambda sample: texts[int(codes[sample])] if codes[sample] >= 0 else ""


def values_of(catalog: Catalog, wanted: Sequence[str] | None, fields: Sequence[str]) -> dict[str, ValueOf]:
    """Return the functions of those names that are no fields, but the catalog has the values of. `wanted`: None for all
    fields, of which rows of JSON may have none.

    Raises InvalidInput for unknown names, and for an empty choice.
    """
    if wanted is None:
        return {}
    stored = {field.name for field in catalog.fields}
    found = {
        name: None if name in stored else value_of(catalog, name) for name in wanted if name not in fields
    }
    missing = [name for name, value in found.items() if value is None]
    if missing or not wanted:
        known = ", ".join(dict.fromkeys([*fields, *_value_names(catalog)]))
        raise InvalidInput(f"fields {missing} are not in the dataset, which has {known}")
    return {name: value for name, value in found.items() if value is not None}


def _label_of(labels: Array) -> ValueOf:
    if labels.ndim == 1:
        return lambda sample: labels[sample].item()
    if labels.dtype.kind == "f":
        return lambda sample: torch.from_numpy(labels[sample].astype(np.float32))
    return lambda sample: torch.from_numpy(_absent_as_nan(labels[sample]))


def _absent_as_nan(cells: Array) -> Array:
    found = cells.astype(np.float32)
    found[cells == ABSENT] = np.nan
    return found


def _number_of(values: Array) -> ValueOf:
    if np.array_equal(values, np.floor(values)):  # NaN is unequal to itself
        return lambda sample: int(values[sample])
    return lambda sample: values[sample].item()


def describe_classes(classes: Sequence[str]) -> str:
    """Describe the classes of numeric labels: all are counted, some are named."""
    if not classes:
        return ""
    some = ", ".join(map(repr, classes[:3])) + (", ..." if len(classes) > 3 else "")
    return f" of {len(classes):,} classes ({some}; {xxh3_64_hexdigest(repr(tuple(classes)).encode())[:8]})"
