"""The checks of `doctor`: each returns findings and changes nothing."""

from __future__ import annotations

import email.utils
import fcntl
import os
import resource
import stat
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from http.client import HTTPException
from pathlib import Path

from cachesvc import config
from cachesvc.client.control import Control
from cachesvc.core.errors import (
    CacheError,
    DaemonUnavailable,
    InvalidInput,
    NotReady,
    OutOfSpace,
    SourceUnavailable,
)
from cachesvc.core.placement.traits import certificate_stage
from cachesvc.daemon.access.path_lookups import Lookups
from cachesvc.daemon.access.tls import certificate_end, certificate_text, read_tls
from cachesvc.daemon.disks.budgets import checked_budget
from cachesvc.sources.limited_calls import LimitedCall
from cachesvc.sources.open import Sources, SourceSettings
from cachesvc.system.footprint import largest_ram_bytes
from cachesvc.system.kubelet import KUBELET, KUBELET_FREE
from cachesvc.tiers.directory import NAME
from cachesvc.tiers.mounts import Mount, check_own, misplaced, mount_of
from cachesvc.tiers.probe import room

PROBE_S = 5.0
"""Timeout of the request that reads an endpoint's clock."""
SKEW_WARN_S = 60.0
SKEW_FAIL_S = 840.0
"""S3 refuses signatures that are 15 minutes off; one minute is left for the request itself."""
DISK_SPARE = 0.05
LIST_S = 10.0
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
    """The severity of a finding."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: the check, its result, and the advice ("" where it is ok)."""

    check: str
    level: Level
    text: str
    advice: str = ""


def _ok(check: str, text: str) -> Finding:
    return Finding(check, Level.OK, text)


def _warn(check: str, text: str, advice: str) -> Finding:
    return Finding(check, Level.WARN, text, advice)


def _fail(check: str, text: str, advice: str) -> Finding:
    return Finding(check, Level.FAIL, text, advice)


def _failed(check: str, error: CacheError) -> Finding:
    """The finding of an error, whose text ends with the advice."""
    text, _, advice = str(error).rpartition("; ")
    return _fail(check, text or advice, advice if text else "")


def settings(given: config.Settings) -> Finding:
    """Check whether a daemon would start with these settings, and reach the mounts that it should serve."""
    try:
        config.validate(given)
        Lookups().allowlist(given.allow, exact=True)
    except (InvalidInput, SourceUnavailable) as error:
        return _failed("settings", error)
    return _ok("settings", f"serves {' '.join(given.allow) or 'all that its user may read'}")


def socket(directory: str) -> Iterator[Finding]:
    """Check the socket directory and the daemon behind it."""
    control = f"{directory}/{config.CONTROL_SOCKET}"
    try:
        config.check_socket_dir(directory)
    except InvalidInput as error:
        yield _failed("socket", error)
        return
    if not os.path.isdir(directory):
        yield _warn("socket", f"{directory} does not exist", "start a daemon: cachesvc serve")
        return
    if not os.path.lexists(control):
        yield _warn("socket", f"no daemon listens in {directory}", "start one: cachesvc serve")
        return
    found = os.lstat(control)
    if not stat.S_ISSOCK(found.st_mode):
        yield _fail("socket", f"{control} is no socket", "remove it, or choose another --socket")
        return
    if not os.access(control, os.R_OK | os.W_OK):
        yield _fail(
            "socket",
            f"{control} is uid {found.st_uid}'s, mode {stat.S_IMODE(found.st_mode):o}; you: {os.geteuid()}",
            "run as that user, or serve with --socket-mode and --allow",
        )
        return
    if os.stat(directory).st_mode & 0o022 and not os.stat(directory).st_mode & stat.S_ISVTX:
        yield _warn("socket", f"others may replace files in {directory}", f"chmod go-w {directory}")
    else:
        yield _ok("socket", f"{control}, mode {stat.S_IMODE(found.st_mode):o}")
    yield daemon(directory)


def daemon(directory: str) -> Finding:
    """Check whether the daemon answers, and its tiers work."""
    try:
        with Control(directory) as control:
            reply = control.status()
    except DaemonUnavailable:
        return _fail(
            "daemon", f"the socket in {directory} is a dead daemon's", "start it again: cachesvc serve"
        )
    except CacheError as error:
        return _fail("daemon", str(error), "see the daemon's log")
    lost = [tier.name for tier in reply.tiers if tier.lost]
    if lost:
        return _fail("daemon", f"tier {', '.join(lost)} is lost", "see the daemon's log; check the disk")
    full = [tier.name for tier in reply.tiers if tier.full]
    if full:
        return _warn(
            "daemon",
            f"tier {', '.join(full)} takes no more",
            "free what the daemon's log says, or lower its budget",
        )
    return _ok("daemon", f"version {reply.version}, pid {reply.pid}, up {reply.uptime_s:.0f} s")


