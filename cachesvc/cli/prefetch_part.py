"""The part of `cachesvc prefetch` that fetches chosen extents: what a run reads next, what an expression selects, or a
fraction."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from cachesvc.cli import options, output, resolve
from cachesvc.cli.progress_bar import ProgressBar
from cachesvc.core.errors import InvalidInput, OutOfSpace

if TYPE_CHECKING:
    from cachesvc.catalog.columns import Ints
    from cachesvc.catalog.options import Options
    from cachesvc.saved_runs.run_data import Leaf
    from cachesvc.saved_runs.saved_run import SavedRun


def _ranks(text: str) -> range:
    """The ranks of `8-15`, both included, or of a single number."""
    match = re.fullmatch(r"([0-9]{1,7})(?:-([0-9]{1,7}))?", text)
    if match is None or (match[2] and int(match[2]) < int(match[1])):
        raise InvalidInput(f"{text!r} is no range of ranks; write it as 8-15, or one number")
    return range(int(match[1]), int(match[2] or match[1]) + 1)


RANKS = options.Parsed("first-last", _ranks)


class FreshRun(NamedTuple):
    """A run that has yet to begin: `steps` of it are fetched, None for none."""

    steps: int | None
    global_batch: int | None
    seed: int
    nodes: int
    shuffle: bool
    world: int
    ranks: range | None


def saved(
    state: str,
    name: str,
    catalogs: Sequence[str],
    counts: str | None,
    ids: str | None,
    uris: Sequence[str],
    socket: str | None,
) -> SavedRun:
    """The run of a saved state."""
    from cachesvc.saved_runs.open import opened_run

    return opened_run(state, name, catalogs, ids, [*map(resolve.absolute_uri, uris)], socket, counts)


def ahead(run: SavedRun, steps: int | None, world: int, ranks: range | None) -> list[tuple[Leaf, Ints]]:
    """The extents of each dataset that these ranks, by default all of `world`, read in the next steps. Raises
    InvalidInput."""
    if steps is None:
        raise InvalidInput("how many steps ahead? Give --steps")
    return run.extents_ahead(steps, [run.slots_of(rank, world) for rank in ranks or range(world)])


def part_of(
    uris: Sequence[str],
    wanted: Options,
    where: str | None,
    fraction: float | None,
    fresh: FreshRun,
    socket: str | None,
    as_json: bool,
) -> tuple[Leaf, Ints]:
    """The dataset at the URIs, and the extents that are chosen of it: those of the samples `where` selects, of the first
    `fraction`, and of a fresh run's first steps, what of these is given. Raises InvalidInput."""
    import numpy as np

    from cachesvc.client.control import Control
    from cachesvc.core.model import DEFAULT_WINDOW_BYTES
    from cachesvc.core.order.epoch_order import OrderSpec, window_extents
    from cachesvc.saved_runs.catalogs import catalog_of
    from cachesvc.saved_runs.data import DataSource
    from cachesvc.saved_runs.extents import extents_of
    from cachesvc.saved_runs.run_data import Leaf
    from cachesvc.saved_runs.saved_run import SavedRun, fresh_state

    if not uris:
        raise InvalidInput("give the URI of the data")
    with Control(socket) as control:
        opened = resolve.open_uris(control, list(uris), wanted, as_json)
        source = DataSource(opened.id, tuple(map(resolve.absolute_uri, uris)), wanted)
        catalog = catalog_of(source, control.directory)
    leaf = Leaf(source, catalog, None if where is None else np.asarray(catalog.find(where), np.int64))
    if fresh.steps is not None:
        if fresh.global_batch is None:
            raise InvalidInput("--steps needs the --state of a run, or the --global-batch of one that begins")
        window = window_extents(catalog.extent_sizes, DEFAULT_WINDOW_BYTES)
        nodes = min(fresh.nodes, fresh.global_batch)
        spec = OrderSpec(fresh.seed, fresh.global_batch, window, nodes, fresh.shuffle, "short")
        run = SavedRun(fresh_state(leaf.identity, leaf.size(spec, 0), spec), leaf)
        ((_, chosen),) = ahead(run, fresh.steps, fresh.world, fresh.ranks)
    elif leaf.ids is not None:
        chosen = extents_of(catalog, leaf.ids)
    else:
        chosen = np.arange(len(catalog.extent_sizes))
    if fraction is not None:
        chosen = chosen[chosen < math.ceil(fraction * len(catalog.extent_sizes))]
    return leaf, chosen


def fill_parts(parts: Sequence[tuple[Leaf, Ints]], socket: str | None, as_json: bool) -> int:
    """Fetch extents, and print what became of them. Raises OutOfSpace where some do not fit, and the first error of those
    that could not be fetched."""
    from cachesvc.saved_runs.fetch import fetch

    started = time.monotonic()
    with ProgressBar("prefetch", as_json) as progress:
        found = fetch(parts, socket, progress.update)
    took_s = time.monotonic() - started
    catalogs = [leaf.catalog for leaf, _ in parts]
    in_all = sum(len(each.extent_sizes) for each in catalogs)
    row = {
        "event": "prefetched",
        "dataset": catalogs[0].id,
        "datasets": [each.id for each in catalogs],
        "extents": found.extents,
        "of_extents": in_all,
        "resident_extents": found.resident_extents,
        "size_bytes": found.size_bytes,
        "resident_bytes": found.resident_bytes,
        "unfit_extents": found.unfit_extents,
        "failed_extents": found.failed_extents,
        "took_s": round(took_s, 3),
    }
    output.report(
        as_json,
        f"{', '.join(f'{each.uri} ({each.id})' for each in catalogs)}: {found.resident_extents:,} of"
        f" {found.extents:,} chosen extents resident, of {in_all:,} in all;"
        f" {output.size(found.resident_bytes)}, in {output.duration(took_s)}",
        row,
    )
    if found.failure is not None:
        raise found.failure
    if found.unfit_extents:
        raise OutOfSpace(
            f"{found.unfit_extents:,} of {found.extents:,} chosen extents do not fit: choose fewer steps or more"
            " shards, or give the daemon more --ram or --nvme"
        )
    return 0
