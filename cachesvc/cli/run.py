"""`cachesvc run -- COMMAND`: run a private daemon while a command runs, on machines without root.

The processes of a job on one node share a directory. The first starts the daemon, the others adopt it, and the last to end
stops it. Each holds a shared `flock`, which the kernel releases if the process is killed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import socket as socket_module
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import click

from cachesvc import config
from cachesvc.cli import job_cluster as job_clusters
from cachesvc.cli import options, output
from cachesvc.cli.job_cluster import Job
from cachesvc.cli.stop import stop_daemon
from cachesvc.client.control import answers, find_daemon
from cachesvc.core.errors import (
    INTERRUPTED,
    DaemonUnavailable,
    DeadlineExceeded,
    InvalidInput,
    NotAllowed,
    NotFound,
    from_code,
)

START_S = 90.0
"""Timeout of the start: a daemon waits for its ports for a minute, and then scans a large NVMe tier."""
POLL_S = 0.05
ENDING = (signal.SIGTERM, signal.SIGHUP)
_FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that schedulers send before a job's end, to each of its processes or to this one alone."""


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@options.node_settings
@options.setting("--socket", metavar="DIR", help="Adopt the daemon here, or start one here.")
@click.option(
    "--job-cluster",
    is_flag=True,
    help="Share extents with the daemons of the job's other nodes: those of SLURM_JOB_NODELIST, or the pods of an Indexed"
    " Job.",
)
@options.setting(
    "--job-dir",
    metavar="DIR",
    help="This user's folder, on a file system that all nodes of the job see, for the certificate of --job-cluster."
    "  [default: ~/.cachesvc-jobs]",
)
@click.option("--json", is_flag=True, help="At the end print one JSON object on stderr.")
def run(
    command: tuple[str, ...],
    socket: str | None,
    job_cluster: bool,
    job_dir: str | None,
    json: bool,
    **given: Any,
) -> int:
    """Run a command with a daemon.

    Example: `cachesvc run --ram 64GiB -- python train.py`. A daemon that already answers is used as it is. Otherwise one
    is started in a private directory, shared with the other tasks of the job on this node, and stopped when the last of
    them ends. With --job-cluster, which uses no other daemon, the daemons of a job's nodes are one cluster:
    `srun cachesvc run --job-cluster --ram 50% -- python train.py`. Returns the command's exit code.
    """
    socket = os.path.abspath(socket) if socket else None  # the command may change its directory
    running = socket or (None if job_cluster else find_daemon())
    if running is not None and not job_cluster and answers(running):
        return _report(_command(command, running), running, False, json)
    job = job_clusters.this_job() if job_cluster else None
    directory = socket or private_dir(job.node if job is not None else "")
    make_private(directory)
    serve, end = _serve_command(directory, **given), _stop
    start: Callable[[str, list[str]], None] = partial(_start_beside_others, json)
    codes: list[int] = []
    if job is not None:
        make_private(shared := job_dir or os.path.expanduser("~/.cachesvc-jobs"), "--job-dir")
        serve += job.options(f"{directory}/tls")
        start, end = partial(_start_member, job, shared, json), partial(_end_member, job, shared, codes)
    # A signal before or after the command ends the daemon too.
    with (
        signal_handlers(ENDING, lambda number, _: sys.exit(128 + number)),
        signal_handlers(_FORWARDED, lambda *_: None),
        _shared(directory, partial(start, directory, serve), partial(end, directory)) as started,
    ):
        if job is not None:
            job_clusters.await_members(job, directory, _without)
        codes.append(_command(command, directory))
    return _report(codes[0], directory, started, json)


def _start_beside_others(json: bool, directory: str, serve: list[str]) -> None:
    _start(directory, serve, with_free_ports(json))


def _start_member(job: Job, shared: str, json: bool, directory: str, serve: list[str]) -> None:
    try:
        job_clusters.take_certificate(job, shared, f"{directory}/tls")
        _start_beside_others(json, directory, serve)
    except BaseException:
        job_clusters.leave(job, shared)
        raise


def _end_member(job: Job, shared: str, codes: Sequence[int], directory: str) -> None:
    """Stop the daemon once the other nodes need it no more. A command that failed is reported at once."""
    try:
        job_clusters.leave(job, shared, wait=codes == [0])
    finally:
        _stop(directory)
        shutil.rmtree(directory, ignore_errors=True)


