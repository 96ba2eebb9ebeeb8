"""Maps Arrow's types, and the features that Hugging Face stores beside them, to columns.

pyarrow is optional, so each function gets it as the argument `arrow`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cachesvc.core.errors import InvalidInput
from cachesvc.sources.columnar.column import MAX_DEPTH, Column

U32 = "<u4"
_EXTENSION, _EXTENSION_METADATA = b"ARROW:extension:name", b"ARROW:extension:metadata"
_JSON = "arrow.json"
_HUGGING_FACE = b"huggingface"
_SHAPED = frozenset({"Array2D", "Array3D", "Array4D", "Array5D"})


class Unread(Exception):
    """A type that is not read; the message is its name."""


def column_of(arrow: Any, field: Any, feature: Any = None, depth: int = 0) -> Column:
    """Return the column of a field as it lies in Arrow's buffers. `feature`: Hugging Face's description of it.

    Raises Unread.
    """
    name, kind = field.name, field.type
    if depth > MAX_DEPTH:
        raise Unread(f"nested deeper than {MAX_DEPTH} types")
    if isinstance(kind, arrow.BaseExtensionType):
        stored = column_of(arrow, arrow.field(name, kind.storage_type), feature, depth)
        if isinstance(kind, arrow.FixedShapeTensorType):
            return _extended(
                stored, kind.extension_name, {"shape": kind.shape, "permutation": kind.permutation}, feature
            )
        return _extended(stored, kind.extension_name, {}, feature)
    if field.metadata and _EXTENSION in field.metadata:
        stored = column_of(arrow, arrow.field(name, kind), feature, depth)
        given = _json(field.metadata.get(_EXTENSION_METADATA))
        return _extended(stored, field.metadata[_EXTENSION].decode(errors="replace"), given, feature)
    types = arrow.types
    if types.is_dictionary(kind):
        values = column_of(arrow, arrow.field(name, kind.value_type), feature, depth + 1)
        return Column(name, "coded", dtype=_dtype(kind.index_type), children=(values,))
    if types.is_map(kind):
        pair = arrow.struct([kind.key_field, kind.item_field])
        return Column(
            name, "list", "map", "<i4", children=(column_of(arrow, arrow.field("", pair), None, depth + 1),)
        )
    if types.is_struct(kind):
        inner = [kind.field(at) for at in range(kind.num_fields)]
        if len({each.name for each in inner}) < len(inner):
            raise Unread("struct with two fields of one name")
        children = tuple(column_of(arrow, each, _part(feature, each.name), depth + 1) for each in inner)
        return Column(name, "struct", _image_of(feature), children=children)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        item = column_of(arrow, arrow.field("", kind.value_type), _part(feature, None), depth + 1)
        means = _shape_of(feature)
        if types.is_fixed_size_list(kind):
            if not kind.list_size:
                raise Unread(str(kind))
            return Column(name, "fixed list", means, size=kind.list_size, children=(item,))
        return Column(name, "list", means, "<i8" if types.is_large_list(kind) else "<i4", children=(item,))
    leaf = _leaf(arrow, name, kind)
    return _extended(leaf, _JSON, {}, feature) if _type_of(feature) == "Json" else leaf


def _leaf(arrow: Any, name: str, kind: Any) -> Column:
    types = arrow.types
    if types.is_null(kind):
        return Column(name, "null")
    if types.is_boolean(kind):
        return Column(name, "bool")
    if types.is_string(kind) or types.is_large_string(kind):
        return Column(name, "text", "text", "<i8" if types.is_large_string(kind) else "<i4")
    if types.is_binary(kind) or types.is_large_binary(kind):
        return Column(name, "text", "bytes", "<i8" if types.is_large_binary(kind) else "<i4")
    if str(kind) in ("string_view", "binary_view"):
        return Column(name, "view", "text" if str(kind) == "string_view" else "bytes")
    if types.is_fixed_size_binary(kind) and not types.is_decimal(kind) and kind.byte_width:
        return Column(name, "fixed", "bytes", f"V{kind.byte_width}")
    if types.is_decimal(kind):
        return Column(name, "fixed", f"decimal:{kind.scale}", f"V{kind.bit_width // 8}")
    if types.is_integer(kind) or types.is_floating(kind):
        return Column(name, "fixed", dtype=_dtype(kind))
    if types.is_date(kind):
        return Column(name, "fixed", "date:D" if types.is_date32(kind) else "date:ms", _int(kind))
    if types.is_time(kind):
        return Column(name, "fixed", f"time:{kind.unit}", _int(kind))
    if types.is_timestamp(kind):
        return Column(name, "fixed", f"timestamp:{kind.unit}:{kind.tz or ''}", "<i8")
    if types.is_duration(kind):
        return Column(name, "fixed", f"duration:{kind.unit}", "<i8")
    raise Unread(str(kind))


def _int(kind: Any) -> str:
    return f"<i{kind.bit_width // 8}"


def _dtype(kind: Any) -> str:
    return str(np.dtype(kind.to_pandas_dtype()).str)


def _extended(stored: Column, name: str, given: Mapping[str, Any], feature: Any) -> Column:
    """Return a column of an extension type with its parameters; one of an unknown type is read as it is stored."""
    if name == _JSON:
        decoded = stored.means == "text" and not (
            isinstance(feature, dict) and feature.get("decode") is False
        )
        return replace(stored, means="json") if decoded else stored
    means = {"arrow.uuid": "uuid", "arrow.bool8": "bool8"}.get(name, stored.means)
    order = ",".join(map(str, given.get("permutation") or ()))
    if name == "arrow.fixed_shape_tensor" and isinstance(given.get("shape"), list):
        means = f"tensor:{','.join(map(str, given['shape']))}:{order}"
    if name == "arrow.variable_shape_tensor" and {each.name for each in stored.children} == {"data", "shape"}:
        means = f"ragged:{order}"
    return replace(stored, means=means)


def _json(raw: bytes | None) -> dict[str, Any]:
    try:
        found = json.loads(raw) if raw else {}
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


# ---- features of Hugging Face


def features_of(schema: Any) -> Mapping[str, Any]:
    """Return the features in a schema's metadata by column, {} where there are none."""
    info = _json((schema.metadata or {}).get(_HUGGING_FACE)).get("info")
    found = info.get("features") if isinstance(info, dict) else None
    return found if isinstance(found, dict) else {}


