"""Eight faults at once in one cluster of real daemons: `nodes`, `status`, `events` and the log name the cause of each."""

from __future__ import annotations

import io
import os
import signal
import threading
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import numpy as np
import psutil
import pytest
import trustme

from cachesvc.__main__ import run
from cachesvc.client.grants import DaemonGrants
from cachesvc.client.protocol import Granted
from testbed import WAIT_S
from testbed.node import Daemon
from testbed.servers import free_ports
from tests.support.faults.disks import mounted
from tests.support.faults.fake_s3 import FakeS3, Object, fake_s3
from tests.support.faults.forwarding import forwarding
from tests.support.keyed_cluster import EXTENT, Cluster, opened, prefetch, read
from tests.support.membership.nodes import authority, certified, metric
from tests.support.waiting import wait_until

NAMES = "abcdefghi"
TLS_NAME = "peers.cachesvc"
EXTENTS = 24
CONTENTS = np.random.default_rng(5).bytes(EXTENTS * EXTENT)


def printed(daemon: Daemon, verb: str, *words: str) -> str:
    """Return what a verb prints."""
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(out):
        run([verb, *words, "--socket", daemon.socket_dir])
    return out.getvalue()


def whole_disk_taken(folder: Path) -> None:
    """Fill a file system with somebody's file."""
    fd = os.open(folder / "other", os.O_CREAT | os.O_WRONLY)
    free = os.fstatvfs(fd)
    os.posix_fallocate(fd, 0, free.f_bavail * free.f_frsize)
    os.close(fd)


def stop(daemon: Daemon, stack: ExitStack) -> None:
    """Stop all processes of a daemon until the end."""
    assert daemon.process is not None
    main = psutil.Process(daemon.process.pid)
    for each in (main, *main.children(recursive=True)):
        each.send_signal(signal.SIGSTOP)
        stack.callback(each.send_signal, signal.SIGCONT)


def started(root: Path, server: FakeS3, disk: Path, metrics: str, stack: ExitStack) -> dict[str, Daemon]:
    """Daemons a to i. a is well, and has `metrics`; c's port of extents is closed, d's certificate has expired, e's is of
    another authority, f has another extent size, g's zone is misspelt, and i has a disk."""
    cluster, ca = Cluster(root, server, NAMES, behind="c"), authority(root)
    stack.enter_context(forwarding(cluster.ports["c"]))
    past = datetime.now(timezone.utc) - timedelta(days=1)
    signed: dict[str, tuple[trustme.CA, datetime | None]] = {"d": (ca, past), "e": (trustme.CA(), None)}
    more = {
        "a": ["--metrics", metrics],
        "f": ["--extent-bytes", str(2 * EXTENT)],
        "g": ["--zone", "X"],
        "i": ["--ram", "1MiB", "--nvme", f"{disk}=6MiB"],
    }
    nodes = {}
    for name in NAMES:
        by, ends = signed.get(name, (ca, None))
        tls = [*certified(root, name, by, TLS_NAME, ends), "--tls-name", TLS_NAME]
        nodes[name] = cluster.node(name, *tls, "--zone", "x", *more.get(name, []))
        nodes[name].root.mkdir()
        stack.push(nodes[name])
        nodes[name].launch()
    for each in nodes.values():
        each.wait_ready()
    return nodes


@pytest.mark.slow
def test_the_cause_of_each_of_eight_faults_is_named(tmp_path: Path) -> None:
    healed, hung = threading.Event(), threading.Event()

    def hang(request: BaseHTTPRequestHandler) -> None:
        if "KEYb" in request.headers["Authorization"] and "Range" in request.headers:
            hung.set()
            healed.wait()

    with fake_s3() as server, mounted(tmp_path / "disk", "size=8m") as disk, ExitStack() as stack:
        server.objects["d/0.bin"] = Object(len(CONTENTS), data=CONTENTS)
        scraped = f"127.0.0.1:{free_ports(1)[0]}"
        nodes = started(tmp_path, server, disk, scraped, stack)
        stack.callback(healed.set)
        first, hanging, full = nodes["a"], nodes["b"], nodes["i"]

        def names(verb: str, *parts: str) -> None:
            """Wait until a line that a verb prints at the first node has these parts."""
            wait_until(
                lambda: any(all(each in line for each in parts) for line in printed(first, verb).splitlines())
            )

        for name in "bfghi":
            names("nodes", f"{name} ", "present")
        whole_disk_taken(disk)
        server.refuse = hang
        for each in (hanging, full):
            opened(each)
        reader = DaemonGrants(first.socket_dir, opened(first))
        stack.callback(reader.close)
        for extent in range(EXTENTS - 1):
            (granted,) = reader.acquire([extent], WAIT_S)
            assert isinstance(granted, Granted)
            os.close(granted.fd)
            reader.release([extent])
        filling = threading.Thread(target=lambda: prefetch(hanging))
        filling.start()
        assert hung.wait(WAIT_S)  # one request, for the extent that no other node has
        assert read(first) == CONTENTS
        filling.join(WAIT_S)
        stop(nodes["h"], stack)
        prefetch(full)

        names("nodes", "b ", "fails")
        assert metric(scraped, 'cachesvc_cluster_warnings{kind="source"}') == 1
        names("nodes", "c ", "unreadable", "127.0.0.2")
        names("nodes", "its certificate has expired; renew it")
        names("nodes", "its certificate is of another authority than this node's --tls-ca")
        names("nodes", "h ", "away", "it did not answer in 2 s")
        warnings = ("the source fails at b", "--extent-bytes of f is 512 KiB", "g is alone in zone 'X'")
        for verb in ("nodes", "status", "events"):
            for warning in warnings:
                names(verb, warning)
        names("events", "nothing is read from a node", "c:")
        names("events", "a node is away", "h:", "it did not answer")
        wait_until(lambda: "takes no more" in printed(first, "status", "--cluster"))
        wait_until(
            lambda: "files of others take all the room of a cache directory" in printed(full, "events")
        )
        assert "the certificate of d has expired; renew it" in printed(nodes["d"], "nodes")
        refused = "it refuses this node's certificate, which is of another authority than its --tls-ca"
        assert refused in printed(nodes["e"], "nodes")
        for part in (*warnings, "its certificate has expired", "is of another authority", "node=h", "node=c"):
            assert part in first.log
        assert "event=tier_taken" in full.log
