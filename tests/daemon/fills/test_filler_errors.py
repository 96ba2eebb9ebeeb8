"""Errors of a filler's jobs: only those of reading and writing extents are errors of a tier."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cachesvc.catalog.build import DirectBytes, build
from cachesvc.catalog.options import Options
from cachesvc.catalog.survey import survey
from cachesvc.config import Settings
from cachesvc.core.errors import SourceUnavailable, TierFailed
from cachesvc.core.model import DatasetId
from cachesvc.daemon.processes import jobs
from cachesvc.daemon.processes.datagrams import send
from cachesvc.daemon.processes.fork_server import ForkServer
from cachesvc.sources.open import Sources, SourceSettings
from cachesvc.tiers.checksum import block_digest
from testbed import WAIT_S
from tests.support import datasets

DATA = bytes(range(256)) * 256  # one block
DIGESTS = block_digest(DATA)
Ask = Callable[..., jobs.JobDone]


@pytest.fixture
def ask(tmp_path: Path) -> Iterator[Ask]:
    """A function that gives a real filler a job with descriptors and returns its answer."""
    settings = Settings(0, (), (), str(tmp_path), str(tmp_path / "state"), fillers=1)
    given = {"settings": settings, "roots": (), "paces": -1}
    forks = ForkServer("cachesvc.daemon.fills.filler", given, (), lambda fd, callback: None, lambda fd: None)
    child, channel = forks.fork()
    channel.settimeout(WAIT_S)

    def asked(job: jobs.Job, *descriptors: int) -> jobs.JobDone:
        send(channel, jobs.Submitted(1, job), descriptors)
        while True:
            received = jobs.receive_answer(channel)
            assert received is not None, "the filler ended"
            message = received[0]
            if isinstance(message, jobs.Answered) and isinstance(message.answer, jobs.JobDone):
                return message.answer

    yield asked
    channel.close()
    assert forks.wait(child, 10) == 0
    forks.close(10)


@contextmanager
def file(path: Path, flags: int, data: bytes = DATA) -> Iterator[int]:
    path.write_bytes(data)
    fd = os.open(path, flags)
    yield fd
    os.close(fd)


def test_a_copy_that_cannot_be_read_or_written_is_an_error_of_its_tier(ask: Ask, tmp_path: Path) -> None:
    job = jobs.CopyJob(len(DATA), DIGESTS)
    with file(tmp_path / "from", os.O_RDONLY) as origin, file(tmp_path / "to", os.O_RDWR, b"") as target:
        assert ask(job, target, origin).code == 0
    with file(tmp_path / "from", os.O_WRONLY) as origin, file(tmp_path / "to", os.O_RDWR, b"") as target:
        assert ask(job, target, origin).code == TierFailed.code
    with file(tmp_path / "from", os.O_RDONLY) as origin, file(tmp_path / "to", os.O_RDONLY, b"") as target:
        assert ask(job, target, origin).code == TierFailed.code


def test_a_check_that_cannot_read_is_an_error_of_its_tier(ask: Ask, tmp_path: Path) -> None:
    with file(tmp_path / "extent", os.O_WRONLY) as extent:
        assert ask(jobs.VerifyJob(len(DATA), DIGESTS), extent).code == TierFailed.code
    reading, writing = os.pipe()  # posix_fadvise fails for a pipe, too
    assert ask(jobs.VerifyJob(len(DATA), DIGESTS), reading).code == TierFailed.code
    os.close(reading)
    os.close(writing)


def test_a_target_that_cannot_be_written_or_read_back_is_an_error_of_its_tier(
    ask: Ask, tmp_path: Path
) -> None:
    datasets.mds_shards(tmp_path / "mds", {"x": "bytes"}, [{"x": DATA}], 1)
    sources = Sources(SourceSettings())
    found = survey([f"{tmp_path}/mds/"], Options(), sources)
    build(found, f"{tmp_path}/catalog", sources, DirectBytes(sources), lambda done, total: None)
    catalog = os.open(tmp_path / "catalog", os.O_RDONLY)
    job = jobs.FetchJob(found.id, 0)
    with file(tmp_path / "target", os.O_RDWR, b"") as target:
        assert ask(job, target, catalog).code == 0
    for flags in (os.O_RDONLY, os.O_WRONLY):
        with file(tmp_path / "target", flags, b"") as target:
            assert ask(job, target, catalog).code == TierFailed.code
    os.close(catalog)


@pytest.mark.slow
def test_other_read_errors_are_not_errors_of_a_tier(ask: Ask, tmp_path: Path) -> None:
    with file(tmp_path / "target", os.O_RDWR, b"") as target:
        folder = os.open(tmp_path, os.O_RDONLY)  # instead of a catalog
        done = ask(jobs.FetchJob(DatasetId("0" * 32), 0), target, folder)
        os.close(folder)
    assert (done.code, done.retry) == (SourceUnavailable.code, True)
