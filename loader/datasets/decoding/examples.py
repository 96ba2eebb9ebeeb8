"""Decodes `tf.train.Example` to values: a feature that has one value in every sample is that value, others are lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cachesvc.catalog.layout import Field
from cachesvc.catalog.parsing.tf_example import BYTES, features_of

_LIST = "[]"


class ExampleDecoder:
    """Decodes the Examples of one catalog: to dicts of all features, or to tuples of the named ones.

    Values are bytes, int and float; several are list[bytes], int64[n] and float32[n]. A feature that a sample lacks is
    None, or empty.
    """

    def __init__(self, fields: Sequence[Field], names: Sequence[str] | None) -> None:
        encodings = {field.name: field.encoding for field in fields}
        self._as_dict = names is None
        self._fields = [(name, encodings[name]) for name in (encodings if names is None else names)]

    def decode(self, record: bytes) -> dict[str, Any] | tuple[Any, ...]:
        """Return one sample. Raises ValueError for a record that is no Example, or has other types than the catalog."""
        features = features_of(record)
        values = (_value(name, encoding, *features.get(name, ("", ()))) for name, encoding in self._fields)
        if self._as_dict:
            return {name: value for (name, _), value in zip(self._fields, values, strict=True)}
        return tuple(values)


def _value(name: str, encoding: str, kind: str, values: Any) -> Any:
    wanted = encoding.removesuffix(_LIST)
    if kind not in ("", wanted):
        raise ValueError(f"feature {name!r} is {kind}, and {wanted} in the catalog")
    if encoding != wanted:
        return list(values) if wanted == BYTES else np.array(values, wanted)
    if len(values) > 1:
        raise ValueError(f"feature {name!r} has {len(values)} values, and one in the catalog")
    return values[0] if values else None
