"""A process that a verb of the command line starts: a job as JSON in the first argument, rows as JSON out, to the pipe
whose descriptor is the second. What a user's code prints goes to stderr."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from cachesvc.core.errors import INTERRUPTED, CacheError


def say(**row: object) -> None:
    """Write a row."""
    with open(int(sys.argv[2]), "w", closefd=False) as rows:
        print(json.dumps(row), file=rows)


def run_job(run: Callable[[dict[str, Any]], None]) -> int:
    """Run the job, with modules of the working directory; return the exit code. An error is a row {"error", "code"}.
    SIGTERM ends the process in good order, and the processes of multiprocessing with it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    sys.path.insert(0, os.getcwd())
    try:
        run(json.loads(sys.argv[1]))
    except CacheError as error:
        say(error=str(error), code=error.code)
        return error.code
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:  # SIGTERM during the interpreter's exit would only print a traceback
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return 0
