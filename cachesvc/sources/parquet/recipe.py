"""Describes what an extent is decoded to: the columns of a dataset, as Arrow's schema. It travels as a piece's codec."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from cachesvc.core.errors import CorruptData, InvalidInput, install
from cachesvc.sources.columnar.arrow_types import Unread, column_of, features_of
from cachesvc.sources.columnar.column import Column
from cachesvc.sources.columnar.extent import decoded

CODEC = "parquet"


@dataclass(frozen=True, slots=True)
class Recipe:
    """`schema`: fields by name, of plain types; a name may be the path of a struct's part. `columns`: the same as an
    extent holds them. `codec`: the schema as text."""

    schema: Any
    columns: tuple[Column, ...]
    codec: str

    @classmethod
    def of(cls, arrow: Any, schema: Any) -> Recipe:
        """Make one of a schema. Raises Unread."""
        features = features_of(schema)
        columns = tuple(decoded(column_of(arrow, field, features.get(field.name))) for field in schema)
        raw = schema.remove_metadata().serialize().to_pybytes()
        return cls(schema, columns, f"{CODEC}:{base64.b64encode(raw).decode()}")


@lru_cache(16)
def recipe_of(codec: str) -> Recipe:
    """The inverse of `Recipe.codec`. Raises CorruptData."""
    arrow = pyarrow_for("a cached dataset")
    try:
        raw = base64.b64decode(codec.partition(":")[2], validate=True)
        return Recipe.of(arrow, arrow.ipc.read_schema(arrow.py_buffer(raw)))
    except (arrow.ArrowException, OSError, ValueError, TypeError, Unread) as error:
        raise CorruptData(f"a catalog names columns that cannot be read: {error}; build it again") from error


def pyarrow_for(uri: str, what: str = "Parquet") -> Any:
    """Import pyarrow, which reads objects that are `what`. Raises InvalidInput where it is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InvalidInput(f"{uri} is {what} and pyarrow is not installed: {install('parquet')}") from None
    return pyarrow
