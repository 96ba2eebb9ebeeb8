"""Messages as plain values, for JSON."""

from __future__ import annotations

from collections.abc import MutableSequence
from typing import Any


def plain(message: Any) -> dict[str, Any]:
    """Convert a protobuf message for JSON, with every field present and integers as integers, unlike proto JSON."""
    return {field.name: _plain_value(getattr(message, field.name)) for field in message.DESCRIPTOR.fields}


def _plain_value(value: Any) -> Any:
    if hasattr(value, "DESCRIPTOR"):  # a message; importing its class would slow every verb
        return plain(value)
    if isinstance(value, MutableSequence):
        return [_plain_value(item) for item in value]
    return value
