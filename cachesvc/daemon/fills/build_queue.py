"""A fair queue of dataset builds. The builder runs few at a time, and one may take hours.

A user's running builds take at most twice what that leaves free; users with waiting builds take turns. A build with the
key of a running one waits for its end, and runs then, since the data may have changed after the first was listed.
Waiting builds with the same key are one, and a build whose callers have all left is dropped.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial

from cachesvc.daemon.fills.pool import OnAnswer
from cachesvc.daemon.processes import jobs


@dataclass(slots=True, eq=False)
class BuildRequest:
    """A user's build; requests with equal keys are the same. Each of `listeners` gets its answers."""

    user: int
    key: Hashable
    job: jobs.BuildJob
    listeners: list[OnAnswer] = field(default_factory=list)


class BuildQueue:
    """Holds at most as many requests as there are control calls. Runs on the loop's thread."""

    def __init__(self, build: Callable[[jobs.BuildJob, OnAnswer], None]) -> None:
        """`build` is `FillerPool.build`; it may answer before it returns."""
        self._build = build
        self._waiting: OrderedDict[int, dict[Hashable, BuildRequest]] = OrderedDict()
        self._running: set[tuple[int, Hashable]] = set()
        self._running_of: Counter[int] = Counter()
        self._starting = False

    def submit(self, user: int, key: Hashable, job: jobs.BuildJob, on_answer: OnAnswer) -> BuildRequest:
        """Run a job when the fair queue comes to the user."""
        request = self._waiting.setdefault(user, {}).setdefault(key, BuildRequest(user, key, job))
        request.listeners.append(on_answer)
        self._start_waiting()
        return request

    def cancel(self, request: BuildRequest, on_answer: OnAnswer) -> None:
        """Remove a listener. A running build goes on, and counts as the user's until it ends."""
        request.listeners.remove(on_answer)
        waiting = self._waiting.get(request.user, {})
        if not request.listeners and waiting.get(request.key) is request:
            self._remove(request)

    def _start_waiting(self) -> None:
        if self._starting:  # `build` answered at once
            return
        self._starting = True
        while (request := self._next()) is not None:
            self._remove(request)
            if request.user in self._waiting:
                self._waiting.move_to_end(request.user)
            self._running.add((request.user, request.key))
            self._running_of[request.user] += 1
            self._build(request.job, partial(self._answered, request))
        self._starting = False

    def _next(self) -> BuildRequest | None:
        free = jobs.JOBS_AT_ONCE - self._running_of.total()
        for user, waiting in self._waiting.items():
            if self._running_of[user] < 2 * free:
                for key, request in waiting.items():
                    if (user, key) not in self._running:
                        return request
        return None

    def _remove(self, request: BuildRequest) -> None:
        waiting = self._waiting[request.user]
        del waiting[request.key]
        if not waiting:
            del self._waiting[request.user]

    def _answered(self, request: BuildRequest, answer: jobs.Answer) -> None:
        for listener in request.listeners:
            listener(answer)
        if isinstance(answer, jobs.JobDone):
            self._running.remove((request.user, request.key))
            self._running_of[request.user] -= 1
            if not self._running_of[request.user]:
                del self._running_of[request.user]
            self._start_waiting()
