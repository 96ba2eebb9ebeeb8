"""What a loader is told -> the order's spec and this rank's share of it: its feed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import default_collate

from cachesvc.core.arguments import whole_number
from cachesvc.core.errors import InvalidInput, StateMismatch
from cachesvc.core.order.epoch_order import Last, OrderSpec
from cachesvc.core.safe_text import printable
from loader.batches.feed import Feed, Share
from loader.datasets.mixture import MAX_TOLD, begun
from loader.datasets.wrapped import Core
from loader.job.agreement import agree
from loader.job.checkpoint import STATE_VERSION, State
from loader.job.topology import ALONE, Topology, resolve

_log = logging.getLogger("cachesvc")
WINDOW_BYTES = 256 << 20
"""Four extents of 64 MiB: mixes well, and the first batch waits for no more than this."""
TOLD = 200
"""Characters of a dataset's identity in an error: that of a mixture has every component in it."""
Window = Literal["auto", "all"] | int


def window_bytes(window: Window) -> int:
    """A window in bytes; 0 means everything. Raises InvalidInput."""
    if isinstance(window, str):
        if window not in ("auto", "all"):
            raise InvalidInput(f"window={window!r} is neither a size in bytes, 'auto' nor 'all'")
        return WINDOW_BYTES if window == "auto" else 0
    return whole_number("window", window, 1, 2**63 - 1)


def window_extents(window: Window, extent_sizes: np.ndarray[Any, np.dtype[np.int64]]) -> int:
    """A window in bytes, "auto" (256 MiB) or "all" -> extents; 0 means everything. Raises InvalidInput."""
    size = window_bytes(window)
    if not size:
        return 0
    mean = float(extent_sizes.mean()) if len(extent_sizes) else 1.0
    return max(1, round(size / max(1.0, mean)))


def ending(last: Last | None, drop_last: bool) -> Last:
    """`last`, or what torch's `drop_last` means: drop, or a short batch."""
    if drop_last and last not in (None, "drop"):
        raise InvalidInput(f"drop_last=True says 'drop', and last={last!r} something else; give one of them")
    if last is not None:
        return last
    if drop_last:
        return "drop"
    return "short"


def facts_of(identity: str, feed: Feed, epoch: int, turn: int) -> dict[str, str | int]:
    """What every rank of a job must have alike: all that the order is made of, and the place in it."""
    spec, share = feed.spec, feed.share
    return {
        "version": identity,
        "seed": spec.seed,
        "shuffle": spec.shuffle,
        "batch_size": share.batch_size,
        "global_batch": spec.global_batch,
        "window_extents": spec.window_extents,
        "canonical_nodes": spec.canonical_nodes,
        "last": spec.last,
        "epoch": epoch,
        "batches already consumed": turn,
        "steps": feed.order(epoch).steps,
    }


def agreed(topology: Topology, facts: Mapping[str, Any], store: Any, via: str, first: bool) -> str:
    """What a job's store knows a loader by, "alone" without one, once all ranks agree on the facts; rank 0 says them
    the first time. Raises what `agree` does."""
    job = "alone" if store is None else agree(topology, facts, store)
    if first and topology.rank == 0:
        _log.info("%s", headline(topology, facts, via))
    return job


def headline(topology: Topology, facts: Mapping[str, Any], via: str) -> str:
    """The line that rank 0 logs where a job starts."""
    each, whole = facts["batch_size"], facts["global_batch"]
    return (
        f"{topology.world_size} ranks ({topology.source}), {each} x {whole // each} = {whole} a step, "
        f"epoch {facts['epoch']}, version {facts['version'][:4]}, seed {facts['seed']}, {facts['steps']:,} steps, "
        f"{facts['last']}, via {via}"
    )


@dataclass(frozen=True, slots=True)
class Arguments:
    """A loader's arguments that say which samples are in which batch of which rank."""

    dataset: TorchDataset[Any]
    batch_size: int | None
    collate_fn: Callable[[Any], Any]
    drop_last: bool
    shuffle: bool
    seed: int
    epochs: int | None
    global_batch_size: int | None
    last: Last | None
    window: Window | None
    rank: int | None
    world_size: int | None
    mesh: Any
    dp_dims: tuple[str, ...]
    shard: bool

    @classmethod
    def of(cls, loader: Any) -> Arguments:
        """The arguments of `loader` as they are now."""
        return cls(*(getattr(loader, field.name) for field in fields(cls)))

    def topology(self) -> Topology:
        """The rank's place in the job. Raises InvalidInput."""
        return resolve(self.rank, self.world_size, self.mesh, self.dp_dims) if self.shard else ALONE


