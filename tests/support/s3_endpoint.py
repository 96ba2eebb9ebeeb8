"""A daemon with an S3 endpoint, and clients of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config

from cachesvc.core.errors import DaemonUnavailable
from cachesvc.gateway.s3.keys import ask_for_keys
from testbed.node import Daemon
from testbed.servers import free_ports
from tests.support.waiting import wait_until


@contextmanager
def served(
    root: Path, options: Sequence[str], credentials: Mapping[str, str], host: str = "127.0.0.1"
) -> Iterator[Daemon]:
    """Run a daemon with an endpoint on a free port, until the block ends."""
    (port,) = free_ports(1)
    with Daemon(root, [*options, "--s3", f"{host}:{port}"], credentials) as daemon:
        wait_until(lambda: answers(daemon))
        yield daemon


def answers(daemon: Daemon) -> bool:
    """Tell whether the endpoint gives keys."""
    with suppress(DaemonUnavailable):
        return bool(ask_for_keys(daemon.socket_dir))
    return False


def client_of(
    daemon: Daemon, keys: Mapping[str, Any] | None = None, ca: str | None = None, **config: Any
) -> Any:
    """Return boto3's client of an endpoint, with keys of this user unless others are given. It tries each call once. `ca`:
    the file of the authority of its certificate."""
    found = keys or ask_for_keys(daemon.socket_dir)
    given = {"retries": {"total_max_attempts": 1}, "s3": {"addressing_style": "path"}, **config}
    return boto3.client(
        "s3",
        endpoint_url=ask_for_keys(daemon.socket_dir)["Endpoint"],
        aws_access_key_id=found["AccessKeyId"],
        aws_secret_access_key=found["SecretAccessKey"],
        aws_session_token=found["SessionToken"],
        region_name="us-east-1",
        verify=ca,
        config=Config(signature_version="s3v4", **given),
    )


def endpoint_process(daemon: Daemon) -> int:
    """Return the pid of the endpoint's process."""
    found = [
        pid
        for pid in daemon.children()
        if b"cachesvc.gateway.s3" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert len(found) == 1
    return found[0]