def _without(missing: Sequence[str]) -> None:
    text = f"the command begins without {', '.join(missing)}, which do not answer"
    output.print_notes([text], as_json=False)


def with_free_ports(as_json: bool) -> dict[str, str]:
    """Return the environment for a daemon beside others on this node: a port that the settings name and another process has
    is replaced by a free one, which is told on stderr."""
    from cachesvc.cli.config import resolved

    _, settings = resolved([])
    environment = dict(os.environ)
    for option in ("listen", "metrics", "s3"):
        wanted = getattr(settings, option)
        found = free_address(wanted) if wanted else ""
        if found != wanted:
            environment[f"CACHESVC_{option.upper()}"] = found
            text = f"--{option} {wanted} is taken; this daemon has {found}"
            if as_json:
                output.emit(
                    {"event": "port", "option": option, "wanted": wanted, "address": found}, to_stderr=True
                )
            else:
                sys.stderr.write(f"cachesvc: {text}\n")
    return environment


def free_address(address: str) -> str:
    """Return HOST:PORT, or, where another process has this port, one that is free."""
    host, _, port = address.rpartition(":")
    for number in (int(port), 0):
        try:
            with socket_module.create_server(
                (host.strip("[]"), number),
                family=socket_module.AF_INET6 if ":" in host else socket_module.AF_INET,
            ) as probe:
                return f"{host}:{probe.getsockname()[1]}"
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                break
    return address  # the daemon says what is wrong with it


def private_dir(node: str = "") -> str:
    """Return the directory of this user's daemon for this job on this node. `node`: its name, where several nodes may have
    one file system."""
    job = os.environ.get("SLURM_JOB_ID", "")
    name = f"cachesvc-{os.geteuid()}{'-' if job.isdigit() else ''}{job if job.isdigit() else ''}{node and f'-{node}'}"
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")  # of a login, which a batch job on another node inherits
    return f"{runtime if os.path.isdir(runtime) else tempfile.gettempdir()}/{name}"


def make_private(directory: str, option: str = "--socket") -> None:
    """Create a directory for this user alone. Raises NotAllowed where another user owns it or may write to it; `option`
    gives another one."""
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
    except OSError as error:
        raise NotAllowed(f"cannot make {directory}: {error.strerror}; give another {option}") from None
    status = os.lstat(directory)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise NotAllowed(f"{directory} is not this user's own directory; give another {option}")


def sharing(
    directory: str, serve: list[str], environment: Mapping[str, str] = os.environ
) -> AbstractContextManager[bool]:
    """Return a block in which a daemon runs in `directory`; it yields whether it was started here, by `serve`."""
    return _shared(directory, partial(_start, directory, serve, environment), partial(_stop, directory))


@contextmanager
def _shared(directory: str, start: Callable[[], None], end: Callable[[], None]) -> Iterator[bool]:
    with ExitStack() as held:
        with _start_lock(directory):
            users = held.enter_context(open(f"{directory}/users.lock", "w"))
            # 1. Counted before the start lock is released, so that no process that ends now finds itself the last.
            fcntl.flock(users, fcntl.LOCK_SH)
            started = not answers(directory)
            if started:
                start()
        try:
            yield started
        finally:
            with _start_lock(directory):
                # 2. No process starts or adopts a daemon while this one checks whether it is the last.
                fcntl.flock(users, fcntl.LOCK_UN)
                if _is_last(users.fileno()):
                    end()


@contextmanager
def _start_lock(directory: str) -> Iterator[None]:
    """Hold the lock of the directory, which is made again where a process that ended has removed it meanwhile."""
    path = f"{directory}/start.lock"
    while True:
        make_private(directory)
        with suppress(FileNotFoundError), open(path, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.exists(path) and os.path.samestat(os.stat(path), os.fstat(lock.fileno())):
                yield
                return


def _is_last(users: int) -> bool:
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _start(directory: str, serve: list[str], environment: Mapping[str, str] = os.environ) -> None:
    log = f"{directory}/daemon.log"
    received: list[int] = []
    daemon = None
    try:
        with (
            open(log, "ab") as out,
            # Signals raise nothing until the child is known and can be ended: Ctrl-C does not reach its session.
            signal_handlers((*ENDING, signal.SIGINT), lambda number, _: received.append(number)),
        ):
            begin = out.tell()
            daemon = subprocess.Popen(
                serve,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**environment, **config.SAFE_PATH},
                start_new_session=True,
                close_fds=True,
            )
        if received:
            sys.exit(128 + received[0])
        _await_answer(directory, daemon, log, begin)
    except BaseException:
        if daemon is not None:
            daemon.terminate()
        raise


