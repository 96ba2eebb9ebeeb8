"""The messages between the daemon and its fillers and builder: jobs, and what becomes of them."""

from __future__ import annotations

import re
from typing import ClassVar, TypeAlias

import msgspec

from cachesvc.catalog.options import Options
from cachesvc.core.commands import Need
from cachesvc.core.model import DatasetId
from cachesvc.core.placement.place_search import Patience, ReadEnd
from cachesvc.daemon.processes.datagrams import Receiver
from cachesvc.sources.timed_reads import SourceCounters

JOBS_AT_ONCE = 16
"""Jobs that a process runs at a time. Fills are fewer; a build of minutes must not delay builds of other datasets."""
MAX_MESSAGE_CHARS = 1 << 20
"""The limit of an error message, which may quote untrusted data or a caller's arguments."""


class FetchJob(msgspec.Struct, frozen=True, tag=True):
    """Fetch extent `index` of a catalog into the target: from its source, or the blocks that its progress lacks from the
    node at HOST:PORT `address`. `patience`: how long it may take. `need`: what waits for it. `most_bytes`: the room for an
    uneven extent, whose size the node tells; 0: the size is in the catalog. Descriptors: target, catalog, and, where other
    nodes may follow the fill (`shared`), its progress."""

    dataset: DatasetId
    index: int
    address: str = ""
    shared: bool = False
    patience: Patience = Patience()
    need: Need = Need.NONE
    most_bytes: int = 0

    @property
    def descriptors(self) -> int:
        """The number of descriptors."""
        return 2 + self.shared


class CopyJob(msgspec.Struct, frozen=True, tag=True):
    """Copy an extent from one tier to another, and verify it. Descriptors: target, origin."""

    descriptors: ClassVar[int] = 2
    size_bytes: int
    digests: bytes


class VerifyJob(msgspec.Struct, frozen=True, tag=True):
    """Check an extent against its checksums. Descriptors: the extent."""

    descriptors: ClassVar[int] = 1
    size_bytes: int
    digests: bytes


class BuildJob(msgspec.Struct, frozen=True, tag=True):
    """Resolve URIs to a dataset version and build its catalog in `catalogs` unless it is there. `version`: the one that is
    wanted; nothing is asked of the source if its catalog is there."""

    descriptors: ClassVar[int] = 0
    uris: list[str]
    options: Options
    catalogs: str
    refresh: bool
    version: str = ""

    def reads(self, uri: str) -> bool:
        """Tell whether the build may read a URI: below one of its own, up to the first wildcard."""
        return any(uri.startswith(re.split(r"[*?\[{]", each)[0].rstrip("/")) for each in self.uris)


class BuildProgress(msgspec.Struct, frozen=True, tag=True):
    """The bytes that a build has read so far, and all that it will read."""

    done_bytes: int
    total_bytes: int


class JobDone(msgspec.Struct, frozen=True, tag=True):
    """The end of a job.

    `code` is 0 for success, else a code of `core/errors.py` with a `message` of one line. `lost`: the process ended
    without an answer. `crashed`: a signal of its own code ended it (an abort, a segmentation fault) while it had
    this job alone. `end`: what a job that failed says about the place that it read from, None where it says
    nothing. `holes`: ranges of objects that a successful fill left out, in the format of grants; `hole_code`
    and `message` are the error of the first. `listed_at`: a build whose source is down opened the version that was the
    source's then, in seconds of Unix time, and `message` says why; `before`: the versions before it that could be opened
    too. `size_bytes`: what the bytes of a prepared extent take.
    """

    code: int = 0
    message: str = ""
    retry: bool = False
    digests: bytes = b""
    source_bytes: int = 0
    peer_bytes: int = 0
    dataset: str = ""
    lost: bool = False
    crashed: bool = False
    end: ReadEnd | None = None
    holes: str = ""
    hole_code: int = 0
    listed_at: int = 0
    before: tuple[DatasetId, ...] = ()
    size_bytes: int = 0


Job: TypeAlias = FetchJob | CopyJob | VerifyJob | BuildJob
Answer: TypeAlias = BuildProgress | JobDone


class Submitted(msgspec.Struct, frozen=True, tag=True):
    """A job and its number, which its answers name."""

    number: int
    job: Job

    @property
    def rank(self) -> float:
        """The place of its reads among late ones, node-wide: what readers wait for, then what plans need, oldest first."""
        need = self.job.need if isinstance(self.job, FetchJob) else 0
        return need * 2.0**48 + self.number


class Answered(msgspec.Struct, frozen=True, tag=True):
    """An answer to the job of this number."""

    number: int
    answer: Answer


class SourceRequests(msgspec.Struct, frozen=True, tag=True):
    """The requests that the process sent to sources since its last such message."""

    counters: SourceCounters


receive_job: Receiver[Submitted] = Receiver(Submitted)
receive_answer: Receiver[Answered | SourceRequests] = Receiver(Answered | SourceRequests)
