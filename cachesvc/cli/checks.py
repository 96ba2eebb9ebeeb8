"""What `doctor` looks at: each check returns findings and mends nothing itself."""

from __future__ import annotations

import email.utils
import fcntl
import os
import resource
import stat
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from http.client import HTTPException
from pathlib import Path

from cachesvc import config
from cachesvc.client.control import Control
from cachesvc.core.errors import CacheError, DaemonUnavailable, InvalidInput, OutOfSpace, SourceUnavailable
from cachesvc.daemon.access.path_lookups import Lookups
from cachesvc.daemon.disks.budgets import checked_budget
from cachesvc.system.footprint import largest_ram_bytes
from cachesvc.tiers.probe import room

PROBE_S = 5.0
"""A server that says nothing for longer is as good as gone."""
SKEW_WARN_S = 60.0
SKEW_FAIL_S = 840.0
"""S3 refuses signatures that are 15 minutes off; a minute is spared for the request itself."""
DISK_SPARE = 0.05
_SHARED_OR_VOLATILE = {
    "tmpfs": "is RAM: bytes there count as memory and are gone after a reboot",
    "ramfs": "is RAM: bytes there count as memory and are gone after a reboot",
    "overlay": "is a container's own layer: slow, and gone with the container; mount a disk",
    "nfs": "is a network file system: use a disk of this node",
    "nfs4": "is a network file system: use a disk of this node",
    "lustre": "is a network file system: use a disk of this node",
    "fuse": "is a user-space file system: use a disk of this node",
    "9p": "is a shared file system: use a disk of this node",
}