def disk(
    spec: config.NvmeSpec, extent_bytes: int, mounts: Sequence[Mount] | None = None
) -> Iterator[Finding]:
    """Check a cache directory: exists, is writable, on a local disk, with room for its budget and for one extent."""
    if not os.path.isdir(spec.path):
        yield _fail("nvme", f"{spec.path} is no directory", "create it, or mount the disk")
        return
    if not os.access(spec.path, os.R_OK | os.W_OK | os.X_OK):
        yield _fail("nvme", f"{spec.path} is not writable by uid {os.geteuid()}", "chown it")
        return
    try:
        if spec.mounted:
            check_own(spec.path, mounts)
    except NotReady as error:
        yield _failed("nvme", error)
        return
    kind = mount_of(spec.path, mounts).kind
    if why := misplaced(spec.path, mounts):
        advice = "mount its disk if it is to have one; DIR=SIZE,mounted refuses to start without"
        yield _warn("nvme", why, advice)
    trouble = _SHARED_OR_VOLATILE.get(kind.partition(".")[0])
    if trouble:
        yield _warn("nvme", f"{spec.path} ({kind}) {trouble.partition(':')[0]}", trouble.partition(": ")[2])
    disk = room(Path(spec.path))
    total, free = disk.total_bytes, disk.free_bytes
    budget = spec.size_bytes or int(total * spec.share)
    held_bytes = _held_bytes(spec.path)
    sizes = f"{free:,} bytes free of {total:,}, budget {budget:,}"
    try:
        checked_budget(spec, disk, held_bytes, extent_bytes)
    except OutOfSpace as error:
        yield _failed("nvme", error)
        return
    if budget > free + held_bytes - int(total * DISK_SPARE):
        yield _warn("nvme", f"{spec.path}: {sizes}", "free space, or lower the budget")
    else:
        yield _ok("nvme", f"{spec.path} ({kind}): {sizes}")
    yield from kubelet(spec.path, total, free + held_bytes - budget)


def kubelet(path: str, total: int, left: int, places: Sequence[str] = KUBELET) -> Iterator[Finding]:
    """Check that a cache directory on the kubelet's own file system leaves enough of its `total` bytes free, where `left`
    bytes are free once the budget is used. `places`: paths on that file system, which need not be there."""
    own = {os.stat(place).st_dev for place in places if os.path.exists(place)}
    if os.stat(path).st_dev in own and left < int(total * KUBELET_FREE):
        yield _warn(
            "nvme",
            f"{path} is on the disk of the kubelet, and leaves {max(0, left):,} of {total:,} bytes free; below 15 %"
            " (imagefs, and 10 % nodefs) the kubelet evicts pods",
            "use another disk, or lower the budget",
        )


def state(directory: str) -> Finding:
    """Check whether catalogs and metadata can be kept. The daemon creates a missing directory at its start."""
    there = os.path.abspath(directory)
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    if not os.path.isdir(there) or not os.access(there, os.W_OK | os.X_OK):
        return _fail(
            "state", f"{directory} cannot be written by uid {os.geteuid()}", "give another --state-dir"
        )
    free = room(Path(there)).free_bytes
    if free < config.STATE_BYTES:
        return _fail(
            "state",
            f"{directory}: {free:,} bytes free, {config.STATE_BYTES:,} needed",
            "free room there, or give another --state-dir",
        )
    return _ok("state", f"{directory}: {free:,} bytes free")


def open_files(ram_bytes: int, extent_bytes: int) -> Finding:
    """Compare the hard limit of open files with a daemon's need."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = config.open_files_advised(ram_bytes, extent_bytes)
    text = f"{'unlimited' if hard == resource.RLIM_INFINITY else f'{hard:,}'} allowed, {needed:,} advised"
    if hard != resource.RLIM_INFINITY and hard < needed:
        return _warn("open files", text, "raise the hard limit (ulimit -Hn, LimitNOFILE=)")
    return _ok("open files", text)


def kernel() -> Finding:
    """Check sealed memory files, which the RAM tier uses: create one, seal it, and expect a write to fail."""
    release = os.uname().release
    try:
        fd = os.memfd_create("cachesvc-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        return _fail(
            "kernel",
            f"Linux {release} makes no sealed memory file: {error.strerror}",
            "allow memfd_create (seccomp, vm.memfd_noexec)",
        )
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        os.write(fd, b"x")
    except PermissionError:
        return _ok("kernel", f"Linux {release}, memory files can be sealed")
    except OSError as error:
        return _fail("kernel", f"Linux {release} seals no memory file: {error.strerror}", "use Linux 5.4+")
    finally:
        os.close(fd)
    return _fail("kernel", f"Linux {release} lets a sealed memory file be written", "use another kernel")


def memory(settings: config.Settings, allowed: int) -> Finding:
    """Compare the RAM budget and the daemon's own memory with the limit of the cgroup or machine, in bytes."""
    line = f"RAM budget {settings.ram_bytes:,} of {allowed:,} bytes"
    if settings.ram_bytes > allowed:
        return _fail("memory", line, "lower --ram, or raise the memory limit")
    if advice := config.ram_advice(settings, allowed):
        text, _, advice = advice.rpartition("; ")
        return _warn("memory", text, advice)
    largest = largest_ram_bytes(allowed, settings.own_bytes)
    return _ok("memory", f"{line}, {largest:,} at most beside the daemon's own processes")


