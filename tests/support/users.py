"""Runs a function as another user, or with mounts of its own, in a new process: a fork of this one would share gRPC's
state."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
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
_CLONE_NEWNS, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x20000, 0x1000, 0x4000, 1 << 18


def needs_mounts(test: Any) -> Any:
    """Mark a test that mounts in a namespace of its own: it is skipped without root or CAP_SYS_ADMIN."""
    may = os.geteuid() == 0 and not subprocess.run(["unshare", "-m", "true"], check=False).returncode
    return pytest.mark.skipif(not may, reason="needs root and CAP_SYS_ADMIN, to mount another folder")(test)


def as_user(
    uid: int, work: Callable[[], object], groups: tuple[int, ...] = (), mount: tuple[str, str] | None = None
) -> Any:
    """Pickle `work`, call it as user `uid`, and return its result; a CacheError as [class name, text]. `mount`: a folder,
    and the path at which that process alone sees it."""
    # By value: by name, the other process would import the test module and all that it needs.
    cloudpickle.register_pickle_by_value(sys.modules[work.__module__])
    command = [sys.executable, "-m", "tests.support.users"]
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as found:
        given.write(cloudpickle.dumps((uid, groups, mount, work)))
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
    uid, groups, mount, work = cloudpickle.load(sys.stdin.buffer)
    if mount is not None:
        _mount(*mount)
    os.setgroups(groups)
    os.setgid(uid)
    os.setuid(uid)
    try:
        found = work()
    except CacheError as error:
        found = [type(error).__name__, str(error)]
    print(json.dumps(found), flush=True)
    os._exit(0)


def _mount(folder: str, path: str) -> None:
    """Show a folder at a path, to this process alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    wrong = libc.unshare(_CLONE_NEWNS)
    wrong = wrong or libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None)
    wrong = wrong or libc.mount(folder.encode(), path.encode(), None, _MS_BIND, None)
    if wrong:
        raise OSError(ctypes.get_errno(), f"cannot mount {folder} at {path}")


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
