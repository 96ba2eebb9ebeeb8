"""Runs a function as another user, in a new process, because a fork of this one would share gRPC's state."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pytest

from cachesvc.core.errors import CacheError
from testbed.forked import CLIENT, ForkedProcess

ALICE, BOB, ML = 64_001, 64_002, 64_100
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two users")
LONGEST_S = 120.0


def as_user(uid: int, work: Callable[[], object], groups: tuple[int, ...] = ()) -> Any:
    """Pickle `work`, call it as user `uid`, and return its result; a CacheError as [class name, text]."""
    # By value: by name, the other process would import the test module and all that it needs.
    cloudpickle.register_pickle_by_value(sys.modules[work.__module__])
    command = [sys.executable, "-m", "tests.support.users"]
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as found:
        given.write(cloudpickle.dumps((uid, groups, work)))
        given.seek(0)
        process = ForkedProcess(command, stdin=given, stdout=found, preloaded=CLIENT)
        try:
            assert process.wait(LONGEST_S) == 0
        finally:
            process.kill()
        found.seek(0)
        return json.load(found)


def main() -> None:
    """Do the work in a process of its own, which has imported what another user may not be able to read."""
    uid, groups, work = cloudpickle.load(sys.stdin.buffer)
    os.setgroups(groups)
    os.setgid(uid)
    os.setuid(uid)
    try:
        found = work()
    except CacheError as error:
        found = [type(error).__name__, str(error)]
    print(json.dumps(found), flush=True)
    os._exit(0)


@contextlib.contextmanager
def effective_user(uid: int) -> Iterator[None]:
    """Set the effective user, which the kernel records when a socket connects."""
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)


if __name__ == "__main__":
    main()