class Level(str, Enum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was checked, how it is, what to mend ("" when it is ok)."""

    check: str
    level: Level
    text: str
    mend: str = ""


def settings(given: config.Settings) -> Finding:
    """Whether a daemon would start with them, and reach the mounts that it is to serve."""
    try:
        config.validate(given)
        Lookups().allowlist(given.allow, exact=True)
    except (InvalidInput, SourceUnavailable) as error:
        what, _, mend = str(error).rpartition("; ")
        return Finding("settings", Level.FAIL, what or mend, mend if what else "")
    return Finding("settings", Level.OK, f"serves {' '.join(given.allow) or 'what its user may read'}")


def socket(directory: str) -> Iterator[Finding]:
    """The socket directory and the daemon behind it."""
    control = f"{directory}/{config.CONTROL_SOCKET}"
    try:
        config.check_socket_dir(directory)
    except InvalidInput as error:
        what, _, mend = str(error).rpartition("; ")
        yield Finding("socket", Level.FAIL, what, mend)
        return
    if not os.path.isdir(directory):
        yield Finding("socket", Level.WARN, f"{directory} does not exist", "start a daemon: cachesvc serve")
        return
    if not os.path.lexists(control):
        yield Finding("socket", Level.WARN, f"no daemon listens in {directory}", "start one: cachesvc serve")
        return
    found = os.lstat(control)
    if not stat.S_ISSOCK(found.st_mode):
        yield Finding(
            "socket", Level.FAIL, f"{control} is no socket", "remove it, or choose another --socket"
        )
        return
    if not os.access(control, os.R_OK | os.W_OK):
        yield Finding(
            "socket",
            Level.FAIL,
            f"{control} is uid {found.st_uid}'s, mode {stat.S_IMODE(found.st_mode):o}; you: {os.geteuid()}",
            "run as that user, or serve with --socket-mode and --allow",
        )
        return
    if os.stat(directory).st_mode & 0o022 and not os.stat(directory).st_mode & stat.S_ISVTX:
        yield Finding(
            "socket", Level.WARN, f"others may replace files in {directory}", f"chmod go-w {directory}"
        )
    else:
        yield Finding("socket", Level.OK, f"{control}, mode {stat.S_IMODE(found.st_mode):o}")
    yield daemon(directory)


def daemon(directory: str) -> Finding:
    """Whether the daemon answers."""
    try:
        with Control(directory) as control:
            reply = control.status()
    except DaemonUnavailable:
        return Finding(
            "daemon",
            Level.FAIL,
            f"the socket in {directory} is a dead daemon's",
            "start it again: cachesvc serve",
        )
    except CacheError as error:
        return Finding("daemon", Level.FAIL, str(error), "see the daemon's log")
    lost = [tier.name for tier in reply.tiers if tier.lost]
    if lost:
        return Finding(
            "daemon", Level.FAIL, f"tier {', '.join(lost)} is lost", "see the daemon's log; check the disk"
        )
    full = [tier.name for tier in reply.tiers if tier.full]
    if full:
        return Finding(
            "daemon",
            Level.WARN,
            f"tier {', '.join(full)} takes no more",
            "free what the daemon's log says, or lower its budget",
        )
    return Finding("daemon", Level.OK, f"version {reply.version}, pid {reply.pid}, up {reply.uptime_s:.0f} s")


def disk(spec: config.NvmeSpec, extent_bytes: int, mounts: str | None = None) -> Iterator[Finding]:
    """A cache directory: there, writable, on a real disk, with room for its budget, and for an extent of it."""
    if not os.path.isdir(spec.path):
        yield Finding("nvme", Level.FAIL, f"{spec.path} is no directory", "create it, or mount the disk")
        return
    if not os.access(spec.path, os.R_OK | os.W_OK | os.X_OK):
        yield Finding("nvme", Level.FAIL, f"{spec.path} is not writable by uid {os.geteuid()}", "chown it")
        return
    kind = file_system(spec.path, mounts or Path("/proc/self/mountinfo").read_text())
    trouble = _SHARED_OR_VOLATILE.get(kind.partition(".")[0])
    if trouble:
        yield Finding(
            "nvme",
            Level.WARN,
            f"{spec.path} ({kind}) {trouble.partition(':')[0]}",
            trouble.partition(": ")[2],
        )
    disk = room(Path(spec.path))
    total, free = disk.total_bytes, disk.free_bytes
    budget = spec.size_bytes or int(total * spec.share)
    ours = _held_bytes(spec.path)
    sizes = f"{free:,} bytes free of {total:,}, budget {budget:,}"
    try:
        checked_budget(spec, disk, ours, extent_bytes)
    except OutOfSpace as error:
        what, _, mend = str(error).rpartition("; ")
        yield Finding("nvme", Level.FAIL, what, mend)
        return
    if budget > free + ours - int(total * DISK_SPARE):
        yield Finding("nvme", Level.WARN, f"{spec.path}: {sizes}", "free space, or lower the budget")
    else:
        yield Finding("nvme", Level.OK, f"{spec.path} ({kind}): {sizes}")


def state(directory: str) -> Finding:
    """Whether catalogs and metadata can be kept; where the directory does not exist yet, it is made at the start."""
    there = os.path.abspath(directory)
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    if not os.path.isdir(there) or not os.access(there, os.W_OK | os.X_OK):
        return Finding(
            "state",
            Level.FAIL,
            f"{directory} cannot be written by uid {os.geteuid()}",
            "give another --state-dir",
        )
    free = room(Path(there)).free_bytes
    if free < config.STATE_BYTES:
        return Finding(
            "state",
            Level.FAIL,
            f"{directory}: {free:,} bytes free, {config.STATE_BYTES:,} needed",
            "free room there, or give another --state-dir",
        )
    return Finding("state", Level.OK, f"{directory}: {free:,} bytes free")


def file_system(path: str, mounts: str) -> str:
    """The type of the file system that holds `path`; `mounts` is the text of /proc/self/mountinfo."""
    wanted = os.path.realpath(path)
    best, kind = "", "unknown"
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        point = left.split()[4].replace("\\040", " ")
        inside = wanted == point or wanted.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, right.split()[0]
    return kind


def open_files(ram_bytes: int, extent_bytes: int) -> Finding:
    """The hard limit against what a daemon wants."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = config.open_files_advised(ram_bytes, extent_bytes)
    text = f"{'unlimited' if hard == resource.RLIM_INFINITY else f'{hard:,}'} allowed, {needed:,} advised"
    if hard != resource.RLIM_INFINITY and hard < needed:
        return Finding("open files", Level.WARN, text, "raise the hard limit (ulimit -Hn, LimitNOFILE=)")
    return Finding("open files", Level.OK, text)


def kernel() -> Finding:
    """Sealed memory files: made, sealed, and found unwritable, as the RAM tier does."""
    release = os.uname().release
    try:
        fd = os.memfd_create("cachesvc-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        return Finding(
            "kernel", Level.FAIL, f"Linux {release} makes no sealed memory file: {error.strerror}",
            "allow memfd_create (seccomp, vm.memfd_noexec)",
        )  # fmt: skip
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        os.write(fd, b"x")
    except PermissionError:
        return Finding("kernel", Level.OK, f"Linux {release}, memory files can be sealed")
    except OSError as error:
        return Finding(
            "kernel", Level.FAIL, f"Linux {release} seals no memory file: {error.strerror}", "use Linux 5.4+"
        )
    finally:
        os.close(fd)
    return Finding(
        "kernel", Level.FAIL, f"Linux {release} lets a sealed memory file be written", "use another kernel"
    )


def memory(settings: config.Settings, allowed: int) -> Finding:
    """The RAM budget, and what our own processes take, against what the cgroups or the machine allow, in bytes."""
    line = f"RAM budget {settings.ram_bytes:,} of {allowed:,} bytes"
    if settings.ram_bytes > allowed:
        return Finding("memory", Level.FAIL, line, "lower --ram, or raise the memory limit")
    if advice := config.ram_advice(settings, allowed):
        what, _, mend = advice.rpartition("; ")
        return Finding("memory", Level.WARN, what, mend)
    largest = largest_ram_bytes(allowed, settings.own_bytes)
    return Finding("memory", Level.OK, f"{line}, {largest:,} at most beside the daemon's own processes")


def credentials() -> Finding:
    """Whether boto3 finds S3 credentials, and by which method; never what they are."""
    import boto3

    from cachesvc.sources.s3.errors import FAILED, one_line
    from cachesvc.sources.s3.identity import check_keys, faulty_setting

    try:
        found = boto3.Session().get_credentials()
        if found is not None and check_keys(found.get_frozen_credentials()).access_key:
            return Finding("credentials", Level.OK, f"S3 credentials from {found.method}: found, not tried")
    except InvalidInput as error:
        what, _, mend = str(error).rpartition("; ")
        return Finding("credentials", Level.FAIL, what, mend)
    except FAILED as error:
        return Finding(
            "credentials",
            Level.FAIL,
            f"S3 credentials cannot be had: {one_line(error)}",
            f"check {faulty_setting(error)}",
        )
    return Finding(
        "credentials",
        Level.WARN,
        "no S3 credentials found",
        "set AWS_PROFILE or AWS_ACCESS_KEY_ID if data is in S3",
    )


def clock(endpoint: str) -> Finding:
    """This machine's clock against the Date header of the S3 endpoint."""
    if not endpoint.startswith(("http://", "https://")):
        place = endpoint.rpartition("@")[2]  # without a password
        return Finding("clock", Level.FAIL, f"{place!r} is not an endpoint", "write it as https://HOST:PORT")
    request = urllib.request.Request(endpoint, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=PROBE_S) as answer:
            date = answer.headers.get("Date", "")
    except urllib.error.HTTPError as error:
        date = error.headers.get("Date", "")  # 403 is an answer too: only its time is wanted
    except (OSError, HTTPException, ValueError) as error:  # the last two: it is no URL
        reason = getattr(error, "reason", error)
        return Finding(
            "clock", Level.FAIL, f"{endpoint} does not answer: {reason}", "check AWS_ENDPOINT_URL and network"
        )
    return skew(endpoint, date, time.time())


def skew(endpoint: str, date: str, now_s: float) -> Finding:
    """Judge a Date header against the seconds since the epoch that this machine believes in."""
    parsed = email.utils.parsedate_tz(date)
    if parsed is None:
        return Finding("clock", Level.WARN, f"{endpoint} names no date", "compare the clock by hand")
    off = now_s - email.utils.mktime_tz(parsed)
    level = Level.FAIL if abs(off) > SKEW_FAIL_S else Level.WARN if abs(off) > SKEW_WARN_S else Level.OK
    text = f"{abs(off):.0f} s {'ahead of' if off > 0 else 'behind'} {endpoint}"
    return Finding(
        "clock", level, text, "" if level is Level.OK else "set the clock (NTP): signatures expire"
    )


def _held_bytes(path: str) -> int:
    """Of the extents below a directory: its budget may count on them."""
    total, pending = 0, [f"{path}/cachesvc/v1/extents"]
    while pending:
        try:
            entries = list(os.scandir(pending.pop()))
        except OSError:
            continue
        pending += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
        total += sum(
            e.stat(follow_symlinks=False).st_size for e in entries if e.is_file(follow_symlinks=False)
        )
    return total
