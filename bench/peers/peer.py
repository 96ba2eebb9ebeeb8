"""The Protocol of a measured loader, and the job that it is given."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

Kind = Literal["records", "varied", "tokens", "blobs", "images", "rows"]
Batches = Iterable[Any]
"""Iterated once per epoch. A batch of fixed samples or decoded images is one tensor [n, ...]; a batch of other uneven
samples is a flat tensor and its n + 1 bounds, see `collate.joined`."""
UNTUNED = "DataLoader, memmap, default collate"
"""The usual code of users: torch's own stack collates fixed samples, one tensor each."""


@dataclass(frozen=True)
class Job:
    """One measurement. `corpus`: folder of the raw data. `folder`: the same data in the peer's format. `remote`: an S3
    prefix with the contents of `folder`, "" to read `folder` itself. `cache`: an empty folder that the peer may fill.
    `endpoint`: URL of the S3 server. `seconds`: length of a timed run. `watched`: further processes whose CPU time
    counts (a daemon's). `thorough`: compare a whole epoch with the corpus. `disk`: the folder of the files that are read
    from a disk, whose page cache is dropped before cold runs."""

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
    disk: str = ""

    def as_json(self) -> str:
        """JSON for the command line of the measuring process."""
        return json.dumps(asdict(self))

    @staticmethod
    def parsed(text: str) -> Job:
        """Inverse of `as_json`."""
        found = json.loads(text)
        return Job(**{**found, "watched": tuple(found["watched"])})


class Peer(Protocol):
    """A shuffling loader, set up as its own documentation recommends; its module names the settings."""

    def write(self, job: Job) -> None:
        """Convert the corpus to this peer's format, into `job.folder`."""
        ...

    def batches(self, job: Job) -> Batches:
        """Open the data, from `job.remote` when it is given."""
        ...
