"""Saved states -> the order that continues them, and back. Each check raises StateMismatch for a state that this loader
cannot continue."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from dataclasses import asdict, replace
from typing import get_args

from cachesvc.core.errors import StateMismatch
from cachesvc.core.order.epoch_order import Last, OrderSpec
from cachesvc.core.order.excluded import parse_excluded
from cachesvc.core.order.skipped import Skipped, parse_skipped
from cachesvc.core.order.state import STATE_VERSION, LoaderState
from cachesvc.core.safe_text import printable
from loader.batches.feed import Feed
from loader.batches.taken_samples import source_of
from loader.datasets.mixture import (
    MAX_IDENTITY_CHARS,
    Mixture,
    Place,
    identity_until,
    is_in_time_order,
    packs_in,
)
from loader.datasets.pack_form import Edges

JOINED = (
    "this run began before pack() had edges=: its packs go on to predict the first token of a document from the one before "
    "(edges='join'); pack(..., edges='mask') ends that"
)
MAX_SHOWN = 200
"""Characters of a dataset's identity in an error: that of a mixture has every component in it."""


def state_of(
    identity: str, samples: int, feed: Feed, place: tuple[int, int, int], world_size: int, digest: str
) -> LoaderState:
    """The state at a place (epoch, turn, complete epochs of the iteration)."""
    spec, share, (epoch, turn, epochs_done) = feed.spec, feed.share, place
    kept, micro = divmod(turn, share.accumulate)
    step = feed.orders.data_step(epoch, kept)
    data_step = feed.orders.run_steps.first(epoch) + step
    taken = _place(epoch, step, micro, data_step, samples, spec.global_batch)
    return LoaderState(
        version=STATE_VERSION,
        dataset=identity if len(identity) <= MAX_IDENTITY_CHARS else identity_until(identity, taken),
        samples=samples,
        epoch=epoch,
        step=step,
        micro=micro,
        steps=feed.orders.data_steps(epoch),
        batch_size=share.batch_size if micro else 0,
        world_size=world_size if micro else 0,
        epochs_done=epochs_done,
        edges=feed.run_edges,
        data_step=data_step,
        source=source_of(feed.dataset),
        digest=digest,
        **asdict(spec),
    )


def resumed(state: LoaderState, spec: OrderSpec, given: Collection[str]) -> OrderSpec:
    """The spec that continues a saved run: the saved one, with the values of `spec` that were `given` where an epoch
    begins. Raises StateMismatch, with the numbers, where a given value contradicts the state."""
    for name in ("seed", "shuffle"):
        if getattr(state, name) != getattr(spec, name):
            raise StateMismatch(
                f"the state has {name}={getattr(state, name)}, the loader {getattr(spec, name)}; they must agree"
            )
    # Under "error" no samples are left over, so only the other side's `last` has a meaning.
    both_have_rest = state.last != "error" and spec.last != "error"
    changed = {name for name in given if getattr(state, name) != getattr(spec, name)}
    if state.step or state.micro:
        _check_unchanged(state, spec, changed if both_have_rest else changed - {"last"})
    batch = spec.global_batch if "global_batch" in changed else state.global_batch
    last: Last = spec.last if "last" in changed or not both_have_rest else state.last  # type: ignore[assignment]
    window, nodes = state.window_extents, state.canonical_nodes
    if changed & {"window_extents", "shuffle_scope"}:  # window="all" has one canonical node
        nodes = spec.canonical_nodes
    if "window_extents" in changed:
        window = spec.window_extents
    found = replace(
        state.spec,
        global_batch=batch,
        window_extents=window,
        canonical_nodes=min(nodes, batch),
        last=last,
        shuffle_scope=spec.shuffle_scope if "shuffle_scope" in changed else state.spec.shuffle_scope,
        skipped=_all_skipped(state, parse_skipped(spec.skipped)),
        excluded=_all_excluded(state, spec.excluded),
    )
    if changed:
        found = replace(found, since_epoch=state.epoch + state.over, since_step=state.data_step)
    return found


def _all_skipped(state: LoaderState, given: Skipped) -> str:
    """The steps that a saved run skips, and those that its loader was given. Raises StateMismatch where the run has trained
    some of these."""
    saved, done = parse_skipped(state.skipped), state.data_step + (state.micro > 0)
    together = Skipped([*saved.ranges, *given.ranges])
    if together.within(0, done).text != saved.within(0, done).text:
        first = next(begin for begin, end in given.ranges if Skipped([(begin, min(end, done))]))
        raise StateMismatch(
            f"skip_steps has step {first:,}, and the state stands at step {state.data_step:,}, behind it: the run has "
            "trained that step; load a state of before it, or skip later steps"
        )
    return together.text


def _all_excluded(state: LoaderState, given: str) -> str:
    """The samples that a saved run leaves out, and those that its loader was given, from where the state stands on."""
    since = state.data_step + (state.micro > 0)
    return parse_excluded(state.excluded).with_more(dict.fromkeys(parse_excluded(given).since, since)).text


def edges_of(state: LoaderState) -> Edges:
    """The edges of packs that were given none, in a run that continues a state. Raises StateMismatch."""
    if state.edges not in get_args(Edges):
        raise StateMismatch(f"no loader saved this state: its edges are {printable(repr(state.edges))}")
    return state.edges  # type: ignore[return-value]


