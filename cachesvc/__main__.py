"""The command `cachesvc`: runs a verb, and turns its errors into one line and a documented exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from cachesvc.cli import cli, output
from cachesvc.cli.exits import INTERRUPTED
from cachesvc.core.errors import CacheError


def run(arguments: Sequence[str] | None = None) -> int:
    """One command line (the process's own unless given) -> its exit code."""
    try:
        code = cli.main(args=arguments, prog_name="cachesvc", standalone_mode=False)
    except CacheError as error:
        output.complain(error)
        return error.code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return INTERRUPTED
    return code if isinstance(code, int) else 0


def main() -> None:
    """The console script."""
    sys.exit(run())


if __name__ == "__main__":
    main()
