"""A filler process: takes jobs from its channel, does the IO and answers. `python -m cachesvc.daemon.fills.filler FD` is
the fork server of all fillers (`daemon/processes/fork_server.py`).

A filler ends when its channel closes, whatever its threads wait for: a hung NFS mount must not keep a dead daemon's
children alive. It also ends when a call to a source has hung for `HUNG_S`: nothing can interrupt that call, and the
daemon replaces the process.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import logging
import os
import socket
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path

import msgspec

from cachesvc.catalog.build import DirectBytes, build
from cachesvc.catalog.catalog import Catalog, is_current
from cachesvc.catalog.expiry import mark_used
from cachesvc.catalog.layout import Indirect
from cachesvc.config import Settings
from cachesvc.core.errors import CacheError, InvalidInput, OutOfSpace, SourceUnavailable
from cachesvc.core.limits import HUNG_S
from cachesvc.core.model import Extent
from cachesvc.core.placement.place_search import ReadEnd
from cachesvc.daemon.blocks.client import BlockClient
from cachesvc.daemon.fills.cached_bytes import CachedBytes
from cachesvc.daemon.fills.node_reads import read_blocks, read_copy
from cachesvc.daemon.fills.openings import KeptVersion, Openings
from cachesvc.daemon.object_parts import read_part
from cachesvc.daemon.processes import jobs
from cachesvc.daemon.processes.datagrams import send
from cachesvc.daemon.processes.fork_server import serve_forks
from cachesvc.daemon.processes.jobs import MAX_MESSAGE_CHARS
from cachesvc.daemon.processes.logs import configure_logging
from cachesvc.daemon.processes.threads import ThreadPool, run_in_background
from cachesvc.sources.fetch import Fetcher, encode_missing
from cachesvc.sources.open import Sources, SourceSettings
from cachesvc.sources.read_watch import ReadWatch
from cachesvc.sources.timed_reads import SourceCounters
from cachesvc.sources.watched import CallWatch
from cachesvc.system.buffers import Buffers
from cachesvc.system.fill_target import open_target
from cachesvc.tiers.checksum import StreamedChecksums, copy_verified, verify
from cachesvc.tiers.fill_progress import FillProgress
from cachesvc.tiers.tier import Checksums, translated

log = logging.getLogger(__name__)
MAX_CATALOGS = 16
"""Open catalogs; each costs two descriptors and no memory of its own."""
COPY_BUFFERS_BYTES = 8 << 20
"""The limit of the buffers of copies to a disk."""
PROGRESS_S = 0.2
WATCH_S = 1.0
IDLE_S = 5.0
"""Idle time after which a process releases memory that the next job would reuse."""
LIMIT_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class Filler:
    """Runs jobs on a pool of threads; answers are single datagrams, so threads need no lock to send them."""

    def __init__(self, channel: socket.socket, given: Given) -> None:
        self._channel = channel
        self._settings = settings = given.settings
        self._calls = CallWatch()
        self._unanswered: dict[int, jobs.Job] = {}
        self._unanswered_lock = threading.Lock()
        self._sources = Sources(
            SourceSettings(
                roots=given.roots,
                metadata_directory=Path(settings.state_dir, "metadata"),
                metadata_expiry_s=settings.metadata_expiry_s,
                paces=given.paces,
                hedge_share=settings.hedge_share,
                sections=settings.source,
            ),
            self._calls,
        )
        self._openings = Openings(self._sources, settings.stale_if_error_s)
        threading.Thread(target=self._watch, name="watch", daemon=True).start()
        self._peers = _block_client(settings)
        self._buffers = Buffers(COPY_BUFFERS_BYTES)
        self._fetcher = Fetcher(self._sources, settings.filler_threads)
        self._catalogs: OrderedDict[str, Catalog] = OrderedDict()
        self._catalogs_lock = threading.Lock()
        self._building: dict[str, tuple[threading.Lock, int]] = {}

    def run(self) -> None:
        """Serve until the daemon closes the channel."""
        threads = ThreadPool(jobs.JOBS_AT_ONCE, "job")  # they inherit this thread's priority
        with suppress(ConnectionResetError):  # the daemon closed the channel with unread answers in it
            while (received := jobs.receive_job(self._channel)) is not None:
                submitted, descriptors = received
                with self._unanswered_lock:
                    self._unanswered[submitted.number] = submitted.job
                threads.submit(self._answer, submitted, descriptors).add_done_callback(_report)

    def prepare(self) -> None:
        """Open the sources before the first job. Errors are dropped here; the first job that needs a source raises them."""
        for uri in self._settings.allow:
            with suppress(CacheError):
                self._sources(uri)

    def _answer(self, submitted: jobs.Submitted, descriptors: list[int]) -> None:
        # Every job is answered, even after a programming error: its readers must not wait forever.
        done = jobs.JobDone(CacheError.code, "a job failed unexpectedly; see the daemon's log")
        try:
            if len(descriptors) < submitted.job.descriptors:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            done = self._run(submitted, descriptors)
        except SourceUnavailable as error:
            done = jobs.JobDone(error.code, str(error)[:MAX_MESSAGE_CHARS], retry=True)
        except CacheError as error:
            done = jobs.JobDone(error.code, str(error)[:MAX_MESSAGE_CHARS])
        except (OSError, MemoryError) as error:
            failure = _failure(error)
            done = jobs.JobDone(failure.code, str(failure)[:MAX_MESSAGE_CHARS], retry=True)
        finally:
            for fd in descriptors:
                os.close(fd)
            self._send(submitted.number, done)

    def _run(self, submitted: jobs.Submitted, descriptors: list[int]) -> jobs.JobDone:
        job = submitted.job
        if isinstance(job, jobs.FetchJob):
            return self._fetch(job, submitted.rank, *descriptors)
        if isinstance(job, jobs.CopyJob):
            return self._copy(job, *descriptors)
        if isinstance(job, jobs.VerifyJob):
            return self._verify(job, *descriptors)
        return self._build(job, self._progress(submitted.number))

    def _send(self, number: int, done: jobs.JobDone) -> None:
        """Send the answer, unless the watch has already answered the job."""
        with self._unanswered_lock:
            if number in self._unanswered:
                del self._unanswered[number]
                send(self._channel, jobs.Answered(number, done))

    def _watch(self) -> None:
        reported, idle_s = SourceCounters(), 0.0
        while not (uri := self._calls.hung_after(WATCH_S)):
            idle_s = 0.0 if self._unanswered else idle_s + WATCH_S
            if idle_s == IDLE_S:
                _release_free_memory()
            if (requests := self._sources.counters()) != reported:
                with suppress(OSError):  # the daemon has ended, and this process is about to
                    send(self._channel, jobs.SourceRequests(requests - reported))
                reported = requests
        message = f"{uri} hangs: it has not answered for {HUNG_S:.0f} s; look at its mount"
        log.error("a source hangs; this process ends", extra={"uri": uri})
        for number, job in tuple(self._unanswered.items()):
            # Another builder retries the other builds.
            if not isinstance(job, jobs.BuildJob) or job.reads(uri):
                self._send(number, jobs.JobDone(SourceUnavailable.code, message, retry=True))
        # The hung thread keeps the process and its descriptors alive after _exit: close the channel first.
        self._channel.shutdown(socket.SHUT_RDWR)
        os._exit(1)

    def _fetch(
        self, job: jobs.FetchJob, rank: float, target: int, catalog: int, progress_fd: int = -1
    ) -> jobs.JobDone:
        """Fetch an extent from its source or from a node. Its progress, where others may follow, is the same for both."""
        dataset = self._catalog(job.dataset, catalog) if job.dataset else read_part(catalog)
        extent = dataset.extent(job.index)
        if job.address:
            if self._peers is None:
                raise SourceUnavailable("peers are not asked: this node's certificates are unusable")
            if not job.shared:
                return read_copy(self._peers, job, target, extent)
            with closing(FillProgress(progress_fd, extent.size_bytes)) as progress:
                return read_blocks(self._peers, job, target, extent, progress)
        if not job.shared:
            return self._from_source(job, rank, target, dataset, extent, None)
        with closing(FillProgress(progress_fd, extent.size_bytes)) as progress:
            return self._from_source(job, rank, target, dataset, extent, progress)

    def _from_source(
        self,
        job: jobs.FetchJob,
        rank: float,
        target: int,
        dataset: Catalog,
        extent: Extent,
        progress: FillProgress | None,
    ) -> jobs.JobDone:
        """Fetch all of the extent, whatever blocks came from nodes before."""
        passing = StreamedChecksums(extent.size_bytes, progress)
        with ReadWatch(job.patience.wait_s, self._sources.give_up, rank=rank) as watch:
            try:
                missing = self._fetcher.fetch(extent, target, passing.add, watch)
            except SourceUnavailable as error:
                if not watch.expired:
                    raise
                return jobs.JobDone(error.code, str(error)[:MAX_MESSAGE_CHARS], retry=True, end=ReadEnd.LATE)
        if isinstance(dataset.layout, Indirect):  # a compressed shard can be checked only now
            with translated("tier", "read an extent"):
                head = os.pread(target, 4, 0)
            dataset.check_shard(job.index, head)
        holes, code, message = "", 0, ""
        if missing:
            first = next(iter(missing.values()))
            holes, code = encode_missing(missing), first.code
            message = (
                f"{len(missing)} of {len(extent.pieces)} objects of an extent are missing, the first: {first}"
            )
        return jobs.JobDone(
            message=message[:MAX_MESSAGE_CHARS],
            digests=passing.checksums(target).digests,
            source_bytes=extent.stored_bytes,
            holes=holes,
            hole_code=code,
        )

    def _copy(self, job: jobs.CopyJob, target: int, origin: int) -> jobs.JobDone:
        with open_target(target, job.size_bytes, self._buffers) as into:
            copy_verified(origin, into, Checksums(job.size_bytes, job.digests))
        return jobs.JobDone(digests=job.digests)

    def _verify(self, job: jobs.VerifyJob, extent: int) -> jobs.JobDone:
        with translated("tier", "read an extent"):
            os.posix_fadvise(extent, 0, 0, os.POSIX_FADV_DONTNEED)  # check the disk, not the page cache
        verify(extent, Checksums(job.size_bytes, job.digests))
        return jobs.JobDone()

    def _build(self, job: jobs.BuildJob, progress: Callable[[int, int], None]) -> jobs.JobDone:
        found = self._openings.find(job)
        if isinstance(found, KeptVersion):
            return jobs.JobDone(
                message=found.why, dataset=found.id, listed_at=found.listed_at, before=found.before
            )
        path = f"{job.catalogs}/{found.id}.lmdb"
        with self._one_build(found.id):
            if not mark_used(path) or not is_current(path):
                # The directory may have been removed; for any other error creating the file fails too.
                with suppress(OSError):
                    os.mkdir(job.catalogs, 0o700)
                direct = DirectBytes(self._sources)
                with CachedBytes(self._settings.socket_dir, job.catalogs, found, direct, self._calls) as data:
                    notes = build(found, path, self._sources, data, progress)
                for note in notes:
                    log.warning("%s", note)
        self._openings.opened(job, found.id)
        return jobs.JobDone(dataset=found.id)

    @contextmanager
    def _one_build(self, dataset: str) -> Iterator[None]:
        """Single-flight for builds: all ranks of a job open its dataset at once; the first builds it, the others wait."""
        with self._catalogs_lock:
            build_lock, users = self._building.get(dataset, (threading.Lock(), 0))
            self._building[dataset] = (build_lock, users + 1)
        try:
            with build_lock:
                yield
        finally:
            with self._catalogs_lock:
                build_lock, users = self._building.pop(dataset)
                if users > 1:
                    self._building[dataset] = (build_lock, users - 1)

    def _progress(self, number: int) -> Callable[[int, int], None]:
        """Return a callback that sends progress to the daemon at most every `PROGRESS_S` seconds."""
        due = 0.0

        def progress(done: int, total: int) -> None:
            nonlocal due
            now = time.monotonic()
            if now >= due:
                due = now + PROGRESS_S
                with self._unanswered_lock:
                    if number in self._unanswered:
                        send(self._channel, jobs.Answered(number, jobs.BuildProgress(done, total)))

        return progress

    def _catalog(self, dataset: str, fd: int) -> Catalog:
        with self._catalogs_lock:
            if dataset not in self._catalogs:
                self._catalogs[dataset] = Catalog.open(f"/proc/self/fd/{fd}")
            self._catalogs.move_to_end(dataset)
            while len(self._catalogs) > MAX_CATALOGS:
                self._catalogs.popitem(last=False)
            return self._catalogs[dataset]


def _release_free_memory() -> None:
    """Collect garbage and give the heap's free memory to the kernel. A C library without `malloc_trim` (musl) keeps it."""
    gc.collect()
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _block_client(settings: Settings) -> BlockClient | None:
    """Return a client of the cluster's nodes; None without a cluster, or where the certificates have become unusable."""
    if settings.cluster is None:
        return None
    try:
        return BlockClient(settings.tls, settings.cluster.tls_name)
    except InvalidInput as error:
        log.error("peers are not asked", extra={"error": str(error)})
        return None


