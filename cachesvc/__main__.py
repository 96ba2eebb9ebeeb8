"""The command `cachesvc`: runs a verb, and turns errors into one line and a documented exit code."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from io import TextIOWrapper
from itertools import pairwise, takewhile
from typing import NoReturn

from cachesvc.core.errors import INTERRUPTED, CacheError

_HELP = frozenset({"-h", "--help", "--version"})


def run(arguments: Sequence[str] | None = None, launch: object = None) -> int:
    """Run a command line, by default the process's own; return the exit code. `launch` starts the daemon of `serve`, where
    it is not to be an interpreter of its own. Raises KeyboardInterrupt for Ctrl-C."""
    import click

    from cachesvc.cli import cli, output

    given = sys.argv[1:] if arguments is None else arguments
    words = list(takewhile(lambda word: word != "--", given))  # after it comes the command of `cachesvc run`
    as_json = _as_json(words)
    try:
        with (
            nullcontext() if _HELP.isdisjoint(words) else output.written()
        ):  # verbs call `written` themselves
            code = cli.main(args=arguments, prog_name="cachesvc", standalone_mode=False, obj=launch)
    except CacheError as error:
        with suppress(OSError):  # stderr may be on a full disk; the exit code still tells
            output.complain(error, as_json)
        return error.code
    except click.ClickException as error:
        with suppress(OSError):
            if as_json:
                output.emit({"error": error.format_message(), "code": error.exit_code}, to_stderr=True)
            else:
                error.show()
        return error.exit_code
    except click.Abort:
        raise KeyboardInterrupt from None
    return code if isinstance(code, int) else 0


def _as_json(words: Sequence[str]) -> bool:
    """Tell whether to print errors as JSON: with `--json`, and for `serve` where its log, on the same stream, is JSON."""
    if "--json" in words or list(words[:1]) != ["serve"]:
        return "--json" in words
    named = [after.removeprefix("--log-format=") for after in words if after.startswith("--log-format=")]
    named += [after for word, after in pairwise(words) if word == "--log-format"]
    return (named or [os.environ.get("CACHESVC_LOG_FORMAT", "")])[-1] == "json"


def main() -> None:
    """Run the console script."""
    _open_streams()
    try:
        code = run()
    except KeyboardInterrupt:  # also while the verbs are imported
        _interrupted()
    try:
        print(end="", flush=True)
        print(end="", flush=True, file=sys.stderr)
    except OSError:  # already reported; a normal exit would print the error again
        os._exit(code or CacheError.code)
    sys.exit(code)


def _interrupted() -> NoReturn:
    """End by SIGINT after one line, so that a shell ends the loop that this command is in. At once: gRPC's threads, stopped
    in a call, would print tracebacks."""
    with suppress(OSError):
        if "--json" in sys.argv:
            sys.stderr.write(f'{{"error": "interrupted", "code": {INTERRUPTED}}}\n')
        else:
            sys.stderr.write("cachesvc: interrupted\n")
        sys.stderr.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    os._exit(INTERRUPTED)  # blocked signals


def _open_streams() -> None:
    """Open the standard streams that the parent process closed; print names that the terminal's encoding lacks.

    Otherwise a file or socket could get the number of a standard stream, and gRPC, for one, would write into it. Output to
    a reopened stdout is an error, see `written`.
    """
    flags = {0: os.O_RDONLY, 1: os.O_RDONLY, 2: os.O_WRONLY}
    for number, flag in flags.items():
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, flag), True)  # the lowest number that is free
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    main()
