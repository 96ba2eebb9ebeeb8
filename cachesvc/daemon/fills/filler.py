"""A filler process: takes jobs from its channel, does the IO, answers. `python -m cachesvc.daemon.fills.filler FD` is
the one that all are forked from (`daemon/processes/fork_server.py`).

It ends when its channel does, whatever its threads are waiting for: a hung NFS mount must not keep a dead
daemon's children alive. And it ends when a call to a source has hung for `HUNG_S`: nothing can interrupt that call,
and the daemon puts a new process in its place.
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
from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.expiry import mark_used
from cachesvc.catalog.layout import Indirect
from cachesvc.catalog.options import Options
from cachesvc.catalog.survey import survey
from cachesvc.config import Settings, Tls
from cachesvc.core.errors import CacheError, CorruptData, InvalidInput, OutOfSpace, SourceUnavailable
from cachesvc.daemon.fills.cached_bytes import CachedBytes
from cachesvc.daemon.fills.peer_fetch import Peers
from cachesvc.daemon.processes import jobs
from cachesvc.daemon.processes.fork_server import serve_forks
from cachesvc.daemon.processes.logs import configure_logging
from cachesvc.daemon.processes.malloc import release_free_memory
from cachesvc.daemon.processes.nice import run_in_background
from cachesvc.daemon.processes.threads import Threads
from cachesvc.sources.fetch import Fetcher, written
from cachesvc.sources.open import Sources, SourceSettings
from cachesvc.sources.resilient import SourceCounters
from cachesvc.sources.watched import HUNG_S, Calls
from cachesvc.tiers.checksum import Passing, verify
from cachesvc.tiers.failures import translated
from cachesvc.tiers.huge import in_huge_pages, in_memory
from cachesvc.tiers.tier import Checksums

log = logging.getLogger(__name__)
MAX_CATALOGS = 16
"""Open catalogs; each costs two descriptors and no memory of its own."""
MOST_SAID = 1 << 20
"""Characters of an error: what it quotes may be as long as whoever wrote the data likes, or who asks for it."""
PROGRESS_S = 0.2
WATCH_S = 1.0
IDLE_S = 5.0
"""Idle time after which a process gives back the memory that its next job would reuse."""
SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class Filler:
    """Runs jobs side by side; answers are single datagrams, so threads need no lock to send them."""

    def __init__(
        self, channel: socket.socket, settings: Settings, roots: tuple[str, ...], paces: int
    ) -> None:
        self._channel = channel
        self._settings = settings
        self._calls = Calls()
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
        threading.Thread(target=self._watch, name="watch", daemon=True).start()
        self._peers = _peers(settings, self._left_alone)
        self._fetcher = Fetcher(self._sources, settings.filler_threads)
        self._catalogs: OrderedDict[str, Catalog] = OrderedDict()
        self._catalogs_lock = threading.Lock()
        self._building: dict[str, tuple[threading.Lock, int]] = {}

    def run(self) -> None:
        """Serve until the daemon closes the channel."""
        threads = Threads(jobs.SIDE_BY_SIDE, "job")  # of this thread's priority
        with suppress(ConnectionResetError):  # the same, while answers were under way
            while (received := jobs.receive(self._channel)) is not None:
                job, descriptors = received
                assert isinstance(job, jobs.Job), "the daemon sends jobs"
                with self._unanswered_lock:
                    self._unanswered[job.number] = job
                threads.submit(self._answer, job, descriptors).add_done_callback(_report)

    def prepare(self) -> None:
        """Open the sources before anyone waits. What fails is said by the first job
        that needs it."""
        for uri in self._settings.allow:
            with suppress(CacheError):
                self._sources(uri)

    def _answer(self, job: jobs.Job, descriptors: list[int]) -> None:
        work: dict[type, Callable[..., jobs.Done]] = {
            jobs.Fill: self._fill,
            jobs.Copy: self._copy,
            jobs.Verify: self._verify,
            jobs.Build: self._build,
        }
        # Every job is answered, also one that ends in an error of ours: its readers must not wait for ever.
        done = jobs.Done(job.number, CacheError.code, "a job failed unexpectedly; see the daemon's log")
        try:
            if len(descriptors) < job.descriptors:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            done = work[type(job)](job, *descriptors)
        except SourceUnavailable as error:
            done = jobs.Done(job.number, error.code, str(error)[:MOST_SAID], retry=True)
        except CacheError as error:
            done = jobs.Done(job.number, error.code, str(error)[:MOST_SAID])
        except (OSError, MemoryError) as error:
            failure = _failure(error)
            done = jobs.Done(job.number, failure.code, str(failure)[:MOST_SAID], retry=True)
        finally:
            for fd in descriptors:
                os.close(fd)
            self._send(done)

    def _send(self, done: jobs.Done) -> None:
        """One answer a job: the watch may have given it."""
        with self._unanswered_lock:
            if done.number in self._unanswered:
                del self._unanswered[done.number]
                jobs.send(self._channel, done)

    def _left_alone(self, peer: str) -> None:
        with suppress(OSError):  # the daemon's end, and ours
            jobs.send(self._channel, jobs.LeftAlone(peer))

    def _watch(self) -> None:
        told, idle_s = SourceCounters(), 0.0
        while not (uri := self._calls.look(WATCH_S)):
            idle_s = 0.0 if self._unanswered else idle_s + WATCH_S
            if idle_s == IDLE_S:
                release_free_memory()
            if (asked := self._sources.asked()) != told:
                with suppress(OSError):  # the daemon's end, and ours
                    jobs.send(self._channel, jobs.Asked(**asdict(asked - told)))
                told = asked
        message = f"{uri} hangs: it has not answered for {HUNG_S:.0f} s; look at its mount"
        log.error("a source hangs; this process ends", extra={"uri": uri})
        for number, job in tuple(self._unanswered.items()):
            if not isinstance(job, jobs.Build) or _reads(job, uri):  # other builds begin anew elsewhere
                self._send(jobs.Done(number, SourceUnavailable.code, message, retry=True))
        # The thread that hangs keeps every descriptor open, and this process half alive: tell the daemon.
        self._channel.shutdown(socket.SHUT_RDWR)
        os._exit(1)

    def _fill(self, job: jobs.Fill, target: int, catalog: int) -> jobs.Done:
        dataset = self._catalog(job.dataset, catalog)
        extent = dataset.extent(job.index)
        if in_memory(target):
            in_huge_pages(target, extent.size_bytes)
        if had := self._peers.fill(extent.id, extent.size_bytes, target):
            return jobs.Done(job.number, digests=jobs.pack_digests(had), peer_bytes=extent.size_bytes)
        passing = Passing(extent.size_bytes)
        missing = self._fetcher.fetch(extent, target, passing.add)
        if isinstance(dataset.layout, Indirect):  # what is compressed could not be asked before
            with translated("tier", "read an extent"):
                head = os.pread(target, 4, 0)
            dataset.check_shard(job.index, head)
        digests = passing.checksums(target).digests
        done = jobs.Done(job.number, digests=jobs.pack_digests(digests), source_bytes=extent.stored_bytes)
        if not missing:
            return done
        first = next(iter(missing.values()))
        message = (
            f"{len(missing)} of {len(extent.pieces)} objects of an extent are missing, the first: {first}"
        )
        return replace(done, holes=written(missing), message=message[:MOST_SAID], hole_code=first.code)

    def _copy(self, job: jobs.Copy, target: int, origin: int) -> jobs.Done:
        if in_memory(target):
            in_huge_pages(target, job.size_bytes)
        offset = 0
        while offset < job.size_bytes:
            with translated("tier", "copy an extent"):
                copied = os.sendfile(target, origin, offset, job.size_bytes - offset)
            if copied == 0:
                raise CorruptData(f"a cached extent ends after {offset:,} of {job.size_bytes:,} bytes")
            offset += copied
        verify(target, Checksums(job.size_bytes, jobs.unpack_digests(job.digests)))
        return jobs.Done(job.number, digests=job.digests)

    def _verify(self, job: jobs.Verify, extent: int) -> jobs.Done:
        with translated("tier", "read an extent"):
            os.posix_fadvise(extent, 0, 0, os.POSIX_FADV_DONTNEED)  # what the disk holds, not the page cache
        verify(extent, Checksums(job.size_bytes, jobs.unpack_digests(job.digests)))
        return jobs.Done(job.number)

    def _build(self, job: jobs.Build) -> jobs.Done:
        if job.refresh:
            for uri in job.uris:
                self._sources.forget(uri)
        uris = self._sources.spelled_out(job.uris)
        found = survey(uris, Options(**job.options), self._sources)  # type: ignore[arg-type]
        path = f"{job.catalogs}/{found.id}.lmdb"
        with self._one_build(found.id):
            if not mark_used(path):
                # Somebody may have removed it; what else there is against it is said of the file.
                with suppress(OSError):
                    os.mkdir(job.catalogs, 0o700)
                direct = DirectBytes(self._sources)
                with CachedBytes(self._settings.socket_dir, job.catalogs, found, direct, self._calls) as data:
                    notes = build(found, path, self._sources, data, self._progress(job.number))
                for note in notes:
                    log.warning("%s", note)
        return jobs.Done(job.number, dataset=found.id)

    @contextmanager
    def _one_build(self, dataset: str) -> Iterator[None]:
        """All ranks of a job open its dataset at once; the first builds, the others wait and find it built."""
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
        """A builder counts every sample; people look a few times a second."""
        due = 0.0

        def progress(done: int, total: int) -> None:
            nonlocal due
            now = time.monotonic()
            if now >= due:
                due = now + PROGRESS_S
                with self._unanswered_lock:
                    if number in self._unanswered:
                        jobs.send(self._channel, jobs.Progress(number, done, total))

        return progress

    def _catalog(self, dataset: str, fd: int) -> Catalog:
        with self._catalogs_lock:
            if dataset not in self._catalogs:
                self._catalogs[dataset] = Catalog.open(f"/proc/self/fd/{fd}")
            self._catalogs.move_to_end(dataset)
            while len(self._catalogs) > MAX_CATALOGS:
                self._catalogs.popitem(last=False)
            return self._catalogs[dataset]


def _peers(settings: Settings, left: Callable[[str], None]) -> Peers:
    """Those of the settings; none, while the certificates that were good at the daemon's start are not."""
    try:
        return Peers(settings.peer, settings.tls, left)
    except InvalidInput as error:
        log.error("no peer is asked", extra={"error": str(error)})
        return Peers(())


