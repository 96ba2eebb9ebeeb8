"""The data of a run as its state names it: where it lies, and which part of it is read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.columns import Ints
from cachesvc.catalog.options import Options
from cachesvc.core.errors import InvalidInput, StateMismatch
from cachesvc.core.order.parts import random_parts
from cachesvc.core.safe_text import redacted

if TYPE_CHECKING:
    from cachesvc.core.order.mixture_weights import EpochWeights, Row, StepWeights

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

    def row(self, left_out: int) -> Row:
        """The source in plain values, without secrets. `left_out`: 1 leaves out the URIs, 2 the selections too."""
        usual = asdict(Options())
        given = {name: value for name, value in asdict(self.options).items() if value != usual[name]}
        uris, picks = [*map(redacted, self.uris)], self.picks
        return {
            "version": self.version,
            "uris": [] if left_out else uris,
            "options": given,
            "picks": [{"select": None}] if left_out > 1 and picks else picks,
        }

    def ids(self, catalog: Catalog) -> Ints | None:
        """The catalog's samples that are read, in the order of their indices; None for all. Raises StateMismatch where the
        source does not say which they are."""
        ids: Ints | None = None
        for pick in self.picks:
            count = catalog.samples if ids is None else ids.size
            if "where" in pick:
                found = catalog.find(str(pick["where"]))
                ids = found if ids is None else ids[np.isin(ids, found)]
                continue
            places = _places(pick, count)
            ids = places if ids is None else ids[places]
        return ids


@dataclass(frozen=True, slots=True)
class PackSource:
    """Packs of `length` tokens of a dataset's documents, with `pack`'s arguments. `overflow`: "" where documents are laid
    end to end. `counted`: where documents end is known from reading the data alone; after each token `eos`, or, for None,
    where rows that are tokenised do."""

    of: DataSource
    length: int
    dtype: str
    fields: tuple[str, ...]
    overflow: str
    counted: bool
    eos: int | None = None

    def row(self, left_out: int) -> Row:
        """See `DataSource`."""
        return {name: getattr(self, name) for name in self.__slots__} | {"of": self.of.row(left_out)}


@dataclass(frozen=True, slots=True)
class MixSource:
    """A mixture of datasets and packs. `weights`: as `Weights.row` has them."""

    mixed: tuple[DataSource | PackSource, ...]
    weights: Row

    def row(self, left_out: int) -> Row:
        """See `DataSource`."""
        return {"mixed": [each.row(left_out) for each in self.mixed], "weights": self.weights}


Source = DataSource | PackSource | MixSource


def text_of(source: Source) -> str:
    """The source as a state has it, in JSON; "" for one that is too long even without URIs and selections."""
    texts = (json.dumps(source.row(left_out), ensure_ascii=False) for left_out in range(3))
    return next((text for text in texts if len(text) <= MAX_SOURCE_CHARS), "")


def parse_source(text: str) -> Source:
    """The inverse of `text_of`. Raises StateMismatch for anything else."""
    try:
        return _source(json.loads(text))
    except (ValueError, TypeError, KeyError, InvalidInput):
        raise StateMismatch(f"the state's source is {text[:80]!r}: it names no dataset") from None


def _source(row: Row) -> Source:
    if "mixed" in row:
        mixed = tuple(map(_source, row["mixed"]))
        if any(isinstance(each, MixSource) for each in mixed):
            raise ValueError("a mixture of mixtures")
        return MixSource(mixed, dict(row["weights"]))  # type: ignore[arg-type]
    if "of" in row:
        return PackSource(**{**row, "of": _of_dataset(row["of"]), "fields": tuple(row["fields"])})
    return _of_dataset(row)


def _of_dataset(row: Row) -> DataSource:
    options = Options(**row["options"])
    return DataSource(str(row["version"]), tuple(map(str, row["uris"])), options, tuple(row["picks"]))


def identity_of(version: str, ids: Ints | None) -> str:
    """The name of a dataset in states: its version, with a digest of the indices for a part of it."""
    if ids is None:
        return version
    return f"{version}:{hashlib.blake2b(np.ascontiguousarray(ids).data, digest_size=8).hexdigest()}"


def identity_of_packs(
    data: str, length: int, dtype: np.dtype[Any], counts: bytes | None, overflow: str | None
) -> str:
    """The name of packs in states: that of the dataset, with the length and type of packs, and how whole documents are
    fitted; with a digest of `counts`, which reading the data gave."""
    packs = f"{data}:{length}{dtype.str}"
    if counts is not None:
        packs += f":{hashlib.blake2b(counts, digest_size=8).hexdigest()}"
    return f"{packs}:best-{overflow}" if overflow else packs


def digest_of_mixture(weights: EpochWeights | StepWeights, identities: Sequence[str]) -> str:
    """The digest of a mixture's components in states, and of how their weights count."""
    parts = [weights.by, str(weights.size), *identities]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()


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
