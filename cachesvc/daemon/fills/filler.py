"""A filler process: takes jobs from its channel, does the IO and answers. `python -m cachesvc.daemon.fills.filler FD` is
the fork server of all fillers (`daemon/processes/fork_server.py`).

A filler ends when its channel closes, whatever its threads wait for: a hung NFS mount must not keep a dead daemon's
children alive. It also ends when a call to a source has hung for `HUNG_S`: nothing can interrupt that call, and the
daemon replaces the process.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import socket
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from cachesvc.catalog.build import DirectBytes, build
from cachesvc.catalog.catalog import Catalog, is_current
from cachesvc.catalog.expiry import mark_used
from cachesvc.catalog.layout import Indirect
from cachesvc.config import ClusterSettings, Settings, Tls
from cachesvc.core.errors import CacheError, InvalidInput, OutOfSpace, SourceUnavailable
from cachesvc.core.model import Extent, ExtentId
from cachesvc.daemon.fills.block_client import BlockClient, PeerFailed
from cachesvc.daemon.fills.cached_bytes import CachedBytes
from cachesvc.daemon.fills.openings import KeptVersion, Openings
from cachesvc.daemon.processes import jobs
from cachesvc.daemon.processes.fork_server import serve_forks
from cachesvc.daemon.processes.logs import configure_logging
from cachesvc.daemon.processes.malloc import release_free_memory
from cachesvc.daemon.processes.nice import run_in_background
from cachesvc.daemon.processes.threads import ThreadPool
from cachesvc.sources.fetch import Fetcher, encode_missing
from cachesvc.sources.open import Sources, SourceSettings
from cachesvc.sources.resilient import SourceCounters
from cachesvc.sources.watched import HUNG_S, CallWatch
from cachesvc.system.buffers import Buffers
from cachesvc.system.fill_target import open_target
from cachesvc.tiers.checksum import StreamedChecksums, copy_verified, verify
from cachesvc.tiers.fill_progress import FillProgress
from cachesvc.tiers.os_errors import translated
from cachesvc.tiers.tier import CHECKSUM_BLOCK_BYTES, Checksums

log = logging.getLogger(__name__)
MAX_CATALOGS = 16
"""Open catalogs; each costs two descriptors and no memory of its own."""
MAX_MESSAGE_CHARS = 1 << 20
"""The limit of an error message, which may quote untrusted data or a caller's arguments."""
COPY_BUFFERS_BYTES = 8 << 20
"""The limit of the buffers of copies to a disk."""
PROGRESS_S = 0.2
WATCH_S = 1.0
IDLE_S = 5.0
"""Idle time after which a process releases memory that the next job would reuse."""
LIMIT_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class Filler:
    """Runs jobs on a pool of threads; answers are single datagrams, so threads need no lock to send them."""

    def __init__(
        self, channel: socket.socket, settings: Settings, roots: tuple[str, ...], paces: int
    ) -> None:
        self._channel = channel
        self._settings = settings
        self._calls = CallWatch()
        self._unanswered: dict[int, jobs.Job] = {}
        self._unanswered_lock = threading.Lock()
        self._sources = Sources(
            SourceSettings(
                roots=roots,
                metadata_directory=Path(settings.state_dir, "metadata"),
                metadata_expiry_s=settings.metadata_expiry_s,
                paces=paces,
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
            while (received := jobs.receive(self._channel)) is not None:
                job, descriptors = received
                assert isinstance(job, jobs.Job), "the daemon sends jobs"
                with self._unanswered_lock:
                    self._unanswered[job.number] = job
                threads.submit(self._answer, job, descriptors).add_done_callback(_report)

    def prepare(self) -> None:
        """Open the sources before the first job. Errors are dropped here; the first job that needs a source raises them."""
        for uri in self._settings.allow:
            with suppress(CacheError):
                self._sources(uri)

    def _answer(self, job: jobs.Job, descriptors: list[int]) -> None:
        work: dict[type, Callable[..., jobs.JobDone]] = {
            jobs.FillJob: self._fill,
            jobs.PullJob: self._pull,
            jobs.CopyJob: self._copy,
            jobs.VerifyJob: self._verify,
            jobs.BuildJob: self._build,
        }
        # Every job is answered, even after a programming error: its readers must not wait forever.
        done = jobs.JobDone(job.number, CacheError.code, "a job failed unexpectedly; see the daemon's log")
        try:
            if len(descriptors) < job.descriptors:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            done = work[type(job)](job, *descriptors)
        except SourceUnavailable as error:
            done = jobs.JobDone(job.number, error.code, str(error)[:MAX_MESSAGE_CHARS], retry=True)
        except CacheError as error:
            done = jobs.JobDone(job.number, error.code, str(error)[:MAX_MESSAGE_CHARS])
        except (OSError, MemoryError) as error:
            failure = _failure(error)
            done = jobs.JobDone(job.number, failure.code, str(failure)[:MAX_MESSAGE_CHARS], retry=True)
        finally:
            for fd in descriptors:
                os.close(fd)
            self._send(done)

    def _send(self, done: jobs.JobDone) -> None:
        """Send the answer, unless the watch has already answered the job."""
        with self._unanswered_lock:
            if done.number in self._unanswered:
                del self._unanswered[done.number]
                jobs.send(self._channel, done)

    def _watch(self) -> None:
        reported, idle_s = SourceCounters(), 0.0
        while not (uri := self._calls.hung_after(WATCH_S)):
            idle_s = 0.0 if self._unanswered else idle_s + WATCH_S
            if idle_s == IDLE_S:
                release_free_memory()
            if (requests := self._sources.counters()) != reported:
                with suppress(OSError):  # the daemon has ended, and this process is about to
                    jobs.send(self._channel, jobs.SourceRequests(**asdict(requests - reported)))
                reported = requests
        message = f"{uri} hangs: it has not answered for {HUNG_S:.0f} s; look at its mount"
        log.error("a source hangs; this process ends", extra={"uri": uri})
        for number, job in tuple(self._unanswered.items()):
            if not isinstance(job, jobs.BuildJob) or _reads(
                job, uri
            ):  # another builder retries the other builds
                self._send(jobs.JobDone(number, SourceUnavailable.code, message, retry=True))
        # The hung thread keeps the process and its descriptors alive after _exit: close the channel first.
        self._channel.shutdown(socket.SHUT_RDWR)
        os._exit(1)

    def _pull(self, job: jobs.PullJob, target: int, progress_fd: int) -> jobs.JobDone:
        """Fill the target from another node. What came is counted also where the node fails in the middle."""
        if self._peers is None:
            raise SourceUnavailable("peers are not asked: this node's certificates are unusable")
        progress = FillProgress(progress_fd, job.size_bytes)
        before, done = _complete_bytes(progress), jobs.JobDone(job.number, from_peer=True)
        try:
            extent = ExtentId(bytes.fromhex(job.extent))
            digests = self._peers.read(job.address, extent, job.size_bytes, target, progress)
            done = replace(done, digests=jobs.pack_digests(digests))
        except PeerFailed as error:
            done = replace(done, code=SourceUnavailable.code, message=str(error)[:MAX_MESSAGE_CHARS])
        except CacheError as error:
            done = replace(done, code=error.code, message=str(error)[:MAX_MESSAGE_CHARS])
        finally:
            came = _complete_bytes(progress) - before
            progress.close()
        return replace(done, peer_bytes=came)

    def _fill(self, job: jobs.FillJob, target: int, catalog: int, progress_fd: int = -1) -> jobs.JobDone:
        dataset = self._catalog(job.dataset, catalog)
        extent = dataset.extent(job.index)
        progress = FillProgress(progress_fd, extent.size_bytes) if job.shared else None
        try:
            return self._fetch(job, target, dataset, extent, StreamedChecksums(extent.size_bytes, progress))
        finally:
            if progress is not None:
                progress.close()

    def _fetch(
        self, job: jobs.FillJob, target: int, dataset: Catalog, extent: Extent, passing: StreamedChecksums
    ) -> jobs.JobDone:
        missing = self._fetcher.fetch(extent, target, passing.add)
        if isinstance(dataset.layout, Indirect):  # a compressed shard can be checked only now
            with translated("tier", "read an extent"):
                head = os.pread(target, 4, 0)
            dataset.check_shard(job.index, head)
        digests = passing.checksums(target).digests
        done = jobs.JobDone(job.number, digests=jobs.pack_digests(digests), source_bytes=extent.stored_bytes)
        if not missing:
            return done
        first = next(iter(missing.values()))
        message = (
            f"{len(missing)} of {len(extent.pieces)} objects of an extent are missing, the first: {first}"
        )
        return replace(
            done, holes=encode_missing(missing), message=message[:MAX_MESSAGE_CHARS], hole_code=first.code
        )

    def _copy(self, job: jobs.CopyJob, target: int, origin: int) -> jobs.JobDone:
        checksums = Checksums(job.size_bytes, jobs.unpack_digests(job.digests))
        with open_target(target, job.size_bytes, self._buffers) as into:
            copy_verified(origin, into, checksums)
        return jobs.JobDone(job.number, digests=job.digests)

    def _verify(self, job: jobs.VerifyJob, extent: int) -> jobs.JobDone:
        with translated("tier", "read an extent"):
            os.posix_fadvise(extent, 0, 0, os.POSIX_FADV_DONTNEED)  # check the disk, not the page cache
        verify(extent, Checksums(job.size_bytes, jobs.unpack_digests(job.digests)))
        return jobs.JobDone(job.number)

    def _build(self, job: jobs.BuildJob) -> jobs.JobDone:
        found = self._openings.find(job)
        if isinstance(found, KeptVersion):
            before = " ".join(found.before)
            return jobs.JobDone(
                job.number, message=found.why, dataset=found.id, listed_at=found.listed_at, before=before
            )
        path = f"{job.catalogs}/{found.id}.lmdb"
        with self._one_build(found.id):
            if not mark_used(path) or not is_current(path):
                # The directory may have been removed; for any other error creating the file fails too.
                with suppress(OSError):
                    os.mkdir(job.catalogs, 0o700)
                direct = DirectBytes(self._sources)
                with CachedBytes(self._settings.socket_dir, job.catalogs, found, direct, self._calls) as data:
                    notes = build(found, path, self._sources, data, self._progress(job.number))
                for note in notes:
                    log.warning("%s", note)
        self._openings.opened(job, found.id)
        return jobs.JobDone(job.number, dataset=found.id)

    @contextmanager
    def _one_build(self, dataset: str) -> Iterator[None]:
        """Single-flight for builds: all ranks of a job open its dataset at once; the first builds it, the others wait."""
        with self._catalogs_lock:
            turn, users = self._building.get(dataset, (threading.Lock(), 0))
            self._building[dataset] = (turn, users + 1)
        try:
            with turn:
                yield
        finally:
            with self._catalogs_lock:
                turn, users = self._building.pop(dataset)
                if users > 1:
                    self._building[dataset] = (turn, users - 1)

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
                        jobs.send(self._channel, jobs.BuildProgress(number, done, total))

        return progress

    def _catalog(self, dataset: str, fd: int) -> Catalog:
        with self._catalogs_lock:
            if dataset not in self._catalogs:
                self._catalogs[dataset] = Catalog.open(f"/proc/self/fd/{fd}")
            self._catalogs.move_to_end(dataset)
            while len(self._catalogs) > MAX_CATALOGS:
                self._catalogs.popitem(last=False)
            return self._catalogs[dataset]


def _block_client(settings: Settings) -> BlockClient | None:
    """Return a client of the cluster's nodes; None without a cluster, or where the certificates have become unusable."""
    if settings.cluster is None:
        return None
    try:
        return BlockClient(settings.tls, settings.cluster.tls_name)
    except InvalidInput as error:
        log.error("peers are not asked", extra={"error": str(error)})
        return None


def _complete_bytes(progress: FillProgress) -> int:
    blocks = sum(count for _, count in progress.runs(0, progress.blocks))
    return min(blocks * CHECKSUM_BLOCK_BYTES, progress.size_bytes)


def _failure(error: OSError | MemoryError) -> CacheError:
    """Translate an error that is neither a tier's nor an extent's: reads and writes of extents raise their own errors."""
    number = errno.ENOMEM if isinstance(error, MemoryError) else error.errno
    if number not in LIMIT_ERRORS:
        return SourceUnavailable(f"a filler process had an error unrelated to the cache's disks: {error}")
    return OutOfSpace(
        f"a filler process is at its limit ({os.strerror(number)}); allow it more (LimitNOFILE=, ulimit -n, ulimit -v)"
    )


def _reads(job: jobs.BuildJob, uri: str) -> bool:
    """Tell whether a build may read a URI: below one of its own, up to the first wildcard."""
    return any(uri.startswith(re.split(r"[*?\[{]", each)[0].rstrip("/")) for each in job.uris)


def _report(ended: Future[None]) -> None:
    error = ended.exception()
    if error is not None and not isinstance(error, BrokenPipeError):  # the daemon has ended
        log.error("a job failed unexpectedly", exc_info=error)


def _run_filler(settings: Settings, roots: tuple[str, ...], paces: int, channel: socket.socket) -> None:
    filler = Filler(channel, settings, roots, paces)
    # At normal priority: in the background it took 20 s beside jobs that keep every core busy, and readers wait for it.
    threading.Thread(target=filler.prepare, name="prepare", daemon=True).start()
    run_in_background()
    filler.run()


def main() -> None:
    """Run the fork server of the fillers."""
    fields = json.loads(os.environ.pop("CACHESVC_GIVEN"))
    channel = socket.socket(fileno=int(sys.argv[1]))
    fields["allow"] = tuple(fields["allow"])
    fields["cluster"] = fields["cluster"] and ClusterSettings(**fields["cluster"])
    fields |= {"nvme": (), "rules": (), "quota": (), "tls": fields["tls"] and Tls(**fields["tls"])}
    roots, paces = tuple(fields.pop("roots")), fields.pop("paces")
    settings = Settings(**fields)
    configure_logging(settings.log_format)
    if not settings.allow or any(uri.startswith("s3://") for uri in settings.allow):
        from cachesvc.sources.s3.s3 import prepare_s3  # imports boto3: 0.3 s of CPU and 28 MB

        prepare_s3()
    serve_forks(channel, partial(_run_filler, settings, roots, paces))


if __name__ == "__main__":
    main()
