"""Runs a job of the loader's in a process of its own, which imports torch, and reads the rows that it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from cachesvc.core.errors import INTERRUPTED, CacheError, from_code

_STDERR = 2
AGAIN_S = 1.0
"""The wait for a process to end, before it gets SIGTERM again."""


@contextmanager
def rows_of(module: str, job: Mapping[str, Any], socket: str | None) -> Iterator[Iterator[dict[str, Any]]]:
    """Run `python -m MODULE JOB FD` until this block ends; yield the rows that it writes to the pipe FD. The iterator
    raises the job's error, and CacheError where the process is killed."""
    environment = os.environ | ({"CACHESVC_SOCKET": socket, "CACHESVC": "require"} if socket else {})
    ours, its = os.pipe()
    command = [sys.executable, "-m", module, json.dumps(job), str(its)]
    with open(ours) as rows:
        try:
            process = subprocess.Popen(command, stdout=_STDERR, pass_fds=[its], env=environment)
        finally:
            os.close(its)
        with process:
            try:
                yield _checked(process, rows, module)
            finally:
                while process.poll() is None:  # an exception that SIGTERM raises in a fork hook is lost
                    process.terminate()
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(AGAIN_S)


def _checked(process: subprocess.Popen[bytes], rows: TextIO, module: str) -> Iterator[dict[str, Any]]:
    for line in rows:
        row: dict[str, Any] = json.loads(line)
        if "error" in row:
            raise from_code(row["code"], row["error"])
        yield row
    code = process.wait()
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        raise CacheError(f"the process of {module} ended with exit code {code}; see its messages above")
