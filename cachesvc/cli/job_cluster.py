"""The cluster of one job, for `cachesvc run --job-cluster`: its members and ports, by the scheduler's variables, and a
certificate that all its nodes share and that ends with it.

The files of the certificate lie in a folder on a file system that all nodes see. The first node makes the folder, complete,
under another name and renames it. Each node has an entry in it while it runs, and the last one to leave removes it.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cachesvc.client.control import Control
from cachesvc.cluster.addresses import host_addresses, join_address
from cachesvc.core.errors import CacheError, InvalidInput, NotAllowed, NotFound

FIRST_PORT, PORTS = 20_000, 12_000
"""Ports from here on: above those of well-known services, below those that the kernel gives to connections."""
TLS_NAME = "job.cachesvc"
"""The name in the certificate."""
FILES = {"--tls-cert": "node.pem", "--tls-key": "node.key", "--tls-ca": "ca.pem"}
MEMBERS_S = 60.0
"""How long a command waits for the other nodes, and a node whose command has ended for theirs: Slurm may start the tasks of
a step some seconds apart, and what a node holds ends with its daemon."""
MAKE_S = 30.0
"""How long a node waits for a folder that another one removes, and for file systems that show changes late."""
STALE_S = 30 * 86_400.0
"""Folders that are older are of jobs that were killed, and are removed."""
POLL_S = 0.2
_NODES = "nodes"
"""The folder of the entries of running nodes."""
_NUMBERED = re.compile(r"([^.]*-)([0-9]+)(\..*)?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Job:
    """A job on several nodes. `name` is unique among this user's jobs, `members` are HOST:PORT of each node, and `address`
    is that of this one, which is the host `node`."""

    name: str
    node: str
    members: tuple[str, ...]
    address: str

    def options(self, files: str) -> list[str]:
        """The options of this node's daemon, with its certificate in the folder `files`."""
        tls = [word for option, name in FILES.items() for word in (option, f"{files}/{name}")]
        cluster = ["--cluster", f"static:{','.join(self.members)}", "--tls-name", TLS_NAME]
        return [*cluster, "--node-name", self.node, "--advertise", self.address, *tls]


def this_job() -> Job:
    """Return the job of this process. Raises InvalidInput where the scheduler's variables do not tell its nodes."""
    if number := os.environ.get("SLURM_JOB_ID", ""):
        return _slurm(number)
    if index := os.environ.get("JOB_COMPLETION_INDEX", ""):
        return _indexed(index)
    raise InvalidInput(
        "--job-cluster needs a job of Slurm (SLURM_JOB_ID) or an Indexed Job of Kubernetes (JOB_COMPLETION_INDEX)"
    )


