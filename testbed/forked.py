"""Python processes that are forked from one that has done their imports already.

A daemon imports for 0.5 s of CPU before it starts, and torch takes 2 s. `python -m testbed.forked FD MODULE ...` imports
the modules, and then forks for each request: a keeper, and the keeper forks the process and reports how it ends.
"""

from __future__ import annotations

import array
import atexit
import ctypes
import functools
import gc
import importlib
import json
import logging
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any, TypeAlias, cast

from testbed import ROOT

log = logging.getLogger(__name__)
REQUEST_BYTES = 128 << 10
DESCRIPTORS = 4
END_S = 5.0
DAEMON = ("cachesvc.cli", "cachesvc.cli.serve", "cachesvc.daemon.serve")
TRAINER = ("loader",)
CLIENT = (
    "cachesvc.client.control",
    "cachesvc.client.grants",
    "cachesvc.v1.services",
    "cloudpickle",
    "pytest",
)
_PR_SET_PDEATHSIG = 1
_Stream: TypeAlias = "IO[Any] | int | None"


class ForkedProcess(subprocess.Popen[Any]):
    """`python -m MODULE ...` or `python -c CODE ...` as `subprocess.Popen` starts it, but forked. Its /proc/PID/cmdline and
    environ are those of the process that it was forked from."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        stdin: _Stream = None,
        stdout: _Stream = None,
        stderr: _Stream = None,
        preloaded: tuple[str, ...] = DAEMON,
    ) -> None:
        """`command` begins with sys.executable and "-m" or "-c". A stream is a file, PIPE for text, or this process's."""
        assert command[0] == sys.executable
        assert command[1] in ("-m", "-c")
        self.args, self.returncode = list(command), None
        self._lock = threading.Lock()
        self.stdin, in_fd = _stream(stdin, 0)
        self.stdout, out_fd = _stream(stdout, 1)
        self.stderr, err_fd = _stream(stderr, 2)
        told, tell = os.pipe()
        self._told = os.fdopen(told, "rb", buffering=0)
        request = {"command": list(command[1:]), "env": dict(os.environ if env is None else env)}
        socket.send_fds(_template(preloaded), [json.dumps(request).encode()], [in_fd, out_fd, err_fd, tell])
        os.close(tell)
        for given, sent in ((stdin, in_fd), (stdout, out_fd), (stderr, err_fd)):
            if given == subprocess.PIPE:
                os.close(sent)
        self.pid = self._number()

    def _number(self) -> int:
        return array.array("i", self._told.read(4))[0]

    def _has_told(self, timeout: float | None) -> bool:
        poll = select.poll()  # select(2) takes no descriptor beyond 1023
        poll.register(self._told, select.POLLIN)
        return bool(poll.poll(None if timeout is None else 1000 * timeout))

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        with self._lock:
            if self.returncode is None and self._has_told(0.0):
                self.returncode = self._number()
                self._told.close()
        return cast("int | None", self.returncode)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return the exit code. Raises subprocess.TimeoutExpired."""
        if self.poll() is None:
            self._has_told(timeout)
            if self.poll() is None:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return cast(int, self.returncode)

    def send_signal(self, sig: int) -> None:
        """Send a signal; no effect on a process that has ended."""
        if self.poll() is None:
            os.kill(self.pid, sig)

    def close(self) -> None:
        """Wait for the end, and close our ends of the pipes."""
        self.wait()
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()


def _stream(given: _Stream, number: int) -> tuple[IO[Any] | None, int]:
    """Return our end of a stream that is a pipe, and the descriptor for the process."""
    if given is None:
        return None, number
    if given != subprocess.PIPE:
        return None, given if isinstance(given, int) else given.fileno()
    read, write = os.pipe()
    return (os.fdopen(write, "w"), read) if number == 0 else (os.fdopen(read), write)


@functools.cache
def _template(modules: tuple[str, ...]) -> socket.socket:
    """Start the process that imports these modules, which ends with this one; return the channel to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "testbed.forked", str(theirs.fileno()), *modules],
            pass_fds=(theirs.fileno(),),
            # a process that forks has one thread
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "GRPC_ENABLE_FORK_SUPPORT": "0"},
            cwd=ROOT,
        )
    atexit.register(_end, process, ours)
    return ours


def _end(process: subprocess.Popen[bytes], channel: socket.socket) -> None:
    channel.close()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:  # a process that this one left behind has the channel open, too
        process.kill()
        process.wait()


def _serve(channel: socket.socket) -> None:
    """Fork a keeper for each request, until the other end closes."""
    gc.collect()
    gc.freeze()
    keepers = set[int]()
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, REQUEST_BYTES, DESCRIPTORS)
        keepers = {each for each in keepers if os.waitpid(each, os.WNOHANG)[0] == 0}
        if not message:
            return
        if keeper := os.fork():
            keepers.add(keeper)
        else:
            channel.close()
            _keep(json.loads(message), descriptors)
        for fd in descriptors:
            os.close(fd)


def _keep(request: dict[str, Any], descriptors: list[int]) -> None:
    """Fork the process; tell its pid, and its exit code when it ends."""
    *streams, tell = descriptors
    _die_with_parent()
    pid = os.fork()
    if pid == 0:
        os.close(tell)
        _die_with_parent()
        _run(request, streams)
    os.write(tell, array.array("i", [pid]).tobytes())
    for fd in streams:
        os.close(fd)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        os.write(tell, array.array("i", [code]).tobytes())
    finally:
        os._exit(0)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _run(request: dict[str, Any], streams: list[int]) -> None:
    """Run the module or the code as Python does, and exit."""
    code: Any = 1
    try:
        for number, fd in enumerate(streams):
            os.dup2(fd, number)
            os.close(fd)
        os.environ.clear()
        os.environ.update(request["env"])
        tempfile.tempdir = None  # found anew, by this environment
        how, what, *sys.argv[1:] = request["command"]
        try:
            if how == "-m":
                runpy.run_module(what, run_name="__main__", alter_sys=True)
            else:
                exec(what, {"__name__": "__main__"})
            code = 0
        except SystemExit as ended:
            code = ended.code
            if isinstance(code, str):
                print(code, file=sys.stderr)
                code = 1
        except BaseException:
            log.exception("the process failed")
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
    finally:
        os._exit(code or 0)


def main() -> None:
    """Import the modules, and fork until the channel closes."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        importlib.import_module(module)
    _serve(channel)


if __name__ == "__main__":
    main()
