"""What the messages of the API say in the daemon's own words, and the other way round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial

from cachesvc.catalog.options import Options
from cachesvc.config import Settings
from cachesvc.daemon.datasets import Dataset
from cachesvc.v1 import cachesvc_pb2 as pb


def options_of(given: pb.DatasetOptions, settings: Settings) -> Options:
    """What a caller said, and the daemon's own where it said nothing."""
    names: Callable[[str], object] = partial(getattr, given)
    plain = {field.name: names(field.name) for field in fields(Options)}
    plain["extent_bytes"] = plain["extent_bytes"] or settings.extent_bytes
    return Options(**plain)  # type: ignore[arg-type]


def described(dataset: Dataset) -> pb.Dataset:
    """What a caller is told of a dataset that it may see."""
    catalog = dataset.catalog
    return pb.Dataset(
        id=dataset.id,
        uri=catalog.uri,
        format=catalog.format,
        samples=catalog.samples,
        extents=len(dataset.extent_ids),
        size_bytes=dataset.size_bytes,
        stored_bytes=catalog.stored_bytes,
    )
