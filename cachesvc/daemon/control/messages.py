"""Converts between the API's messages and the daemon's own types."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from time import gmtime, strftime
from typing import TypeVar

from google.protobuf.message import Message

from cachesvc.catalog.options import Options
from cachesvc.daemon.datasets import ServedDataset
from cachesvc.v1 import cachesvc_pb2 as pb

_M = TypeVar("_M", bound=Message)


def message_of(kind: type[_M], source: object, **more: object) -> _M:
    """Return a message with `more`, and with the other fields that `source` has as attributes."""
    names = set(kind.DESCRIPTOR.fields_by_name).difference(more)
    return kind(**{name: getattr(source, name) for name in names if hasattr(source, name)}, **more)


def options_of(given: pb.DatasetOptions, extent_bytes: int) -> Options:
    """Return a caller's options, with the daemon's default extent size where the caller gave none."""
    option: Callable[[str], object] = partial(getattr, given)
    plain = {field.name: option(field.name) for field in fields(Options)}
    plain["extent_bytes"] = plain["extent_bytes"] or extent_bytes
    return Options(**plain)  # type: ignore[arg-type]


def dataset_message(dataset: ServedDataset) -> pb.Dataset:
    """Return a dataset's message for a caller who may see it."""
    return message_of(
        pb.Dataset,
        dataset.catalog,
        id=dataset.id,
        extents=len(dataset.extent_ids),
        size_bytes=dataset.size_bytes,
    )


def stale_text(dataset: ServedDataset, listed_at: int, why: str) -> str:
    """Return the warning of an opening while the source is down."""
    at = strftime("%Y-%m-%d %H:%M:%S UTC", gmtime(listed_at))
    return (
        f"{dataset.catalog.uri}: the source is down, so this is version {dataset.id}, listed at {at}; what changed since is"
        f" not seen ({why})"
    )
