"""Openings on their way to the builder, shared out by user: it works at few side by side, and one of them may take hours.

A user takes no more than twice what is left free.
The rest waits here, users in turn. The same opening once more waits for the first to end, for all that it would do
meanwhile is wait there; it is asked then, since the data may have changed after the first had listed it. Those that
wait are asked as one, and what nobody waits for any more is not asked."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial

from cachesvc.daemon.fills.pool import Answered
from cachesvc.daemon.processes import jobs

Make = Callable[[int], jobs.Build]


@dataclass(slots=True, eq=False)
class Opening:
    """What a user asked for: equal `asked` are the same. `heard` get its answers."""

    user: int
    asked: Hashable
    make: Make
    heard: list[Answered] = field(default_factory=list)


class Builds:
    """No more wait than there are calls. Runs on the loop's thread."""

    def __init__(self, build: Callable[[Make, Answered], None]) -> None:
        """`build`: of `Fillers`; it may answer at once."""
        self._build = build
        self._lines: OrderedDict[int, dict[Hashable, Opening]] = OrderedDict()
        self._at_work: set[tuple[int, Hashable]] = set()
        self._held: Counter[int] = Counter()
        self._feeding = False

    def open(self, user: int, asked: Hashable, make: Make, answered: Answered) -> Opening:
        """Build what `make` says, when it is the user's turn."""
        opening = self._lines.setdefault(user, {}).setdefault(asked, Opening(user, asked, make))
        opening.heard.append(answered)
        self._feed()
        return opening

    def leave(self, opening: Opening, answered: Answered) -> None:
        """One who asked is gone. What is at work goes on: it is a user's share until it ends."""
        opening.heard.remove(answered)
        line = self._lines.get(opening.user, {})
        if not opening.heard and line.get(opening.asked) is opening:
            self._take(opening)

    def _feed(self) -> None:
        if self._feeding:
            return
        self._feeding = True
        while (opening := self._next()) is not None:
            self._take(opening)
            if opening.user in self._lines:
                self._lines.move_to_end(opening.user)
            self._at_work.add((opening.user, opening.asked))
            self._held[opening.user] += 1
            self._build(opening.make, partial(self._answered, opening))
        self._feeding = False

    def _next(self) -> Opening | None:
        free = jobs.SIDE_BY_SIDE - self._held.total()
        for user, line in self._lines.items():
            if self._held[user] < 2 * free:
                for asked, opening in line.items():
                    if (user, asked) not in self._at_work:
                        return opening
        return None

    def _take(self, opening: Opening) -> None:
        line = self._lines[opening.user]
        del line[opening.asked]
        if not line:
            del self._lines[opening.user]

    def _answered(self, opening: Opening, answer: jobs.Answer) -> None:
        for heard in opening.heard:
            heard(answer)
        if isinstance(answer, jobs.Done):
            self._at_work.remove((opening.user, opening.asked))
            self._held[opening.user] -= 1
            if not self._held[opening.user]:
                del self._held[opening.user]
            self._feed()