def _failure(error: OSError | MemoryError) -> CacheError:
    """Whatever reads or writes an extent raises TierFailed or OutOfSpace by itself: what comes as an OSError says nothing
    about a tier, which would give up what it holds, nor about what is in it."""
    number = errno.ENOMEM if isinstance(error, MemoryError) else error.errno
    if number not in SHORT:
        return SourceUnavailable(f"a filler process met an error that is no disk's of the cache: {error}")
    return OutOfSpace(
        f"a filler process is at its limit ({os.strerror(number)}); allow it more (LimitNOFILE=, ulimit -n, ulimit -v)"
    )


def _reads(job: jobs.Build, uri: str) -> bool:
    """Whether a build may have asked for a URI: below what it was given, up to the first wildcard."""
    return any(uri.startswith(re.split(r"[*?\[{]", each)[0].rstrip("/")) for each in job.uris)


def _report(ended: Future[None]) -> None:
    error = ended.exception()
    if error is not None and not isinstance(error, BrokenPipeError):  # that is the daemon's end
        log.error("a job failed unexpectedly", exc_info=error)


def _live(settings: Settings, roots: tuple[str, ...], paces: int, channel: socket.socket) -> None:
    filler = Filler(channel, settings, roots, paces)
    # Not in the background: beside jobs that keep every core busy it took 20 s, and readers wait for it.
    threading.Thread(target=filler.prepare, name="prepare", daemon=True).start()
    run_in_background()
    filler.run()


def main() -> None:
    """The whole life of the process that fillers are forked from."""
    fields = json.loads(os.environ.pop("CACHESVC_GIVEN"))
    channel = socket.socket(fileno=int(sys.argv[1]))
    fields |= {name: tuple(fields[name]) for name in ("allow", "peer")}
    fields |= {"nvme": (), "rules": (), "quota": (), "tls": fields["tls"] and Tls(**fields["tls"])}
    roots, paces = tuple(fields.pop("roots")), fields.pop("paces")
    settings = Settings(**fields)
    configure_logging(settings.log_format)
    if not settings.allow or any(uri.startswith("s3://") for uri in settings.allow):
        from cachesvc.sources.s3.s3 import prepare_s3  # boto3, which is theirs alone: 0.3 s of CPU and 28 MB

        prepare_s3()
    serve_forks(channel, partial(_live, settings, roots, paces))


if __name__ == "__main__":
    main()