def _failure(error: OSError | MemoryError) -> CacheError:
    """Translate an error that is neither a tier's nor an extent's: reads and writes of extents raise their own errors."""
    number = errno.ENOMEM if isinstance(error, MemoryError) else error.errno
    if number not in LIMIT_ERRORS:
        return SourceUnavailable(f"a filler process had an error unrelated to the cache's disks: {error}")
    return OutOfSpace(
        f"a filler process is at its limit ({os.strerror(number)}); allow it more (LimitNOFILE=, ulimit -n, ulimit -v)"
    )


def _report(ended: Future[None]) -> None:
    error = ended.exception()
    if error is not None and not isinstance(error, BrokenPipeError):  # the daemon has ended
        log.error("a job failed unexpectedly", exc_info=error)


class Given(msgspec.Struct, frozen=True):
    """The start arguments of the fillers' fork server: settings, the real paths that files must lie under, and the
    descriptor of the paces of requests."""

    settings: Settings
    roots: tuple[str, ...]
    paces: int


def _run_filler(given: Given, channel: socket.socket) -> None:
    filler = Filler(channel, given)
    # At normal priority: in the background it took 20 s beside jobs that keep every core busy, and readers wait for it.
    threading.Thread(target=filler.prepare, name="prepare", daemon=True).start()
    run_in_background()
    filler.run()


def main() -> None:
    """Run the fork server of the fillers."""
    given = msgspec.json.decode(os.environ.pop("CACHESVC_GIVEN"), type=Given)
    channel = socket.socket(fileno=int(sys.argv[1]))
    configure_logging(given.settings.log_format, given.settings.log)
    allow = given.settings.allow
    if not allow or any(uri.startswith("s3://") for uri in allow):
        from cachesvc.sources.s3.s3 import prepare_s3  # imports boto3: 0.3 s of CPU and 28 MB

        prepare_s3()
    serve_forks(channel, partial(_run_filler, given))


if __name__ == "__main__":
    main()