def classes_of(features: Mapping[str, Any], names: Sequence[str]) -> tuple[str, ...]:
    """Return the class names of `label` (or `labels`), else of the only column of classes; () where there is none."""
    found = {
        name: tuple(map(str, features[name].get("names") or ()))
        for name in names
        if _type_of(features.get(name)) == "ClassLabel"
    }
    for name in ("label", "labels"):
        if name in found:
            return found[name]
    return next(iter(found.values())) if len(found) == 1 else ()


def _type_of(feature: Any) -> str:
    found = feature.get("_type") if isinstance(feature, dict) else None
    return found if isinstance(found, str) else ""


def _part(feature: Any, name: str | None) -> Any:
    """Return the feature of a struct's field, or of a list's items if `name` is None."""
    if isinstance(feature, list):
        return feature[0] if feature and name is None else None
    if not isinstance(feature, dict):
        return None
    if _type_of(feature) in ("Sequence", "List", "LargeList"):
        inner = feature.get("feature")
        if name is None:
            return inner
        # a sequence of dicts is stored as a dict of lists
        part = inner.get(name) if isinstance(inner, dict) and "_type" not in inner else None
        return {"_type": "List", "feature": part} if part is not None else None
    return feature.get(name) if name is not None and "_type" not in feature else None


def _image_of(feature: Any) -> str:
    """Return "image" with the mode that a feature states ("image:L"), "" for other features."""
    if _type_of(feature) != "Image" or feature.get("decode") is False:
        return ""
    mode = feature.get("mode")
    return f"image:{mode}" if isinstance(mode, str) else "image"


