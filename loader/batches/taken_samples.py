"""Names the samples of a step of a run, without reading them."""

from __future__ import annotations

from dataclasses import dataclass

from cachesvc.catalog.sample_places import SamplePlace
from cachesvc.core.errors import InvalidInput, StateMismatch
from cachesvc.saved_runs.data import text_of
from loader.batches.feed import Feed
from loader.datasets.mixture import Mixture
from loader.datasets.packing import Packed
from loader.datasets.sample_keys import named_in
from loader.datasets.wrapped import as_view


@dataclass(frozen=True, slots=True)
class TakenSample:
    """A sample of a step. `slot`: its place in the global batch; rank r of R has the slots from r * G / R on. `index`: in
    the dataset, a spot in a mixture, a pack among packs. `key`: its name in the source, "" without one. `places`: the bytes
    that hold it. `documents`: the keys of a pack's documents, one for each of its places."""

    slot: int
    index: int
    key: str
    places: tuple[SamplePlace, ...]
    documents: tuple[str, ...] = ()


def samples_of(feed: Feed, step: int) -> list[TakenSample]:
    """The samples of a data step of all ranks; [] for a skipped one. Raises InvalidInput, StateMismatch."""
    if step < feed.spec.since_step:
        raise StateMismatch(
            f"step {step:,} lies before step {feed.spec.since_step:,}, where the global batch, `last` or the window "
            "changed: load a state of before it"
        )
    place = feed.orders.run_steps.place(step)
    if place is None:
        raise InvalidInput(f"step {step:,}: the data is less than one batch, so the run has no steps")
    epoch, data_step = place
    slots, indices = feed.orders.global_batch(epoch, data_step)
    named = named_in(feed.dataset, indices, feed.spec.at_step(step), epoch)
    rows = zip(slots.tolist(), indices.tolist(), named, strict=True)
    return [TakenSample(slot, index, *each) for slot, index, each in rows]


def source_of(dataset: object) -> str:
    """The text by which a state names where the data lies; "" for what is no dataset of `open_dataset`, a part of it, packs
    or a mixture."""
    found = dataset if isinstance(dataset, (Mixture, Packed)) else as_view(dataset)
    return "" if found is None else text_of(found.source)
