"""Runs a job of the loader's in a process of its own, which imports torch, and reads the rows that it prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from cachesvc.core.errors import INTERRUPTED, CacheError, from_code


@contextmanager
def rows_of(module: str, job: Mapping[str, Any], socket: str | None) -> Iterator[Iterator[dict[str, Any]]]:
    """Run `python -m MODULE JOB` until this block ends; yield what it prints. The iterator raises the job's error, and
    CacheError where the process is killed."""
    environment = os.environ | ({"CACHESVC_SOCKET": socket, "CACHESVC": "require"} if socket else {})
    command = [sys.executable, "-m", module, json.dumps(job)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield _checked(process, module)
        finally:
            process.terminate()


def _checked(process: subprocess.Popen[str], module: str) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None, "stdout is a pipe"
    for line in process.stdout:
        row: dict[str, Any] = json.loads(line)
        if "error" in row:
            raise from_code(row["code"], row["error"])
        yield row
    code = process.wait()
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        raise CacheError(f"the process of {module} ended with exit code {code}; see its messages above")