def _shape_of(feature: Any) -> str:
    if _type_of(feature) not in _SHAPED:
        return ""
    shape = feature.get("shape")
    if not isinstance(shape, list) or not all(each is None or isinstance(each, int) for each in shape):
        return ""
    return f"tensor:{','.join('-1' if each is None else str(each) for each in shape)}:"


# ---- one schema for several files


def plain_type(arrow: Any, kind: Any) -> Any:
    """Return a type without dictionaries and views, which are other ways to store the same values."""
    types = arrow.types
    if types.is_dictionary(kind):
        return plain_type(arrow, kind.value_type)
    if str(kind) in ("string_view", "binary_view"):
        return arrow.string() if str(kind) == "string_view" else arrow.binary()
    if types.is_struct(kind):
        return arrow.struct([_plain_field(arrow, kind.field(at)) for at in range(kind.num_fields)])
    if types.is_map(kind):
        return arrow.map_(plain_type(arrow, kind.key_type), _plain_field(arrow, kind.item_field))
    if types.is_fixed_size_list(kind):
        return arrow.list_(_plain_field(arrow, kind.value_field), kind.list_size)
    if types.is_large_list(kind) or str(kind).startswith("large_list_view"):
        return arrow.large_list(_plain_field(arrow, kind.value_field))
    if types.is_list(kind) or str(kind).startswith("list_view"):
        return arrow.list_(_plain_field(arrow, kind.value_field))
    return kind


def _plain_field(arrow: Any, field: Any) -> Any:
    return field.with_type(plain_type(arrow, field.type)).with_nullable(True)


def plain_schema(arrow: Any, schema: Any) -> Any:
    """Return a schema of plain types, with its metadata."""
    return arrow.schema([_plain_field(arrow, field) for field in schema], schema.metadata)


def united(arrow: Any, whole: Any, uri: str, schema: Any) -> Any:
    """Return the schema of plain types that holds the values of `whole` and of a further file at `uri`: columns by name,
    the wider of two numbers, any type for a column without values. Raises InvalidInput for types that do not unite, and
    for several columns of one name."""
    twice = next((name for name in schema.names if schema.names.count(name) > 1), None)
    if twice is not None:
        raise InvalidInput(
            f"{uri} has several columns named {twice!r}: rename them, or choose others by fields="
        )
    try:
        found = arrow.unify_schemas([whole, schema], promote_options="permissive")
        return found.with_metadata(whole.metadata or schema.metadata)
    except (arrow.ArrowException, ValueError, TypeError):
        for field in schema:
            at = whole.get_field_index(field.name)
            try:
                if at >= 0:
                    arrow.unify_schemas(
                        [arrow.schema([whole.field(at)]), arrow.schema([field])], promote_options="permissive"
                    )
            except (arrow.ArrowException, ValueError, TypeError):
                raise InvalidInput(
                    f"{uri}: column {field.name!r} is {field.type}, and {whole.field(at).type} in the files before it: "
                    "write it with one type, or leave it out of fields="
                ) from None
        raise


def fields_of(arrow: Any, schema: Any, names: Sequence[str]) -> Any:
    """Return the schema of these fields, as far as a file has them: columns, or parts of structs by path
    (`image.bytes`), whose name is the path."""
    found = [(name, field_at(schema, name)) for name in names]
    return arrow.schema(
        [field.with_name(name) for name, field in found if field is not None], schema.metadata
    )


def field_at(schema: Any, path: str) -> Any:
    """Return the column of a name, else the part of a struct at a path, else None."""
    if path in schema.names:
        return schema.field(schema.names.index(path))
    first, *rest = path.split(".")
    if not rest or first not in schema.names:
        return None
    field = schema.field(schema.names.index(first))
    for name in rest:
        at = field.type.get_field_index(name) if hasattr(field.type, "get_field_index") else -1
        if at < 0:
            return None
        field = field.type.field(at)
    return field


def part_at(schema: Any, column: Any, path: str) -> Any:
    """Return the array of `field_at`, given a chunked array of its top-level column in a file's `schema`."""
    if path in schema.names:
        return column
    import pyarrow.compute

    _, *rest = path.split(".")
    return pyarrow.compute.struct_field(column, rest)
