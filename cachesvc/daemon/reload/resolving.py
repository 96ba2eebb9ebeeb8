"""Resolves the settings of this daemon anew, in a process of its own: options, variables and files belong to the command
line, which the daemon does not import."""

from __future__ import annotations

import os

import msgspec

from cachesvc.config import Origin, Settings
from cachesvc.core.errors import from_code
from cachesvc.daemon.processes.own_command import run_verb

RESOLVE_S = 30.0


def resolve(origin: Origin) -> Settings:
    """Return the settings that the command line of this daemon gives now. Raises the error of a wrong file, variable or
    option, DeadlineExceeded where files cannot be read in time, CacheError where no process can be started."""
    words = ["config", "show", "--json", "--settings", "--", *origin.arguments]
    done = run_verb(words, RESOLVE_S)
    if done.returncode:
        raise from_code(done.returncode, _message(done.stderr))
    return msgspec.json.decode(done.stdout, type=Settings)


def _message(stderr: bytes) -> str:
    """Return the text of the error in the last line."""
    lines = stderr.decode(errors="replace").splitlines() or ["the settings cannot be read"]
    try:
        return str(msgspec.json.decode(lines[-1], type=dict[str, object])["error"])
    except (msgspec.DecodeError, KeyError):
        return lines[-1]


def marks(origin: Origin) -> tuple[object, ...]:
    """Return what changes when one of the files does, also when a link to it is replaced, as in a ConfigMap."""
    return tuple(map(_mark, origin.files))


def _mark(path: str) -> object:
    try:
        found = os.stat(path)
    except OSError as error:
        return error.errno
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
