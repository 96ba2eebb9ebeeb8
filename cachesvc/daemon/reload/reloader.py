"""Reloads the settings: on SIGHUP, on a call, and when a file changes. Resolves them anew, compares them with
those that the daemon runs with, and has the parts of the daemon take what changed."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import msgspec

from cachesvc.config import NvmeSpec, Origin, Settings, check_ram, validate
from cachesvc.core.errors import CacheError, from_code
from cachesvc.core.model import TierName
from cachesvc.daemon.access.path_lookups import Lookups
from cachesvc.daemon.access.quotas import Quotas
from cachesvc.daemon.access.tenants import Tenants
from cachesvc.daemon.access.tls import file_mark
from cachesvc.daemon.claims import DatasetClaims
from cachesvc.daemon.datasets import Datasets
from cachesvc.daemon.disks.budgets import Budgets, MemoryPressure
from cachesvc.daemon.events.event import Event, failed, record
from cachesvc.daemon.fills.pool import FillerPool
from cachesvc.daemon.loop.loop import Loop
from cachesvc.daemon.processes.logs import set_level
from cachesvc.daemon.processes.own_command import run_verb
from cachesvc.system.memory import allowed_bytes

log = logging.getLogger(__name__)
LOOK_S = 1.0
"""How often the files are looked at. A file that changed is read when it has been the same for as long, since an editor
may write it in parts."""


class Reloader:
    """Runs on a thread of its own, and on those of calls."""

    def __init__(self, settings: Settings, take: Callable[[Changes], None], stale: bool) -> None:
        """`take` changes the parts of the daemon, or raises CacheError and changes none. `stale`: the settings may be older
        than the files, since a daemon that died is replaced by one with the settings of the service's start."""
        self.settings = settings
        self.succeeded = True
        self.succeeded_at = time.time()
        self._take, self._stale = take, stale
        self._lock = threading.Lock()
        self._ended, self._asked = False, threading.Event()
        self._thread = threading.Thread(target=self._run, name="reload", daemon=True)

    def start(self) -> None:
        """Look at the files from now on."""
        if self.settings.origin is not None:
            self._thread.start()

    def close(self) -> None:
        """Stop looking. A reload under way is not waited for."""
        self._ended = True
        self._asked.set()

    def ask(self) -> None:
        """Have the settings reloaded soon; safe in a signal handler."""
        self._asked.set()

    def reload(self) -> Changes:
        """Reload the settings and return what changed. Raises CacheError, and changes nothing, where they are wrong."""
        with self._lock:
            try:
                changes = self._reloaded()
            except CacheError as error:
                self.succeeded = False
                record(failed("reload_failed", error))
                raise
            self.succeeded, self.succeeded_at = True, time.time()
            return changes

    def _reloaded(self) -> Changes:
        if self.settings.origin is None:
            raise CacheError(
                "this daemon was not started by a command line, so its settings cannot be read again"
            )
        wanted = resolve(self.settings.origin)
        validate(wanted)
        check_ram(wanted.ram_bytes, allowed_bytes())
        changes = compare(self.settings, wanted)
        if changes.taken:
            self._take(changes)
            self.settings = changes.settings
        record(Event("reloaded", why=text(changes)))
        return changes

    def _run(self) -> None:
        origin = self.settings.origin
        assert origin is not None
        read = before = marks(origin)
        if self._stale:
            self._asked.set()
        while True:
            asked = self._asked.wait(LOOK_S)
            self._asked.clear()
            if self._ended:
                return
            seen = marks(origin)
            if asked or (seen == before and seen != read):
                read = seen
                self._try()
            before = seen

    def _try(self) -> None:
        try:
            self.reload()
        except CacheError:
            pass  # it is recorded
        except Exception:
            log.exception("a reload failed unexpectedly")


def text(changes: Changes) -> str:
    """Return a line about a reload for people."""
    said = [f"{', '.join(changes.taken)} changed" if changes.taken else "nothing changed"]
    if changes.waiting:
        said.append(f"{', '.join(changes.waiting)} will change when the service is started again")
    return "; ".join(said)


RESOLVE_S = 30.0