def _stop(directory: str) -> None:
    with suppress(DaemonUnavailable):  # it is already gone
        stop_daemon(directory)


def _await_answer(directory: str, daemon: subprocess.Popen[bytes], log: str, begin: int) -> None:
    deadline = time.monotonic() + START_S
    while not answers(directory):
        if (code := daemon.poll()) is not None:
            lines = Path(log).read_bytes()[begin:].decode("utf-8", "replace").strip().splitlines()
            reason = lines[-1].removeprefix("cachesvc: ") if lines else f"it exited with {code}"
            raise from_code(code, f"the daemon did not start: {reason} (log: {log})")
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"the daemon did not answer within {START_S:.0f} s of its start; see {log}"
            )
        time.sleep(POLL_S)


def _command(command: Sequence[str], directory: str) -> int:
    """Run the command and return its code. Ctrl-C reaches it through the terminal; other signals are forwarded."""
    environment = os.environ | {"CACHESVC_SOCKET": directory}
    received: list[int] = []
    children: list[subprocess.Popen[bytes]] = []

    def forward(number: int, _: object) -> None:
        received.append(number)
        for child in children:
            if child.returncode is None:
                os.kill(child.pid, number)

    try:
        # A function for SIGINT, not SIG_IGN, which the command would inherit: it must get Ctrl-C, and this process wait.
        with (
            signal_handlers((*ENDING, *_FORWARDED), forward),
            signal_handlers((signal.SIGINT,), lambda *_: None),
        ):
            child = subprocess.Popen(command, env=environment)
            children.append(child)
            if received:
                child.send_signal(received[0])
            code = _wait(child)
    except FileNotFoundError:
        raise NotFound(f"there is no command {command[0]!r} on the PATH") from None
    except PermissionError:
        raise NotAllowed(f"{command[0]!r} may not be executed") from None
    except OSError as error:
        raise InvalidInput(f"{command[0]!r} cannot be executed ({error.strerror})") from None
    return 128 - code if code < 0 else code


def _wait(child: subprocess.Popen[bytes]) -> int:
    """Wait for the command. The first process of a container also reaps orphans, which become its children."""
    whom = (os.P_ALL, 0) if os.getpid() == 1 else (os.P_PID, child.pid)
    while (ended := os.waitid(*whom, os.WEXITED | os.WNOWAIT)) and ended.si_pid != child.pid:
        os.waitpid(ended.si_pid, 0)
    return child.wait()


@contextmanager
def signal_handlers(
    numbers: Sequence[int], handler: Callable[[int, FrameType | None], Any]
) -> Iterator[None]:
    """Handle signals by `handler` in the block; signals ignored at the start (nohup's SIGHUP) stay ignored."""
    handled = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def _report(code: int, directory: str, started: bool, as_json: bool) -> int:
    """Return the command's code. Raises KeyboardInterrupt where Ctrl-C ended it, so that this process ends so too."""
    if as_json:
        output.emit(
            {"event": "ran", "exit_code": code, "socket": directory, "started": started}, to_stderr=True
        )
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    return code


def _serve_command(
    directory: str, ram: int | None, nvme: tuple[config.NvmeSpec, ...], allow: tuple[str, ...], **others: Any
) -> list[str]:
    given = [sys.executable, "-m", "cachesvc", "serve", "--socket", directory]
    # A home directory may be shared between nodes; a daemon's state must not be.
    others["state_dir"] = others["state_dir"] or f"{directory}/state"
    others["ram"] = ram
    for option, value in others.items():
        if value is not None:
            given += [f"--{option.replace('_', '-')}", str(value)]
    for spec in nvme:
        given += ["--nvme", config.nvme_text(spec)]
    for prefix in allow:
        given += ["--allow", prefix]
    return given