def certificate(tls: config.Tls, now: float) -> Finding:
    """Check whether the files of mutual TLS can be used, and when the certificate ends. `now`: Unix time."""
    try:
        read_tls(tls)
        ends = certificate_end(tls.certificate)
    except InvalidInput as error:
        return _fail("certificate", str(error), "make it again: deploy/certificates.sh")
    text, stage = certificate_text(ends, now).rpartition("; ")[0], certificate_stage(ends, now)
    if stage is None:
        return _ok("certificate", text)
    return Finding(
        "certificate", Level.WARN if stage else Level.FAIL, text, "renew it: deploy/certificates.sh"
    )


def credentials() -> Finding:
    """Check whether boto3 finds S3 credentials, and by which method. Never prints them."""
    import boto3

    from cachesvc.sources.s3.errors import FAILED, one_line
    from cachesvc.sources.s3.identity import check_keys, faulty_setting

    try:
        found = boto3.Session().get_credentials()
        if found is not None and check_keys(found.get_frozen_credentials()).access_key:
            return _ok("credentials", f"S3 credentials from {found.method}: found, not tried")
    except InvalidInput as error:
        return _failed("credentials", error)
    except FAILED as error:
        return _fail(
            "credentials",
            f"S3 credentials cannot be had: {one_line(error)}",
            f"check {faulty_setting(error)}",
        )
    return _warn(
        "credentials", "no S3 credentials found", "set AWS_PROFILE or AWS_ACCESS_KEY_ID if data is in S3"
    )


def sources(settings: config.Settings) -> Iterator[Finding]:
    """Send one real request for a listing of each allowed prefix, all at once."""
    allowed = Lookups().allowlist(settings.allow, exact=False)
    opened = Sources(SourceSettings(roots=allowed.roots, sections=settings.source), open_s=LIST_S)
    prefixes = [f"{each}/" for each in allowed.prefixes or ()]
    for prefix, call in [(each, LimitedCall(partial(opened.probe, each), "list")) for each in prefixes]:
        try:
            call.result_within(LIST_S, lambda: SourceUnavailable(f"no answer in {LIST_S:.0f} s"))
        except InvalidInput as error:
            yield _ok("source", f"{prefix} cannot be listed, and was not tried: {error}")
        except CacheError as error:
            yield _failed("source", type(error)(f"{prefix}: {error}"))
        else:
            yield _ok("source", f"{prefix} was listed in {call.age_s:.2f} s")


def clock(endpoint: str) -> Finding:
    """Compare this machine's clock with the Date header of the S3 endpoint."""
    if not endpoint.startswith(("http://", "https://")):
        place = endpoint.rpartition("@")[2]  # without a password
        return _fail("clock", f"{place!r} is not an endpoint", "write it as https://HOST:PORT")
    request = urllib.request.Request(endpoint, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=PROBE_S) as answer:
            date = answer.headers.get("Date", "")
    except urllib.error.HTTPError as error:
        date = error.headers.get("Date", "")  # any answer has the time, a 403 too
    except (OSError, HTTPException, ValueError) as error:  # ValueError: not a valid URL
        reason = getattr(error, "reason", error)
        return _fail("clock", f"{endpoint} does not answer: {reason}", "check AWS_ENDPOINT_URL and network")
    return skew(endpoint, date, time.time())


def skew(endpoint: str, date: str, now_s: float) -> Finding:
    """Compare a Date header with this machine's time, in seconds since the epoch."""
    parsed = email.utils.parsedate_tz(date)
    if parsed is None:
        return _warn("clock", f"{endpoint} names no date", "compare the clock by hand")
    skew_s = now_s - email.utils.mktime_tz(parsed)
    level = Level.FAIL if abs(skew_s) > SKEW_FAIL_S else Level.WARN if abs(skew_s) > SKEW_WARN_S else Level.OK
    text = f"{abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} {endpoint}"
    return Finding(
        "clock", level, text, "" if level is Level.OK else "set the clock (NTP): signatures expire"
    )


def _held_bytes(path: str) -> int:
    """Return the bytes of the extents below a directory, which count as free for its budget."""
    found = (each.lstat() for each in Path(path, NAME, "v1", "extents").rglob("*"))
    return sum(each.st_size for each in found if stat.S_ISREG(each.st_mode))
