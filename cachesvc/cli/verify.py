"""`cachesvc verify`: check resident bytes against the checksums of their fills."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import click

from cachesvc.cli import members, options, output
from cachesvc.client.control import Control
from cachesvc.core.errors import CacheError, CorruptData
from cachesvc.core.model import DatasetId


@click.command()
@click.argument("name", metavar="URI|ID", shell_complete=options.known_uris)
@members.option
@options.dataset
@options.daemon
def verify(name: str, cluster: bool, socket: str | None, json: bool, **given: Any) -> int:
    """Check a dataset's resident extents against their checksums.

    A corrupt extent, or one whose file is gone, is dropped and filled again when it is needed; the exit code is then 5.
    """

    def verify(control: Control, versions: Sequence[DatasetId]) -> None:
        failure: CacheError | None = None
        for dataset in versions:
            try:
                check(control, dataset, name, json)
            except CorruptData as error:
                failure = error
        if failure is not None:
            raise failure

    return members.run_versions(socket, cluster, name, options.dataset_options(given), verify, json)[0]


def check(control: Control, dataset: DatasetId, name: str, as_json: bool) -> None:
    """Verify one dataset and print the result. Raises CorruptData when an extent was corrupt."""
    replies = deque(control.verify(dataset), maxlen=1)
    if not replies or not replies[0].done:
        raise CacheError(f"the daemon ended the check of {name} early; see its log")
    reply = replies[0]
    counts, good = output.plain(reply), reply.checked_extents - reply.corrupt_extents
    del counts["done"]
    text = f"{name} ({dataset}): {good:,} of {reply.checked_extents:,} resident extents verified"
    output.report(as_json, text, {"event": "verified", "dataset": dataset, "target": name} | counts)
    if reply.corrupt_extents:
        raise CorruptData(
            f"{reply.corrupt_extents:,} of {reply.extents:,} resident extents of {name} were corrupt or not to"
            f" be read and are dropped; fill them again: cachesvc prefetch {name}"
        )
