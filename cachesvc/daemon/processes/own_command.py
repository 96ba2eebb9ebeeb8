"""Runs a verb of the command line in a process of its own, with the environment of the daemon, which does not import it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from cachesvc.core.errors import CacheError, DeadlineExceeded


def run_verb(words: Sequence[str], limit_s: float, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Return the exit status and output of `cachesvc WORDS`, which reads `given`. Raises DeadlineExceeded where it takes
    longer than `limit_s` seconds, CacheError where no process can be started."""
    command = [sys.executable, "-m", "cachesvc", *words]
    try:
        return subprocess.run(command, input=given, capture_output=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        raise DeadlineExceeded(f"cachesvc {words[0]} did not end in {limit_s:.0f} s") from None
    except OSError as error:
        raise CacheError(
            f"cachesvc {words[0]} cannot be run ({error.strerror}); allow more processes or memory"
        ) from None
