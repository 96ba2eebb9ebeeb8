"""Where an epoch's batches come from: made in this process as each is asked for, or ahead of that by an engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from loader.batches.bad_samples import Mender, OnError
from loader.batches.epoch_report import Account
from loader.batches.feed import Feed
from loader.workers.engines import Fetches, Given, engine_for


class Supply:
    """The batches of a feed, made as is `given`; what was mended in them, and what others' took, enters `account`."""

    def __init__(self, feed: Feed, given: Given, account: Account) -> None:
        self.feed, self.account = feed, account
        self.made_here = given.num_workers == 0
        """By no worker."""
        self._given = given
        self._engine: Fetches | None = None
        self._on_error: OnError | None = None

    def start(self, epoch: int, first: int, last: int, on_error: OnError) -> Callable[[tuple[int, int]], Any]:
        """Begin to make the turns [first, last) of an epoch. Returns what gives a batch by its (epoch, turn): the feed
        itself where there is nothing to enter."""
        if on_error != self._on_error:
            self.rest()
            self._engine, self._on_error = engine_for(self.feed, self._given, on_error), on_error
        if self._engine is not None:
            self._engine.start(epoch, first, last)
            return partial(self.account.handed, self._engine.fetch)
        if on_error == "raise":
            return self.feed.__getitem__
        noted, make = self.account.noted, Mender(self.feed, on_error).make
        return lambda key: noted(*make(key))

    def rest(self) -> None:
        """Nothing more is asked for until the next start."""
        if self._engine is not None:
            self._engine.rest()
