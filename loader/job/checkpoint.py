"""Where a rank stands in its epochs, and how that is saved: plain numbers, the same on every rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from cachesvc.core.errors import InvalidInput, StateMismatch
from cachesvc.core.order.epoch_order import Last, OrderSpec
from cachesvc.core.safe_text import printable

STATE_VERSION = 3
"""The oldest version that can be loaded; a state inside a step that is not full needs version 3."""
MAX_COUNT, MAX_SEED = 2**63 - 1, 2**64 - 1
"""The order counts in numpy's integers, and its keys are of 64 bits, without a sign."""


class Turns(Protocol):
    """How long epochs are: alike, but from each of `changes`, ascending, on."""

    @property
    def changes(self) -> tuple[int, ...]: ...

    def turns(self, epoch: int) -> int: ...


@dataclass(slots=True)
class Place:
    """`turn` batches of `epoch` have been handed to the user; `latest` is the last of them. `resume`: the next
    iteration continues at `turn` instead of beginning the epoch anew. `loaded`: a state says so, and no batch was handed
    over since."""

    epoch: int = 0
    turn: int = 0
    resume: bool = False
    latest: tuple[int, int] | None = None
    loaded: bool = False

    def told(self, accumulate: int) -> str:
        """For messages."""
        return f"epoch {self.epoch}, step {self.turn // accumulate}"

    def begin(self, feed: Turns) -> None:
        """An iteration starts: an abandoned epoch begins anew, a loaded state or a skip continues. An epoch whose batches
        were all handed over is over, also for a caller (Lightning, `zip`) who counts them and asks for no more."""
        if not self.resume and self.turn < feed.turns(self.epoch):
            self.turn = 0
        self.epoch, self.turn = self.next_in(feed)

    def next_in(self, feed: Turns) -> tuple[int, int]:
        """Epoch and turn of the next batch; turns beyond an epoch's are those of the next."""
        epoch, turn = self.epoch, self.turn
        while turn and turn >= (turns := feed.turns(epoch)):
            alike = [change for change in feed.changes if change > epoch][:1]
            if turns:
                epochs = min([turn // turns, *(change - epoch for change in alike)])
                epoch, turn = epoch + epochs, turn - epochs * turns
            elif alike:  # epochs of less than one batch, until the weights change
                epoch = alike[0]
            else:
                break
        return epoch, turn

    def reach(self, feed: Turns) -> bool:
        """To the next epoch that has batches, past those of less than one; whether there is any."""
        for epoch in (self.epoch, *(change for change in feed.changes if change > self.epoch)):
            if feed.turns(epoch):
                self.epoch = epoch
                return True
        return False

    def skip(self, batches: int) -> None:
        """So many batches are left out, into next epochs if need be; none changes nothing. Raises InvalidInput for more
        than any state could say."""
        if batches > MAX_COUNT - self.epoch - self.turn:
            raise InvalidInput(
                f"skip={batches} from {self.turn} batches after the beginning of epoch {self.epoch}: no run is that long"
            )
        self.turn += batches
        self.resume = self.resume or batches > 0

    def hand(self, key: tuple[int, int]) -> None:
        """The batch of a turn goes to the user."""
        self.turn, self.latest, self.resume, self.loaded = key[1] + 1, key, False, False

    def pass_over(self, turn: int) -> None:
        """A turn's batch cannot be made; whoever heard so may have skipped it already, and more."""
        if self.turn == turn:
            self.turn += 1

    def finish(self, turns: int) -> None:
        """An iteration reached the end of an epoch of so many turns; what was skipped beyond it is the next one's."""
        self.epoch, self.turn = self.epoch + 1, max(0, self.turn - turns)
        self.resume = self.turn > 0


class Progress:
    """The place of one loader, the state that it was loaded from, and which of its iterations takes it further: the latest.
    An iteration sees that its place was moved by there being another, and what it still does with its own then moves
    nobody."""

    def __init__(self, place: Place | None = None, loaded: State | None = None) -> None:
        self.place, self.loaded = place or Place(), loaded
        self.iteration = object()
        self.counted_from: int | None = 0
        """The epoch that callers which count the epochs of this process call 0; None: the next of them says, for the user
        has moved the place since."""
        self.given_out: int | None = None
        """The epoch whose batches a sampler gave out to the last, since a state was loaded or an epoch was set."""

    def move(self, epoch: int, turn: int = 0, resume: bool = False) -> None:
        """To wherever the user wants."""
        self.place = Place(epoch, turn, resume)

    def load(self, state: State, turn: int) -> None:
        """Move to a state's place, `turn` batches into its epoch."""
        self.place = Place(state.epoch + state.over, 0 if state.over else turn, not state.over, loaded=True)
        self.loaded, self.counted_from, self.given_out = state, None, None

    def skip(self, batches: int) -> None:
        """See Place."""
        self.place.skip(batches)
        self.counted_from = None

    def epoch(self, feed: Callable[[], Turns]) -> int:
        """The epoch that the latest iteration is in, and the next one after its end."""
        return self.place.next_in(feed())[0] if self.place.resume else self.place.epoch

    def begin(self, epoch: int, feed: Callable[[], Turns]) -> None:
        """The next iteration is of this epoch: from its beginning, unless the place was moved into it. Warns where it goes
        back behind a place that was loaded."""
        self.counted_from = self.given_out = None
        if self.place.resume and epoch == self.epoch(feed):
            return
        if self.place.loaded and epoch < self.place.epoch:
            warnings.warn(
                f"set_epoch({epoch}) goes back behind the state that was loaded, which is of epoch {self.place.epoch}; to"
                " go on from there, begin with the epoch that batches.epoch says",
                stacklevel=3,
            )
        self.move(epoch)

    def counted(self, epoch: int) -> int:
        """The epoch that a caller means who may count the epochs of this process: an earlier one than the loader was moved
        to begins the count there."""
        if self.counted_from is None:
            self.counted_from = max(0, self.place.epoch - epoch)
        return self.counted_from + epoch

    def warn_of_twice(self) -> None:
        """Warn where the iteration that begins now reads the rest of an epoch that another loader has read."""
        place = self.place
        if place.loaded and place.turn and place.epoch == self.given_out:
            warnings.warn(
                f"epoch {place.epoch} was read to its end by its batch_sampler (in accelerate.skip_first_batches, say), and"
                f" this iteration reads on where a state was loaded in it; set_epoch({place.epoch + 1}) begins the next",
                stacklevel=3,
            )

    def take_over(self) -> object:
        """Another iteration begins. Returns what it knows itself by."""
        self.iteration = object()
        return self.iteration

    def copied(self) -> Progress:
        """The same place, for another loader to go on from."""
        copy = Progress(replace(self.place), self.loaded)
        copy.counted_from = self.counted_from
        return copy


@dataclass(frozen=True, slots=True)
class State:
    """All that a resumed run keeps. `step` of `steps` global batches of `epoch` are consumed, and `micro`
    micro-batches of the next, by each of `world_size` ranks in batches of `batch_size` (0 between steps)."""

    version: int
    dataset: str
    samples: int
    epoch: int
    step: int
    micro: int
    steps: int
    seed: int
    global_batch: int
    batch_size: int
    world_size: int
    window_extents: int
    canonical_nodes: int
    shuffle: bool
    last: str

    @property
    def over(self) -> bool:
        """Whether all of its epoch is consumed."""
        return self.steps > 0 and self.step >= self.steps

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def parsed(state: Mapping[str, Any]) -> State:
    """Raises StateMismatch for anything that `State.plain` did not write."""
    expected = State.__dataclass_fields__
    if not isinstance(state, Mapping):
        raise StateMismatch(
            f"{type(state).__name__} is not a state of this loader: give what state_dict() returned"
        )
    if set(state) != set(expected):
        odd = ", ".join(sorted(map(str, set(state) ^ set(expected))))
        raise StateMismatch(f"not a state of this loader: its keys differ in {printable(odd)}")
    texts, flags = ("dataset", "last"), ("shuffle",)
    for name in expected:
        kind = str if name in texts else bool if name in flags else int
        if type(state[name]) is not kind:
            found = printable(repr(state[name]))
            raise StateMismatch(f"the state's {name} is {found}, not {kind.__name__}")
        if kind is int and not 0 <= state[name] <= (MAX_SEED if name == "seed" else MAX_COUNT):
            raise StateMismatch(f"the state's {name} is {state[name]}: no state says so")
    if state["version"] not in (2, STATE_VERSION):
        raise StateMismatch(
            f"a state of version {state['version']}; this program reads 2 and {STATE_VERSION}"
        )
    whole = State(**state)
    _must_be_an_order(whole)
    return whole


def _must_be_an_order(state: State) -> None:
    """Raises StateMismatch where numbers that follow from each other do not."""
    try:
        last: Last = state.last  # type: ignore[assignment]
        nodes = state.canonical_nodes
        OrderSpec(state.seed, state.global_batch, state.window_extents, nodes, state.shuffle, last)
    except InvalidInput as error:
        raise StateMismatch(f"no loader saved this state: {printable(str(error))}") from None
    each = state.batch_size * state.world_size
    cut = each > 0 and state.global_batch % each == 0 and state.micro * each < state.global_batch
    if not (cut if state.micro else state.batch_size == state.world_size == 0):
        raise StateMismatch(
            f"no loader saved this state: {state.micro} batches of {state.batch_size} on each of {state.world_size} ranks"
            f" are no part of a global batch of {state.global_batch}"
        )
