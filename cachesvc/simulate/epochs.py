"""The epochs of a simulated run: their meters, and the steps that ranks take together."""

from __future__ import annotations

from collections.abc import Callable

from cachesvc.simulate.clock import Clock
from cachesvc.simulate.measure import EpochResult, Meter


class Epochs:
    """Meters of the epochs that some rank is in. An epoch ends with the last of `ranks`.

    In each step, `in_step` ranks wait for each other, as ranks that average gradients do. With 1, no rank waits.
    """

    def __init__(self, clock: Clock, ranks: int, in_step: int = 1) -> None:
        self.results: list[EpochResult] = []
        self._clock = clock
        self._ranks = ranks
        self._in_step = in_step
        self._arrived: list[Callable[[], None]] = []
        self._meters: dict[int, Meter] = {}
        self._ended: dict[int, int] = {}

    def meter(self, epoch: int) -> Meter:
        """The meter of an epoch, started by its first rank."""
        return self._meters.setdefault(epoch, Meter(self._clock.now))

    def running(self) -> list[Meter]:
        """The meters of all epochs that have begun and not ended, the earliest first."""
        return [self._meters[epoch] for epoch in sorted(self._meters)]

    def arrive(self, go_on: Callable[[], None]) -> None:
        """Note that a rank is done with a step. It goes on once the others are done too."""
        self._arrived.append(go_on)
        if len(self._arrived) == self._in_step:
            arrived, self._arrived = self._arrived, []
            for each in arrived:
                each()

    def ended(self, epoch: int) -> None:
        """Note that a rank has finished an epoch. The last rank closes the meter."""
        self._ended[epoch] = self._ended.get(epoch, 0) + 1
        if self._ended[epoch] == self._ranks:
            self.results.append(self._meters.pop(epoch).close(self._clock.now))
