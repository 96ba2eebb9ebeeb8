"""Opens a saved run: its state from a file, and the catalog of its data."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cachesvc.catalog.columns import Ints
from cachesvc.core.errors import InvalidInput, StateMismatch
from cachesvc.core.order.state import LoaderState, parse_state
from cachesvc.saved_runs.catalogs import catalog_at, catalog_of
from cachesvc.saved_runs.data import DataSource, check_identity, parse_source
from cachesvc.saved_runs.saved_run import SavedRun
from cachesvc.saved_runs.state_files import read_state

_PLAIN = re.compile("[0-9a-f]{32}(:[0-9a-f]{16})?")


def opened_run(
    state: str | Mapping[str, Any],
    name: str = "",
    catalog_path: str | None = None,
    ids: str | None = None,
    uris: Sequence[str] = (),
    socket: str | None = None,
) -> SavedRun:
    """The run of a saved state, or of the file that holds one. `name`: its place in the file. `catalog_path`: a copy of its
    catalog. `ids`: a file of np.save with the indices of a part of the dataset. `uris`: where the data lies, if that is not
    where the state says.

    Raises what reading the state and finding the catalog raise, StateMismatch for a run over anything but a dataset of
    `open_dataset` or a part of it.
    """
    found = read_state(state, name) if isinstance(state, str) else parse_state(state)
    source = _source_of(found)
    if uris:
        source = replace(source, uris=tuple(uris))
    catalog = catalog_of(source, socket) if catalog_path is None else catalog_at(catalog_path, source)
    if ids is None:
        part = source.ids(catalog, found.dataset)
    else:
        part = _saved_ids(ids)
        check_identity(part, source.version, found.dataset)
    return SavedRun(found, source, catalog, part)


def _source_of(state: LoaderState) -> DataSource:
    if state.source:
        return parse_source(state.source)
    if not _PLAIN.fullmatch(state.dataset):
        raise StateMismatch(
            "the state is of a mixture, of packs or of a dataset that wraps one of open_dataset: only its loader knows its "
            "samples; load the state, and call batches.samples_of(step)"
        )
    return DataSource(state.dataset.partition(":")[0])


def _saved_ids(path: str) -> Ints:
    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InvalidInput(f"{path} is no file of np.save: {error}") from None
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise InvalidInput(f"{path} holds {found.dtype} of shape {found.shape}, not a list of indices")
    indices: Ints = found.astype(np.int64)
    return indices
