"""Events of fills: a failure, by whose fault it is, and the repair of a copy that was dropped as damaged."""

from __future__ import annotations

from typing import Any

from cachesvc.core.commands import StartFill
from cachesvc.core.errors import CacheError, from_code
from cachesvc.daemon.datasets import ServedDataset
from cachesvc.daemon.events.event import SOURCE_ERRORS, Event, failed, record
from cachesvc.daemon.fills.holes import CopyHoles


def record_failure(error: CacheError, command: StartFill, dataset: ServedDataset) -> None:
    """Record that a fill failed, or left out objects."""
    kind = "source_failed" if isinstance(error, SOURCE_ERRORS) else "fill_failed"
    record(failed(kind, error, **_about(command, dataset)))


def record_filled(command: StartFill, dataset: ServedDataset, holes: CopyHoles, repairs: bool) -> None:
    """Record a fill that left out objects, or that repairs a damaged copy; others are no events."""
    if holes.ranges:
        record_failure(from_code(holes.code, holes.message), command, dataset)
    elif repairs:
        record(Event("repaired", **_about(command, dataset)))


def _about(command: StartFill, dataset: ServedDataset) -> dict[str, Any]:
    return {
        "uri": dataset.catalog.uri,
        "dataset": dataset.id,
        "extent": command.extent.hex(),
        "tier": command.tier,
        "size_bytes": dataset.sizes[dataset.index_of[command.extent]],
    }
