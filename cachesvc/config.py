"""The daemon's settings: one frozen tree, with each default and its reason."""

from __future__ import annotations

import grp
import os
import pwd
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from urllib.parse import quote

from cachesvc.core.errors import InvalidInput
from cachesvc.core.model import EXTENT_BYTES, PART_BYTES
from cachesvc.core.rates.hedge_budget import HEDGE_SHARE
from cachesvc.system.footprint import default_fillers, footprint_bytes, largest_ram_bytes, work_bytes

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}

_ID_DIGITS = 10
"""The longest number of a user or group, of 32 bits."""
_RULE = re.compile(r"(.+)=((?:uid|gid):[^,:=/]+(?:,(?:uid|gid):[^,:=/]+)*)")

SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""Environment of child processes: nothing is imported from the working directory (Python 3.11 and newer), such as a clone
named cachesvc or a select.py."""
CONTROL_SOCKET = "cachesvc.sock"
GRANTS_SOCKET = "grants.sock"
PARENT_SOCKET = "parent.sock"
S3_SOCKET = "s3.sock"
UPGRADING = "upgrading"
"""A file beside the sockets while one daemon replaces another."""
SOCKET_PATH_BYTES = 107
"""The longest path of a Unix socket: `sockaddr_un` has 108 bytes, the last of them a zero."""
OPEN_FILES = 65_536
"""The advised limit of open files, whatever the RAM tier: connections of readers, grants, catalogs, connections to
sources."""
OPEN_FILES_SPARE = 4096
"""Open files reserved for others than extents in RAM; half of the limit where that is less."""
OPEN_FILES_LEAST = 256
"""The least limit: 128 extents in RAM, 32 readers with a control connection each, and 64 for the daemon itself, which
holds 21 and 2 for each dataset."""
STATE_BYTES = 8 << 20
"""The free space that catalogs and the metadata cache need at the start."""
CALLERS = 1024
"""Connections to each address of the control API; a process needs one while it opens a dataset."""
READERS = 8192
READERS_SHARE = 8
"""One open file in so many is for a reader's connection, and as many again for control connections."""
PEER_PORT = 7070
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
CLUSTER_WAIT_S = 60.0
"""Lists are late by seconds when nodes boot together; a server of DNS or etcd restarts within a minute."""
REJOIN_GRACE_S = 600.0
"""A node that restarts, or is replaced in a rolling update, is back within ten minutes."""
MAX_UNPLANNED_SHARE = 0.5
"""The largest part of a tier for readers without a plan; the cache is for the datasets that jobs declare."""
S3_UNPLANNED_SHARE = 0.1
"""The default with an S3 endpoint, whose readers have no plans."""


REQUEST_PAYER = "AWS_REQUEST_PAYER"
"""A variable as GDAL has it, since botocore has none."""


@dataclass(frozen=True, slots=True)
class NvmeSpec:
    """One cache directory: a budget in bytes, or a share of its disk (0 < share <= 1)."""

    path: str
    size_bytes: int = 0
    share: float = 0.0
    mounted: bool = False
    """The directory must lie on a file system of its own."""


USER = "user"


@dataclass(frozen=True, slots=True)
class QuotaSpec:
    """A limit in bytes. `of` is a prefix (each dataset below it), `user` (each user) or `user:UID` (that user)."""

    of: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class SourceSection:
    """How objects below `prefix` are read. Empty fields leave it to the environment; a rate of 0 is no limit."""

    prefix: str
    """`SCHEME://BUCKET/`, or a longer prefix that ends in a slash."""
    endpoint: str = ""
    region: str = ""
    profile: str = ""
    requester_pays: bool = False
    anonymous: bool = False
    """Requests are not signed."""
    requests_per_s: float = 0.0
    bytes_per_s: int = 0
    path: str = ""
    """A mounted folder that holds the same objects, which are read there."""


def section_of(uri: str, sections: Sequence[SourceSection]) -> SourceSection:
    """Return the section with the longest prefix, or one of the URI's scheme and host that says nothing."""
    found = [each for each in sections if f"{uri}/".startswith(each.prefix)]
    if found:
        return max(found, key=lambda each: len(each.prefix))
    scheme, mark, rest = uri.partition("://")
    return SourceSection(f"{scheme}://{rest.partition('/')[0]}" if mark else "")


