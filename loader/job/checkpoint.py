"""A rank's position in its epochs: the batches that were handed over, and where the next iteration begins."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from cachesvc.core.errors import InvalidInput
from cachesvc.core.order.digests import SampleSum, parse_sum
from cachesvc.core.order.state import MAX_COUNT, LoaderState
from loader.job.handed_over import HandedOver


class EpochLengths(Protocol):
    """The lengths of epochs: they are equal, except that they may change at each of `length_changes`, ascending epochs."""

    @property
    def length_changes(self) -> tuple[int, ...]: ...

    def turns(self, epoch: int) -> int:
        """Batches of an epoch on this rank."""
        ...

    def turns_of(self, epoch: int, epochs: int) -> int:
        """Batches of `epochs` epochs from `epoch` on."""
        ...


@dataclass(slots=True)
class EpochPosition:
    """`turn` batches of `epoch` have been handed to the user; `latest` is the last of them. `resume`: the next iteration
    continues at `turn` instead of beginning the next epoch. `loaded`: the position is that of a loaded state, and no
    batch was handed over since. `epochs_done`: complete epochs of the iteration that hands them over."""

    epoch: int = 0
    turn: int = 0
    resume: bool = False
    latest: tuple[int, int] | None = None
    loaded: bool = False
    epochs_done: int = 0

    def text(self, accumulate: int) -> str:
        """The position in words, for messages."""
        return f"epoch {self.epoch}, step {self.turn // accumulate}"

    def begin(self, feed: EpochLengths, epochs: int | None) -> None:
        """Begin an iteration of `epochs`. A loaded state or a skip continues. Otherwise an epoch is done once a batch
        of it was handed over, whether the caller took all its batches or left early: the next one begins, as in
        torch."""
        if self.resume:
            self.epoch, self.turn, self.epochs_done = self.next_of(feed, epochs)
        else:
            self.epoch, self.turn, self.epochs_done = self.epoch + (self.turn > 0), 0, 0

    def next_of(self, feed: EpochLengths, epochs: int | None) -> tuple[int, int, int]:
        """Epoch and turn of the next batch, and how many of an iteration's `epochs` are complete then (see `done_of`)."""
        epoch, turn = self.next_in(feed)
        return epoch, turn, self.done_of(epochs, epoch - self.epoch)

    def done_of(self, epochs: int | None, more: int = 0) -> int:
        """Return how many of an iteration's `epochs` are complete after `more` of them: none where all are."""
        done = self.epochs_done + more
        return done if epochs is None or done < epochs else 0

    def upcoming(self, feed: EpochLengths, epochs: int | None) -> tuple[int, int]:
        """Epoch and turn of the batch with which the next iteration begins."""
        place = replace(self)
        place.begin(feed, epochs)
        if epochs is None:
            place.reach(feed)
        return place.epoch, place.turn

    def length(self, feed: EpochLengths, epochs: int | None) -> int:
        """Batches of an iteration of `epochs`. After a loaded state or a skip these are the batches that are left of
        several epochs, but all of a single epoch: trainers count on from the place."""
        if epochs is None or epochs == 1 or not self.resume:
            return feed.turns_of(self.next_in(feed)[0] if self.resume else self.epoch, epochs or 1)
        epoch, turn, done = self.next_of(feed, epochs)
        return feed.turns_of(epoch, epochs - done) - turn

    def next_in(self, feed: EpochLengths) -> tuple[int, int]:
        """Epoch and turn of the next batch. Turns beyond the end of an epoch count into the next one."""
        epoch, turn = self.epoch, self.turn
        while turn and turn >= (turns := feed.turns(epoch)):
            next_change = [change for change in feed.length_changes if change > epoch][:1]
            if turns:
                epochs = min([turn // turns, *(change - epoch for change in next_change)])
                epoch, turn = epoch + epochs, turn - epochs * turns
            elif next_change:  # epochs of less than one batch, until the weights change
                epoch = next_change[0]
            else:
                break
        return epoch, turn

    def reach(self, feed: EpochLengths) -> bool:
        """Move to the next epoch that has batches; False when there is none."""
        for epoch in (self.epoch, *(change for change in feed.length_changes if change > self.epoch)):
            if feed.turns(epoch):
                self.epoch = epoch
                return True
        return False

    def skip(self, batches: int) -> None:
        """Leave out `batches` batches, into the next epochs if need be. Raises InvalidInput for more than a state can
        hold."""
        if batches > MAX_COUNT - self.epoch - self.turn:
            raise InvalidInput(
                f"skip={batches} from {self.turn} batches after the beginning of epoch {self.epoch}: no run is that long"
            )
        self.turn += batches
        self.resume = self.resume or batches > 0

    def hand(self, key: tuple[int, int]) -> None:
        """Count a batch (epoch, turn) that is handed to the user."""
        self.turn, self.latest, self.resume, self.loaded = key[1] + 1, key, False, False

    def pass_over(self, turn: int) -> None:
        """Count a batch that cannot be made, unless the user has skipped it since the error."""
        if self.turn == turn:
            self.turn += 1

    def finish(self, turns: int) -> None:
        """End an epoch of so many turns; turns skipped beyond it count into the next one."""
        self.epoch, self.turn = self.epoch + 1, max(0, self.turn - turns)
        self.resume, self.epochs_done = self.turn > 0, self.epochs_done + 1


class LoaderProgress:
    """The position of one loader, the state that it was loaded from, and the iteration that moves it: the latest one.
    `move` and `load` make a new `place`: an iteration that holds the old one thereby sees that the loader was moved, and
    changes only its own."""

    def __init__(self, place: EpochPosition | None = None, loaded: LoaderState | None = None) -> None:
        self.place, self.loaded = place or EpochPosition(), loaded
        self.iteration = object()
        self.count_begins_at: int | None = 0
        """The epoch that callers of a sampler's `set_epoch` count as 0; None after the user moved the position: the next
        such call defines it."""
        self._counted: tuple[int, EpochPosition, tuple[int, int] | None] | None = None
        """The latest such call: its count, the position that it led to, and the latest batch then."""
        self.handed = HandedOver(SampleSum())
        """The batches that were handed over, for the run's digest."""
        self.read_by_sampler: int | None = None
        """The epoch whose batches a sampler handed out to the last, since a state was loaded or an epoch was set."""

    def move(self, epoch: int, turn: int = 0, resume: bool = False) -> None:
        """Move to an epoch and turn."""
        self.place = EpochPosition(epoch, turn, resume)

    def load(self, state: LoaderState, turn: int) -> None:
        """Move to the position of a state, `turn` batches into its epoch."""
        self.place = EpochPosition(
            state.epoch + state.over,
            0 if state.over else turn,
            resume=True,
            loaded=True,
            epochs_done=state.epochs_done + state.over,
        )
        self.loaded, self.count_begins_at, self.read_by_sampler = state, None, None
        self.handed = HandedOver(parse_sum(state.digest) if state.digest else None)

    def skip(self, batches: int) -> None:
        """See `EpochPosition.skip`."""
        self.place.skip(batches)
        self.count_begins_at = None

    def epoch(self, feed: Callable[[], EpochLengths]) -> int:
        """The epoch of the latest iteration, and the next one after its end."""
        return self.place.next_in(feed())[0] if self.place.resume else self.place.epoch

    def begin(self, epoch: int, feed: Callable[[], EpochLengths]) -> None:
        """Let the next iteration begin with this epoch, unless the position was moved into it. Warns of an epoch before a
        loaded position."""
        self.count_begins_at, self.read_by_sampler = 0, None
        if self.place.resume and epoch == self.epoch(feed):
            return
        if self.place.loaded and epoch < self.place.epoch:
            warnings.warn(
                f"set_epoch({epoch}) goes back behind the loaded state, which is of epoch {self.place.epoch}; to go on from"
                " the state, begin with the epoch in batches.epoch",
                stacklevel=3,
            )
        self.move(epoch)

    def epoch_of_count(self, count: int, feed: Callable[[], EpochLengths]) -> int:
        """Return the epoch that a caller of a sampler's `set_epoch` means by its count. The first count after the position
        was moved may be below its epoch, for two reasons: the caller counts the epochs of this process (Fabric), or it has
        yet to end an epoch whose batches are all consumed (Lightning). In the second case it takes no batch before its
        next count, which therefore means the same epoch again."""
        if self.count_begins_at is None:
            self.count_begins_at = max(0, self.epoch(feed) - count)
        elif self.count_begins_at and self._counted == (count - 1, self.place, self.place.latest):
            self.count_begins_at -= 1
        return self.count_begins_at + count

    def note_count(self, count: int, begins_at: int) -> None:
        """Record a call of a sampler's `set_epoch`, which has moved the position."""
        self.count_begins_at, self._counted = begins_at, (count, self.place, self.place.latest)

    def warn_if_read_twice(self) -> None:
        """Warn if the iteration that begins now reads the rest of an epoch that another loader has read."""
        place = self.place
        if place.loaded and place.turn and place.epoch == self.read_by_sampler:
            warnings.warn(
                f"epoch {place.epoch} was read to its end by its batch_sampler (in accelerate.skip_first_batches, say), and"
                f" this iteration reads on where a state was loaded in it; set_epoch({place.epoch + 1}) begins the next",
                stacklevel=3,
            )

    def take_over(self) -> object:
        """Let a new iteration move the position. Returns its mark, which is `iteration` until the next one takes over."""
        self.iteration = object()
        return self.iteration

    def copied(self) -> LoaderProgress:
        """A copy, for another loader to go on from."""
        copy = LoaderProgress(replace(self.place), self.loaded)
        copy.count_begins_at = self.count_begins_at
        return copy
