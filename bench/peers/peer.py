"""What a loader must offer to be measured, and what it is told."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

Kind = Literal["records", "varied", "tokens", "blobs", "images", "rows"]
Batches = Iterable[Any]
"""May be iterated again for the next epoch. A batch is one tensor [n, ...] of fixed samples or of decoded images; of
other uneven samples one flat tensor and the n + 1 bounds in it: see `collate.joined`."""
UNTUNED = "DataLoader, memmap, default collate"
"""As most people write it: fixed samples go through torch's own stack, one tensor each."""


@dataclass(frozen=True)
class Job:
    """One measurement. `corpus`: folder of the raw data. `folder`: of the peer's own format of it. `remote`: the same
    as an S3 prefix, "" when it is read from `folder`. `cache`: an empty folder that the peer may fill.
    `endpoint`: of the S3 server. `seconds`: how long a timed run lasts. `watched`: processes besides this one
    and its children whose work counts (a daemon). `thorough`: compare a whole epoch with the corpus."""

    peer: str
    kind: Kind
    corpus: str
    folder: str
    samples: int
    batch_size: int
    workers: int = 0
    threads: bool = False
    remote: str = ""
    cache: str = ""
    endpoint: str = ""
    seconds: float = 1.0
    runs: int = 3
    watched: tuple[int, ...] = ()
    thorough: bool = False

    def as_json(self) -> str:
        """For the command line of the process that does it."""
        return json.dumps(asdict(self))

    @staticmethod
    def parsed(text: str) -> Job:
        """The inverse of `as_json`."""
        found = json.loads(text)
        return Job(**{**found, "watched": tuple(found["watched"])})


class Peer(Protocol):
    """A loader, shuffled, used as its own documentation recommends; how, is said in its module."""

    def write(self, job: Job) -> None:
        """Convert the corpus to this peer's format, into `job.folder`."""
        ...

    def batches(self, job: Job) -> Batches:
        """Open the data (from `job.remote` when it is given)."""
        ...

    def halfway(self, job: Job) -> Callable[[], Iterator[Any]]:
        """Do what a checkpoint in mid-epoch does; the answer continues from there (that is what is timed)."""
        ...


def replayed(batches: Callable[[], Batches], count: int) -> Callable[[], Iterator[Any]]:
    """For peers that keep no state: begin anew and throw `count` batches away."""

    def again() -> Iterator[Any]:
        found = iter(batches())
        for _ in range(count):
            next(found)
        return found

    return again
