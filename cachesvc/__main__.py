"""The command `cachesvc`: runs a verb, and turns its errors into one line and a documented exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from io import TextIOWrapper
from itertools import pairwise, takewhile

from cachesvc.core.errors import INTERRUPTED, CacheError

_HELP = frozenset({"-h", "--help", "--version"})


def run(arguments: Sequence[str] | None = None) -> int:
    """One command line (the process's own unless given) -> its exit code."""
    import click

    from cachesvc.cli import cli, output

    given = sys.argv[1:] if arguments is None else arguments
    words = list(takewhile(lambda word: word != "--", given))  # what follows is another's command
    as_json = _as_json(words)
    try:
        with nullcontext() if _HELP.isdisjoint(words) else output.written():  # verbs do so for themselves
            code = cli.main(args=arguments, prog_name="cachesvc", standalone_mode=False)
    except CacheError as error:
        with suppress(OSError):  # stderr may be on the full disk, too: the code says it still
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
        return INTERRUPTED
    return code if isinstance(code, int) else 0


def _as_json(words: Sequence[str]) -> bool:
    """Whether errors are JSON: a daemon's are where its log is, since one program reads both."""
    if "--json" in words or list(words[:1]) != ["serve"]:
        return "--json" in words
    named = [after.removeprefix("--log-format=") for after in words if after.startswith("--log-format=")]
    named += [after for word, after in pairwise(words) if word == "--log-format"]
    return (named or [os.environ.get("CACHESVC_LOG_FORMAT", "")])[-1] == "json"


def main() -> None:
    """The console script."""
    _open_streams()
    try:
        code = run()
    except KeyboardInterrupt:  # Ctrl-C while the verbs are imported
        code = INTERRUPTED
    try:
        print(end="", flush=True)
        print(end="", flush=True, file=sys.stderr)
    except OSError:  # said already; at the interpreter's end it would be said once more, in other words
        os._exit(code or CacheError.code)
    if code == INTERRUPTED:  # at once: gRPC's threads, stopped in mid-call, would end in tracebacks
        os._exit(code)
    sys.exit(code)


def _open_streams() -> None:
    """Whoever started this may have closed them: a file or socket that got the number of one, here or in a child, would
    be written into, by gRPC for one. What goes to stdout is then an error, as `written` says. And names may hold what
    the terminal's encoding does not."""
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
