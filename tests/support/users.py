"""Runs a function as another user, in a new process, because a fork of this one would share gRPC's state."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pytest

from testbed import ROOT

ALICE, BOB, ML = 64_001, 64_002, 64_100
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two users")
LONGEST_S = 120.0

_WORK = """
import json, os, sys
import cloudpickle
from cachesvc.core.errors import CacheError
from cachesvc.v1 import services  # imported here, because another user may not be able to read the modules
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
"""


def as_user(uid: int, work: Callable[[], object], groups: tuple[int, ...] = ()) -> Any:
    """Pickle `work`, call it as user `uid`, and return its result; a CacheError as [class name, text]."""
    # By value: by name, the other process would import the test module and all that it needs.
    cloudpickle.register_pickle_by_value(sys.modules[work.__module__])
    done = subprocess.run(
        [sys.executable, "-c", _WORK],
        input=cloudpickle.dumps((uid, groups, work)),
        stdout=subprocess.PIPE,
        cwd=ROOT,
        timeout=LONGEST_S,
        check=True,
    )
    return json.loads(done.stdout)


@contextlib.contextmanager
def effective_user(uid: int) -> Iterator[None]:
    """Set the effective user, which the kernel records when a socket connects."""
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