def requester_pays(section: SourceSection) -> bool:
    """Return whether requests are sent as ones that their sender pays for."""
    return section.requester_pays or os.environ.get(REQUEST_PAYER, "").lower() == "requester"


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files for TCP ports; clients must present a certificate that `ca` signed."""

    certificate: str
    key: str
    ca: str


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """This node as a member of a cluster."""

    members: str
    """Where the members are listed: the argument of `cachesvc.cluster.open.open_membership`."""
    node_name: str
    """A member is known by its name, so that it may change its address."""
    advertise: str
    """HOST:PORT at which this node answers others. The next port sends extents."""
    zone: str = ""
    by_zone: bool = True
    """Each zone owns every extent, so that no extent crosses zones."""
    rejoin_grace_s: float = REJOIN_GRACE_S
    """How long a member that is away keeps its share."""
    wait_s: float = CLUSTER_WAIT_S
    """How long fills wait after the start for the first list of members."""
    bytes_per_s: int = 0
    """The most bytes that this node sends to others, each second; 0: no limit."""
    tls_name: str = ""
    """The name in the certificate of all members; "": each has one for its own host."""
    compared_share: float | None = None
    """The part of the extents from other nodes that is compared with the source; None: 1 % by all nodes together."""
    share_prepared: bool = False
    """Nodes give each other what a user prepared, to the same user. A uid is one person on all of them."""
    drain_on_stop_s: float = 0.0
    """How long a daemon that stops hands on what it alone holds, before it leaves for good; 0: it says goodbye only."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The only users, with members of the groups, that may use data below an allowed prefix."""

    prefix: str
    uids: tuple[int, ...]
    gids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of the settings: the arguments of `serve`, and the files that are read where they exist."""

    arguments: tuple[str, ...]
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of `cachesvc serve`."""

    ram_bytes: int
    nvme: tuple[NvmeSpec, ...]
    allow: tuple[str, ...]
    """Allowed prefixes, without their rules."""
    socket_dir: str
    state_dir: str
    listen: str = ""
    tls: Tls | None = None
    cluster: ClusterSettings | None = None
    metrics: str = ""
    """HOST:PORT of the metrics, which hold only numbers and version ids, so other machines may scrape it. The status page
    at the same address is for this machine alone."""
    s3: str = ""
    """HOST:PORT of the S3 endpoint."""
    s3_fresh_s: float = 60.0
    """The greatest age of metadata and listings that the S3 endpoint answers with; 0: the source is asked each time."""
    s3_part_bytes: int = PART_BYTES
    """How objects are cut that no dataset has, where programs read them by S3."""
    s3_writes: tuple[str, ...] = ()
    """Prefixes, perhaps with users, below which the S3 endpoint passes writes on to the source."""
    extent_bytes: int = EXTENT_BYTES
    socket_mode: int = 0o600
    """Only the daemon's own user. A wider socket needs an allowlist, or every user could read with the daemon's rights."""
    fillers: int = field(default_factory=default_fillers)
    filler_threads: int = 64
    """Connections of one filler. Objects of 110 KB with 20 ms a request need tens in flight."""
    preparing: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    """Prepared extents that processes of jobs make at once, each with one core."""
    hedge_share: float = HEDGE_SHARE
    """The bytes that late reads ask of sources a second time, as a part of all; 0: none."""
    scrub_rate: int = 32 << 20
    """Bytes per second that the scrub reads: 1 % of one NVMe disk, a terabyte in nine hours. 0: no scrub."""
    unplanned_share: float = 0.0
    """The part of each tier that claims and plans leave to readers without a plan, those of the S3 endpoint among them. It
    lowers the hit rate of shuffled epochs."""
    metadata_expiry_s: float = 30.0
    """The age at which a listing is repeated; short, so that changed data is seen."""
    stale_if_error_s: float = 86_400.0
    """While a source is down, the version that was opened last is opened, unless its listing is older. Outages last hours.
    0 turns this off."""
    log_format: str = "text"
    log: str = "INFO"
    """The level of the log. Libraries log warnings alone."""
    rules: tuple[Rule, ...] = ()
    quota: tuple[QuotaSpec, ...] = ()
    source: tuple[SourceSection, ...] = ()
    takeover: bool = False
    """Take over from the daemon that serves `socket_dir`, if one does."""
    origin: Origin | None = None
    """None: the settings cannot be read again."""

    @property
    def own_bytes(self) -> int:
        """Peak memory of the daemon and its processes, without the RAM tier."""
        return footprint_bytes(self.fillers, self.extent_bytes, self.cluster is not None)

    @property
    def work_bytes(self) -> int:
        """The part of `own_bytes` that fills take."""
        return work_bytes(self.fillers, self.extent_bytes)


