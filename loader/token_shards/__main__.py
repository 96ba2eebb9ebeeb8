"""The process that `cachesvc tokenize` starts: `python -m loader.token_shards JOB`, where JOB is JSON of `Job`.

It prints JSON, one object a line: {"done_bytes", "total_bytes"} while it runs, and then the result, or {"error", "code"}.
"""

from __future__ import annotations

import json
import os
import sys

from cachesvc.core.errors import INTERRUPTED, CacheError
from loader.token_shards.job import Job, write_shards


def main() -> int:
    """Run the job of the command line. Returns the exit code."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each process has a core, and no threads of the parent's
    job = Job(**json.loads(sys.argv[1]))
    try:
        for row in write_shards(job):
            print(json.dumps(row), flush=True)
    except CacheError as error:
        print(json.dumps({"error": str(error), "code": error.code}), flush=True)
        return error.code
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
