"""Network namespaces joined by one bridge, with a rate, a delay and cuts for each link.

    namespace of a node                namespace of the hub              namespace of this process
    ┌──────────────┐  link of a node  ┌─────────────────────┐  own link  ┌──────────────┐
    │ daemon, eth0 │ ───────────────> │ p1  bridge  p2   p0 │ <───────── │ S3 and tests │
    └──────────────┘ <─────────────── └─────────────────────┘            └──────────────┘
        "out" of it is shaped at eth0, "in" to it at its port of the bridge

It needs root and the programs `ip`, `tc` and `nsenter`. Names hold the process id, so `sweep` finds what dead processes
left. The bridge has a namespace of its own, where rules of the host's firewall do not apply.
"""

from __future__ import annotations

import ipaddress
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal

Way = Literal["in", "out", "both"]
RANGE = ipaddress.IPv4Network("198.18.0.0/15")
"""Addresses for benchmarks of networks (RFC 2544), which no host routes."""
PREFIX = 26
"""Bits of a network's prefix: 62 addresses for each network."""
QUEUE_S = 0.05
"""The queue before a slow link, in seconds at its rate."""
LEAST_BURST, LEAST_QUEUE = 64 << 10, 256 << 10
"""Bytes: one segment as the kernel hands it over, and a few of them. A queue of one drops most of a connection's."""
_NAME = re.compile(r"cs(\d+)x\d+-\w+")
_serials = itertools.count()


class Unavailable(Exception):
    """Something that this host has not: a right, a program or a part of the kernel. Tests skip."""


def run(*command: str) -> str:
    """Run a command and return its output. Raises Unavailable with its error message."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Unavailable(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def inside(namespace: str, *command: str) -> list[str]:
    """The command line that runs `command` in a namespace, as the same process. Other than `ip netns exec`, it leaves
    /sys, and so the limits of cgroups, as they are."""
    return ["nsenter", f"--net=/var/run/netns/{namespace}", *command]


def sweep() -> None:
    """Remove namespaces of dead processes, and kill what still runs in them."""
    for name in _namespaces():
        match = _NAME.fullmatch(name)
        if match is not None and not os.path.exists(f"/proc/{match[1]}"):
            remove(name)


def remove(name: str) -> None:
    """Kill the processes of a namespace and delete it, with its links."""
    with suppress(Unavailable):  # another process sweeps too
        for pid in run("ip", "netns", "pids", name).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        run("ip", "netns", "delete", name)


def _namespaces() -> list[str]:
    return [each["name"] for each in json.loads(run("ip", "-json", "netns", "list") or "[]")]


@dataclass
class Link:
    """The link of one node or of this process. `namespace` is "" for this process; `end` is the interface there and
    `port` the one of the bridge."""

    namespace: str
    end: str
    hub: str
    port: str
    address: str
    rate: float = 0.0
    delay_s: float = 0.0
    loss: float = 0.0
    cuts: set[str] = field(default_factory=set)

    def shape(self, rate: float = 0.0, delay_s: float = 0.0, loss: float = 0.0) -> None:
        """Limit both ways to `rate` bytes/s (0: no limit), with a delay in each way and this part of the packets lost.
        Raises Unavailable for a delay or loss where the kernel has no netem."""
        self.rate, self.delay_s, self.loss = rate, delay_s, loss
        self._apply()

    def cut(self, way: Way = "both") -> None:
        """Drop every packet "in" to it, "out" of it, or "both"."""
        self.cuts |= {"in", "out"} if way == "both" else {way}
        self._apply()

    def heal(self) -> None:
        """End all cuts and limits."""
        self.cuts.clear()
        self.shape()

    def passed_bytes(self) -> tuple[int, int]:
        """Bytes that went in and out so far, headers included."""
        (found,) = json.loads(run("ip", "-json", "-n", self.hub, "-s", "link", "show", self.port))
        return found["stats64"]["tx"]["bytes"], found["stats64"]["rx"]["bytes"]

    def _apply(self) -> None:
        self._queue(["-n", self.hub], self.port, "in" in self.cuts)
        self._queue(["-n", self.namespace] if self.namespace else [], self.end, "out" in self.cuts)

    def _queue(self, where: Sequence[str], device: str, cut: bool) -> None:
        kind = ["blackhole"] if cut else self._discipline()
        if kind:
            run("tc", *where, "qdisc", "replace", "dev", device, "root", *kind)
        else:
            with suppress(Unavailable):  # there is none
                run("tc", *where, "qdisc", "delete", "dev", device, "root")

    def _discipline(self) -> list[str]:
        bits, queue = f"{self.rate * 8:.0f}bit", self.rate * QUEUE_S
        if self.delay_s or self.loss:
            slow = ["rate", bits] if self.rate else []
            return ["netem", "delay", f"{self.delay_s * 1e3:g}ms", "loss", f"{self.loss:%}", *slow]
        if not self.rate:
            return []
        burst, limit = (f"{max(least, queue):.0f}b" for least in (LEAST_BURST, LEAST_QUEUE))
        return ["tbf", "rate", bits, "burst", burst, "limit", limit]


class Network:
    """A bridge, and links to it. Context manager; raises Unavailable where it cannot be made."""

    def __init__(self) -> None:
        self._prefix = f"cs{os.getpid()}x{next(_serials)}"
        self.hub = f"{self._prefix}-hub"
        """The namespace of the bridge, which all packets pass."""
        self._numbers = itertools.count()

    def __enter__(self) -> Network:
        missing = [each for each in ("ip", "tc", "nsenter") if shutil.which(each) is None]
        if missing or os.geteuid():
            raise Unavailable(f"network namespaces need {missing[0] if missing else 'root'}")
        sweep()
        self._addresses = _free_subnet().hosts()
        try:
            run("ip", "netns", "add", self.hub)
            for line in ("add bridge type bridge forward_delay 0", "set bridge up"):
                run("ip", "-n", self.hub, "link", *line.split())
            self.own = self._link("", self._prefix)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def add(self, name: str) -> Link:
        """Make a namespace with a link. `name` is short, of letters and digits."""
        namespace = f"{self._prefix}-{name}"
        run("ip", "netns", "add", namespace)
        run("ip", "-n", namespace, "link", "set", "lo", "up")
        return self._link(namespace, "eth0")

    def _link(self, namespace: str, end: str) -> Link:
        port, address = f"p{next(self._numbers)}", str(next(self._addresses))
        where = ["-n", namespace] if namespace else []
        home = namespace or str(os.getpid())
        run("ip", "-n", self.hub, "link", "add", port, "type", "veth", "peer", "name", end, "netns", home)
        run("ip", "-n", self.hub, "link", "set", port, "master", "bridge", "up")
        run("ip", *where, "address", "add", f"{address}/{PREFIX}", "dev", end)
        run("ip", *where, "link", "set", end, "up")
        return Link(namespace, end, self.hub, port, address)

    def _remove(self) -> None:
        with suppress(Unavailable):  # it was not made
            run("ip", "link", "delete", self._prefix)
        for name in _namespaces():
            if name.startswith(f"{self._prefix}-"):
                remove(name)


def _free_subnet() -> ipaddress.IPv4Network:
    """A network of `RANGE` that no interface has. Processes begin at different ones."""
    subnets = list(RANGE.subnets(new_prefix=PREFIX))
    begin = os.getpid() * 7 % len(subnets)
    for subnet in subnets[begin:] + subnets[:begin]:
        if not run("ip", "-4", "-oneline", "address", "show", "to", str(subnet)):
            return subnet
    raise Unavailable(f"no network of {RANGE} is free")
