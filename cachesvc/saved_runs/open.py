"""Opens a saved run: its state from a file, and the catalogs of its data."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.columns import Ints
from cachesvc.core.errors import InvalidInput, StateMismatch
from cachesvc.core.order.state import LoaderState, parse_state
from cachesvc.saved_runs.catalogs import catalog_at, catalog_of
from cachesvc.saved_runs.data import DataSource, MixSource, PackSource, Source, check_identity, parse_source
from cachesvc.saved_runs.run_data import Leaf
from cachesvc.saved_runs.saved_run import SavedRun
from cachesvc.saved_runs.state_files import read_state

if TYPE_CHECKING:
    from cachesvc.saved_runs.composed import Mixed, Packs

_PLAIN = re.compile("[0-9a-f]{32}(:[0-9a-f]{16})?")


def opened_run(
    state: str | Mapping[str, Any],
    name: str = "",
    catalogs: Sequence[str] = (),
    ids: str | None = None,
    uris: Sequence[str] = (),
    socket: str | None = None,
    counts: str | None = None,
) -> SavedRun:
    """The run of a saved state, or of the file that holds one. `name`: its place in the file. `catalogs`: copies of its
    datasets' catalogs. `ids`: a file of np.save with the indices of a part of the dataset. `uris`: where the data lies, if
    that is not where the state says. `counts`: the folder of `pack(counts=)`, for packs with `eos=` or `tokenize=`.

    Raises what reading the state and finding the catalogs raise, StateMismatch for a run over anything but datasets of
    `open_dataset`, parts, packs and mixtures of them, and InvalidInput for `ids` or `uris` of several datasets.
    """
    found = read_state(state, name) if isinstance(state, str) else parse_state(state)
    source, copies = _source_of(found), [catalog_at(path) for path in catalogs]
    if isinstance(source, DataSource):
        return SavedRun(found, _leaf(_moved(source, uris), copies, socket, found.dataset, ids))
    if isinstance(source, PackSource):
        source = replace(source, of=_moved(source.of, uris))
    elif uris:
        raise InvalidInput(
            "the run has several datasets: bring each to where the state says, or give their --catalog"
        )
    if ids is not None:
        raise InvalidInput("--ids is for runs over a part of one dataset, and not for packs or mixtures")
    data = _composed(source, copies, socket, counts)
    if data.identity != found.dataset.partition("@")[0]:
        raise StateMismatch(
            f"the state belongs to {found.dataset[:80]}, and this data is {data.identity[:80]}"
        )
    return SavedRun(found, data)


def _composed(
    source: PackSource | MixSource, copies: Sequence[Catalog], socket: str | None, counts: str | None
) -> Packs | Mixed:
    from cachesvc.core.order.mixture_weights import weights_of
    from cachesvc.saved_runs.composed import Mixed, Packs, sizes_of

    if isinstance(source, PackSource):
        return Packs(source, _leaf(source.of, copies, socket), counts)
    parts = [
        _leaf(each, copies, socket)
        if isinstance(each, DataSource)
        else Packs(each, _leaf(each.of, copies, socket), counts)
        for each in source.mixed
    ]
    try:
        return Mixed(parts, weights_of(sizes_of(parts), source.weights))
    except (KeyError, TypeError, ValueError) as error:
        raise StateMismatch(
            f"no loader saved this state: its weights are {source.weights}: {error}"
        ) from None


def _moved(source: DataSource, uris: Sequence[str]) -> DataSource:
    return replace(source, uris=tuple(uris)) if uris else source


def _leaf(
    source: DataSource,
    copies: Sequence[Catalog],
    socket: str | None,
    identity: str | None = None,
    ids: str | None = None,
) -> Leaf:
    """A dataset of the run. `identity`: the state's name of it, which is checked where it is known."""
    catalog = next((each for each in copies if each.id == source.version), None)
    if copies and catalog is None:
        have = ", ".join(each.id for each in copies)
        raise StateMismatch(f"the state is of version {source.version}, and --catalog has {have}")
    if catalog is None:
        catalog = catalog_of(source, socket)
    part = source.ids(catalog) if ids is None else _saved_ids(ids)
    if identity is not None:
        check_identity(part, source.version, identity)
    return Leaf(source, catalog, part)


def _source_of(state: LoaderState) -> Source:
    if state.source:
        return parse_source(state.source)
    if not _PLAIN.fullmatch(state.dataset):
        raise StateMismatch(
            "the state does not say which data it is of, as that of a dataset which wraps one of open_dataset: only its "
            "loader knows its samples; load the state, and call batches.samples_of(step)"
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
