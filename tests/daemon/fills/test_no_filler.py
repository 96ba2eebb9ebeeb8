"""Jobs for which no filler process can be started."""

from __future__ import annotations

import resource
from pathlib import Path

from cachesvc.config import Settings
from cachesvc.core.errors import SourceUnavailable
from cachesvc.daemon.fills.pool import FillerPool
from cachesvc.daemon.processes import jobs


def test_a_job_without_a_process_fails_without_being_lost(tmp_path: Path) -> None:
    settings = Settings(0, (), (), str(tmp_path), str(tmp_path), fillers=1)
    fillers, answers = FillerPool(settings, (), lambda *_: None, lambda _: None), list[jobs.Answer]()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        fillers.submit(jobs.VerifyJob(1, b""), (), answers.append)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    (done,) = answers
    assert isinstance(done, jobs.JobDone)
    assert (done.code, done.retry, done.lost) == (SourceUnavailable.code, True, False)
    assert "no filler process can be started" in done.message