class Single:
    """Hands out samples instead of batches, as torch does without a batch size: `convert` gets the sample alone."""

    def __init__(self, convert: Callable[[Any], Any]) -> None:
        self._convert = convert

    def __call__(self, samples: list[Any]) -> Any:
        """The only one of these."""
        (sample,) = samples
        return self._convert(sample)


def feed_of(given: Arguments, core: Core, topology: Topology, state: State | None, epoch: int) -> Feed:
    """This rank's batches, from an epoch on; of the run that a state saved, if any. Raises InvalidInput, StateMismatch."""
    single = given.batch_size is None
    batch_size = 1 if given.batch_size is None else given.batch_size
    spec = spec_of(given, batch_size, core, topology)
    if state is not None:
        spec = resumed(state, spec, _stated(given))
    share = share_of(spec.global_batch, batch_size, topology)
    collate = Single(given.collate_fn) if single else given.collate_fn
    feed = Feed(given.dataset, spec, share, collate, collate is default_collate)
    feed.order(epoch)
    return feed


def spec_of(given: Arguments, batch_size: int, core: Core, topology: Topology) -> OrderSpec:
    """The order that a loader's arguments ask for. Raises InvalidInput."""
    wanted = given.global_batch_size or batch_size * topology.world_size
    sizes = np.concatenate([leaf.catalog.extent_sizes for leaf in core.leaves])
    return OrderSpec(
        seed=given.seed,
        global_batch=wanted,
        window_extents=window_extents(given.window or "auto", sizes),
        canonical_nodes=1 if given.window == "all" else min(topology.nodes, wanted),
        shuffle=given.shuffle,
        last=ending(given.last, given.drop_last),
    )


def share_of(global_batch: int, batch_size: int, topology: Topology) -> Share:
    """This rank's slots. Raises InvalidInput when batches do not divide the global batch."""
    world = topology.world_size
    if batch_size < 1 or global_batch % (batch_size * world):
        raise InvalidInput(
            f"a global batch of {global_batch} is no multiple of {world} ranks x {batch_size} samples; choose "
            f"batch_size x {world} to divide it, or another global_batch_size (of a saved run: at an epoch's beginning)"
        )
    width = global_batch // world
    return Share(topology.rank * width, (topology.rank + 1) * width, batch_size)


def state_of(identity: str, samples: int, feed: Feed, place: tuple[int, int], world_size: int) -> State:
    """What is saved at an epoch and turn."""
    spec, share, epoch = feed.spec, feed.share, place[0]
    step, micro = divmod(place[1], share.accumulate)
    return State(
        version=STATE_VERSION,
        dataset=begun(identity, epoch, bool(place[1])) if len(identity) > MAX_TOLD else identity,
        samples=samples,
        epoch=epoch,
        step=step,
        micro=micro,
        steps=feed.steps(epoch),
        seed=spec.seed,
        global_batch=spec.global_batch,
        batch_size=share.batch_size if micro else 0,
        world_size=world_size if micro else 0,
        window_extents=spec.window_extents,
        canonical_nodes=spec.canonical_nodes,
        shuffle=spec.shuffle,
        last=spec.last,
    )


def turn_of(state: State, feed: Feed) -> int:
    """The batches of its epoch that a state has behind it, as the epoch is cut now."""
    return state.step * feed.share.accumulate + state.micro


def check_data(state: State, identity: str, samples: int) -> None:
    """Raises StateMismatch when a state belongs to another version, subset or mixture; the weights of a mixture may
    differ from the next epoch on."""
    inside = bool(state.step or state.micro)
    try:
        of_state, own = (begun(one, state.epoch, inside) for one in (state.dataset, identity))
    except ValueError:  # weights that no mixture has
        of_state, own = state.dataset, identity
    if of_state != own or state.samples != samples:
        theirs, ours = _told_apart(state.dataset, identity)
        raise StateMismatch(
            f"the state belongs to version {printable(theirs)} with {state.samples:,} samples, the loader has {ours} "
            f"with {samples:,}; open that version, with the same filter and weights, or start anew"
        )