def _slurm(number: str) -> Job:
    hosts, node = os.environ.get("SLURM_JOB_NODELIST", ""), os.environ.get("SLURMD_NODENAME", "")
    if not hosts or not number.isdigit():
        raise InvalidInput(
            "SLURM_JOB_ID or SLURM_JOB_NODELIST is missing or no job's; start the command by srun"
        )
    # Two jobs that share a node seldom have numbers that differ by a multiple of this.
    port = FIRST_PORT + 2 * (int(number) % (PORTS // 2))
    return _job(f"slurm-{os.environ.get('SLURM_CLUSTER_NAME', '')}-{number}", f"{hosts}:{port}", node, port)


def _indexed(index: str) -> Job:
    """The pods of an Indexed Job have its name and their index as host name, which the service of their subdomain
    resolves."""
    host, count = socket.getfqdn(), os.environ.get("PET_NNODES") or os.environ.get("NNODES", "")
    name = _NUMBERED.fullmatch(host)
    if name is None or name[2] != index or not count.isdigit():
        raise InvalidInput(
            f"the nodes of this Indexed Job are unknown: NNODES (or PET_NNODES) is {count!r}, and this host is {host!r},"
            f" not NAME-{index}; set NNODES, and give the pods a subdomain"
        )
    hosts = ",".join(f"{name[1]}{number}{name[3] or ''}" for number in range(int(count)))
    return _job(f"job-{name[1]}{name[3] or ''}", f"{hosts}:{FIRST_PORT}", host, FIRST_PORT)


def _job(name: str, members: str, node: str, port: int) -> Job:
    addresses, mine = host_addresses(members), join_address(node.strip("[]"), port)
    if mine not in addresses:
        raise InvalidInput(f"this node, {node!r}, is not one of the job's: {members.rpartition(':')[0]}")
    return Job(name.replace("/", "_"), node, tuple(addresses), mine)


def take_certificate(job: Job, directory: str, local: str) -> None:
    """Put the job's certificate into the folder `local`, until `leave`. `directory`: this user's own, on a file system that
    all nodes of the job see. Raises NotAllowed, NotFound."""
    shared = Path(directory, job.name)
    _remove_stale(directory)
    until = time.monotonic() + MAKE_S
    while not _joined(shared, job.node):
        if time.monotonic() > until:
            raise NotAllowed(f"{shared} is half removed, by a job that was killed; remove it")
        _make(shared, job.node)
    os.makedirs(local, mode=0o700, exist_ok=True)
    for name in FILES.values():
        shutil.copy(shared / name, f"{local}/{name}")


def leave(job: Job, directory: str, wait: bool = False) -> None:
    """End this node's use of the certificate. The last node removes it. `wait`: return once all nodes have left, after
    `MEMBERS_S` at most."""
    shared = Path(directory, job.name)
    with suppress(OSError):
        os.unlink(shared / _NODES / job.node)
    until = time.monotonic() + MEMBERS_S
    while not _removed(shared) and wait and time.monotonic() < until:
        time.sleep(POLL_S)


def _removed(shared: Path) -> bool:
    """Remove the folder, unless nodes have entries in it; return whether it is gone."""
    try:
        os.rmdir(shared / _NODES)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    shutil.rmtree(shared, ignore_errors=True)
    return True


def _joined(shared: Path, node: str) -> bool:
    """Enter this node; return False where the folder is not there, or is being removed."""
    try:
        os.close(os.open(shared / _NODES / node, os.O_CREAT | os.O_WRONLY, 0o600))
    except FileNotFoundError:
        return False
    except OSError as error:
        raise NotAllowed(f"cannot write to {shared}: {error.strerror}; give another --job-dir") from None
    return True


def _make(shared: Path, node: str) -> None:
    """Make the folder, unless another node is quicker."""
    made = Path(f"{shared}.{node}.{os.getpid()}")
    try:
        made.mkdir(0o700)
        (made / _NODES).mkdir(0o700)
        _make_certificate(made)
        made.rename(shared)  # fails where it exists: it is not empty
    except CacheError:
        raise
    except OSError as error:
        if not shared.exists():
            raise NotAllowed(f"cannot make {shared}: {error.strerror}; give another --job-dir") from None
        time.sleep(POLL_S)  # it may be one that is just being removed
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _make_certificate(folder: Path) -> None:
    script = f"{os.path.dirname(__file__)}/certificates.sh"
    try:
        done = subprocess.run(
            ["bash", script, TLS_NAME], cwd=folder, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise NotFound("--job-cluster needs bash and openssl to make a certificate; install them") from None
    if done.returncode:
        raise NotFound(f"openssl made no certificate: {done.stderr.strip().splitlines()[-1:]}")
    os.unlink(folder / "ca.key")  # the authority signs nothing more


def _remove_stale(directory: str) -> None:
    for each in Path(directory).iterdir():
        with suppress(OSError):
            if time.time() - each.stat().st_mtime > STALE_S:
                shutil.rmtree(each, ignore_errors=True)


def await_members(job: Job, socket_dir: str, absent: Callable[[Sequence[str]], None]) -> None:
    """Wait until all nodes of the job have answered this one, for `MEMBERS_S` at most; then call `absent` with the
    addresses of the others."""
    until = time.monotonic() + MEMBERS_S
    while missing := _missing(job, socket_dir):
        if time.monotonic() >= until:
            return absent(missing)
        time.sleep(POLL_S)


def _missing(job: Job, socket_dir: str) -> list[str]:
    try:
        with Control(socket_dir) as control:
            came = {
                node.address for node in control.nodes().nodes if node.state not in ("unknown", "refused")
            }
    except CacheError:
        return list(job.members)
    return [address for address in job.members if address not in came]
