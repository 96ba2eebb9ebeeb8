"""Has `cachesvc doctor` examine the daemon: in a process of its own, with the daemon's settings, user and environment."""

from __future__ import annotations

import msgspec

from cachesvc.config import Settings
from cachesvc.core.errors import CacheError
from cachesvc.daemon.processes.own_command import run_verb
from cachesvc.v1 import cachesvc_pb2 as pb

EXAMINE_S = 120.0


def examine(settings: Settings) -> list[pb.Finding]:
    """Return what `doctor` finds. Raises CacheError where it does not end as it should."""
    words = ["doctor", "--settings", "--json", "--config", "/dev/null"]
    done = run_verb(words, EXAMINE_S, msgspec.json.encode(settings))
    if done.returncode not in (0, 1):
        said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise CacheError(f"the examination failed: {said or f'exit code {done.returncode}'}")
    rows = (msgspec.json.decode(line, type=dict[str, str]) for line in done.stdout.splitlines())
    return [pb.Finding(**row) for row in rows]
