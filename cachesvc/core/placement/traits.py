"""Traits that nodes tell each other in greetings, and warnings to the operator: settings that should agree, certificates
that end, and a list of members that cannot be read."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

DAY_S = 86_400
CERTIFICATE_DAYS = (1, 7, 30)
"""The days before the end of a certificate from which on there is another warning."""
NAMES = 3
"""Nodes that a warning names; it counts the others."""
PREFIXES = 3
"""Prefixes of --allow that a warning names."""

Kind = Literal["extent_size", "zone", "domain", "allow", "blocks", "certificate", "source", "list"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Traits:
    """A node about itself, beside its identity. A field is 0 or "" where a node of an older release does not tell it.

    `domain`: zone or none. `blocks`: the version of the blocks' protocol. `certificate_ends`: in seconds of Unix time; 0
    without TLS.
    """

    release: str = ""
    extents: int = 0
    free_bytes: int = 0
    source: str = ""
    extent_bytes: int = 0
    domain: str = ""
    allow: tuple[str, ...] = ()
    blocks: int = 0
    certificate_ends: int = 0


@dataclass(frozen=True, slots=True)
class ClusterWarning:
    """A warning for people. `about`: what stays equal while the names in `text` change."""

    kind: Kind
    about: str
    text: str


def differences(me: str, traits: Mapping[str, Traits], zones: Mapping[str, str]) -> list[ClusterWarning]:
    """Return the settings of the present nodes, this one included, that keep them from sharing extents.

    `zones`: the zone of each of these nodes, "" for none.
    """
    mine = traits[me]
    found: list[ClusterWarning] = []

    def compare(kind: Kind, value: Callable[[Traits], Hashable], text: Callable[[str, Traits], str]) -> None:
        groups: defaultdict[Hashable, list[str]] = defaultdict(list)
        for name, its in traits.items():
            if its.extent_bytes:  # else it is of a release that tells none of this
                groups[value(its)].append(name)
        for other, nodes in groups.items():
            if other != value(mine):
                found.append(ClusterWarning(kind, repr(other), text(_named(nodes), traits[nodes[0]])))

    compare(
        "extent_size",
        lambda its: its.extent_bytes,
        lambda names, its: (
            f"--extent-bytes of {names} is {its.extent_bytes >> 10:,} KiB, of this node {mine.extent_bytes >> 10:,} KiB:"
            " they share no extent; give all nodes the same"
        ),
    )
    compare(
        "domain",
        lambda its: its.domain,
        lambda names, its: (
            f"--domain of {names} is {its.domain}, of this node {mine.domain}: they disagree who owns an extent; give all"
            " nodes the same"
        ),
    )
    compare(
        "allow",
        lambda its: frozenset(its.allow),
        lambda names, its: (
            f"--allow of {names} differs from this node's ({_unlike(mine.allow, its.allow)}): a node keeps nothing for"
            " others that it does not allow; give all nodes the same"
        ),
    )
    found += _blocks(mine, traits)
    return found + (_zones(zones) if mine.domain == "zone" else [])


def _blocks(mine: Traits, traits: Mapping[str, Traits]) -> list[ClusterWarning]:
    """Warn of nodes whose protocol of blocks is two versions or more away; neighbours speak the lower of the two."""
    far = {name: its for name, its in traits.items() if its.blocks and abs(its.blocks - mine.blocks) > 1}
    return [
        ClusterWarning(
            "blocks",
            str(version),
            f"the blocks' protocol of {_named([name for name, its in far.items() if its.blocks == version])} has version"
            f" {version}, of this node {mine.blocks}: they share no extent; update the older one",
        )
        for version in sorted({its.blocks for its in far.values()})
    ]


def _zones(zones: Mapping[str, str]) -> list[ClusterWarning]:
    """Warn of nodes without a zone among nodes that have one, and of a node that is alone in its zone while others are
    not, since a misspelt zone looks like that."""
    counts = Counter(zones.values())
    if len(counts) < 2:
        return []
    others = ", ".join(f"{zone!r} ({count})" for zone, count in sorted(counts.items()) if zone)
    found = []
    if without := sorted(name for name, zone in zones.items() if not zone):
        text = (
            f"--zone is missing at {_named(without)}, and others have one: extents do not cross zones; the zones are"
            f" {others}"
        )
        found.append(ClusterWarning("zone", "", text))
    if max(counts.values()) > 1:
        for name, zone in sorted(zones.items()):
            if zone and counts[zone] == 1:
                text = (
                    f"{name} is alone in zone {zone!r}: extents do not cross zones, so it fetches all of them; is it"
                    f" misspelt? The zones are {others}"
                )
                found.append(ClusterWarning("zone", f"{name} {zone}", text))
    return found


def certificates(traits: Mapping[str, Traits], now: float) -> list[ClusterWarning]:
    """Return a warning for the nodes whose certificates end within 30, 7 or 1 days, or have ended. `now`: Unix time."""
    stages: defaultdict[int, list[str]] = defaultdict(list)
    for name, its in traits.items():
        if its.certificate_ends and (stage := certificate_stage(its.certificate_ends, now)) is not None:
            stages[stage].append(name)
    return [
        ClusterWarning(
            "certificate", str(stage), f"the certificate of {_named(names)} {_ends(stage)}; renew it"
        )
        for stage, names in sorted(stages.items())
    ]


def sources(traits: Mapping[str, Traits]) -> list[ClusterWarning]:
    """Return a warning for the nodes whose source fails."""
    if not (failing := [name for name, its in traits.items() if its.source == "fails"]):
        return []
    text = f"the source fails at {_named(failing)}: requests hang, or are refused; look at their route and credentials"
    return [ClusterWarning("source", "", text)]


def certificate_stage(ends: int, now: float) -> int | None:
    """Return 0 for a certificate that has ended, else the least of 1, 7 and 30 days within which it ends; None for
    later."""
    if ends <= now:
        return 0
    return next((days for days in CERTIFICATE_DAYS if ends - now <= days * DAY_S), None)


def _ends(stage: int) -> str:
    return f"ends in {stage} day{'s' * (stage > 1)} or sooner" if stage else "has expired"


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(names[:NAMES])
    return f"{shown} and {len(names) - NAMES:,} more" if len(names) > NAMES else shown


def _unlike(mine: Iterable[str], theirs: Iterable[str]) -> str:
    mine, theirs = set(mine), set(theirs)
    if not mine or not theirs:
        return "one of them allows all that its user may read"
    parts = [
        f"{word} {', '.join(sorted(found)[:PREFIXES])}"
        for word, found in (("not", mine - theirs), ("but", theirs - mine))
        if found
    ]
    return ", ".join(parts)


class Noticed:
    """Which warnings are worth a log line: those that last for `LASTS_S`, once, and their end."""

    LASTS_S = 5.0
    """Nodes that start together greet each other within seconds, and differ meanwhile."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, str], float] = {}
        self._said: dict[tuple[str, str], ClusterWarning] = {}

    def update(
        self, found: Iterable[ClusterWarning], now: float
    ) -> tuple[list[ClusterWarning], list[ClusterWarning]]:
        """Take the warnings of `now`; return those to log, and those logged before that no longer hold."""
        current = {(each.kind, each.about): each for each in found}
        self._since = {key: self._since.get(key, now) for key in current}
        new = [
            each
            for key, each in current.items()
            if key not in self._said and now - self._since[key] >= self.LASTS_S
        ]
        gone = [self._said.pop(key) for key in list(self._said) if key not in current]
        self._said |= {(each.kind, each.about): each for each in new}
        return new, gone