def parse_size(text: str) -> int:
    """Parse `64GiB`, `64G`, `1.5TB` or `4096` into bytes. `KB`, `MB`, ... are decimal, all other units binary.

    Raises InvalidInput.
    """
    match = re.fullmatch(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise InvalidInput(f"{text!r} is not a size; write it as 64GiB, 500GB or plain bytes")
    return int(Fraction(match[1]) * _UNITS[match[2].lower()])


def size_text(size_bytes: int) -> str:
    """Return a size as a person types it, in the largest unit that gives it exactly: `64GiB`, `500GB`, `4097 bytes`."""
    for letter in "PTGMK":
        for suffix in ("iB", "B"):
            unit = _UNITS[f"{letter}{suffix}".lower()]
            if size_bytes >= unit and not size_bytes % unit:
                return f"{size_bytes // unit}{letter}{suffix}"
    return f"{size_bytes:,} bytes"


def percent_text(share: float) -> str:
    """Return a share as a person types it: `2%`."""
    return f"{share * 100:g}%"


def parse_nvme(text: str) -> NvmeSpec:
    """Parse `DIR=SIZE` or `DIR=80%`, each perhaps with `,mounted`. Raises InvalidInput."""
    path, _, given = text.rpartition("=")
    amount, comma, word = given.partition(",")
    if not path:
        raise InvalidInput(f"{text!r} names no budget; write DIR=SIZE or DIR=80%")
    if comma and word != "mounted":
        raise InvalidInput(f"{word!r} is no condition of a cache directory; write DIR=SIZE,mounted")
    if not amount.endswith("%"):
        return NvmeSpec(path, size_bytes=parse_size(amount), mounted=bool(comma))
    try:
        share = float(amount[:-1]) / 100
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise InvalidInput(f"{amount!r} is not a share of a disk; write 1% to 100%")
    return NvmeSpec(path, share=share, mounted=bool(comma))


def nvme_text(spec: NvmeSpec) -> str:
    """Return a cache directory as it is typed: `DIR=64GiB`, `DIR=80%,mounted`."""
    budget = percent_text(spec.share) if spec.share else f"{spec.size_bytes}"
    return f"{spec.path}={budget}{',mounted' if spec.mounted else ''}"


def parse_allow(text: str, option: str = "--allow") -> tuple[str, Rule | None]:
    """Parse `PREFIX` or `PREFIX=uid:1001,gid:ml` into the prefix and its rule; names of users and groups are resolved.

    Raises InvalidInput for an invalid prefix, and for a user or group that does not exist.
    """
    if "://" not in text and not text.startswith("/"):
        raise InvalidInput(
            f"{option} {text} is neither a URI nor an absolute path; write s3://bucket/prefix/ or /path/"
        )
    match = _RULE.fullmatch(text)
    if match is None:
        return text, None
    ids: dict[str, list[int]] = {"uid": [], "gid": []}
    for each in match[2].split(","):
        kind, _, name = each.partition(":")
        ids[kind].append(_id_of(kind, name))
    return match[1], Rule(match[1], tuple(ids["uid"]), tuple(ids["gid"]))


def _id_of(kind: str, name: str) -> int:
    if name.isdecimal() and len(name) <= _ID_DIGITS:
        return int(name)
    try:
        return pwd.getpwnam(name).pw_uid if kind == "uid" else grp.getgrnam(name).gr_gid
    except KeyError:
        what = "user" if kind == "uid" else "group"
        raise InvalidInput(f"there is no {what} {name!r} on this machine; give its number") from None


def parse_quota(text: str) -> QuotaSpec:
    """Parse `PREFIX=SIZE`, `user=SIZE` or `user:UID=SIZE`. Raises InvalidInput."""
    of, _, amount = text.rpartition("=")
    kind, _, uid = of.partition(":")
    prefix = "://" in of or of.startswith("/")
    numbered = uid.isdecimal() and len(uid) <= _ID_DIGITS
    if not prefix and (kind != USER or (of != USER and not numbered)):
        raise InvalidInput(
            f"{text!r} is no quota; write s3://bucket/prefix/=SIZE, user=SIZE or user:1000=SIZE"
        )
    return QuotaSpec(of, parse_size(amount))


def default_state_dir() -> str:
    """Return `$STATE_DIRECTORY` (systemd), /var/lib/cachesvc for root, else a directory below the user's state home."""
    if given := os.environ.get("STATE_DIRECTORY"):
        return given
    if os.geteuid() == 0:
        return "/var/lib/cachesvc"
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return f"{home}/cachesvc"


def socket_dirs() -> list[str]:
    """Return the directories in which a client looks for the daemon's sockets, in order."""
    if named := os.environ.get("CACHESVC_SOCKET"):
        return [named]
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return ["/run/cachesvc", *([f"{runtime}/cachesvc"] if runtime else [])]


def default_node_name() -> str:
    """Return the name of this node: Slurm's, else the host's."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


def default_socket_dir() -> str:
    """Return the directory of a daemon without `--socket`: $CACHESVC_SOCKET, else root's or the user's own."""
    named = socket_dirs()
    return named[0] if os.environ.get("CACHESVC_SOCKET") or os.geteuid() == 0 else named[-1]


def control_address(directory: str) -> str:
    """Return the control socket as a gRPC address, a URI in which `#`, `?` and `%` must be quoted."""
    return f"unix:{quote(os.path.join('/', os.path.abspath(directory).strip('/'), CONTROL_SOCKET))}"


def check_socket_dir(directory: str) -> None:
    """Raise InvalidInput for a directory in which sockets cannot be bound: its path is too long or not UTF-8."""
    path = f"{os.path.abspath(directory)}/{max(CONTROL_SOCKET, GRANTS_SOCKET, key=len)}"
    try:
        size_bytes = len(path.encode())
    except UnicodeEncodeError:
        raise InvalidInput(f"the socket's directory {directory!a} is not UTF-8; give another name") from None
    if size_bytes > SOCKET_PATH_BYTES:
        raise InvalidInput(
            f"a socket's path ends at {SOCKET_PATH_BYTES} bytes, and {path} has {size_bytes}; give --socket (or"
            " CACHESVC_SOCKET) a shorter directory"
        )


def check_ram(ram_bytes: int, allowed: int) -> None:
    """Raise InvalidInput for a budget above the `allowed` bytes of this machine and cgroup, since it ends in OOM kills."""
    if ram_bytes > allowed:
        raise InvalidInput(
            f"a RAM budget of {size_text(ram_bytes)} is more than the {allowed:,} bytes that this machine or cgroup allows;"
            " lower --ram"
        )


def ram_advice(settings: Settings, allowed: int) -> str:
    """Return advice with the budget to use where `--ram` leaves the daemon's processes too little of the `allowed` bytes.

    Returns "" where it leaves enough. Memory that others use in the same cgroup is measured while the daemon runs.
    """
    largest = largest_ram_bytes(allowed, settings.own_bytes)
    if settings.ram_bytes <= largest:
        return ""
    change = f"give --ram {largest >> 20}MiB" if largest >= settings.extent_bytes else "lower --extent-bytes"
    return (
        f"a RAM budget of {size_text(settings.ram_bytes)} leaves too little of the {allowed:,} bytes that this machine or"
        f" cgroup allows: the daemon, {settings.fillers} fillers and their fills take up to {settings.own_bytes:,};"
        f" {change}, or raise the memory limit"
    )


def open_files_advised(ram_bytes: int, extent_bytes: int) -> int:
    """Return the advised limit of open files; every extent in RAM is one."""
    return max(OPEN_FILES, ram_bytes // max(1, extent_bytes) + OPEN_FILES_SPARE)


def check_open_files(open_files: int) -> None:
    """Raise InvalidInput for a limit that leaves readers no descriptors."""
    if open_files < OPEN_FILES_LEAST:
        raise InvalidInput(
            f"the limit of {open_files} open files leaves no place for readers; allow {OPEN_FILES:,}"
            f" (LimitNOFILE=, ulimit -Hn), {OPEN_FILES_LEAST} at least"
        )


def most_in_ram(open_files: int) -> int:
    """Return the most extents that the RAM tier may hold; each is an open file."""
    return open_files - min(OPEN_FILES_SPARE, open_files // 2)


def most_callers(open_files: int) -> int:
    """Return the most connections to each address of the control API."""
    return min(CALLERS, open_files // READERS_SHARE)


def most_readers(open_files: int) -> int:
    """Return the most connections to the grants socket."""
    return min(READERS, open_files // READERS_SHARE)


NAMED_TWICE = "--nvme names {} more than once; name each directory once"


def validate(settings: Settings) -> None:
    """Raise InvalidInput, one line that says what to change, for settings that cannot work together."""
    if settings.extent_bytes < 4096 or settings.extent_bytes % 4096:
        raise InvalidInput(f"--extent-bytes {settings.extent_bytes} is not a multiple of 4096")
    if settings.s3_part_bytes < 4096 or settings.s3_part_bytes % 4096:
        raise InvalidInput(f"--s3-part {settings.s3_part_bytes} is not a multiple of 4096")
    if settings.ram_bytes < settings.extent_bytes and not settings.nvme:
        raise InvalidInput(
            f"the RAM budget of {size_text(settings.ram_bytes)} cannot hold one extent of"
            f" {size_text(settings.extent_bytes)}; raise --ram, add --nvme, or lower --extent-bytes"
        )
    for spec in settings.nvme:
        if not spec.share and spec.size_bytes < settings.extent_bytes:
            raise InvalidInput(
                f"the budget of {size_text(spec.size_bytes)} for {spec.path} cannot hold one extent of"
                f" {size_text(settings.extent_bytes)}; raise --nvme, or lower --extent-bytes"
            )
    prefixes = [section.prefix for section in settings.source]
    if doubled := [prefix for prefix in prefixes if prefixes.count(prefix) > 1]:
        raise InvalidInput(f"--source names {doubled[0]} more than once; name each prefix once")
    _check_writes(settings)
    share, known = settings.unplanned_share, not any(spec.share for spec in settings.nvme)
    largest = max(settings.ram_bytes, *(spec.size_bytes for spec in settings.nvme), 0)
    if share and known and not settings.s3 and share * largest < settings.extent_bytes:
        raise InvalidInput(
            f"--unplanned-share {share:g} of the largest tier holds no extent of {size_text(settings.extent_bytes)};"
            " raise it, or lower --extent-bytes"
        )
    # Links to the same directory are found when all are open, since resolving a link may hang.
    places = [os.path.abspath(spec.path) for spec in settings.nvme]
    if twice := [place for place in places if places.count(place) > 1]:
        raise InvalidInput(NAMED_TWICE.format(twice[0]))
    if settings.socket_mode & 0o077 and not settings.allow:
        raise InvalidInput(
            "a socket for other users needs --allow: they would read with this daemon's rights"
        )
    name = settings.cluster.node_name if settings.cluster else "-"
    if name.split() != [name]:
        raise InvalidInput(f"--node-name {name!r}: a name is one word")
    advertised = settings.cluster.advertise if settings.cluster else ""
    for option, address in (
        ("--listen", settings.listen),
        ("--advertise", advertised),
        ("--s3", settings.s3),
    ):
        if address and settings.tls is None and not is_loopback(address):
            raise InvalidInput(
                f"{option} {address} is open to others; give --tls-cert, --tls-key and --tls-ca, or 127.0.0.1"
            )
    if settings.log not in LOG_LEVELS:
        raise InvalidInput(f"--log (CACHESVC_LOG) {settings.log} is no level; give {', '.join(LOG_LEVELS)}")


def _check_writes(settings: Settings) -> None:
    if settings.s3_writes and not settings.s3:
        raise InvalidInput("--s3-writes is of the S3 endpoint; give --s3 too")
    for text in settings.s3_writes:
        prefix, _ = parse_allow(text, "--s3-writes")
        if not re.match(r"s3://[^/]", prefix):
            raise InvalidInput(f"--s3-writes {text} is no prefix of S3; write s3://bucket/prefix/")


def is_loopback(address: str) -> bool:
    """Tell whether HOST:PORT is for this machine alone."""
    return address.rpartition(":")[0] in ("127.0.0.1", "localhost", "[::1]")