def _check_unchanged(state: LoaderState, spec: OrderSpec, changed: Collection[str]) -> None:
    """Raise StateMismatch for changed values that may change between epochs only."""
    texts = {
        "global_batch": "global_batch_size={}",
        "window_extents": "a window of {} extents (0: all)",
        "last": "last={!r}",
        "shuffle_scope": "shuffle_scope={!r}",
    }
    for name in sorted(changed):
        saved, wanted = (texts[name].format(getattr(one, name)) for one in (state, spec))
        raise StateMismatch(
            f"the state stands at step {state.step} of {state.steps} with {saved}, the loader has {wanted}; it may "
            "change between epochs only: leave it out to go on with the saved one, or load a state of an epoch's beginning"
        )


def _place(epoch: int, step: int, micro: int, data_step: int, samples: int, batch: int) -> Place:
    """The place in the run `micro` micro-batches after a step of an epoch."""
    taken = step + (micro > 0)
    return Place(epoch + (taken > 0), data_step + (micro > 0), epoch * samples + taken * batch)


def check_data(state: LoaderState, identity: str, samples: int) -> None:
    """Raise StateMismatch for a state of another version, subset or mixture; the weights of a mixture may differ from the
    next epoch on."""
    place = _place(state.epoch, state.step, state.micro, state.data_step, state.samples, state.global_batch)
    try:
        saved, own = (identity_until(one, place) for one in (state.dataset, identity))
    except ValueError:  # weights that no mixture has
        saved, own = state.dataset, identity
    if saved != own or state.samples != samples:
        theirs, ours = _shortened(state.dataset, identity)
        raise StateMismatch(
            f"the state belongs to version {printable(theirs)} with {state.samples:,} samples, the loader has {ours} "
            f"with {samples:,}: give the same data (version= if it has changed), filter and weights, or start anew. If all"
            " are the same, another release saved the state and numbered the samples otherwise: only that one continues it"
        )


def check_place(state: LoaderState, feed: Feed) -> None:
    """Raise StateMismatch for a place that its epoch does not have. At an epoch's beginning a mixture's weights may have
    changed since the state was saved, and the epoch's length with them. Warns of packs that join documents for no other
    reason than the state's age: it is loaded by a caller of this function's caller."""
    if state.version < 5 and any(packs.form.edges is None for packs in packs_in(feed.dataset)):
        warnings.warn(JOINED, stacklevel=3)
    _check_schedule(state, feed)
    if feed.orders.mixture_changes and not (state.step or state.micro):
        return
    samples = feed.samples(state.epoch)
    steps = samples // state.global_batch if state.last == "drop" else -(-samples // state.global_batch)
    if state.steps != steps or 0 < steps < state.step + (state.micro > 0):
        raise StateMismatch(
            f"no loader saved this state: it stands at step {state.step} of {state.steps}, and an epoch of {samples:,} "
            f"samples in global batches of {state.global_batch} has {steps} ({state.last})"
        )


def _check_schedule(state: LoaderState, feed: Feed) -> None:
    """Raise StateMismatch for a mixture whose weights change by step, if earlier steps would have other samples."""
    mixture = feed.dataset
    if not isinstance(mixture, Mixture):
        return
    begun = (state.step or state.micro) and state.shuffle and state.canonical_nodes > 1
    if begun and mixture.in_time_order != is_in_time_order(state.dataset):
        raise StateMismatch(
            f"the state stands inside epoch {state.epoch} of a mixture on {state.canonical_nodes} nodes, each of which "
            "reads a part of the epoch; weights that change by step make one sequence for all: load a state of an epoch's "
            "beginning, or make a mixture that will be reweighed with schedule=[]"
        )
    spec, cut = feed.spec, (state.global_batch, state.last == "drop")
    if mixture.counts_steps and state.epoch and (spec.global_batch, spec.last == "drop") != cut:
        raise StateMismatch(
            f"the weights of this mixture change by step, and the state has epochs of other steps: global_batch_size="
            f"{state.global_batch}, last={state.last!r}; leave them out, or change weights by unit='tokens'"
        )


def check_micro_batches(state: LoaderState, batch_size: int, world_size: int) -> None:
    """Raise StateMismatch for a state between the micro-batches of a step that is cut differently now."""
    if state.micro and (state.batch_size, state.world_size) != (batch_size, world_size):
        raise StateMismatch(
            f"the state stands inside step {state.step}, after {state.micro} batches of {state.batch_size} on each of "
            f"{state.world_size} ranks; go on with the same numbers, not {world_size} x {batch_size}, or save "
            "after a whole step"
        )


def _shortened(*identities: str) -> list[str]:
    """The identities; long ones from shortly before the first difference."""
    if max(map(len, identities)) <= MAX_SHOWN:
        return list(identities)
    differ = (at for at, letters in enumerate(zip(*identities, strict=False)) if len(set(letters)) > 1)
    begin = max(0, next(differ, min(map(len, identities))) - MAX_SHOWN // 4)
    return [("..." if begin else "") + each[begin : begin + MAX_SHOWN] + "..." for each in identities]