def resolve(origin: Origin) -> Settings:
    """Return the settings that the command line of this daemon gives now, read in a process of its own: options, variables
    and files belong to the command line, which the daemon does not import. Raises the error of a wrong file, variable or
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
    return tuple(map(file_mark, origin.files))


LIVE = {
    "ram_bytes": "ram",
    "nvme": "nvme",
    "allow": "allow",
    "rules": "allow",
    "quota": "quota",
    "source": "source",
    "hedge_share": "hedge",
    "log": "log",
}
"""Settings that a running daemon takes, with the option that sets each."""
_OF_ONE_COMMAND = {"takeover", "origin"}
_OPTIONS = {
    "socket_dir": "socket",
    "tls": "tls-cert, tls-key or tls-ca",
    "cluster": "cluster, or another option of it",
    "stale_if_error_s": "stale-if-error",
    "s3_fresh_s": "s3-fresh",
    "s3_part_bytes": "s3-part",
    "s3_writes": "s3-writes",
}


@dataclass(frozen=True, slots=True)
class Changes:
    """`settings`: what the daemon is to run with. `taken` and `waiting`: the options that change now, and those that change
    with the next start."""

    settings: Settings
    taken: tuple[str, ...]
    waiting: tuple[str, ...]


def compare(running: Settings, wanted: Settings) -> Changes:
    """Compare the settings that a daemon runs with to those that its files, variables and options give now."""
    differ = {
        each.name
        for each in fields(Settings)
        if each.name not in _OF_ONE_COMMAND and getattr(running, each.name) != getattr(wanted, each.name)
    }
    live = set(LIVE)
    if bool(running.ram_bytes) != bool(wanted.ram_bytes):  # a tier comes or goes
        live.remove("ram_bytes")
    if _places(running.nvme) != _places(wanted.nvme):
        live.remove("nvme")
    if running.s3:  # whose process reads them at its start
        live -= {"allow", "rules", "source"}
    taken = differ & live
    settings = replace(running, **{name: getattr(wanted, name) for name in taken})
    return Changes(settings, _named(taken), _named(differ - taken))


def _places(specs: tuple[NvmeSpec, ...]) -> list[tuple[str, bool]]:
    return [(spec.path, spec.mounted) for spec in specs]


def _named(names: set[str]) -> tuple[str, ...]:
    """Return the options that set these fields."""
    options = {name: name.removesuffix("_s").replace("_", "-") for name in names} | LIVE | _OPTIONS
    return tuple(sorted({options[name] for name in names}))


@dataclass(slots=True)
class LiveParts:
    """`disks` are the names of the cache directories, in the order of `Settings.nvme`."""

    loop: Loop
    lookups: Lookups
    tenants: Tenants
    datasets: Datasets
    quotas: Quotas
    claims: DatasetClaims
    budgets: Budgets
    pressure: MemoryPressure
    fillers: FillerPool
    disks: Sequence[TierName]

    def take(self, changes: Changes) -> None:
        """Take changed settings. Call it on a thread that may wait for lookups. Raises CacheError, and changes nothing, for
        what they get wrong; SourceUnavailable after the change where a loaded dataset cannot be looked up."""
        settings = changes.settings
        allowed = self.lookups.allowlist(settings.allow, exact=bool(settings.rules))
        Tenants(allowed, settings.rules)
        Quotas(settings.quota, self.quotas.resolve)
        if not {"allow", "source", "hedge", "log"}.isdisjoint(changes.taken):
            self._renew_fillers(settings, allowed.roots)
        self.tenants.replace(allowed, settings.rules)
        self.quotas.replace(settings.quota)
        set_level(settings.log)
        self.loop.call(lambda: self._resize(settings))
        self.datasets.check_again()

    def _renew_fillers(self, settings: Settings, roots: tuple[str, ...]) -> None:
        try:
            self.loop.call(lambda: self.fillers.renew(settings, roots))
        except OSError as error:
            raise CacheError(
                f"no process with the new settings can be started ({os.strerror(error.errno or 0)}); allow more"
                " processes or memory"
            ) from None

    def _resize(self, settings: Settings) -> None:
        self.claims.quotas_changed()
        self.budgets.replace(dict(zip(self.disks, settings.nvme, strict=True)))
        self.pressure.replace(settings.ram_bytes)
