"""Work done as another user of the machine, in a process of its own: a fork of this one would share what gRPC holds."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

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
from cachesvc.v1 import services  # another user may not be able to read where modules lie
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


def as_user(uid: int, work: Callable[[], object], groups: tuple[int, ...] = ()) -> object:
    """What `work`, and what it refers to, gives when it is pickled and called by that user; CacheErrors by name."""
    # As it is, not as a name in its module, which would be imported there with all that tests need.
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
def being(uid: int) -> Iterator[None]:
    """The kernel notes the effective user of the moment at which a socket connects."""
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
