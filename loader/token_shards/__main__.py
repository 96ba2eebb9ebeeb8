"""The process that `cachesvc tokenize` starts: `python -m loader.token_shards JOB FD`, where JOB is JSON of `Job`.

It writes JSON to the pipe FD, one object a line: {"done_bytes", "total_bytes"} while it runs, and then the result, or
{"error", "code"}.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from loader.process.command_job import run_job, say
from loader.token_shards.job import Job, write_shards


def run(given: dict[str, Any]) -> None:
    """Run a job, and say how far it is."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each process has a core, and no threads of the parent's
    for row in write_shards(Job(**given)):
        say(**row)


if __name__ == "__main__":
    sys.exit(run_job(run))
