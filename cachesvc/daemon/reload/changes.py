"""Compares settings: what a running daemon takes, and what needs a restart."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from cachesvc.config import NvmeSpec, Settings

LIVE = {
    "ram_bytes": "ram",
    "nvme": "nvme",
    "allow": "allow",
    "rules": "allow",
    "quota": "quota",
    "source": "source",
    "log": "log",
}
"""Settings that a running daemon takes, with the option that sets each."""
_OF_ONE_COMMAND = {"takeover", "origin"}
_OPTIONS = {
    "socket_dir": "socket",
    "tls": "tls-cert, tls-key or tls-ca",
    "cluster": "cluster, or another option of it",
    "stale_if_error_s": "stale-if-error",
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
