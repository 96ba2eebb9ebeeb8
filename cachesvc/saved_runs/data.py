"""The data of a run as its state names it: where it lies, and which part of it is read."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.columns import Ints
from cachesvc.catalog.options import Options
from cachesvc.core.errors import InvalidInput, StateMismatch
from cachesvc.core.order.parts import random_parts
from cachesvc.core.safe_text import redacted

MAX_SOURCE_CHARS = 16_384
"""Characters of a source in a state; a state has 64 KiB. Longer lists of URIs and indices are left out."""
_MOST_RANGES = 256
Pick = dict[str, Any]
"""One selection: `{"where": expression}`, `{"split": name, "of": {name: fraction}, "seed": n}`, `{"select": ranges}`, or
`{"select": None}` for indices that are too many to write down."""


@dataclass(frozen=True, slots=True)
class DataSource:
    """A dataset of `open_dataset` or a part of it: the URIs and options that opened it, its version, and the selections
    that were made of it, in turn. `uris` are without secrets, and empty where they were too long."""

    version: str
    uris: tuple[str, ...] = ()
    options: Options = field(default_factory=Options)
    picks: tuple[Pick, ...] = ()

    @property
    def text(self) -> str:
        """The source as a state has it, in JSON."""
        usual = asdict(Options())
        given = {name: value for name, value in asdict(self.options).items() if value != usual[name]}
        row = {"version": self.version, "uris": [*map(redacted, self.uris)], "options": given}
        found = json.dumps(row | {"picks": self.picks}, ensure_ascii=False)
        if len(found) > MAX_SOURCE_CHARS:
            found = json.dumps(row | {"picks": self.picks, "uris": []}, ensure_ascii=False)
        if len(found) > MAX_SOURCE_CHARS:
            found = json.dumps(row | {"picks": [{"select": None}], "uris": []}, ensure_ascii=False)
        return found if len(found) <= MAX_SOURCE_CHARS else ""

    def ids(self, catalog: Catalog, identity: str) -> Ints | None:
        """The catalog's samples that are read, in the order of their indices; None for all. `identity` is the state's name
        of the data. Raises StateMismatch where the source does not say which they are."""
        ids: Ints | None = None
        for pick in self.picks:
            count = catalog.samples if ids is None else ids.size
            if "where" in pick:
                found = catalog.find(str(pick["where"]))
                ids = found if ids is None else ids[np.isin(ids, found)]
                continue
            places = _places(pick, count)
            ids = places if ids is None else ids[places]
        check_identity(ids, self.version, identity)
        return ids


def parse_source(text: str) -> DataSource:
    """The inverse of `DataSource.text`. Raises StateMismatch for anything else."""
    try:
        row = json.loads(text)
        return DataSource(
            str(row["version"]), tuple(map(str, row["uris"])), Options(**row["options"]), tuple(row["picks"])
        )
    except (ValueError, TypeError, KeyError, InvalidInput):
        raise StateMismatch(f"the state's source is {text[:80]!r}: it names no dataset") from None


def identity_of(version: str, ids: Ints | None) -> str:
    """The name of a dataset in states: its version, with a digest of the indices for a part of it."""
    if ids is None:
        return version
    return f"{version}:{hashlib.blake2b(np.ascontiguousarray(ids).data, digest_size=8).hexdigest()}"


def check_identity(ids: Ints | None, version: str, identity: str) -> None:
    """Raise StateMismatch where these samples are not those that a state names."""
    found = identity_of(version, ids)
    if found != identity:
        raise StateMismatch(
            f"the state belongs to {identity[:80]}, and this is {found}: give the indices of its part (--ids)"
        )


def selected(places: Ints) -> Pick:
    """The pick of `select` with these indices."""
    starts = np.flatnonzero(np.diff(places, prepend=places[:1] - 2) != 1)
    if starts.size > _MOST_RANGES:
        return {"select": None}
    ends = np.append(starts[1:], places.size)
    pairs = zip(places[starts].tolist(), (ends - starts).tolist(), strict=True)
    return {"select": [[first, first + count] for first, count in pairs]}


def _places(pick: Pick, count: int) -> Ints:
    """The indices that a pick takes of `count`."""
    if "split" in pick:
        names, fractions = [*pick["of"]], [*pick["of"].values()]
        return random_parts(count, fractions, int(pick["seed"]))[names.index(pick["split"])]
    ranges = pick.get("select")
    if ranges is None:
        raise StateMismatch(
            "the state's data is a selection of indices that the state does not hold: save them (np.save), and give --ids"
        )
    return np.concatenate([np.empty(0, np.int64), *(np.arange(low, high) for low, high in ranges)])