def _told_apart(*identities: str) -> list[str]:
    """Long ones from shortly before where they differ."""
    if max(map(len, identities)) <= TOLD:
        return list(identities)
    differ = (at for at, letters in enumerate(zip(*identities, strict=False)) if len(set(letters)) > 1)
    begin = max(0, next(differ, min(map(len, identities))) - TOLD // 4)
    return [("..." if begin else "") + each[begin : begin + TOLD] + "..." for each in identities]


def check_place(state: State, feed: Feed) -> None:
    """Raises StateMismatch for a place that its epoch does not have. At an epoch's beginning a mixture's weights may be
    others than when it was saved, and that epoch as long as they say."""
    if feed.changes and not (state.step or state.micro):
        return
    samples = feed.samples(state.epoch)
    if state.version < STATE_VERSION and state.micro and state.step == samples // state.global_batch:
        raise StateMismatch(
            f"the state stands inside the last step of epoch {state.epoch}, which is not full, and an earlier version of "
            "this program saved it: that step's batches are cut differently now; load a state of another step"
        )
    steps = samples // state.global_batch if state.last == "drop" else -(-samples // state.global_batch)
    if state.steps != steps or 0 < steps < state.step + (state.micro > 0):
        raise StateMismatch(
            f"no loader saved this state: it stands at step {state.step} of {state.steps}, and an epoch of {samples:,} "
            f"samples in global batches of {state.global_batch} has {steps} ({state.last})"
        )


def check_inside(state: State, batch_size: int, world_size: int) -> None:
    """Raises StateMismatch where a state stands between the micro-batches of a step that is cut differently now."""
    if state.micro and (state.batch_size, state.world_size) != (batch_size, world_size):
        raise StateMismatch(
            f"the state stands inside step {state.step}, after {state.micro} batches of {state.batch_size} on each of "
            f"{state.world_size} ranks; go on with as many and as large, not {world_size} x {batch_size}, or save "
            "after a whole step"
        )


def _stated(given: Arguments) -> set[str]:
    """What a loader was told of the order, besides what every run must have alike."""
    stated = {
        "global_batch": given.global_batch_size is not None,
        "window_extents": given.window is not None,
        "last": given.last is not None or given.drop_last,
    }
    return {name for name, is_stated in stated.items() if is_stated}


def resumed(state: State, spec: OrderSpec, given: Collection[str]) -> OrderSpec:
    """The spec that a saved run continues with: its own, and at an epoch's beginning what was `given`. Raises
    StateMismatch with the numbers where what was asked contradicts it."""
    for name in ("seed", "shuffle"):
        if getattr(state, name) != getattr(spec, name):
            raise StateMismatch(
                f"the state has {name}={getattr(state, name)}, the loader {getattr(spec, name)}; they must agree"
            )
    # Under "error" an epoch has no rest, so the other side alone says what becomes of one.
    kept = state.last != "error" and spec.last != "error"
    changed = {name for name in given if getattr(state, name) != getattr(spec, name)}
    if state.step or state.micro:
        _must_wait(state, spec, changed if kept else changed - {"last"})
    batch = spec.global_batch if "global_batch" in changed else state.global_batch
    last: Last = spec.last if "last" in changed or not kept else state.last  # type: ignore[assignment]
    window, nodes = state.window_extents, state.canonical_nodes
    if "window_extents" in changed:  # "all" is dealt to one node
        window, nodes = spec.window_extents, spec.canonical_nodes
    return OrderSpec(spec.seed, batch, window, min(nodes, batch), spec.shuffle, last)


def _must_wait(state: State, spec: OrderSpec, changed: Collection[str]) -> None:
    """Raises StateMismatch where something of the order was given that may change between epochs only."""
    words = {
        "global_batch": "global_batch_size={}",
        "window_extents": "a window of {} extents (0: all)",
        "last": "last={!r}",
    }
    for name in sorted(changed):
        saved, wanted = (words[name].format(getattr(one, name)) for one in (state, spec))
        raise StateMismatch(
            f"the state stands at step {state.step} of {state.steps} with {saved}, the loader has {wanted}; it may "
            "change between epochs only: leave it out to go on with the saved one, or load a state of an epoch's beginning"
        )
